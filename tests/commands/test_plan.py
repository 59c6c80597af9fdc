"""The verb `plan`: exit codes, what it prints, what it saves, and that it loads no torch."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.errors import DoesNotFit, UserError
from lamella.forecast.document import read_plan
from tests.fixtures import chat12, make_tokenizer, write_jsonl
from tests.forecast import numbers

runner = CliRunner()

# Hugging Face, Qwen/Qwen3-235B-A22B-Thinking-2507, config.json
QWEN_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 1536, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}  # fmt: skip
ONE_BOX = "4xH100-80+ram=512GB"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen") / "config.json"
    path.write_text(json.dumps(QWEN_235B))
    return str(path)


def invoke(*arguments):
    return runner.invoke(app, ["plan", *map(str, arguments)])


def error_of(*arguments):
    result = invoke(*arguments)
    assert isinstance(result.exception, UserError), result.output
    return result.exception


def test_the_big_model_on_four_cards_fits_and_every_figure_is_explained(config, tmp_path):
    saved = tmp_path / "plan.json"
    result = invoke(config, "--machine", ONE_BOX, "--rows", 3600, "--tokens", 4096, "--explain", "--save", saved)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("fits: ")
    assert "3,600 rows" in " ".join(result.stdout.split())[:120]
    plan = read_plan(saved)
    assert plan.fits and plan.model.total_parameters == 235_093_634_560
    layers = plan.figures["model"]["layer_store_bytes"]
    assert sum(layers) == pytest.approx(120.7e9, rel=1e-3)
    assert numbers.check(plan.numbers) > 60
    for number in plan.numbers:
        assert f"{number.name} = " in result.stdout
    assert all(rank["need"] <= rank["have"] for rank in plan.figures["ranks"]) and len(plan.figures["ranks"]) == 4


def test_json_is_the_same_document(config):
    result = invoke(config, "--machine", ONE_BOX, "--json")
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)
    assert tree["kind"] == "lamella plan" and tree["rows"]["how"] == "given"
    assert (tree["rows"]["rows"], tree["rows"]["tokens"]) == (3600, 3600 * 4096)
    assert "store" not in tree["asked"]


def test_a_price_that_is_given_is_taken(config):
    whole = json.loads(invoke(config, "--machine", ONE_BOX, "--price-per-hour", "10", "--json").stdout)
    assert whole["money"]["usd"] == pytest.approx(10 * whole["money"]["hours"])
    assert whole["money"]["hours"] == pytest.approx(whole["figures"]["run_s"] / 3600)


def test_what_does_not_fit_exits_with_3_and_says_what_would(config):
    result = invoke(config, "--machine", "1xT4+ram=8GB", "lora.rank=256", "lora.expert_rank=256")
    assert isinstance(result.exception, DoesNotFit) and result.exception.exit_code == 3
    assert "need" in result.exception.what and "have" in result.exception.what and result.exception.fix
    assert result.stdout.startswith("does not fit")
    as_json = invoke(config, "--machine", "1xT4+ram=8GB", "lora.rank=256", "lora.expert_rank=256", "--json")
    tree = json.loads(as_json.stdout)
    assert isinstance(as_json.exception, DoesNotFit) and not tree["fits"] and tree["figures"]["shortfall"]


def test_b68_host_memory_and_disk_are_counted_by_part_and_refused(config, tmp_path):
    """An offloaded run on a host of 2 GB with 100 MB of disk left."""
    box = tmp_path / "box.toml"
    box.write_text('[[hosts]]\nname = "box"\nram = "2GB"\ndisk_free = "100MB"\n[[devices]]\ndevice = "RTX4090"\n')
    result = invoke(config, "--machine", box, "--json")
    assert isinstance(result.exception, DoesNotFit)
    figures = json.loads(result.stdout)["figures"]
    (host,) = figures["hosts"]
    assert sum(host["ram"].values()) > 2e9 and "adapter state" in host["ram"]
    assert host["disk"]["store"] > 1e11 and host["disk_have"] == 100_000_000
    said = " ".join(figures["shortfall"])
    assert "box: RAM: need" in said and "box: disk: need" in said and "have 100 MB" in said
    assert "RAM" in result.exception.fix and "disk" in result.exception.fix


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--machine", "4xH999"], "H999"),
        (["--machine", ONE_BOX, "--rows", "0", "--tokens", "100"], "--rows 0"),
        (["--machine", ONE_BOX, "--rows", "10", "--tokens", "300000"], "262144"),
        (["--machine", ONE_BOX, "--rows", "10", "--tokens", "4096", "data.max_tokens=2048"], "data.max_tokens = 2048"),
        (["--machine", ONE_BOX, "--data", "rows.jsonl", "--rows", "10"], "--data together with"),
        (["--machine", ONE_BOX, "--price-per-hour", "-1"], "not positive"),
        (["--machine", ONE_BOX, "lora.ranks=3"], "nearest valid name: `rank`"),
        (["--machine", ONE_BOX, "lora.targets=[\"nothing_proj\"]"], "nothing_proj"),
        (["--machine", ONE_BOX, "--compare", "runs/x"], "--compare takes a run"),
        (["--machine", ONE_BOX, "split.stages=[1,1,1]"], "stages"),
    ],
)  # fmt: skip
def test_bad_input(config, arguments, what):
    error = error_of(config, *arguments)
    assert error.exit_code == 2 and what in error.what


def test_no_model_no_machine_and_no_such_thing(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no MODEL" in error_of("--machine", ONE_BOX).what
    assert "lamella probe" in error_of(config).fix
    assert "no such file" in error_of("nowhere/at/all", "--machine", ONE_BOX).what


def test_an_unknown_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never_seen", "architectures": ["NeverSeen"]}))
    error = error_of(tmp_path / "config.json", "--machine", ONE_BOX)
    assert error.exit_code == 2 and "never_seen" in error.what


def test_data_are_counted_with_the_tokenizer_beside_the_config(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_235B, "num_hidden_layers": 2}))
    rows = write_jsonl(tmp_path / "rows.jsonl", chat12())
    tree = json.loads(invoke(tmp_path / "config.json", "--machine", ONE_BOX, "--data", rows, "--json").stdout)
    assert tree["rows"]["how"] == "counted" and tree["rows"]["rows"] == 12
    assert tree["asked"]["data"]["train"] == [str(rows)]
    with rows.open("a") as file:
        file.write("{}\n")
    error = error_of(tmp_path / "config.json", "--machine", ONE_BOX, "--data", rows)
    assert (error.path, error.line) == (str(rows), 13)


def test_training_from_a_plan_of_a_config_asks_for_a_store(config, tmp_path):
    saved = tmp_path / "plan.json"
    assert invoke(config, "--machine", ONE_BOX, "--save", saved).exit_code == 0
    result = runner.invoke(app, ["train", str(saved)])
    assert isinstance(result.exception, UserError) and "lamella quantize" in result.exception.fix


def test_planning_imports_no_torch(config):
    code = (
        "import sys; from typer.testing import CliRunner; from lamella.cli import app\n"
        f"r = CliRunner().invoke(app, ['plan', {config!r}, '--machine', {ONE_BOX!r}, '--explain'])\n"
        "assert r.exit_code == 0, r.output\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'triton', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"

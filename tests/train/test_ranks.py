"""Several processes on one step give the update of one process, decide alike, and end together."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.config import load_run_config
from lamella.data.steps import share_rows
from lamella.errors import RunFailed, UserError
from lamella.models.layout import pack_rows
from lamella.ranks.group import Ranks
from lamella.store.quantize import quantize_checkpoint
from lamella.train.assemble import assemble_parts
from lamella.train.loop import train_run
from tests import fixtures
from tests.train import fake
from tests.train.processes import LIMIT_S, free_port, run_ranks, start

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
ADAPTER = "adapter_model.safetensors"


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def adapter(runs_dir):
    return load_file(runs_dir / "run" / ADAPTER)


def same_as_one_process(tmp_path, world, sections, options=None, tolerance=1e-6):
    codes, texts = run_ranks(world, tmp_path / "many", sections, options)
    assert codes == [0] * world, texts
    fake.run(tmp_path / "one", fake.Options(**(options or {})), **sections)
    one, many = adapter(tmp_path / "one"), adapter(tmp_path / "many")
    for name in one:
        assert (one[name] - many[name]).norm() <= tolerance * one[name].norm(), name
    a, b = lines(tmp_path / "one" / "run"), lines(tmp_path / "many" / "run")
    assert [x["loss"] for x in a] == pytest.approx([x["loss"] for x in b], rel=1e-6)
    assert [(x["rows"], x["label_tokens"]) for x in a] == [(x["rows"], x["label_tokens"]) for x in b]
    return b


SGD_LIKE = {"eps": 1e-2, "schedule": "constant", "warmup_steps": 0}
"""AdamW whose update is proportional to small gradients: rounding of a gradient near zero is not blown up to +-lr."""


def test_b47_two_ranks_report_and_update_like_one(tmp_path):
    options = {"label_counts": [2, 18], "row_losses": [4.0, 1.0]}
    steps = same_as_one_process(tmp_path, 2, {"train": {"steps": 3, **SGD_LIKE}}, options)
    assert [s["loss"] for s in steps] == pytest.approx([1.3] * 3)


def test_b47_a_rank_without_labels_adds_nothing(tmp_path):
    options = {"label_counts": [0, 18], "row_losses": [4.0, 1.0]}
    steps = same_as_one_process(tmp_path, 2, {"train": {"steps": 3, **SGD_LIKE}}, options)
    assert [s["loss"] for s in steps] == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(
    ("world", "rows", "per_step", "micro_batch_tokens"),
    [(2, 1, 4, 2048), (4, 1, 4, 2048), (4, 5, 8, 2048), (2, 9, 4, 20)],
)
def test_b58_uneven_rows(tmp_path, world, rows, per_step, micro_batch_tokens):
    train = {"epochs": 3, "rows_per_step": per_step, "micro_batch_tokens": micro_batch_tokens, **SGD_LIKE}
    steps = same_as_one_process(tmp_path, world, {"train": train}, {"rows": rows})
    assert sum(s["rows"] for s in steps) == 3 * rows


def third_step_of_rank_1():
    config = fake.make_config("runs", train={"steps": 6})
    data = fake.FakeData(config, fake.Options())
    rows = data.rows_of(2).rows
    return [rows[i] for i in share_rows([data.tokens(r) for r in rows], [1.0, 1.0])[1]]


def test_b60_one_row_with_one_label(tmp_path):
    train = {"steps": 3, **SGD_LIKE}
    steps = same_as_one_process(tmp_path, 2, {"train": train}, {"rows": 1, "label_counts": [1]})
    assert [s["label_tokens"] for s in steps] == [1, 1, 1]


def test_b59_a_rank_whose_batch_has_no_labels(tmp_path):
    steps = same_as_one_process(
        tmp_path, 2, {"train": {"steps": 6, **SGD_LIKE}}, {"no_label_rows": third_step_of_rank_1()}
    )
    assert all(s["skipped"] is None for s in steps)


def test_b59_nan_on_one_rank_is_skipped_by_all(tmp_path):
    codes, texts = run_ranks(2, tmp_path, {"train": {"steps": 6}}, {"nan_rows": third_step_of_rank_1()})
    assert codes == [0, 0], texts
    steps = lines(tmp_path / "run")
    assert [bool(s["skipped"]) for s in steps] == [False, False, True, False, False, False]
    assert json.loads((tmp_path / "run" / "receipt.json").read_text())["figures"]["updates"] == 5


def test_b59_an_exception_on_one_rank_ends_all_and_is_shown(tmp_path):
    codes, texts = run_ranks(2, tmp_path, {"train": {"steps": 6}}, {"fail_rank": 1})
    assert codes[0] == 1
    assert codes[1] == 2
    assert "error: the disk of this rank is gone" in texts[1]
    assert "rank 1 failed in step 3: the disk of this rank is gone" in texts[0]
    tree = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert (tree["status"], len(lines(tmp_path / "run"))) == ("failed", 2)


def test_b59_a_killed_rank_ends_the_others(tmp_path):
    codes, texts = run_ranks(2, tmp_path, {"train": {"steps": 6}}, {"hang_rank": 1})
    assert codes == [1, -signal.SIGKILL]
    assert "rank 1 is lost: its process" in texts[0]
    assert "Its last completed step is 2" in texts[0]


def test_b59_a_rank_that_never_comes_ends_the_others(tmp_path):
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
           "LAMELLA_RANK_TIMEOUT_S": "4"}  # fmt: skip
    ranks = [
        start(tmp_path, {"train": {"steps": 6}}, options={"stuck_rank": 1}, env={**env, "RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        code, text = ranks[0].finish()
    finally:
        for rank in ranks:
            rank.send(signal.SIGKILL)
    assert code == 1
    assert "rank 1 makes no progress" in text
    assert "Its last completed step is 2; after that: computing step 3" in text
    assert "LAMELLA_RANK_TIMEOUT_S" in text
    tree = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert (tree["status"], len(lines(tmp_path / "run"))) == ("failed", 2)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "nan"])
def test_time_out_must_be_seconds(monkeypatch, text):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"),
                        ("LAMELLA_RANK_TIMEOUT_S", text)):  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="LAMELLA_RANK_TIMEOUT_S is"):
        Ranks.join()


def test_failure_of_the_first_rank_ends_the_others(tmp_path):
    (tmp_path / "file").write_text("")
    codes, texts = run_ranks(2, tmp_path / "file", {"train": {"steps": 6}})
    assert codes == [2, 1]
    assert "rank 0 failed" in texts[1]
    assert "cannot be written" in texts[1]


def routed_store(stores, folder, case):
    """A MoE whose router is set in the checkpoint, and its rows.

    `two`, `one`: equal router logits everywhere, and the first expert(s) win every tie; 2 or 1 experts a token.
    `apart`: tokens of the first (longer) row go to experts 0 and 1, those of the second to 2 and 3: the sign of hidden
    feature 0, which the embeddings set, decides.
    """
    rows = fixtures.chat12()[:4]
    if case == "plain":
        return stores / "moe", rows
    template = None if case == "apart" else fixtures.CHATML
    tokenizer = fixtures.make_tokenizer(chat_template=template)
    config = fixtures.moe_config(top_k=1 if case == "one" else 2)
    fixtures.write_checkpoint(folder / "hf", config, tokenizer=tokenizer, shards=1)
    file = folder / "hf" / "model.safetensors"
    tensors = load_file(file)
    gates = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    for name in gates:
        tensors[name] = torch.zeros_like(tensors[name])
    if case == "apart":
        rows = [{"prompt": "qjqqjq", "completion": "jqqjqjqj"}, {"prompt": "zxx", "completion": "xzzx"}]
        for name in gates:
            tensors[name][:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
        first = tokenizer("qjqqjqjqqjqjqj")["input_ids"]
        tensors["model.embed_tokens.weight"][:, 0] = -3.0
        tensors["model.embed_tokens.weight"][first, 0] = 3.0
    save_file(tensors, file, metadata={"format": "pt"})
    quantize_checkpoint(folder / "hf", folder / "store", threads=1)
    return folder / "store", rows


def experts_reached(config, row):
    """Experts that see tokens of this one row, but for its last one (which nothing is learnt from)."""
    parts = assemble_parts(config, Ranks(0, 1), False)
    encoded = parts.data.dataset.rows[row]
    batch = pack_rows([(list(encoded.input_ids)[:-1], list(encoded.label_mask)[:-1])], [row])
    parts.engine.loss_sums([batch])
    hits = parts.engine.walk.expert_hits()
    parts.engine.close()
    return {expert for counts in hits.values() for expert, count in enumerate(counts) if count}


@pytest.mark.parametrize(
    ("case", "count", "moved"),
    [
        ("plain", 4, 32),
        ("one", 4, 8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("plain", 1, 32), ("two", 4, 16), ("apart", 2, 32))),
    ],
)
def test_b60_experts_that_no_token_of_a_rank_reaches(tmp_path, stores, case, count, moved):
    """Two ranks on a real MoE through the command line give what one process gives."""
    store, rows = routed_store(stores, tmp_path, case)
    data = fixtures.write_jsonl(tmp_path / "rows.jsonl", rows[:count])
    (tmp_path / "run.toml").write_text(
        f'store = "{store}"\n[data]\ntrain = ["{data}"]\n[lora]\nrank = 4\n[compute]\ndtype = "fp32"\n'
        f'[train]\nsteps = 3\nrows_per_step = {count}\neps = 1e-2\nwarmup_steps = 0\nschedule = "constant"\n'
    )
    one_process = load_run_config(tmp_path / "run.toml", [f"runs_dir={tmp_path / 'one'}", "compute.threads=1"])
    if case == "apart":
        assert [experts_reached(one_process, row) for row in (0, 1)] == [{0, 1}, {2, 3}]
        assert share_rows([15, 8], [1.0, 1.0]) == [[0], [1]]  # the longer row is rank 0's, whatever its place
    port = str(free_port())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    verb = ["-m", "lamella", "train", str(tmp_path / "run.toml"), f"runs_dir={tmp_path / 'many'}"]
    done = subprocess.run([*launcher, *verb], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("receipt of run: ok") == 1
    train_run(one_process)
    one, many = adapter(tmp_path / "one"), adapter(tmp_path / "many")
    for name in one:
        assert (one[name] - many[name]).norm() <= 1e-5 * one[name].norm(), name
    rows_moved = json.loads((tmp_path / "many" / "run" / "receipt.json").read_text())["moved"]
    experts = next(row for row in rows_moved if row["class"] == "experts")
    assert experts["total"] == 32
    assert experts["moved"] == moved or case == "plain"


def test_torchrun_environment_must_be_whole(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(UserError, match="RANK and MASTER_PORT is not set"):
        Ranks.join()


def test_one_process_makes_no_calls():
    ranks = Ranks(0, 1)
    p = torch.nn.Parameter(torch.zeros(2))
    ranks.sum_gradients([p], [True])
    assert p.grad is None
    assert ranks.sum_numbers([1.0, 2.0]) == [1.0, 2.0]
    assert ranks.gather("x") == ["x"]
    with pytest.raises(RunFailed, match="as it is"):
        ranks.on_first(lambda: (_ for _ in ()).throw(RunFailed("as it is")))

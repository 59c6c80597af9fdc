"""The verb `train`: help without torch, the dry run, and user errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.errors import UserError

runner = CliRunner()


@pytest.fixture
def run_toml(stores, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'store = "{stores / "dense"}"\nruns_dir = "runs"\n[data]\ntrain = ["{stores / "rows.jsonl"}"]\n'
        '[train]\nrows_per_step = 4\n[lora]\nrank = 4\n[compute]\ndtype = "fp32"\nthreads = 1\n'
    )
    return file


def test_help_imports_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from lamella.cli import app; "
        "r = CliRunner().invoke(app, ['train', '--help']); assert '--dry-run' in r.stdout; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"TERM": "dumb", "COLUMNS": "120", "NO_COLOR": "1"})


def test_dry_run_prints_config_and_steps_and_writes_nothing(run_toml):
    result = runner.invoke(app, ["train", str(run_toml), "train.epochs=2", "--dry-run"])
    assert result.exit_code == 0, result.output
    config = json.loads(result.stdout[: result.stdout.index("\n}") + 2])
    assert config["train"]["epochs"] == 2.0
    assert config["lora"]["rank"] == 4
    assert "6 steps" in result.stdout
    assert not (run_toml.parent / "runs").exists()


def test_train_writes_the_run_and_prints_the_receipt(run_toml):
    result = runner.invoke(app, ["train", str(run_toml), "train.steps=2"])
    assert result.exit_code == 0, result.output
    assert "receipt of run: ok" in result.stdout
    assert "rows: 12 read, 12 kept, 0 dropped" in result.stderr
    names = {p.name for p in (run_toml.parent / "runs" / "run").iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "receipt.json", "adapter_model.safetensors", "adapter_config.json"}


def test_b62_a_run_of_nan_ends_with_exit_code_1_and_one_message(run_toml):
    """With q and k far too large, attention overflows in the second step and all others."""
    more = ["train.steps=8", "train.learning_rate=1e30", "train.clip_norm=0", "train.warmup_steps=0"]
    verb = [sys.executable, "-m", "lamella", "train", str(run_toml), *more]
    done = subprocess.run(verb, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error:") == 1
    assert "3 steps in a row (to step 4) had a non-finite loss or gradient" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ok" not in done.stdout
    tree = json.loads((run_toml.parent / "runs" / "run" / "receipt.json").read_text())
    assert (tree["status"], tree["figures"]["skipped_bad"]) == ("failed", 3)
    assert any("3 of 4 steps" in text for text in tree["warnings"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "--fresh"], "--resume and --fresh together"),
        (["--resume"], "no complete checkpoint to resume from"),
        (["train.stepz=3"], "nearest valid name: `steps`"),
        (["store=nowhere"], "nowhere"),
    ],
)
def test_user_errors(run_toml, arguments, message):
    result = runner.invoke(app, ["train", str(run_toml), *arguments])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


@pytest.mark.parametrize("ranks", [1, 2])
def test_json_is_the_receipt_alone(stores, tmp_path, ranks):
    devices = "".join("[[devices]]\nthreads = 1\n" for _ in range(ranks if ranks > 1 else 0))
    (tmp_path / "run.toml").write_text(
        f'store = "{stores / "dense"}"\n[data]\ntrain = "{stores / "rows.jsonl"}"\n'
        f'[train]\nsteps = 2\nrows_per_step = 4\n[compute]\ndtype = "fp32"\nthreads = 1\n{devices}'
    )
    done = subprocess.run(
        [sys.executable, "-m", "lamella", "train", "run.toml", "--json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    receipt = json.loads(done.stdout)
    assert receipt["status"] == "ok" and receipt["figures"]["ranks"] == ranks
    assert "receipt of run: ok" in done.stderr

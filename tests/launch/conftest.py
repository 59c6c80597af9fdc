"""The real command, in processes of its own, on a tiny real store."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.train.conftest import stores  # noqa: F401

LIMIT_S = 240


class Command:
    """`lamella train` on two ranks; `folder` holds its run.toml and runs."""

    def __init__(self, folder: Path, store: Path, rows: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "run"
        (folder / "run.toml").write_text(
            f'store = "{store}"\nruns_dir = "runs"\n[data]\ntrain = ["{rows}"]\n'
            "[train]\nrows_per_step = 4\nsteps = 3\nlearning_rate = 0.01\nwarmup_steps = 0\n[lora]\nrank = 4\n"
            '[compute]\ndtype = "fp32"\n[checkpoint]\nevery_steps = 1\n[[devices]]\nthreads = 1\n[[devices]]\nthreads = 1\n'
        )

    def start(self, *arguments: str, **env: str) -> subprocess.Popen:
        verb = [sys.executable, "-m", "lamella", "train", str(self.folder / "run.toml"), *arguments]
        return subprocess.Popen(
            verb, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
            env={**os.environ, **env},
        )  # fmt: skip

    def run(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        return finish(self.start(*arguments, **env))

    def steps(self) -> list[int]:
        """Steps that `metrics.jsonl` has, in its order."""
        import json

        file = self.run_dir / "metrics.jsonl"
        text = file.read_text() if file.is_file() else ""
        return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for_step(self, step: int, process: subprocess.Popen) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not (steps := self.steps()) or steps[-1] < step:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end_s, f"no step {step} after {LIMIT_S} s: {steps}"
            time.sleep(0.05)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; nothing is left behind when it takes too long."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        for child in ranks_of(process).values():
            child.kill()
        process.kill()
        raise
    return process.returncode, out, err


def ranks_of(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """The ranks that a command has started."""
    return {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}


@pytest.fixture
def command(stores, tmp_path):  # noqa: F811
    made = Command(tmp_path, stores / "dense", stores / "rows.jsonl")
    yield made
    for process in psutil.process_iter(["cmdline"]):  # ranks that outlived a failed test
        if str(tmp_path / "run.toml") in (process.info["cmdline"] or []):
            process.send_signal(signal.SIGKILL)

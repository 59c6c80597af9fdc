"""Ranks killed at random moments: nothing is lost beyond the step under way, and the end has the bits of an unbroken run."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lamella.store.quantize import quantize_checkpoint
from tests import fixtures
from tests.train.processes import free_port, start, torchrun_env

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
ADAPTER = "adapter_model.safetensors"
EVERY_STEP = {"checkpoint": {"every_steps": 1}}


def lines(run_dir):
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def steps(run_dir):
    return [(line["step"], line["rows_hash"], line["loss"], line["grad_norm"]) for line in lines(run_dir)]


def assert_same_bits(whole, broken, count):
    assert json.loads((broken / "receipt.json").read_text())["status"] == "ok"
    assert len(steps(whole)) == count
    assert steps(whole) == steps(broken)
    assert (whole / ADAPTER).read_bytes() == (broken / ADAPTER).read_bytes()


def wait_for(condition, alive, limit_s=120.0):
    """Until `condition` or `alive` turns; True when the condition did first."""
    limit_s += time.monotonic()
    while not condition():
        if not alive():
            return False
        assert time.monotonic() < limit_s, "nothing happened"
        time.sleep(0.001)
    return True


def is_saving(run_dir):
    return any((run_dir / "checkpoints").glob("step-*.partial"))


def test_killed_three_times_and_started_again(tmp_path):
    """A loop of its own in the place of torchrun's; the rank that saves dies in the middle of it once."""
    rng, count, run_dir = random.Random(3), 12, tmp_path / "broken" / "run"
    sections, options = {"train": {"steps": count}, **EVERY_STEP}, {"sleep_s": 0.03}

    def begin(name):
        port = free_port()
        return [
            start(
                tmp_path / name, sections, options=options, env=torchrun_env(2, r, port) | {"LAMELLA_SILENCE_S": "20"}
            )
            for r in range(2)
        ]

    done = 0
    for kill in range(3):
        ranks = begin("broken")
        victim = rng.randrange(2) if kill != 1 else 0
        alive = lambda r=ranks: all(rank.process.is_alive() for rank in r)  # noqa: E731
        assert wait_for(lambda d=done: len(lines(run_dir)) > d + 1, alive)
        if kill == 1:
            assert wait_for(lambda: is_saving(run_dir), alive)
        else:
            time.sleep(rng.uniform(0, 0.1))
        seen = len(lines(run_dir))
        ranks[victim].send(signal.SIGKILL)
        ended = [rank.finish() for rank in ranks]
        assert ended[victim][0] == -signal.SIGKILL
        code, text = ended[1 - victim]
        assert code == 1, text
        assert f"rank {victim}" in text and text.count("error:") == 1
        if kill:
            assert f"after step {done}" in ended[0][1] or victim == 0
        done = max(
            (json.loads(p.read_text())["step"] for p in run_dir.glob("checkpoints/step-*/complete.json")), default=0
        )
        assert seen - 1 <= done < count
    for name in ("broken", "whole"):
        ended = [rank.finish() for rank in begin(name)]
        assert [code for code, _ in ended] == [0, 0], ended
    assert_same_bits(tmp_path / "whole" / "run", run_dir, count)


@pytest.fixture
def job(tmp_path):
    """run.toml of a real MoE, 60 steps of 4 rows, a checkpoint after each. The ranks' shares are given: divided by
    measured speed, each run would have its own rounding."""
    fixtures.write_checkpoint(tmp_path / "hf", fixtures.moe_config(), tokenizer=fixtures.make_tokenizer())
    quantize_checkpoint(tmp_path / "hf", tmp_path / "store", threads=1)
    rows = [{**row, "id": 12 * k + row["id"]} for k in range(5) for row in fixtures.chat12()]
    fixtures.write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "run.toml").write_text(
        'store = "store"\nruns_dir = "runs"\n[data]\ntrain = ["rows.jsonl"]\n[lora]\nrank = 4\ndropout = 0.1\n'
        '[train]\nrows_per_step = 4\nsteps = 60\nschedule = "constant"\nwarmup_steps = 0\n[compute]\ndtype = "fp32"\n'
        'threads = 1\n[split]\nkind = "tokens"\nshares = [1.0, 1.0]\nrebalance = false\n'
        "[checkpoint]\nevery_steps = 1\nkeep = 2\n"
    )
    return tmp_path


def torchrun(folder, name, log, restarts=0, count=60):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "--max-restarts",
                str(restarts)]  # fmt: skip
    verb = ["-m", "lamella", "train", str(folder / "run.toml"), f"runs_dir={folder / 'runs'}", f"name={name}",
            f"train.steps={count}"]  # fmt: skip
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *launcher, *verb], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=file
        )


def workers(launcher):
    """The ranks' processes, by rank."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "RANK" in (env := child.environ()):
                found[int(env["RANK"])] = child
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def kill_under_torchrun(folder, kills, count, seed):
    """Train under `torchrun --max-restarts`; kill ranks at random moments: while they start, compute and save."""
    rng, run_dir, log = random.Random(seed), folder / "runs" / "broken", folder / "broken.log"
    launcher = torchrun(folder, "broken", log, kills, count)
    seen, killed = [], set()

    def fresh():
        return {r: p for r, p in workers(launcher).items() if p.pid not in killed}

    try:
        while len(seen) < kills:
            kill = len(seen)
            assert wait_for(lambda: len(fresh()) == 2, lambda: launcher.poll() is None), log.read_text()
            ranks = fresh()
            victim, before = rng.randrange(2), len(lines(run_dir))
            alive = lambda r=ranks: all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in r.values())  # noqa: E731
            match kill % 4:
                case 0:
                    time.sleep(rng.uniform(0, 6))
                case 3:
                    victim = 0
                    wait_for(lambda: is_saving(run_dir), alive)
                case _:
                    wait_for(lambda b=before: len(lines(run_dir)) != b, alive)
                    time.sleep(rng.uniform(0, 0.5))
            now = log.stat().st_size, len(lines(run_dir))
            killed |= {p.pid for p in ranks.values()}
            try:
                ranks[victim].kill()
            except psutil.NoSuchProcess:  # it ended after the other rank's death before
                continue
            seen.append(now)
        assert launcher.wait(120) == 0, log.read_text()
    except AssertionError:  # show where they are
        for process in workers(launcher).values():
            process.send_signal(signal.SIGABRT)
        time.sleep(2)
        raise AssertionError(log.read_text()[-10_000:]) from None
    finally:
        for process in [*psutil.Process(launcher.pid).children(recursive=True)] if launcher.poll() is None else []:
            process.kill()
        launcher.kill()
        launcher.wait()
    text = log.read_text()
    for match in re.finditer(r"resuming \S+ after step (\d+)", text):
        done = max((n for offset, n in seen if offset <= match.start()), default=0)
        assert int(match[1]) >= done - 1
    return text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_goes_on_after_twenty_random_kills(job):
    text = kill_under_torchrun(job, 20, 60, seed=5)
    assert text.count("resuming") >= 5
    assert torchrun(job, "whole", job / "whole.log").wait(240) == 0
    assert_same_bits(job / "runs" / "whole", job / "runs" / "broken", 60)

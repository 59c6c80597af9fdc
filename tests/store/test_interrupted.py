"""Kill, Ctrl-C, full disk: nothing half-made under the store's name, and going on gives the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.store.journal import JOURNAL_NAME, Journal
from lamella.store.pipeline import run_pipeline
from lamella.store.quantize import QuantizeSettings, plan_store, quantize_checkpoint
from tests.fixtures import moe_config, write_checkpoint

# Quantises as the verb does, and dies of SIGKILL in the middle: after the given number of chunks.
DIE = """
import os, signal, sys
from pathlib import Path
from lamella.store import quantize, pipeline
chunks = int(sys.argv[3])
def stop(nbytes, note):
    global chunks
    chunks -= 1
    if chunks == 0:
        os.kill(os.getpid(), signal.SIGKILL)
settings = quantize.QuantizeSettings()
with quantize.Checkpoint.open(sys.argv[1]) as checkpoint:
    plan = quantize.plan_store(checkpoint, settings)
    head = quantize.journal_head(checkpoint, plan, settings)
    with quantize.Journal.open(Path(sys.argv[2]), head, plan.groups) as journal:
        pipeline.run_pipeline(checkpoint, plan.groups, journal, advance=stop)
"""


def contents(folder) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("moe") / "moe", moe_config(layers=6), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def unbroken(source):
    quantize_checkpoint(source, source.parent / "unbroken")
    return contents(source.parent / "unbroken")


def run(command, **options):
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, **options)


@pytest.mark.parametrize("chunks", [40, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 100))])
def test_killed_and_resumed_gives_the_bytes_of_an_unbroken_run(source, unbroken, tmp_path, chunks):
    store = tmp_path / "store"
    done = run(["-c", DIE, str(source), str(store), str(chunks)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not store.exists()
    assert (tmp_path / "store.partial" / JOURNAL_NAME).is_file()
    quantize_checkpoint(source, store)
    assert contents(store) == unbroken
    assert not (tmp_path / "store.partial").exists()


def start(source, store, stop_after: int, error: type[BaseException]) -> None:
    """Run the pipeline and raise `error` in it after some chunks."""
    settings = QuantizeSettings()
    left = stop_after

    def advance(nbytes: int, note: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error

    with Checkpoint.open(source) as checkpoint:
        plan = plan_store(checkpoint, settings)
        from lamella.store.quantize import journal_head

        with Journal.open(store, journal_head(checkpoint, plan, settings), plan.groups) as journal:
            run_pipeline(checkpoint, plan.groups, journal, advance=advance)


def test_ctrl_c_ends_all_threads_and_can_go_on(source, unbroken, tmp_path):
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        start(source, tmp_path / "store", 60, KeyboardInterrupt)
    assert threading.active_count() == before
    assert not (tmp_path / "store").exists()
    quantize_checkpoint(source, tmp_path / "store")
    assert contents(tmp_path / "store") == unbroken


# The verb itself; says when the writer opens the fourth layer's file, and holds the writer there until stdin ends.
HELD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
def hold(event, args):
    if event == "open" and str(args[0]).endswith("layers/00003.bin"):
        print("there", flush=True)
        sys.stdin.read()
sys.addaudithook(hold)
sys.argv = ["lamella", *sys.argv[1:]]
from lamella.cli import main
main()
"""


def test_ctrl_c_of_the_command(source, unbroken, tmp_path):
    store = tmp_path / "store"
    command = [sys.executable, "-c", HELD, "quantize", str(source), "-o", str(store)]
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()  # ends stdin: the writer goes on
    assert process.returncode == 130, told
    assert "stopped; the same command goes on where it was" in told
    assert "Traceback" not in told
    assert not store.exists()
    assert (tmp_path / "store.partial" / "layers" / "00002.bin").is_file()
    again = run(["-m", "lamella", "quantize", str(source), "-o", str(store)])
    assert again.returncode == 0, again.stderr
    assert "going on: 4 of 7 files are done" in again.stderr
    assert contents(store) == unbroken


def test_finished_layers_are_kept(source, tmp_path, capsys):
    start(source, tmp_path / "store", 10**9, KeyboardInterrupt)  # all layers, no manifest
    stamps = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "store.partial" / "layers").iterdir()}
    capsys.readouterr()
    quantize_checkpoint(source, tmp_path / "store")
    assert "going on: 7 of 7 files are done" in capsys.readouterr().err
    assert stamps == {f.name: f.stat().st_mtime_ns for f in (tmp_path / "store" / "layers").iterdir()}


def test_torn_journal_line_and_damaged_file_are_made_again(source, unbroken, tmp_path):
    start(source, tmp_path / "store", 10**9, KeyboardInterrupt)
    journal = tmp_path / "store.partial" / JOURNAL_NAME
    with journal.open("r+b") as stream:
        stream.truncate(journal.stat().st_size - 5)
    os.truncate(tmp_path / "store.partial" / "layers" / "00002.bin", 10)
    (tmp_path / "store.partial" / ".manifest.json.4711.partial").write_text("{")
    quantize_checkpoint(source, tmp_path / "store")
    assert contents(tmp_path / "store") == unbroken


def test_partial_store_of_other_weights_or_settings_is_refused(source, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        start(source, tmp_path / "store", 60, KeyboardInterrupt)
    other = write_checkpoint(tmp_path / "other", moe_config(layers=6), dtype=torch.bfloat16, seed=1)
    with pytest.raises(UserError, match="begun otherwise: fingerprint"):
        quantize_checkpoint(other, tmp_path / "store")
    with pytest.raises(UserError, match="double_quant True there, False now"):
        quantize_checkpoint(source, tmp_path / "store", QuantizeSettings(double_quant=False))


def test_two_runs_on_one_store(source, tmp_path):
    settings = QuantizeSettings()
    with Checkpoint.open(source) as checkpoint:
        plan = plan_store(checkpoint, settings)
        with (
            Journal.open(tmp_path / "store", {"a": 1}, plan.groups),
            pytest.raises(UserError, match="another `lamella quantize`"),
        ):
            Journal.open(tmp_path / "store", {"a": 1}, plan.groups)


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv = ["lamella", *sys.argv[2:]]
from lamella.cli import main
main()
"""


def test_disk_full_while_writing(source, unbroken, tmp_path):
    """The kernel refuses bytes past a limit, as it does on a full disk."""
    store = tmp_path / "store"
    largest = max(f.stat().st_size for f in (source.parent / "unbroken").rglob("*.bin"))
    done = run(["-c", FULL, str(largest - 1000), "quantize", str(source), "-o", str(store)])
    assert done.returncode == 2
    assert "disk is full" in done.stderr
    assert "free" in done.stderr
    assert "Traceback" not in done.stderr
    assert not store.exists()
    assert run(["-m", "lamella", "quantize", str(source), "-o", str(store)]).returncode == 0
    assert contents(store) == unbroken


def test_too_little_room_is_found_before_writing(source, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        with pytest.raises(UserError, match=r"too little room: needs .* free"):
            quantize_checkpoint(source, mount / "store")
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_command_prints_report_and_json(source, tmp_path):
    done = run(["-m", "lamella", "quantize", str(source), "-o", str(tmp_path / "a"), "--json", "--threads", "1"])
    tree = json.loads(done.stdout)
    assert {row["tensor_class"]: row["format"] for row in tree["classes"]}["experts"] == "nf4"
    again = run(["-m", "lamella", "quantize", str(source), "-o", str(tmp_path / "a")])
    assert again.returncode == 2
    assert "exists already" in again.stderr

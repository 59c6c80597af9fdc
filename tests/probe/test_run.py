"""The whole of it on this machine, as short as it can be; the command; and an end in the middle."""

import datetime
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lamella.errors import UserError
from lamella.hardware.machines import open_machine
from lamella.hardware.matmul import native_dtype
from lamella.probe.run import Plan, measure_machine
from lamella.probe.table import show
from lamella.probe.timing import Effort

ROOT = Path(__file__).parent.parent.parent
SHORT = Plan(Effort(1, 0.001), 16 << 20, 0.5, children=False, quick=True, parts=1)


def run(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    command = [sys.executable, "-m", "lamella", "probe", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The command's file, and what it printed."""
    folder = tmp_path_factory.mktemp("probe")
    done = run(["--quick", "--json", "--out", "here.json", "--device", "cpu"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "here.json", done.stdout


def shown(machine) -> str:
    stream = io.StringIO()
    show(machine, Console(file=stream, width=120))
    return stream.getvalue()


def test_this_machine(written):
    file, printed = written
    assert json.loads(printed) == json.loads(file.read_text())
    assert [path.name for path in file.parent.iterdir()] == ["here.json"]
    machine = open_machine(str(file))
    (device,), (host,) = machine.devices, machine.hosts
    dtype = "bf16" if native_dtype(torch.device("cpu")) == torch.bfloat16 else "fp32"
    assert (device.kind, device.dtype, device.reached, device.host) == ("cpu", dtype, 1.0, 0)
    assert device.matmul_flops_per_s == device.details[f"{dtype}_flops_per_s"]
    assert device.threads == device.kernels.threads == 1 and device.kernels.matmul
    assert device.memory_bytes == host.limit_bytes and device.free_bytes <= host.free_bytes
    assert host.cores == len(os.sched_getaffinity(0)) and host.disk.read_bytes_per_s > 0
    assert machine.source == "measured" and datetime.datetime.fromisoformat(machine.taken).tzinfo is not None
    assert any("--quick" in note for note in machine.notes)


def test_tables(written):
    text = shown(open_machine(str(written[0])))
    assert "NF4 undone" in text and "GB/s" in text and "FLOP/s" in text and "disk " in text and "--quick" in text
    text = shown(open_machine("2xH100-80,1xT4+price=9"))
    assert "host to 2" in text and "nvlink" in text and "0 to 1" in text and "989 TFLOP/s bf16" in text


def test_gpus_that_are_not_there(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there are some")
    with pytest.raises(UserError, match="torch sees no CUDA device here"):
        measure_machine(SHORT, tmp_path, which="cuda")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--store", "none"], "none: no such folder"),
        (["--out", "none/machine.json"], "none: no such folder"),
        (["--device", "tpu"], "Invalid value for '--device'"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(arguments, told, tmp_path):
    done = run(arguments, tmp_path)
    assert done.returncode == 2 and told in done.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_an_end_in_the_middle_leaves_no_file(tmp_path):
    """Stopped while the disk is measured, the last thing it does: a file of its own is there then."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lamella", "probe", "--quick", "--device", "cpu"]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 120
    while not list(tmp_path.glob(".lamella-probe-*")) and child.poll() is None and time.monotonic() < until_s:
        time.sleep(0.002)
    child.send_signal(signal.SIGINT)
    _, text = child.communicate(timeout=60)
    assert child.returncode == 130, text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []

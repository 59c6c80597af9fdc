"""The host's memory or disk is full on one rank: all ranks end and the message says so."""

import json
import signal
import subprocess

import pytest

from lamella.hardware.limit import memory_limit
from lamella.train.checkpoint import fault_of
from tests.ranks.processes import run_job
from tests.train.processes import run_ranks

pytestmark = pytest.mark.distributed


def test_a_rank_killed_by_the_kernel_for_its_memory(tmp_path):
    with memory_limit(400 << 20) as limit:
        if limit.folder is None:
            pytest.skip("no cgroup can be made here")
        codes, texts = run_job("lose", 2, tmp_path, op="sum", how="ram full", cgroup=str(limit.folder))
    assert codes == [1, -signal.SIGKILL], texts
    assert "rank 1 is lost: its process" in texts[0]
    assert "Its last completed step is 2" in texts[0]
    assert "It probably ran out of memory: the kernel of" in texts[0]


def test_a_rank_that_gets_no_more_memory(tmp_path):
    codes, texts = run_job("lose", 3, tmp_path, op="sum", how="ram limit")
    assert codes == [1, 1, 1], texts
    for rank in (0, 2):
        assert "rank 1 failed after step 2: probably out of memory, with" in texts[rank]
        assert "you tried to allocate 17179869184 bytes" in texts[rank]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_in_the_run(small_disk):
    sections = {"train": {"steps": 300}, "checkpoint": {"every_steps": 1, "keep": 1000}}
    codes, texts = run_ranks(2, small_disk, sections)
    assert codes[0] == 2 and codes[1] == 1, texts
    assert "not enough disk space for a checkpoint" in texts[0] or "cannot be written: No space left" in texts[0]
    assert texts[0].count("error:") == texts[1].count("error:") == 1
    assert "rank 0 failed" in texts[1]
    done = sorted((small_disk / "run" / "checkpoints").glob("step-????????"))
    assert len(done) > 3
    assert [fault_of(path) for path in done] == [""] * len(done)


def test_a_disk_that_is_full_when_a_checkpoint_is_written(tmp_path):
    sections = {"train": {"steps": 9}, "checkpoint": {"every_steps": 1}}
    codes, texts = run_ranks(3, tmp_path, sections, {"full_at_save": 4})
    assert codes == [2, 1, 1], texts
    for text in texts:
        assert "not enough disk space for a checkpoint" in text
    assert json.loads((tmp_path / "run" / "receipt.json").read_text())["kept"].endswith("step-00000003")

"""Checkpoints are complete or not there; a full disk leaves earlier ones intact."""

import errno
import json
import resource
import shutil
import signal
from contextlib import contextmanager

import pytest
import torch

from lamella.errors import UserError
from lamella.train.checkpoint import Checkpoints, fault_of, load_optimizer, load_state


def adapter_writer(value: float, size: int = 10):
    from safetensors.torch import save_file

    def write(folder):
        save_file({"a": torch.full((size,), value)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

    return write


def save(points: Checkpoints, step: int, size: int = 10, best: int | None = None):
    path = points.save(
        step, adapter_writer(step, size), {"a/exp_avg": torch.ones(size)}, {"step": step}, 8 * size, best
    )
    points.settle()
    return path


@contextmanager
def file_size_limit(nbytes: int):
    """Writes past `nbytes` fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_save_and_read_back(tmp_path):
    points = Checkpoints(tmp_path / "checkpoints", keep=2)
    path = save(points, 3)
    assert fault_of(path) == ""
    assert load_state(path) == {"step": 3}
    assert torch.equal(load_optimizer(path)["a/exp_avg"], torch.ones(10))
    assert points.latest().path == path
    assert not points.latest().incomplete


def test_b34_unfinished_save_is_not_used_and_is_named(tmp_path):
    points = Checkpoints(tmp_path / "checkpoints", keep=2)
    save(points, 1)
    second = save(points, 2)
    torn = tmp_path / "checkpoints" / "step-00000003.partial"
    torn.mkdir()
    adapter_writer(3)(torn)
    found = points.latest()
    assert found.path == second
    assert found.incomplete == {"step-00000003": "the save did not finish"}
    points.prune(None)
    assert not torn.exists()


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "no record", "torn record"])
def test_b34_damaged_newest_gives_way_to_the_one_before(tmp_path, damage):
    points = Checkpoints(tmp_path / "checkpoints", keep=3)
    first, second = save(points, 1), save(points, 2)
    weights = second / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(data[:-4])
    elif damage == "flipped":
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "no record":
        (second / "complete.json").unlink()
    else:
        record = (second / "complete.json").read_text()
        (second / "complete.json").write_text(record[: len(record) // 2])
    found = points.latest()
    assert found.path == first
    assert list(found.incomplete) == ["step-00000002"]


def test_b34_disk_full_while_writing(tmp_path):
    points = Checkpoints(tmp_path / "checkpoints", keep=2)
    first = save(points, 1)
    with file_size_limit(100_000), pytest.raises(UserError, match=r"needed, .* free") as error:
        save(points, 2, size=100_000)
    assert error.value.exit_code != 0
    assert "400000" not in error.value.fix
    assert points.latest().path == first
    assert [p.name for p in points.folder.iterdir()] == ["step-00000001"]


def test_b34_free_space_is_checked_before_writing(tmp_path):
    points = Checkpoints(tmp_path / "checkpoints", keep=2)
    first = save(points, 1)
    too_much = shutil.disk_usage(tmp_path).free * 2
    calls = []
    with pytest.raises(UserError, match=f"{too_much + (1 << 20)} bytes"):
        points.save(2, calls.append, {}, {}, too_much)
    assert not calls
    assert points.latest().path == first


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path):
    points = Checkpoints(tmp_path / "checkpoints", keep=2)

    def broken(folder):
        raise OSError(errno.EIO, "input/output error")

    points.save(1, broken, {}, {}, 10)
    with pytest.raises(OSError, match="input/output"):
        points.settle()
    assert list(points.folder.iterdir()) == []


def test_b37_prune_keeps_the_newest_and_the_best(tmp_path):
    points = Checkpoints(tmp_path / "checkpoints", keep=1)
    for step in (1, 2, 3, 4):
        save(points, step, best=2 if step >= 2 else 1)
    assert points.steps() == [2, 4]


def test_saving_a_step_again_replaces_it(tmp_path):
    points = Checkpoints(tmp_path / "checkpoints", keep=2)
    save(points, 5)
    points.save(5, adapter_writer(1), {"a/step": torch.tensor(2.0)}, {"step": 5, "again": True}, 100)
    points.settle()
    assert load_state(points.path(5))["again"]
    assert points.steps() == [5]
    assert json.loads((points.path(5) / "complete.json").read_text())["step"] == 5

"""A run goes on with another number of ranks than it was saved with."""

import signal

import pytest
from safetensors.torch import load_file

from tests.train import fake
from tests.train.processes import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("worlds", [(1, 2, 3), (3, 1, 2)])
def test_the_number_of_ranks_changes_at_resume(tmp_path, worlds):
    train = {"steps": 9, "eps": 1e-2, "schedule": "constant", "warmup_steps": 0}
    sections = {"train": train, "checkpoint": {"every_steps": 1}}
    for world, stop_at in zip(worlds, (3, 6, -1), strict=True):
        codes, texts = run_ranks(world, tmp_path / "many", sections, {"stop_at": stop_at})
        assert all(code == 0 if stop_at < 0 else code in (1, -signal.SIGKILL) for code in codes), texts
        if stop_at > 3 or stop_at < 0:
            assert "resuming" in texts[0]
    fake.run(tmp_path / "one", **sections)
    one, many = (load_file(tmp_path / name / "run" / "adapter_model.safetensors") for name in ("one", "many"))
    for name in one:
        assert (one[name] - many[name]).norm() <= 1e-5 * one[name].norm(), name

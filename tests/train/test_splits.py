"""Whole trainings divided in every way end with the adapter of one process."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from lamella.config import build_run_config
from lamella.plan.costs import CostTable
from lamella.train.assemble import assemble_parts
from lamella.train.loop import train_run
from tests import fixtures
from tests.distributed import run_as_ranks
from tests.ranks.netns import two_hosts
from tests.train.processes import free_port
from tests.train.test_ranks import SGD_LIKE

pytestmark = pytest.mark.distributed

STEPS = 20
CPU = {"device": "cpu", "threads": 1}


def config_of(stores, runs_dir, **sections):
    tree = {
        "store": str(stores / "moe4"), "runs_dir": str(runs_dir), "data": {"train": [str(stores / "rows24.jsonl")]},
        "lora": {"rank": 4}, "compute": {"dtype": "fp32", "threads": 1}, **sections,
        "train": {"rows_per_step": 8, "learning_rate": 0.01, "steps": STEPS, "micro_batch_tokens": 128, **SGD_LIKE,
                  **sections.get("train", {})},
    }  # fmt: skip
    return build_run_config(tree)


@pytest.fixture(scope="session")
def stores4(stores):
    from lamella.store.quantize import quantize_checkpoint

    fixtures.write_checkpoint(stores / "moe4-hf", fixtures.moe_config(layers=4), tokenizer=fixtures.make_tokenizer())
    quantize_checkpoint(stores / "moe4-hf", stores / "moe4", threads=1)
    rows = [{**row, "id": f"{row.get('id', i)}-{n}"} for n in range(2) for i, row in enumerate(fixtures.chat12())]
    fixtures.write_jsonl(stores / "rows24.jsonl", rows)
    return stores


@pytest.fixture(scope="session")
def one(stores4, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train_run(config_of(stores4, folder))
    return folder / "run"


def trained(config, mode="auto"):
    train_run(config, mode)


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def same(run_dir, one, tolerance=1e-5):
    a, b = load_file(one / "adapter_model.safetensors"), load_file(run_dir / "adapter_model.safetensors")
    for name in a:
        assert (a[name] - b[name]).norm() <= tolerance * a[name].norm(), name
    assert [s["loss"] for s in lines(one)] == pytest.approx([s["loss"] for s in lines(run_dir)], rel=1e-5)
    assert json.loads((run_dir / "receipt.json").read_text())["status"] == "ok"


WAYS = {
    "2 even": (2, {"kind": "tokens", "shares": [0.5, 0.5]}),
    "2 uneven": (2, {"kind": "tokens", "shares": [0.75, 0.25]}),
    "3 uneven": (3, {"kind": "tokens", "shares": [0.5, 0.3, 0.2]}),
    "2 stages": (2, {"kind": "stages", "layers": [3, 1]}),
    "3 stages": (3, {"kind": "stages", "layers": [1, 1, 2]}),
    "2 by experts": (2, {"kind": "experts", "shares": [0.6, 0.4]}),
    "3 by experts": (3, {"kind": "experts", "shares": [0.5, 0.3, 0.2]}),
    "experts x stages": (3, {"kind": "experts", "stages": [2, 1], "layers": [2, 2], "shares": [0.6, 0.4, 1.0]}),
    "tokens x stages": (3, {"kind": "stages", "stages": [2, 1], "layers": [2, 2], "shares": [0.6, 0.4, 1.0]}),
}


QUICK_WAYS = ("3 uneven", "2 by experts", "tokens x stages")


@pytest.mark.parametrize(
    "way", [way if way in QUICK_WAYS else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_any_split_trains_the_same_adapter(way, stores4, one, tmp_path):
    world, split = WAYS[way]
    config = config_of(stores4, tmp_path, devices=[CPU] * world, split={**split, "rebalance": False})
    run_as_ranks(world, trained, config, join=False, preload="tests.train.test_splits")
    same(tmp_path / "run", one)
    steps = lines(tmp_path / "run")
    assert [d["rank"] for d in steps[-1]["devices"]] == list(range(world))
    divided = json.loads((tmp_path / "run" / "receipt.json").read_text())["engine"]["split"]
    assert (divided is not None) == (split["kind"] == "experts")


def newest_split(run_dir):
    """Stages of the newest checkpoint's split."""
    newest = max((run_dir / "checkpoints").iterdir())
    (state,) = [json.loads(f.read_text()) for f in newest.glob("*.json") if '"in_flight"' in f.read_text()]
    return state["split"]["stages"]


class Scripted:
    """A spread that is told how long ranks computed: rank 1 at a fifth of its speed from the sixth step on."""

    def __init__(self, spread):
        self._spread, self.steps = spread, 0

    def __getattr__(self, name):
        return getattr(self._spread, name)

    def adapt(self, rows, busy_s):
        self.steps += 1
        plan, split = self._spread.plan(rows), self._spread.split
        table = CostTable(self._spread.model)
        costs = self._spread.costs(rows)
        busy = []
        for rank in range(2):
            at = split.stage_of(rank)
            stage = split.stages[at]
            mine = [costs[i] for m, item in enumerate(plan.items) if rank in plan.owners[at][m] for i in item]
            slow = 5.0 if rank == 1 and self.steps > 5 else 1.0
            busy.append(slow * table.flops(mine, stage.first, stage.last) / 1e9)
        return self._spread.adapt(rows, busy)


def trained_as_scripted(config):
    def assemble(*args):
        parts = assemble_parts(*args)
        return replace(parts, spread=lambda state: Scripted(parts.spread(state)))

    train_run(config, "auto", assemble)


@pytest.mark.parametrize("kind", ["stages", "tokens"])
def test_a_device_that_slows_down_gets_less_and_the_result_stays(kind, stores4, one, tmp_path):
    config = config_of(stores4, tmp_path, devices=[CPU, CPU], split={"kind": kind})
    run_as_ranks(2, trained_as_scripted, config, join=False, preload="tests.train.test_splits")
    same(tmp_path / "run", one)
    found = newest_split(tmp_path / "run")
    if kind == "stages":
        layers = {stage["ranks"][0]: stage["last"] - stage["first"] for stage in found}
        assert layers[0] == 3, "the faster device took a layer over"
    else:
        assert found[0]["shares"][0] > 0.7


def test_another_split_and_number_of_ranks_at_every_resume(stores4, one, tmp_path):
    parts = (
        (6, 1, {}),
        (10, 2, {"kind": "tokens", "shares": [0.5, 0.5]}),
        (14, 2, {"kind": "stages", "layers": [1, 3]}),
        (STEPS, 3, {"kind": "tokens", "shares": [0.5, 0.3, 0.2]}),
    )
    for steps, world, split in parts:
        config = config_of(
            stores4, tmp_path, devices=[CPU] * world if world > 1 else [], split={**split, "rebalance": False},
            train={"steps": steps},
        )  # fmt: skip
        if world == 1:
            train_run(config)
        else:
            run_as_ranks(world, trained, config, "resume", join=False, preload="tests.train.test_splits")
            assert len(newest_split(tmp_path / "run")) == len(split.get("layers", "1")), "as asked at this resume"
    same(tmp_path / "run", one)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_pipeline_over_two_hosts(stores4, one, tmp_path):
    """Two network namespaces joined by a slow link."""
    config = config_of(
        stores4, tmp_path, devices=[CPU, CPU], split={"kind": "stages", "layers": [2, 2], "rebalance": False}
    )
    file = tmp_path / "run.json"
    file.write_text(config.model_dump_json())
    port = free_port()
    with two_hosts() as hosts:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", hosts.names[r], sys.executable, "-c", TRAIN, str(file)],
                env={**os.environ, **hosts.env(2, r, port)}, stderr=subprocess.PIPE, text=True,
            )
            for r in range(2)
        ]  # fmt: skip
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    same(tmp_path / "run", one)


TRAIN = (
    "import sys; from lamella.config import RunConfig; from lamella.train.loop import train_run; "
    "train_run(RunConfig.model_validate_json(open(sys.argv[1]).read()))"
)

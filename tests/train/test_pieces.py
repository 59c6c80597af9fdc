"""A traced step shows the pieces that the simulator lists for it: the same names, as often, with the same bytes."""

import json
from dataclasses import replace

import pytest
import torch

from lamella.config import build_run_config
from lamella.forecast.compare import compare_run
from lamella.forecast.document import write_plan
from lamella.forecast.events import play
from lamella.forecast.items import part_of_share, step_items
from lamella.forecast.pieces import pieces_of_items, read_traced
from lamella.plan.costs import LayerCost, ModelCost, RowCost
from lamella.plan.split import Split, Stage
from lamella.plan.work import plan_step
from lamella.ranks.group import Ranks
from lamella.store.reader import Store
from lamella.train.assemble import assemble_parts
from lamella.train.loop import train_run
from tests.distributed import run_as_ranks
from tests.forecast.cases import HIDDEN, rank_plan, shape, sites
from tests.forecast.outcomes import forecast_of, question_of
from tests.forecast.test_present import document_of

pytestmark = pytest.mark.distributed

LAYERS = 4
COST = ModelCost((LayerCost(1e6, 1e2, 1 / 3, 10**5, 10**5, 16, 100.0, HIDDEN * 4),) * LAYERS)
TRACE = {"train": {"steps": 4, "rows_per_step": 12, "micro_batch_tokens": 96}, "trace": {"steps": 2}}
ALONE = Split((Stage(0, LAYERS, (0,), (1.0,)),))
STAGES = Split((Stage(0, 3, (0,), (1.0,)), Stage(3, LAYERS, (1,), (1.0,))), 2)
EXPERTS = Split((Stage(0, LAYERS, (0, 1), (0.6, 0.4), "experts"),))
ROWS_OF_TWO = Split((Stage(0, LAYERS, (0, 1), (0.5, 0.5)),))


def train_as_rank(tree):
    torch.set_num_threads(1)
    train_run(build_run_config(tree))


def listed(split, row_costs, own, group_bytes):
    """Pieces of a step that takes these rows."""
    world = sum(len(stage.ranks) for stage in split.stages)
    plan = plan_step(split, COST, [1.0] * world, row_costs, 96)
    model = shape(LAYERS, group_bytes)
    ranks = [own] * world
    if split.stages[0].way == "experts":
        ranks = [replace(own, part=part_of_share(share)) for share in split.stages[0].shares]
    items = step_items(split, plan, model, row_costs, ranks, {}, sites(LAYERS), dtype_bytes=4)
    return pieces_of_items(items), items


def lengths_of(config):
    """Costs of the step's rows: every row of the data, in every step."""
    parts = assemble_parts(config, Ranks(0, 1), False)
    return [RowCost(parts.data.tokens(r), parts.data.label_tokens(r)) for r in parts.data.rows_of(0).rows]


def run(config, world=1):
    if world == 1:
        train_run(config)
    else:
        run_as_ranks(world, train_as_rank, config.model_dump(mode="json"), join=False)


def check(traced, expected, ranks):
    """All traced steps show just these pieces, as often. (Which micro-batches a step has depends on its rows.)"""
    assert len(traced.steps) == 2 and traced.dropped == 0
    for step in traced.pieces:
        assert set(step) == set(expected)
        for key, spent in expected.items():
            each = key.name in ("embed", "head")  # of every micro-batch
            if key.cause in ("load", "dequantise", "compute", "optimizer") and not each:
                assert step[key].count == spent.count, key
    assert {key.rank for key in expected} == set(range(ranks))


def test_everything_resident(tmp_path, real_config):
    config = real_config("dense", **TRACE, memory={"recompute": "always"})
    run(config)
    expected, _ = listed(ALONE, lengths_of(config), rank_plan(resident=range(LAYERS)), 1)
    check(read_traced(tmp_path / "run" / "trace.json", 2), expected, 1)


def streaming_budget(config):
    """Room for a step, one layer that stays, and three that take turns in two slots."""
    parts = assemble_parts(config, Ranks(0, 1), False)
    plan, packed = parts.engine.plan, parts.engine.walk.weights.residency.packed_bytes
    parts.engine.close()
    return plan.beyond_program_bytes - packed // 4 + 64


def test_streamed(tmp_path, real_config, stores):
    store = Store.open(stores / "dense")
    budget = streaming_budget(real_config("dense", **TRACE, memory={"recompute": "always", "budget": "1GB"}))
    config = real_config("dense", **TRACE, memory={"recompute": "always", "budget": str(budget)})
    run(config)
    held = json.loads((tmp_path / "run" / "receipt.json").read_text())["engine"]["layers_resident"]
    expected, _ = listed(ALONE, lengths_of(config), rank_plan(resident=range(held)), store.group_bytes(0))
    assert held == 1 and any(key.cause == "load" for key in expected)
    traced = read_traced(tmp_path / "run" / "trace.json", 2)
    check(traced, expected, 1)
    for step in traced.pieces:
        assert all(step[key].nbytes == expected[key].nbytes for key in expected if key.cause == "load")


def test_two_stages(tmp_path, real_config):
    split = {"kind": "stages", "layers": [3, 1], "groups": 2, "rebalance": False}
    config = real_config("dense", **TRACE, split=split, memory={"recompute": "always"})
    run(config, 2)
    expected, items = listed(STAGES, lengths_of(config), rank_plan(resident=range(LAYERS)), 1)
    traced = read_traced(tmp_path / "run" / "trace.json", 2)
    check(traced, expected, 2)
    for key in expected:
        if key.cause in ("send", "receive"):  # after the last step the adapter is gathered too
            assert traced.pieces[0][key].nbytes == expected[key].nbytes
    compared(tmp_path / "run", items)


def compared(folder, items):
    """The run with such a plan: every piece finds its counterpart."""
    played, question = play(items, {}), question_of()
    document = document_of(question, forecast_of(question), figures={
        "step_s": played.step_s, "step_tokens": 1000.0, "tokens_per_s": 1.0, "played": played.to_dict(),
        "ranks": [{"device": k, "need": 10**9} for k in range(2)],
    })  # fmt: skip
    write_plan(folder / "plan.json", document)
    found = compare_run(folder)
    assert (found.steps, found.traced_steps, found.missing) == (2, 2, ())
    assert {x.what for x in found.pieces if x.where == "rank 1"} >= {"forward 3", "head", "backward 3", "update"}
    assert all(x.measured > 0 for x in found.pieces)
    sent = {x.where: x for x in found.summary if x.what.startswith("bytes to rank")}
    assert all(1 <= x.ratio < 1.6 for x in sent.values())  # after the last step the adapter is gathered too
    assert {x.what for x in found.summary} >= {"computing", "idle", "peak memory", "exchange and waiting for others"}


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_layers_divided_by_experts(tmp_path, real_config, recompute):
    split = {"kind": "experts", "shares": [0.6, 0.4], "rebalance": False}
    config = real_config("dense", **TRACE, split=split, memory={"recompute": recompute})
    run(config, 2)
    own = rank_plan(resident=range(LAYERS), recompute=recompute == "always")
    expected, _ = listed(EXPERTS, lengths_of(config), own, 1)
    traced = read_traced(tmp_path / "run" / "trace.json", 2)
    check(traced, expected, 2)
    for key in (key for key in expected if key.name == "sum of ranks 0, 1"):
        for step in traced.pieces:  # the summed loss and what ranks agree on are a few bytes more
            assert 0 <= step[key].nbytes - expected[key].nbytes <= 100


def test_rows_of_two_ranks(tmp_path, real_config):
    config = real_config("dense", **TRACE, split={"kind": "tokens", "shares": [0.5, 0.5], "rebalance": False},
                         memory={"recompute": "always"})  # fmt: skip
    run(config, 2)
    expected, _ = listed(ROWS_OF_TWO, lengths_of(config), rank_plan(resident=range(LAYERS)), 1)
    check(read_traced(tmp_path / "run" / "trace.json", 2), expected, 2)

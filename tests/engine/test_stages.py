"""A step split among ranks, by tokens, by stages and both, has the loss and the gradients of one process."""

import itertools
from pathlib import Path

import pytest
import torch

from lamella.engine import Engine
from lamella.engine.costs import model_cost
from lamella.engine.stages import rank_work, whole_work
from lamella.models.layout import pack_rows
from lamella.plan.costs import RowCost
from lamella.plan.split import Split, Stage
from lamella.plan.work import plan_step
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.conftest import random_rows
from tests.distributed import run_as_ranks
from tests.engine.test_families import trained_adapter
from tests.fixtures import moe_config, write_checkpoint

ROWS = random_rows((5, 23, 9, 30, 12, 17, 8, 26))
LABELS = sum(sum(mask) for _, mask in ROWS)
MICRO_BATCH_TOKENS = 32


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    write_checkpoint(folder / "model", moe_config(layers=5))
    quantize_checkpoint(str(folder / "model"), folder / "store", QuantizeSettings())
    return folder / "store"


def opened(store: Path, dtype: str, recompute: str, dropout: float = 0.0, budget: int | None = None) -> Engine:
    engine = Engine.open(Store.open(store), dtype=dtype, recompute=recompute, threads=1, seed=3, budget_bytes=budget)
    trained_adapter(engine, dropout=dropout)
    return engine


def pack(rows):
    return [pack_rows([ROWS[r] for r in rows], list(rows))]


def split_step(ranks, store, split, dtype, recompute, dropout):
    """One rank's loss, start, gradients, and the summed loss of forward passes alone."""
    engine = opened(store, dtype, recompute, dropout)
    stage = split.stages[split.stage_of(ranks.rank)]
    engine.assign(stage.first, stage.last)
    engine.walk.peers = ranks
    costs = [RowCost(len(ids), sum(mask)) for ids, mask in ROWS]
    plan = plan_step(split, model_cost(engine, True), [1.0] * ranks.world, costs, MICRO_BATCH_TOKENS)
    work = rank_work(split, plan, ranks.rank, range(len(ROWS)), pack)
    out = engine.step(work, step_index=2, label_tokens=LABELS, beside_base=True)
    grads = {name: p.grad for name, p in engine.adapter.parameters().items() if p.grad is not None}
    facts = (engine.facts()["layers_resident"], out.first_bad_layer(), len(plan.groups))
    result = (out.loss_sum, out.start, grads, engine.evaluate(work), facts, out.flops)
    ranks.meet("the end")
    engine.close()
    return result


def alone(store, dtype, recompute, dropout):
    engine = opened(store, dtype, recompute, dropout)
    out = engine.step(
        whole_work([b for r in range(len(ROWS)) for b in pack([r])], 5), step_index=2, label_tokens=LABELS
    )
    sums = engine.loss_sums([b for r in range(len(ROWS)) for b in pack([r])])
    grads = {name: p.grad.clone() for name, p in engine.adapter.parameters().items()}
    engine.close()
    return out, grads, float(sum(s.sum() for s in sums))


def stages(*cuts, groups=3):
    """Split of one rank per stage at these layers."""
    edges = [0, *cuts, 5]
    parts = itertools.pairwise(edges)
    return Split(tuple(Stage(a, b, (r,), (1.0,)) for r, (a, b) in enumerate(parts)), groups)


SPLITS = {
    "2 stages": stages(2),
    "3 stages": stages(1, 4, groups=4),
    "2 stages, one group": stages(3, groups=1),
    "tokens, uneven": Split((Stage(0, 5, (0, 1, 2), (0.6, 0.3, 0.1)),)),
    "tokens x stages": Split((Stage(0, 2, (0, 1), (0.7, 0.3)), Stage(2, 5, (2,), (1.0,))), 3),
    "stages x tokens": Split((Stage(0, 3, (0,), (1.0,)), Stage(3, 5, (1, 2), (0.5, 0.5))), 3),
}


@pytest.mark.parametrize(
    ("name", "recompute", "dropout"),
    [(name, "always", 0.0) for name in SPLITS]
    + [("3 stages", "never", 0.0), ("2 stages", "never", 0.3), ("tokens x stages", "always", 0.3)],
)
def test_a_split_step_is_the_whole_one(store, name, recompute, dropout):
    split = SPLITS[name]
    world = sum(len(stage.ranks) for stage in split.stages)
    found = run_as_ranks(
        world, split_step, store, split, "fp32", recompute, dropout, preload="tests.engine.test_stages"
    )
    out, grads, evaluated = alone(store, "fp32", recompute, dropout)
    assert sum(f[0] for f in found) == pytest.approx(out.loss_sum, rel=1e-6)
    assert sum(f[3] for f in found) == pytest.approx(evaluated, rel=1e-6)
    assert len([f[1] for f in found if f[1]]) == 1, "one rank measures the bare base"
    assert sum(f[5] for f in found) == pytest.approx(out.flops, rel=1e-6 if recompute == "always" else 0.5)
    for name, whole in grads.items():
        parts = [f[2][name] for f in found if name in f[2]]
        layer = int(name.split(".layers.")[1].split(".")[0])
        owners = next(stage.ranks for stage in split.stages if stage.first <= layer < stage.last)
        assert 1 <= len(parts) <= len(owners), name
        assert (sum(parts) - whole).norm() <= 1e-5 * whole.norm(), name
    for rank, f in enumerate(found):
        stage = split.stages[split.stage_of(rank)]
        assert f[4][:2] == (stage.last - stage.first, None)
        assert f[4][2] == split.groups


def test_the_bits_repeat(store):
    first, second = (
        run_as_ranks(3, split_step, store, SPLITS["tokens x stages"], "fp32", "always", 0.0,
                     preload="tests.engine.test_stages")
        for _ in range(2)
    )  # fmt: skip
    for a, b in zip(first, second, strict=True):
        assert a[0] == b[0]
        assert all(torch.equal(a[2][name], b[2][name]) for name in a[2])

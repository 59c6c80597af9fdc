"""The list of pieces, played, takes what the quick simulation of the search for splits says."""

import random
from dataclasses import replace

import pytest

from lamella.forecast.events import play
from lamella.forecast.items import DIVIDED, RankPlan, Route, step_items
from lamella.plan.costs import CostTable, RowCost, visible_pairs
from lamella.plan.devices import Link, Links
from lamella.plan.memory import memory_of
from lamella.plan.simulate import simulate
from lamella.plan.split import Split, Stage
from lamella.plan.work import part_of, plan_step
from tests.forecast.cases import shape, sites
from tests.plan.cases import devices, model, random_rows

LAYERS = 24
LINKS = Links(Link(5e9, 1e-5), Link(1e9, 1e-4))
HIDDEN = 4096


class OfCosts:
    """A device's times as plans take them: FLOPs over speed."""

    def __init__(self, cost, device):
        self.cost, self.device = cost, device

    def _flops(self, layer, lengths):
        one = self.cost.layers[layer]
        pairs = sum(visible_pairs(n, one.window) for n in lengths)
        return one.forward_share, sum(lengths) * one.flops_per_token + pairs * one.flops_per_pair

    def forward(self, layer, lengths):
        share, flops = self._flops(layer, lengths)
        return {"linear": share * flops / self.device.flops_per_s}

    def backward(self, layer, lengths, recompute):
        share, flops = self._flops(layer, lengths)
        return {"linear": (1 - share) * flops / self.device.flops_per_s}

    def dequantise(self, layer):
        return self.cost.layers[layer].dequantised_bytes / self.device.dequantise_bytes_per_s

    def hang(self, layer):
        return 0.0

    def prologue(self, tokens):
        return 0.0

    def head(self, label_tokens):
        return label_tokens * self.cost.head_flops_per_label / self.device.flops_per_s

    def update(self, parameters):
        return 0.0


def both(split, cost, machines, rows, micro_batch_tokens=4096):
    """Seconds of a step, piece by piece and by the quick way."""
    table = CostTable(cost)
    speeds = [d.flops_per_s for d in machines]
    plan = plan_step(split, cost, speeds, rows, micro_batch_tokens, devices=machines, links=LINKS)
    memory = memory_of(split, cost, machines, plan, rows)
    ranks, rates, routes = [], {}, {}
    for r, device in enumerate(machines):
        stage = split.stages[split.stage_of(r)]
        part = part_of(stage, r, table)
        rates[f"disk {r}"] = device.read_bytes_per_s
        ranks.append(RankPlan(
            OfCosts(cost, device), frozenset(range(stage.first, stage.first + memory[r].layers_held)),
            read=Route((f"disk {r}",)), part=dict.fromkeys(DIVIDED, part),
            layer_bytes={i: int(cost.layers[i].packed_bytes * part) for i in range(LAYERS)},
        ))  # fmt: skip
        for other in range(len(machines)):
            link, hosts = LINKS.between(machines, r, other), (device.host, machines[other].host)
            name = f"{r} to {other}" if hosts[0] == hosts[1] else f"host {hosts[0]} to {hosts[1]}"
            rates[name] = link.bytes_per_s
            routes[r, other] = Route((name,), link.latency_s)
    model_shape = replace(shape(LAYERS, cost.layers[0].packed_bytes), hidden=HIDDEN)
    items = step_items(split, plan, model_shape, rows, ranks, routes, sites(LAYERS))
    played = play(items, rates)
    quick = simulate(split, plan, cost, machines, LINKS, rows, table, memory)
    return played, quick


def parts(*shares, first=0, last=LAYERS, way="tokens", rank=0):
    total = sum(shares)
    return Stage(first, last, tuple(range(rank, rank + len(shares))), tuple(x / total for x in shares), way)


SPLITS = {
    "one device": Split((parts(1),)),
    "rows of two": Split((parts(1, 0.5),)),
    "experts of two": Split((parts(0.6, 0.4, way="experts"),)),
    "experts of three": Split((parts(0.5, 0.3, 0.2, way="experts"),)),
    "three stages": Split(tuple(parts(1, first=8 * k, last=8 * k + 8, rank=k) for k in range(3)), 8),
    "two stages of two": Split((parts(1, 1, last=10), parts(1, 0.5, first=10, rank=2)), 6),
    "experts, then rows": Split((parts(0.5, 0.5, last=12, way="experts"), parts(1, 1, first=12, rank=2)), 4),
}
COSTS = {
    "computing": model(LAYERS, boundary_bytes_per_token=HIDDEN * 2),
    "dequantising": model(LAYERS, boundary_bytes_per_token=HIDDEN * 2, dequantised_bytes=4 * 10**8, divisible=0.9),
}


@pytest.mark.parametrize("hosts", ["one host", "two hosts"])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_alike(split, cost, hosts):
    world = sum(len(stage.ranks) for stage in split.stages)
    machines = devices(*(1 - 0.2 * (r % 2) for r in range(world)))
    if hosts == "two hosts":
        machines = [replace(d, host="ab"[2 * r // world]) for r, d in enumerate(machines)]
    rows = random_rows(random.Random(world), 32)
    played, quick = both(split, cost, machines, rows)
    assert played.step_s == pytest.approx(quick.step_s, rel=0.03)
    assert [played.idle[r] for r in range(world)] == pytest.approx(quick.idle, abs=0.03)


@pytest.mark.parametrize("read", [2e8, 1e9, 1e10])
@pytest.mark.parametrize("held", [0, 10])
def test_alike_where_layers_are_streamed(read, held):
    cost, rows = COSTS["computing"], [RowCost(1000, 100)] * 4
    (machine,) = devices(1, read=read)
    plan = plan_step(SPLITS["one device"], cost, [machine.flops_per_s], rows, 4096)
    (whole,) = memory_of(SPLITS["one device"], cost, [machine], plan, rows)
    small = replace(machine, memory_bytes=whole.need - (LAYERS - held - 2) * 10**8 + 1)
    played, quick = both(SPLITS["one device"], cost, [small], rows)
    assert quick.read_bytes[0] == sum(item.nbytes for item in [played.links["disk 0"]]) > 0
    assert played.step_s == pytest.approx(quick.step_s, rel=0.03)

"""How a run's steps are divided among its ranks: who takes which rows through which layers, and who trains what.

The split changes while the run goes on (`rebalance`); every rank decides from the same gathered numbers, so all hold the
same split at every step.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from lamella.config import RunConfig
from lamella.console import notice
from lamella.data.steps import share_rows
from lamella.engine import Engine
from lamella.engine.costs import model_cost
from lamella.engine.gather import GroupPeers
from lamella.engine.stages import RankWork, rank_work
from lamella.models.layout import PackedBatch
from lamella.plan.balance import Balancer
from lamella.plan.costs import ModelCost, RowCost
from lamella.plan.devices import Device, Link, Links
from lamella.plan.explain import explain
from lamella.plan.search import Choice, find_split
from lamella.plan.simulate import simulate
from lamella.plan.split import Split, Stage
from lamella.plan.work import StepPlan, plan_step
from lamella.ranks.beats import PULSE
from lamella.ranks.group import Ranks
from lamella.train.parts import TrainData

PROBE_BYTES = 4 << 20
"""Sent from each rank to the next to measure links."""
READ_BYTES_PER_S = 1.5e9
DEQUANTISE_BYTES_PER_S = 1.0e10
REACHED = 0.5
"""Share of the matmul rate that training is taken to reach. These three are taken, not measured, for the first split alone:
steps show how fast a device is with all of them together."""

Fit = Callable[[Callable[[Sequence[int]], list[PackedBatch]]], None]


class RowSource(Protocol):
    """Rows by number, and micro-batches of some of them."""

    def tokens(self, row: int) -> int: ...
    def label_tokens(self, row: int) -> int: ...
    def pack(self, rows: Sequence[int]) -> list[PackedBatch]: ...


class EvenRows:
    """Every rank walks all layers over an even part of a step's rows."""

    pipelined = False

    def __init__(self, ranks: Ranks, data: TrainData) -> None:
        self._ranks, self._data = ranks, data

    def take(self, rows: Sequence[int]) -> list[PackedBatch] | None:
        """This rank's micro-batches; None: it has nothing to do."""
        lengths = [self._data.tokens(row) for row in rows]
        mine = [rows[position] for position in share_rows(lengths, [1.0] * self._ranks.world)[self._ranks.rank]]
        return self._data.pack(mine) if mine else None

    def counts(self, work: list[PackedBatch] | None) -> tuple[int, int]:
        """Tokens and rows of this rank's part."""
        return _counts(work or [])

    def owners(self, name: str) -> tuple[int, ...]:
        """Ranks that train this parameter."""
        return tuple(range(self._ranks.world))

    def adapt(self, rows: Sequence[int], busy_s: Sequence[float]) -> tuple[str, ...] | None:
        return None

    def settle(self) -> None:
        """Nothing ever changes."""

    def planned_s(self, rows: Sequence[int]) -> float | None:
        return None

    def lines(self) -> list[str]:
        return [f"rows are shared evenly by {self._ranks.world} ranks"]

    def state(self) -> dict[str, Any] | None:
        return None


@dataclass(frozen=True)
class Measured:
    """What a rank tells of itself before the run."""

    name: str
    host: str
    flops_per_s: float
    memory_bytes: int | None


class SplitRows:
    """Rows and layers divided by a found or given split.

    Args:
        layer_of: layer that a parameter belongs to.
        state: a checkpoint's split, taken when it is for as many ranks and the same settings.
        fit: makes this rank's micro-batches of any step fit its budget; gets `batches`.
    """

    def __init__(
        self, config: RunConfig, ranks: Ranks, engine: Engine, data: TrainData, layer_of: dict[str, int],
        state: dict[str, Any] | None = None, fit: Fit = lambda take: None,
    ) -> None:  # fmt: skip
        self._config, self._ranks, self._engine, self._data = config, ranks, engine, data
        self._layer_of, self._fit = layer_of, fit
        self.model: ModelCost = model_cost(engine, recompute=engine.recompute != "never")
        self.devices = self._measure()
        self.links = self._measure_links()
        first_rows = self.costs(data.rows_of(0).rows)
        micro = config.train.micro_batch_tokens
        self.choice: Choice | None = None
        self._in_flight: int | None = None
        if state is not None and _ranks_of(state) == ranks.world and state["asked"] == self._asked():
            self.split, self._in_flight = _split_from(state), state["in_flight"]
        else:
            self.choice = find_split(self.model, self.devices, self.links, first_rows, config.split, micro)
            self.split, self._in_flight = self.choice.split, self.choice.in_flight
            if ranks.first:
                for line in explain(self.choice, self.devices):
                    notice(line)
        self._speeds = [device.flops_per_s for device in self.devices]
        self._balancer = Balancer(
            self.split,
            self.model,
            self.devices,
            self.links,
            config.split,
            micro_batch_tokens=micro,
            in_flight=self._in_flight,
        )
        self._plan: tuple[tuple[int, ...], StepPlan] | None = None
        self._settle()

    def _asked(self) -> dict[str, Any]:
        """Settings that a split follows from: a checkpoint's split is for its own ones."""
        return self._config.model_dump(mode="json", include={"split", "devices"})

    def _measure(self) -> list[Device]:
        config, rank = self._config, self._ranks.rank
        budget = self._engine.budget_bytes
        device = config.devices[rank].device if config.devices else config.compute.device
        mine = Measured(
            f"rank {rank} ({device})",
            socket.gethostname(),
            self._engine.matmul_rate().best / self._engine.walk.pace.factor,
            budget,
        )
        return [
            Device(m["name"], m["host"], REACHED * m["flops_per_s"], DEQUANTISE_BYTES_PER_S, READ_BYTES_PER_S,
                   m["memory_bytes"])
            for m in self._ranks.gather(asdict(mine))
        ]  # fmt: skip

    def _measure_links(self) -> Links:
        """Every rank sends to the next one, all at once, as they do in a step: the links of the ring, and the slowest ones of
        it for all others within a host and between hosts."""
        ranks = self._ranks
        after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world

        def exchange(nbytes: int) -> float:
            out, into = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
            ranks.meet("measuring links")
            start_s = time.perf_counter()
            pending = [ranks.receive(into, before, nbytes), ranks.send(out, after, nbytes)]
            for transfer in pending:
                transfer.wait()
            return time.perf_counter() - start_s

        exchange(PROBE_BYTES)  # connections are made at first use
        latency_s = min(exchange(1) for _ in range(3))
        seconds = max(min(exchange(PROBE_BYTES) for _ in range(2)) - latency_s, 1e-6)
        found = ranks.gather((PROBE_BYTES / seconds, latency_s))
        links = {(r, (r + 1) % ranks.world): Link(rate, latency) for r, (rate, latency) in enumerate(found)}
        within = [link for (a, b), link in links.items() if self.devices[a].host == self.devices[b].host]
        across = [link for (a, b), link in links.items() if self.devices[a].host != self.devices[b].host]
        slow = [min(group or list(links.values()), key=lambda link: link.bytes_per_s) for group in (within, across)]
        return Links(slow[0], slow[1], links)

    def _settle(self) -> None:
        """Hold this stage's layers, and make the groups that its ranks add gradients up in."""
        at = self.split.stage_of(self._ranks.rank)
        stage = self.split.stages[at]
        for other in self.split.stages:
            if len(other.ranks) > 1:
                self._ranks.subgroup(other.ranks)
        together = self._ranks.subgroup(stage.ranks) if stage.way == "experts" and len(stage.ranks) > 1 else None
        self._engine.divide(together, stage.shares)
        here = self.devices[self._ranks.rank].host
        self._engine.assign(stage.first, stage.last, sum(self.devices[rank].host == here for rank in stage.ranks))
        self._engine.walk.peers = self._ranks
        self._fit(self.batches)
        if self._engine.plan is not None:
            PULSE.planned_bytes = self._engine.plan.beyond_program_bytes
        elif self.choice is not None:
            PULSE.planned_bytes = self.choice.memory[self._ranks.rank].need
        self._gather(fast_peers=False)

    def _gather(self, fast_peers: bool) -> None:
        """Where `split.gather` says so, or peers are faster than the host, the ranks of a stage that share its rows read its
        streamed layers together. All ranks call it.

        Args:
            fast_peers: links between these ranks' devices are faster than those to their hosts.
        """
        asked = self._config.split.gather
        groups = [stage.ranks for stage in self.split.stages if len(stage.ranks) > 1 and stage.way == "tokens"]
        if groups and (asked == "always" or (asked == "auto" and fast_peers)):
            peers = GroupPeers.open(groups, self._engine.walk.weights.device, self._ranks.patience_s)
            if peers is not None:
                self._engine.gather_with(peers)

    @property
    def pipelined(self) -> bool:
        """Ranks wait for each other within a step, so one that fails cannot come to the next meeting."""
        return len(self.split.stages) > 1 or any(s.way == "experts" for s in self.split.stages)

    def costs(self, rows: Sequence[int], data: RowSource | None = None) -> list[RowCost]:
        data = data or self._data
        return [RowCost(data.tokens(row), data.label_tokens(row)) for row in rows]

    def plan(self, rows: Sequence[int]) -> StepPlan:
        """The step's list of work."""
        key = tuple(rows)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, self._plan_of(self.costs(rows)))
        return self._plan[1]

    def _plan_of(self, costs: Sequence[RowCost]) -> StepPlan:
        return plan_step(
            self.split, self.model, self._speeds, costs, self._config.train.micro_batch_tokens, self._in_flight,
            devices=self.devices, links=self.links,
        )  # fmt: skip

    def take(self, rows: Sequence[int]) -> RankWork | None:
        """This rank's work on these rows; None: it has nothing to do. (Where layers are read together, there is always
        something: a walk with no rows.)"""
        work = rank_work(self.split, self.plan(rows), self._ranks.rank, rows, self._data.pack)
        return work if work.tasks or self._engine.walk.weights.gather is not None else None

    def counts(self, work: RankWork | None) -> tuple[int, int]:
        """Tokens and rows of this rank's part."""
        return _counts([task.batch for task in work.tasks] if work is not None else [])

    def part_of(self, rows: Sequence[int], data: RowSource) -> RankWork | None:
        """This rank's work on rows of other data, such as those held out."""
        work = rank_work(self.split, self._plan_of(self.costs(rows, data)), self._ranks.rank, rows, data.pack)
        return work if work.tasks else None

    def batches(self, rows: Sequence[int]) -> list[PackedBatch]:
        """This rank's micro-batches of these rows."""
        work = self.take(rows)
        return [task.batch for task in work.tasks] if work is not None else []

    def owners(self, name: str) -> tuple[int, ...]:
        """Ranks that train this parameter."""
        layer = self._layer_of[name]
        return next(stage.ranks for stage in self.split.stages if stage.first <= layer < stage.last)

    def adapt(self, rows: Sequence[int], busy_s: Sequence[float]) -> tuple[str, ...] | None:
        """Take another split when measured times ask for it. Returns the parameters that changed hands, or None when the
        split stays as it is; `settle` has to be called once they are where they belong."""
        costs = self.costs(rows)
        self._balancer.observe(self.plan(rows), costs, busy_s)
        proposed = self._balancer.propose(costs)
        if proposed is None or proposed == self.split:
            return None
        before = {name: self.owners(name) for name in self._layer_of}
        self.split, self._plan = proposed, None
        self.devices = self._balancer.devices
        self._speeds = [device.flops_per_s for device in self.devices]
        return tuple(name for name, ranks in before.items() if self.owners(name) != ranks)

    def settle(self) -> None:
        """After `adapt`."""
        self._settle()

    def planned_s(self, rows: Sequence[int]) -> float:
        """Seconds that this step should take, by the plan and the speeds measured so far."""
        costs = self.costs(rows)
        return simulate(self.split, self.plan(rows), self.model, self._balancer.devices, self.links, costs).step_s

    def lines(self) -> list[str]:
        """One line per stage."""
        return [
            f"layers {stage.first} to {stage.last - 1} on "
            + ", ".join(f"rank {r} ({share:.0%})" for r, share in zip(stage.ranks, stage.shares, strict=True))
            + (" by experts" if stage.way == "experts" else "")
            for stage in self.split.stages
        ]

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint: a resumed run of as many ranks goes on with this split."""
        return {"stages": [asdict(stage) for stage in self.split.stages], "groups": self.split.groups,
                "in_flight": self._in_flight, "asked": self._asked()}  # fmt: skip


def _counts(batches: Sequence[PackedBatch]) -> tuple[int, int]:
    return sum(batch.tokens for batch in batches), sum(len(batch.row_ids) for batch in batches)


def _ranks_of(state: dict[str, Any]) -> int:
    return sum(len(stage["ranks"]) for stage in state["stages"])


def _split_from(state: dict[str, Any]) -> Split:
    stages = tuple(
        Stage(s["first"], s["last"], tuple(s["ranks"]), tuple(s["shares"]), s["way"]) for s in state["stages"]
    )
    return Split(stages, int(state["groups"]))

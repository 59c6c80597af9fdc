"""What a stage takes if rows could be cut at will: the quick estimate that the search and the balancer compare splits by.

For a team of devices on layers [a, b), all groups of a step together, F FLOPs there, v FLOP/s, f seconds of dequantising:

    tokens    each takes a share x of F: x F / v + f, level at T = (F + sum v f) / sum v
    experts   each takes 1 - d + d x of w = F / v + f (d: what is divided), level at T = (d + n (1 - d)) / sum 1/w, and rings
    memory    what does not stay is read in each pass of each group; the longer of the two counts; no room: infinite

Matrices are [L + 1, L + 1]: row a, column b. Only element by element operations of numpy, which round alike everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from lamella.plan.costs import GRADIENT_BYTES, STATE_BYTES, CostTable, ModelCost, RowCost
from lamella.plan.devices import Device, Links
from lamella.plan.split import Split, Stage, Way

ROOM = 0.97
"""Of the room for boundaries that a share is planned with: rows are not cut."""


@dataclass(frozen=True)
class Team:
    """Devices that hold one stage together."""

    ranks: tuple[int, ...]
    way: Way = "tokens"


class Fluid:
    """Estimates for one model, one set of devices and the rows of a step."""

    def __init__(
        self,
        model: ModelCost,
        devices: Sequence[Device],
        links: Links,
        rows: Sequence[RowCost],
        micro_batch_tokens: int,
        table: CostTable | None = None,
    ) -> None:
        self.table = table or CostTable(model)
        self.model, self.devices, self.links = model, devices, links
        self.tokens = sum(row.tokens for row in rows)
        self.largest = max([min(micro_batch_tokens, self.tokens), *(row.tokens for row in rows)])
        self.micro_batches = max(1, -(-self.tokens // max(micro_batch_tokens, 1)))
        self._seconds: dict[tuple[Team, int, int], np.ndarray] = {}
        layers = self.layers = len(model.layers)
        self.points = np.arange(layers + 1)
        self.head = sum(row.labels for row in rows) * model.head_flops_per_label
        self.valid = np.arange(layers + 1)[:, None] < np.arange(layers + 1)[None, :]
        self.flops = _between(self.table.before(rows))
        self.flops[:, layers] += self.head
        self.dequantised = _between(self.table.dequantised)
        self.packed = _between(self.table.packed)
        self.adapter = _between(self.table.adapter)
        per_token = [0, *np.cumsum([layer.boundary_bytes_per_token for layer in model.layers]).tolist()]
        self.boundary = _between(per_token)
        self.outer = np.zeros_like(self.packed)
        self.outer[0, :] += model.first_bytes
        self.outer[:, layers] += model.last_bytes
        self.slots = 2 * _range_max([layer.packed_bytes for layer in model.layers])
        self.state = self.adapter + _range_max([layer.dequantised_bytes for layer in model.layers])
        activation = _range_max([layer.activation_bytes_per_token for layer in model.layers])
        self.rest = self.outer + activation * self.largest
        divided = [layer.flops_per_token * layer.divisible for layer in model.layers]
        whole = _between([0, *np.cumsum([layer.flops_per_token for layer in model.layers]).tolist()])
        self.divisible = _between([0, *np.cumsum(divided).tolist()]) / np.where(whole > 0, whole, 1)

    def on_grid(self, points: Sequence[int]) -> Fluid:
        """The same for runs of layers that begin and end at some points only (the first and the last among them)."""
        other = copy(self)
        other._seconds = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray) and value.ndim == 2:
                setattr(other, name, value[np.ix_(points, points)])
        other.points = np.asarray(points)
        return other

    def compute(self, team: Team, groups: int) -> np.ndarray:
        """Seconds of a step in each run of layers, memory aside."""
        fixed = [2 * groups * self.dequantised / self.devices[r].dequantise_bytes_per_s for r in team.ranks]
        speeds = [self.devices[r].flops_per_s for r in team.ranks]
        if team.way == "tokens":
            work = self.flops.copy()
            for f, v in zip(fixed, speeds, strict=True):
                work = work + f * v
            return work / sum(speeds)
        inverse = np.zeros_like(self.flops)
        for f, v in zip(fixed, speeds, strict=True):
            inverse = inverse + 1 / np.where(self.valid, self.flops / v + f, 1.0)
        n, d = len(team.ranks), self.divisible
        return (d + n * (1 - d)) / inverse + self._rings(team, groups)

    def _rings(self, team: Team, groups: int) -> np.ndarray:
        count = max(self.micro_batches, groups)
        latency = self.links.ring_seconds(self.devices, team.ranks, 0)
        per_byte = self.links.ring_seconds(self.devices, team.ranks, 1.0) - latency
        layers = self.points[None, :] - self.points[:, None]
        times = sum(self.model.sums_of(kind, 2) for kind in ("F", "B"))
        nbytes = sum(self.model.sums_of(kind, len(team.ranks)) for kind in ("F", "B")) * self.boundary * self.tokens
        return times * layers * count * latency + nbytes * per_byte

    def need(self, team: Team, k: int, groups: int, flying: int, stream: bool) -> np.ndarray:
        """Bytes that device k of a team needs: with nothing held (two slots instead), or with all layers held."""
        share = self._shares_about(team)[k]
        held = self.slots if stream else self.packed
        fixed = self.devices[team.ranks[k]].fixed_bytes
        if team.way == "experts":
            part = 1 - self.divisible * (1 - share)
            out = (held + self.state) * part + self.rest + fixed
            tokens = self.tokens * min(1.0, flying / groups)
        else:
            out = held + self.state + self.rest + fixed
            tokens = self.tokens * min(1.0, flying / groups) * share
        if self.devices[team.ranks[k]].spills:
            return out
        return out + self.boundary * tokens

    def caps(self, team: Team, groups: int, flying: int, hold: bool = False) -> list[np.ndarray]:
        """The largest share that each device of a team has memory for, in each run of layers (below 0: none).

        Args:
            hold: with all its layers held, where that is possible at all.
        """
        out = []
        tokens = self.tokens * min(1.0, flying / groups)
        for rank in team.ranks:
            device = self.devices[rank]
            if device.memory_bytes is None:
                out.append(np.full_like(self.packed, np.inf))
                continue
            held = self.slots if device.read_bytes_per_s > 0 and not hold else self.packed
            room = device.memory_bytes - device.fixed_bytes - self.rest
            if team.way == "tokens":
                room = room - held - self.state
                per_share = np.zeros_like(room) if device.spills else self.boundary * tokens
            else:
                whole = held + self.state
                room = room - whole * (1 - self.divisible)
                if not device.spills:
                    room = room - self.boundary * tokens
                per_share = whole * self.divisible
            some = per_share > 0
            cap = np.where(some, room / np.where(some, per_share, 1.0), np.inf)
            out.append(np.where(room < 0, -1.0, cap))
        return out

    def seconds(self, team: Team, groups: int, flying: int) -> np.ndarray:
        """Seconds of a step in each run of layers [a, b); infinite where a >= b or where it does not fit.

        Args:
            flying: groups held at most between forward and back.
        """
        key = (team, groups, flying)
        if key not in self._seconds:
            self._seconds[key] = self._find_seconds(team, groups, flying)
        return self._seconds[key]

    def _find_seconds(self, team: Team, groups: int, flying: int) -> np.ndarray:
        out = self.compute(team, groups)
        if any(self.devices[r].memory_bytes is not None for r in team.ranks):
            out = np.maximum(out, self._limited(team, groups, flying))
        for k, rank in enumerate(team.ranks):
            if self.devices[rank].memory_bytes is not None:
                out = np.maximum(out, self.reading(team, k, groups, flying))
        return np.where(self.valid, out, np.inf)

    def reading(self, team: Team, k: int, groups: int, flying: int) -> np.ndarray:
        """Seconds in which device k of a team reads what it has no room for, at a share by its speed."""
        device = self.devices[team.ranks[k]]
        if device.memory_bytes is None or device.read_bytes_per_s <= 0:
            return np.zeros_like(self.packed)
        short = self.need(team, k, groups, flying, stream=False) - device.memory_bytes
        part = 1 - self.divisible * (1 - self._shares_about(team)[k]) if team.way == "experts" else 1.0
        streamed = np.minimum(short + self.slots * part, self.packed * part)
        return np.where(short > 0, 2 * groups * streamed / device.read_bytes_per_s, 0.0)

    def _limited(self, team: Team, groups: int, flying: int) -> np.ndarray:
        """Seconds where memory keeps a device's share below what its speed is good for, the others taking more; infinite
        where they have no room either."""
        caps = self.caps(team, groups, flying)
        fits = np.minimum.reduce(caps) >= 0
        speeds = self._shares_about(team)
        if all((cap[fits] >= v).all() for cap, v in zip(caps, speeds, strict=True)):
            return np.where(fits, 0.0, np.inf)
        if len(team.ranks) == 1:
            return np.where(caps[0] >= 1, 0.0, np.inf)
        shares = [np.minimum(cap, v) for cap, v in zip(caps, speeds, strict=True)]
        slack = [np.minimum(cap, 1.0) - share for cap, share in zip(caps, shares, strict=True)]
        missing, spare = np.ones_like(self.packed), np.zeros_like(self.packed)
        for share, more in zip(shares, slack, strict=True):
            missing, spare = missing - share, spare + more
        tight = missing > 1e-12
        fits &= ~tight | (spare >= missing)
        out = np.zeros_like(self.packed)
        for share, more, rank in zip(shares, slack, team.ranks, strict=True):
            device = self.devices[rank]
            share = share + missing * more / np.where(spare > 0, spare, 1.0)
            part = 1 - self.divisible * (1 - share) if team.way == "experts" else 1.0
            fixed = part * 2 * groups * self.dequantised / device.dequantise_bytes_per_s
            work = (part if team.way == "experts" else share) * self.flops / device.flops_per_s
            out = np.maximum(out, np.where(tight, work + fixed, 0.0))
        return np.where(fits, out, np.inf)

    def pressure(self, team: Team, groups: int, flying: int) -> np.ndarray:
        """The least memory needed over what there is, of the device that is shortest of it, in each run of layers."""
        out = np.zeros_like(self.packed)
        for k, rank in enumerate(team.ranks):
            device = self.devices[rank]
            if device.memory_bytes is not None:
                need = self.need(team, k, groups, flying, stream=device.read_bytes_per_s > 0)
                out = np.maximum(out, need / device.memory_bytes)
        return np.where(self.valid, out, np.inf)

    def _shares_about(self, team: Team) -> list[float]:
        speeds = [self.devices[r].flops_per_s for r in team.ranks]
        return [v / sum(speeds) for v in speeds]

    def shares(
        self, team: Team, first: int, last: int, groups: int, in_flight: int | None = None, hold: bool = False
    ) -> tuple[float, ...]:
        """Shares under which all of a team's devices end together, as far as each has memory; 0 for one that its own
        dequantising alone keeps longer.

        Args:
            in_flight: groups held at most; None: all.
            hold: as far as each device has memory beside all its layers, if the team has it in all.
        """
        n = len(team.ranks)
        if n == 1:
            return (1.0,)
        flops = float(self.flops[first, last])
        nbytes = float(self.dequantised[first, last])
        fixed = [2 * groups * nbytes / self.devices[r].dequantise_bytes_per_s for r in team.ranks]
        whole = [flops / self.devices[r].flops_per_s for r in team.ranks]
        if team.way == "experts":
            d = float(self.divisible[first, last])
            work = [w + f for w, f in zip(whole, fixed, strict=True)]
            fixed, whole = [(1 - d) * w for w in work], [d * w for w in work]
        flying = min(groups, in_flight or groups)
        caps = [float(cap[first, last]) for cap in self.caps(team, groups, flying, hold)]
        return level_shares(fixed, whole, [max(0.0, ROOM * cap) for cap in caps], keep=team.way == "experts")

    def reduce_seconds(self, team: Team, first: int, last: int) -> float:
        nbytes = (self.table.adapter[last] - self.table.adapter[first]) / STATE_BYTES * GRADIENT_BYTES
        return self.links.ring_seconds(self.devices, team.ranks, nbytes)

    def cut(
        self, teams: Sequence[Team], groups: int, in_flight: int | None = None
    ) -> tuple[float, tuple[int, ...]] | None:
        """Layers for teams in order: (estimated seconds of a step, ends), or None when nothing fits.

        Args:
            in_flight: groups that the first stage holds at most; None: as many as there are stages.
        """
        return cut([self.seconds(*x) for x in self._flying(teams, groups, in_flight)], groups)

    def tightest(self, teams: Sequence[Team], groups: int, in_flight: int | None = None) -> tuple[int, ...]:
        """Ends of the cut that comes nearest to fitting."""
        found = cut([self.pressure(*x) for x in self._flying(teams, groups, in_flight)], None)
        assert found is not None, "fewer layers than teams"
        return found[1]

    def estimate(self, teams: Sequence[Team], ends: Sequence[int], groups: int, in_flight: int | None = None) -> float:
        """Seconds of a step with stages that end there."""
        return float(in_pipeline(self.stage_seconds(teams, ends, groups, in_flight), groups))

    def stage_seconds(
        self, teams: Sequence[Team], ends: Sequence[int], groups: int, in_flight: int | None = None
    ) -> list[float]:
        cells = zip([0, *ends[:-1]], ends, self._flying(teams, groups, in_flight), strict=True)
        return [float(self.seconds(*x)[a, b]) for a, b, x in cells]

    def _flying(self, teams: Sequence[Team], groups: int, in_flight: int | None) -> list[tuple[Team, int, int]]:
        limit = len(teams) if in_flight is None else in_flight
        return [(team, groups, min(groups, max(1, limit - s))) for s, team in enumerate(teams)]

    def split(
        self, teams: Sequence[Team], ends: Sequence[int], groups: int, in_flight: int | None = None, hold: bool = False
    ) -> Split:
        """A split with these teams and ends, and the shares that suit them."""
        stages = []
        for (team, _, flying), a, b in zip(self._flying(teams, groups, in_flight), [0, *ends[:-1]], ends, strict=True):
            stages.append(Stage(a, b, team.ranks, self.shares(team, a, b, groups, flying, hold), team.way))
        return Split(tuple(stages), groups if len(stages) > 1 else 1)


def in_pipeline(times: Sequence[float], groups: int) -> float:
    """Seconds of a step whose stages take `times`, in equal groups: a stage begins when one group has passed those before
    it, and they take that group back when it is done."""
    rest = 0.0
    for t in reversed(times):
        rest = max(t, t / groups + rest)
    return rest


def cut(matrices: Sequence[np.ndarray], groups: int | None) -> tuple[float, tuple[int, ...]] | None:
    """Cut layers into consecutive runs so that a step takes the least time; exact for `in_pipeline`.

    Args:
        matrices: [L + 1, L + 1] for each run: its figure for layers [a, b).
        groups: None: the largest figure alone is to be smallest.

    Returns:
        The least time (or largest figure) and where each run ends; None when every cut has an infinite one.
    """
    layers = matrices[0].shape[0] - 1
    rest = np.full(layers + 1, np.inf)
    rest[layers] = 0.0
    ends_at = []
    for matrix in reversed(matrices):
        both = before(matrix, rest, groups)
        ends_at.append(both.argmin(axis=1))
        rest = both.min(axis=1)
    if not np.isfinite(rest[0]):
        return None
    ends = [0]
    for pointers in reversed(ends_at):
        ends.append(int(pointers[ends[-1]]))
    return float(rest[0]), tuple(ends[1:])


def before(matrix: np.ndarray, rest: np.ndarray, groups: int | None) -> np.ndarray:
    """Seconds [..., a, b] of a stage [a, b) and the stages after it, which take `rest` [..., b] from their first group on."""
    rest = rest[..., None, :]
    return np.maximum(matrix, rest if groups is None else matrix / groups + rest)


def level_shares(
    fixed: Sequence[float], whole: Sequence[float], caps: Sequence[float] | None = None, keep: bool = False
) -> tuple[float, ...]:
    """Shares x (sum 1) that make the largest of fixed + x * whole smallest.

    Args:
        caps: of each share. Where they sum to less than 1, shares are in their proportion.
        keep: nobody may be left without: a share below a hundredth of an even one is raised to that.
    """
    n = len(fixed)
    caps = [min(cap, 1.0) for cap in caps] if caps is not None else [1.0] * n
    if sum(caps) <= 1:
        shares = list(caps) if sum(caps) > 0 else [1.0] * n
    elif min(whole) <= 0:
        shares = list(caps)
    else:
        shares = _level(fixed, whole, caps)
    if keep:
        shares = [max(x, 0.01 / n) for x in shares]
    total = sum(shares)
    return tuple(x / total for x in shares)


def _level(fixed: Sequence[float], whole: Sequence[float], caps: Sequence[float]) -> list[float]:
    full: set[int] = set()
    while True:
        able = [k for k in range(len(fixed)) if k not in full and caps[k] > 0]
        left = 1 - sum(caps[k] for k in full)
        while True:
            level = (left + sum(fixed[k] / whole[k] for k in able)) / sum(1 / whole[k] for k in able)
            out = [k for k in able if level <= fixed[k]]
            if not out:
                break
            able = [k for k in able if k not in out]
        over = [k for k in able if (level - fixed[k]) / whole[k] > caps[k]]
        if not over:
            break
        full.update(over)
    return [caps[k] if k in full else (level - fixed[k]) / whole[k] if k in able else 0.0 for k in range(len(fixed))]


def _between(sums: Sequence[float]) -> np.ndarray:
    x = np.asarray(sums, dtype=np.float64)
    return np.maximum(x[None, :] - x[:, None], 0.0)


def _range_max(values: Sequence[float]) -> np.ndarray:
    n = len(values)
    out = np.zeros((n + 1, n + 1))
    for a in range(n):
        out[a, a + 1 :] = np.maximum.accumulate(np.asarray(values[a:], dtype=np.float64))
    return out

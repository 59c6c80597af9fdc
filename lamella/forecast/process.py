"""What a rank's process (and its device) will hold at its peak, from a model's shape and a run's settings alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lamella.errors import UserError
from lamella.forecast.blocks import expert_bytes
from lamella.forecast.peak import FAULT_BYTES, MemoryPlan, Process, Trained, Work, compose
from lamella.forecast.residency import (
    DEVICE_SHARE,
    HOST_SHARE,
    Residency,
    keeps_activations,
    least_bytes,
    place_layers,
    plan_residency,
)
from lamella.forecast.shape import LayerShape, Matrix, ModelShape, Site
from lamella.forecast.tape import Ways
from lamella.forecast.use import PAD_TOKENS, Use, head_use, is_estimate, layer_use
from lamella.hardware.machine import DeviceFacts, Host
from lamella.plan.costs import STATE_BYTES

IMPORT_BYTES = 440_000_000
"""Resident set of a process that has imported what training imports, where machine.json does not say it (measured: torch for
CPUs with transformers)."""
ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
BLOCK = 64


@dataclass(frozen=True)
class Rank:
    """One rank of a run, as its memory sees it.

    Attributes:
        layers: those it holds; None: all.
        share: of every layer, in a group that divides layers among its ranks; 1: whole.
        sharers: ranks of its host that read one copy of the layers that stay; ranks_here: of the run, on its host.
        in_flight: micro-batches between forward and back at most; None: all.
        sizes: different sizes of its micro-batches in the whole run; 0: those of the step.
    """

    layers: range | None = None
    share: float = 1.0
    sharers: int = 1
    ranks_here: int = 1
    in_flight: int | None = None
    sizes: int = 0


@dataclass(frozen=True)
class Base:
    """The base weights of a rank before it is decided which packed layers stay.

    Attributes:
        group_bytes: packed bytes of each of its layers.
        buffer: of the dequantised layer.
        fixed: with outer and small tensors.
        table: of embeddings that are mapped, of which only rows are read.
    """

    group_bytes: tuple[int, ...]
    buffer: int
    fixed: int
    table: int

    def parts(self, residency: Residency, tokens: int) -> dict[str, float]:
        """Named parts, as `compose` takes them."""
        return base_parts(residency, self.buffer, self.table, tokens)


def base_parts(residency: Residency, buffer: int, table: int, tokens: int) -> dict[str, float]:
    """Named parts of the base: `buffer` the dequantised layer's bytes, `table` a mapped embedding's, `tokens` of a step."""
    return {
        "packed layers held": residency.packed_bytes,
        "two packed slots": residency.slot_bytes,
        "dequantised layer": buffer,
        "outer and small tensors": residency.fixed_bytes - buffer,
        "rows of a mapped table": 0 if residency.streamed else min(table, FAULT_BYTES * tokens),
    }


def _padded(numel: int) -> int:
    return -(-numel // BLOCK) * BLOCK


def stays_packed(matrix: Matrix, cpu: bool) -> bool:
    """Gated experts on a CPU are never dequantised as a whole (`models.packed`)."""
    return cpu and matrix.fused_experts and matrix.outputs * matrix.inputs % BLOCK == 0


def _unquantised(layer: LayerShape) -> int:
    return layer.other_parameters + sum(m.parameters for m in layer.matrices if not m.quantised)


def base_of(shape: ModelShape, dtype: str, device_kind: str, rank: Rank | None = None) -> Base:
    """The base weights of one rank: what `engine.weights.LayerWeights` holds.

    (Small tensors and the outer ones are all layers' on every rank.)
    """
    rank = rank or Rank()
    element, cpu = ELEMENT[dtype], device_kind == "cpu"
    held = part_of(shape, rank.share)
    buffer = 0
    small = 0
    for layer in held.layers:
        numel = sum(_padded(m.parameters) for m in layer.matrices if m.quantised and not stays_packed(m, cpu))
        buffer = max(buffer, numel * element)
    for layer in shape.layers:
        small += _unquantised(layer) * element
    outer = shape.embedding_parameters + shape.head_parameters + shape.outer_parameters
    stored = 4 if shape.outer_store_bytes >= 3 * outer else 2
    mapped = cpu and stored == element and dtype != "fp16"
    table = 0
    if mapped:
        table = 0 if shape.tied else shape.embedding_parameters * element
        small += -(-(outer * element - table) // rank.sharers)
    else:
        small += outer * element
    layers = rank.layers or range(len(shape.layers))
    sizes = tuple(held.layers[i].store_bytes for i in layers)
    return Base(sizes, buffer, buffer + small, table)


# ---- a rank's part of every layer ----------------------------------------------------------------------------------


def _cut(matrix: Matrix, share: float) -> Matrix:
    last = matrix.name.rpartition(".")[2]
    if matrix.fused_experts:
        return replace(matrix, experts=max(1, round(matrix.experts * share)), active=matrix.active)
    if last in ("o_proj", "down_proj"):
        return replace(matrix, inputs=max(1, round(matrix.inputs * share)))
    if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj"):
        return replace(matrix, outputs=max(1, round(matrix.outputs * share)))
    return matrix


def part_of(shape: ModelShape, share: float) -> ModelShape:
    """A model whose layers are a rank's part of another's: heads, columns and experts by their share. (A token's choices of
    experts are counted by `layer_uses`.)"""
    if share >= 1:
        return shape
    seen: dict[int, LayerShape] = {}
    layers = []
    for layer in shape.layers:
        if id(layer) not in seen:
            matrices = tuple(_cut(m, share) for m in layer.matrices)
            core = layer.core
            if core is not None:
                kv = max(1, round(core.kv_heads * share))
                core = replace(core, kv_heads=kv, heads=core.heads // core.kv_heads * kv)
            before, after = (sum(m.parameters for m in x if m.quantised) for x in (layer.matrices, matrices))
            packed = (layer.store_bytes - layer.raw_bytes) * after // max(before, 1) + layer.raw_bytes
            seen[id(layer)] = replace(layer, matrices=matrices, core=core, store_bytes=packed)
        layers.append(seen[id(layer)])
    return replace(shape, layers=tuple(layers))


def _parts_of_sites(held: ModelShape, sites: Sequence[Site]) -> list[Site]:
    by_name = [{m.name: m for m in layer.matrices} for layer in held.layers]
    return [replace(site, matrix=by_name[site.layer][site.matrix.name]) for site in sites]


# ---- the work of a step --------------------------------------------------------------------------------------------


def _filled(lengths: Sequence[int], element: int, cpu: bool) -> list[int]:
    """Lengths with the sequence that fills a micro-batch up, as `Walk.enter` does in bf16 on a CPU."""
    total = sum(lengths)
    extra = -total % PAD_TOKENS if cpu and element == 2 else 0
    return [*lengths, extra] if extra else list(lengths)


def _kinds(shape: ModelShape, sites: Sequence[Site], layers: range) -> dict[tuple[object, ...], list[int]]:
    """Layers alike: same matrices and same pairs."""
    found: dict[tuple[object, ...], list[int]] = {}
    ranks: dict[int, list[tuple[str, int]]] = {}
    for site in sites:
        ranks.setdefault(site.layer, []).append((site.matrix.name, site.rank))
    for i in layers:
        found.setdefault((shape.layers[i], tuple(ranks.get(i, ()))), []).append(i)
    return found


def work_of(
    shape: ModelShape, sites: Sequence[Site], lengths: Sequence[Sequence[int]], positions: Sequence[int], dtype: str,
    device_kind: str, rank: Rank, *, dropout: bool = False, threads: int = 1, fused: bool = True,
) -> tuple[Work, bool]:  # fmt: skip
    """The work of a step on one rank, and whether some of its layers are only estimated.

    Args:
        sites: of the rank's part (`part_of`).
    """
    element, cpu = ELEMENT[dtype], device_kind == "cpu"
    layers = rank.layers or range(len(shape.layers))
    first = max(min(s.layer for s in sites), layers.start) if sites else layers.start
    trained = max(layers.stop - first, 1)
    filled = [_filled(x, element, cpu) for x in lengths]
    tokens = [sum(x) for x in filled]
    most = sorted(range(len(tokens)), key=lambda k: -tokens[k])[: rank.in_flight or len(tokens)]
    uses: list[Use] = []
    graph = last_graph = 0.0
    kinds = _kinds(shape, sites, range(min(first, layers.stop - 1), layers.stop))
    made: dict[tuple[int, tuple[int, ...]], Use] = {}
    for alike in kinds.values():
        for k in {most[0], *most}:
            key = alike[0], tuple(filled[k])
            if key not in made:
                made[key] = layer_use(shape, alike[0], sites, filled[k], element, device_kind, dropout=dropout,
                                      threads=threads, fused=fused)  # fmt: skip
        uses.append(made[alike[0], tuple(filled[most[0]])])
        of_one = sum(made[alike[0], tuple(filled[k])].graph for k in most)
        graph += of_one * len(alike)
        last_graph = of_one if first in alike else last_graph
    head = (0, 0.0)
    if layers.stop == len(shape.layers):
        head = head_use(shape, max(positions), element, device_kind, fused=fused)
    boundary = float(shape.hidden * element)
    work = Work(uses, graph, last_graph, trained, boundary, tokens, sum(tokens[k] for k in most), head,
                "played tensor by tensor")  # fmt: skip
    return work, any(is_estimate(shape.layers[i]) for i in layers)


def peak_of(
    shape: ModelShape, sites: Sequence[Site], lengths: Sequence[Sequence[int]], positions: Sequence[int], *, kept: bool,
    dtype: str, device: DeviceFacts, host: Host, residency: Residency | None = None, rank: Rank | None = None,
    state_on_disk: bool = False, tuned_heap: bool = True, dropout: bool = False, updates: bool = True, fused: bool = True,
    boundary_room: float | None = None,
) -> MemoryPlan:  # fmt: skip
    """Peak of one rank: of its process on a CPU, of its device's memory on a GPU (its process: `host_parts`).

    Args:
        sites: LoRA pairs of the whole model.
        lengths: per micro-batch, its sequences' lengths in tokens; all of this rank's in a step.
        positions: per micro-batch, its label positions.
        kept: activations are kept; else layers are recomputed.
        dtype: "bf16", "fp16" or "fp32".
        residency: which packed layers stay (`choose_residency`); None: all.
        state_on_disk: the adapter's state is a file, one layer of it in memory.
        tuned_heap: the process starts itself with a tuned heap, as the commands do.
        dropout: of LoRA.
        fused: the CPU has AVX-512 with bf16.
        boundary_room: of boundary inputs on a GPU; None: all stay there.
    """
    rank = rank or Rank()
    if not lengths or not all(sum(x) for x in lengths):
        raise UserError("a step without tokens has no peak", fix="give rows for every rank")
    cpu, element = device.kind == "cpu", ELEMENT[dtype]
    threads = device.threads or 1
    held = part_of(shape, rank.share)
    own_sites = _parts_of_sites(held, sites) if rank.share < 1 else list(sites)
    base = base_of(shape, dtype, device.kind, rank)
    layers = rank.layers or range(len(shape.layers))
    residency = residency or plan_residency(base.group_bytes, base.fixed, None, layers.start, rank.sharers)
    work, estimate = work_of(held, own_sites, lengths, positions, dtype, device.kind, rank, dropout=dropout, threads=threads,
                             fused=fused)  # fmt: skip
    per_layer: dict[int, int] = {}
    for site in own_sites:
        if site.layer in layers:
            per_layer[site.layer] = per_layer.get(site.layer, 0) + site.parameters
    trained = Trained(sum(per_layer.values()), max(per_layer.values(), default=0))
    sides = int(layers.start > 0) + int(layers.stop < len(shape.layers))
    process = Process(
        import_bytes(host), element, threads, compiles=cpu and element == 2, cpu=cpu, tuned_heap=tuned_heap, updates=updates,
        state_on_disk=state_on_disk, between_ranks=sides * work.boundary_bytes * work.held_tokens, boundary_room=boundary_room,
        expert_bytes=expert_bytes(held, own_sites, layers, max(work.tokens), Ways.of(device.kind, element, fused, dropout, threads)),
        sizes=rank.sizes,
    )  # fmt: skip
    return compose(base.parts(residency, sum(work.tokens)), work, trained, process, kept=kept, sharers=rank.sharers,
                   estimate=estimate)  # fmt: skip


def import_bytes(host: Host) -> int:
    """Resident set of a process before it opens a model: measured, or the stated default."""
    return IMPORT_BYTES if host.import_bytes is None else host.import_bytes


# ---- decisions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Where a rank's layers are and what it keeps.

    Attributes:
        residency: of packed layers; kept: activations are kept; state_on_disk: the adapter's state is a file.
        plan: the peak under that.
        have: bytes it may take, the program itself aside on a CPU; None: no limit.
        least: bytes without which it cannot run.
        boundary_room: of boundary inputs on a GPU.
    """

    residency: Residency
    kept: bool
    state_on_disk: bool
    plan: MemoryPlan
    have: int | None
    least: int
    boundary_room: float | None = None

    @property
    def fits(self) -> bool:
        return self.have is None or self.least <= self.have


def state_is_on_disk(asked: str, parameters: int, budget_bytes: int | None) -> bool:
    """`memory.state`: as asked, or (auto) where it would take more than half of a budget."""
    if asked != "auto":
        return asked == "disk"
    return budget_bytes is not None and STATE_BYTES * parameters > budget_bytes / 2


def choose_residency(
    shape: ModelShape, sites: Sequence[Site], lengths: Sequence[Sequence[int]], positions: Sequence[int], *, dtype: str,
    device: DeviceFacts, host: Host, budget: int | None = None, recompute: str = "auto", state: str = "auto",
    rank: Rank | None = None, tuned_heap: bool = True, dropout: bool = False, fused: bool = True,
) -> Choice:  # fmt: skip
    """Which layers stay, whether activations are kept, and where the state is: by the rules of `Engine.open` and `Engine.fit`.

    Args:
        budget: `memory.budget`; of a GPU its memory. None: no limit (on a GPU a share of its free memory).
        recompute: "always", "never" or "auto"; state: `memory.state`, of one rank alone.
    """
    rank = rank or Rank()
    base = base_of(shape, dtype, device.kind, rank)
    first = (rank.layers or range(len(shape.layers))).start
    parameters = sum(site.parameters for site in sites)
    on_disk = rank.ranks_here == 1 and state_is_on_disk(state, parameters, budget)

    def peak(kept: bool, residency: Residency, room: float | None = None) -> MemoryPlan:
        return peak_of(shape, sites, lengths, positions, kept=kept, dtype=dtype, device=device, host=host, residency=residency,
                       rank=rank, state_on_disk=on_disk, tuned_heap=tuned_heap, dropout=dropout, fused=fused,
                       boundary_room=room)  # fmt: skip

    if device.kind == "cuda":
        return _choose_on_device(base, first, peak, device, host, budget, recompute, rank)
    whole = plan_residency(base.group_bytes, base.fixed, None, first, rank.sharers)
    plan = peak(recompute == "never", whole)
    graphs = peak(True, whole).moments["head"]["kept activations"]
    if budget is None:
        kept = keeps_activations(recompute, graphs, host.limit_bytes // (2 * rank.ranks_here))
        return Choice(whole, kept, on_disk, peak(kept, whole), None, 0)
    aside = plan.beyond_program_bytes - whole.total_bytes
    least = round(least_bytes(aside, base.fixed, base.group_bytes, rank.sharers))
    if least > budget:
        tightest = Residency((), whole.resident, base.fixed, 0, min(2 * max(base.group_bytes), whole.packed_bytes))
        return Choice(tightest, recompute == "never", on_disk, peak(recompute == "never", tightest), budget, least)
    residency = plan_residency(base.group_bytes, base.fixed, budget - aside, first, rank.sharers)
    kept = keeps_activations(recompute, graphs, budget - aside - residency.total_bytes)
    return Choice(residency, kept, on_disk, peak(kept, residency), budget, least)


def _choose_on_device(
    base: Base,
    first: int,
    peak: object,
    device: DeviceFacts,
    host: Host,
    budget: int | None,
    recompute: str,
    rank: Rank,
) -> Choice:
    """As `Engine.open` does: a share of free memory for weights, half of the rest for boundaries and kept activations."""
    assert callable(peak)
    free = device.memory_bytes if device.free_bytes is None else device.free_bytes
    pinned = math.floor(host.limit_bytes * HOST_SHARE * rank.sharers / rank.ranks_here)
    if host.pinned_bytes is not None:
        pinned = min(pinned, host.pinned_bytes)
    weights = int(free * DEVICE_SHARE) + base.buffer if budget is None else budget
    slots = base.fixed + 2 * max(base.group_bytes)
    if slots > weights:
        tightest = Residency(
            (), tuple(range(first, first + len(base.group_bytes))), base.fixed, 0, 2 * max(base.group_bytes)
        )
        plan = peak(False, tightest, 0.0)
        return Choice(tightest, False, False, plan, weights, max(slots, plan.peak_bytes), 0.0)
    residency = place_layers(base.group_bytes, base.fixed, weights, pinned, first)
    left = free - residency.total_bytes if budget is None else budget - residency.total_bytes
    room = max(left // 2 if budget is None else left, 0) // 2
    graphs = peak(True, residency).moments["head"]["kept activations"]
    kept = keeps_activations(recompute, graphs, room)
    plan = peak(kept, residency, room)
    return Choice(residency, kept, False, plan, free if budget is None else budget, plan.peak_bytes, room)

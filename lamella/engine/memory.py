"""Peak memory of a training step of an open engine: what probes measure, put together by `forecast.peak`.

What a layer's work takes is not fitted: the layer runs twice on a few sequences of the wanted length while a ledger
counts every tensor that comes and goes, and the figures are extended linearly in the number of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamella.engine.walk import Walk
from lamella.forecast.peak import MemoryPlan, Process, Trained, Work, compose
from lamella.forecast.process import base_parts
from lamella.forecast.routed import expert_scratch_bytes
from lamella.forecast.use import Use
from lamella.models import experts_cpu
from lamella.models.layout import PackedBatch, pack_rows

PROBE_TOKENS = 1024
"""Tokens of the larger of the two probes, at least one sequence; longer sequences are probed at this length."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "addmm_", "_addmm_activation")


class Ledger(TorchDispatchMode):
    """Counts bytes of tensors made while it is active: `live` now, `peak` since the last `mark`; and `shapes`, the
    different bf16 products on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.shapes: set[tuple[Any, ...]] = set()
        self._seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under it; the base's True imports the whole compiler at the first tensor."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        for x in inputs:
            self._seen.setdefault(x.untyped_storage())
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if name in _PRODUCTS and inputs[-1].dtype == torch.bfloat16 and inputs[-1].device.type == "cpu":
            self.shapes.add((name, *((tuple(x.shape), x.stride()[-1] == 1) for x in inputs)))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage() not in self._seen:
                storage = x.untyped_storage()
                self._seen[storage] = None
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes

    def mark(self) -> None:
        """Begin a new peak."""
        self.peak = self.live


@dataclass(frozen=True)
class Linear:
    """`Use` as a function of tokens, through two measured points."""

    low: tuple[int, Use]
    high: tuple[int, Use]

    def at(self, tokens: int) -> Use:
        (x0, a), (x1, b) = self.low, self.high
        if x0 == x1:
            return b

        def line(y0: float, y1: float) -> float:
            return max(y1 + (y1 - y0) * (tokens - x1) / (x1 - x0), 0.0)

        return Use(line(a.forward, b.forward), line(a.graph, b.graph), line(a.graph_peak, b.graph_peak),
                   line(a.backward, b.backward), b.shapes)  # fmt: skip


def _use(run: Callable[[], tuple[Tensor, list[Tensor]]]) -> Use:
    """Measure one piece of work; `run` gives its output and what gradients are wanted of."""
    with Ledger() as ledger, torch.no_grad():
        out = run()[0]
        del out
        forward = ledger.peak
    with Ledger() as ledger, torch.enable_grad():
        out, wanted = run()
        graph, graph_peak = ledger.live, ledger.peak
        grad_out = torch.ones_like(out)
        made = grad_out.nbytes
        ledger.mark()
        wanted = [x for x in wanted if x.requires_grad]
        if wanted and out.requires_grad:
            found = torch.autograd.grad(out, wanted, grad_out, allow_unused=True)
            del found
        backward = ledger.peak - made
    return Use(forward, graph, graph_peak, backward, len(ledger.shapes))


def probe_layer(walk: Walk, layer: int, length: int, tokens: int) -> Linear:
    """What a layer's work takes by tokens, for sequences of `length`.

    Args:
        tokens: of the micro-batch; the larger probe does not pass it.
    """
    length = max(2, min(length, PROBE_TOKENS))
    many = max(1, min(tokens, PROBE_TOKENS) // length)
    points = []
    for count in sorted({max(1, many // 2), many}):
        batch = pack_rows([([1] * length, [])] * count)
        experts_cpu.reserve_rows(
            batch.tokens * walk.top_k, int(walk.skeleton.config.hidden_size)
        )  # kept: no layer's own
        use = _use(walk.probe(batch, layer))
        points.append((count * length, use))
    if len(points) == 1:  # one long sequence: a shorter one is the second point
        batch = pack_rows([([1] * max(1, length // 2), [])])
        points.insert(0, (batch.tokens, _use(walk.probe(batch, layer))))
    return Linear(points[0], points[1])


def probe_head(walk: Walk, positions: int) -> tuple[int, float]:
    """Positions of a chunk of the head, and the bytes that its loss and gradient take."""
    rows = max(1, min(walk.head_chunk_rows(), positions))
    points = []
    for n in sorted({min(32, rows), min(64, rows)}):
        run = walk.probe_head(n)
        with Ledger() as ledger, torch.no_grad():
            out = run()
            del out
        points.append((n, ledger.peak))
    (x0, y0), (x1, y1) = points[0], points[-1]
    return rows, float(y1 if x0 == x1 else y1 + (y1 - y0) * (rows - x1) / (x1 - x0))


def _kinds(walk: Walk, first: int) -> dict[int, list[int]]:
    """Layers alike (class, shapes, adapted weights) by the lowest of each kind, the lowest kind last: a step begins there."""
    assert walk.adapter is not None
    found: dict[tuple[Any, ...], list[int]] = {}
    for i in range(min(first, walk.weights.layers.stop - 1), walk.weights.layers.stop):
        layer = walk.skeleton.layers[i]
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        sites = tuple((s.path, s.parameter, s.rank) for s in walk.adapter.layer_sites(i))
        found.setdefault((type(layer), shapes, sites), []).append(i)
    return {alike[0]: alike for alike in sorted(found.values(), reverse=True)}


def _expert_bytes(walk: Walk, tokens: int) -> float:
    """What the expert kernels keep from call to call."""
    assert walk.adapter is not None
    found = 0.0
    for i in walk.weights.layers:
        ranks = {s.parameter: s.rank for s in walk.adapter.layer_sites(i) if s.parameter is not None}
        for module in walk.skeleton.layers[i].modules():
            sizes = experts_cpu.kernel_sizes(module, walk.skeleton.dtype, walk.adapter.dropout > 0 and bool(ranks))
            if sizes is not None:
                hidden, inner = sizes
                scratch = expert_scratch_bytes(hidden, inner, ranks.get("gate_up_proj", 0), ranks.get("down_proj", 0))
                rows = walk.skeleton.dtype.itemsize * tokens * walk.top_k * hidden
                found = max(found, rows + torch.get_num_threads() * scratch)
    return found


def predict(
    walk: Walk, lengths: Sequence[Sequence[int]], positions: Sequence[int], *, kept: bool, imports_bytes: int,
    state_on_disk: bool = False, tuned_heap: bool = False, updates: bool = True,
) -> MemoryPlan:  # fmt: skip
    """Peak of a process that takes steps of these micro-batches.

    Args:
        walk: with an adapter attached.
        lengths: per micro-batch, its sequences' lengths in tokens.
        positions: per micro-batch, its label positions.
        kept: activations are kept; else layers are recomputed.
        imports_bytes: resident set of the process before the engine was opened.
        state_on_disk: adapter values, gradients and moments are in a file, one layer of them in memory.
        tuned_heap: the allocator was tuned (`hardware.allocator`).
        updates: an optimizer is used, so moments are there.
    """
    adapter, skeleton, weights = walk.adapter, walk.skeleton, walk.weights
    assert adapter is not None, "no adapter attached"
    first, size = max(adapter.first_layer, weights.layers.start), skeleton.dtype.itemsize
    tokens = [walk.padded_tokens(sum(x)) for x in lengths]
    largest, longest = max(tokens), max(max(x) for x in lengths)
    probes = [(probe_layer(walk, i, longest, largest), alike) for i, alike in _kinds(walk, first).items()]
    graphs = [(sum(probe.at(t).graph for t in tokens), alike) for probe, alike in probes]
    work = Work(
        uses=[probe.at(largest) for probe, _ in probes],
        graph_bytes=sum(nbytes * len(alike) for nbytes, alike in graphs),
        last_graph_bytes=next((nbytes for nbytes, alike in graphs if first in alike), 0.0),
        trained=max(weights.layers.stop - first, 1),
        boundary_bytes=float(int(skeleton.config.hidden_size) * size),
        tokens=tokens,
        held_tokens=sum(tokens),
        head=probe_head(walk, max(positions)),
        said="measured on a probe",
    )
    per_layer = [sum(s.numel for s in adapter.layer_sites(i)) for i in weights.layers]
    process = Process(
        imports_bytes=imports_bytes, element=size, threads=torch.get_num_threads(), compiles=walk.compiles_shapes,
        cpu=weights.device.type == "cpu", tuned_heap=tuned_heap, updates=updates, state_on_disk=state_on_disk,
        expert_bytes=_expert_bytes(walk, largest),
    )  # fmt: skip
    base = base_parts(weights.residency, weights.buffer_bytes, weights.mapped_table_bytes, sum(tokens))
    return compose(base, work, Trained(sum(per_layer), max(per_layer)), process, kept=kept, sharers=weights.sharers)


def shape_of(batches: Sequence[PackedBatch]) -> tuple[list[list[int]], list[int]]:
    """Lengths and label positions of packed micro-batches, as `predict` takes them."""
    return [b.lengths for b in batches], [int(b.score_positions.numel()) for b in batches]

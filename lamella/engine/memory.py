"""Peak memory of a training step in closed form, from parts that can be named.

    peak = process before the engine + base + adapter + kernels + largest moment of the step

    base      packed layers held + two slots when any is streamed + dequantised layer + outer and small tensors
              (of layers in a map that several ranks of a host share, this rank's part: bytes / ranks)
    adapter   per trained parameter: 4 bytes value, 8 bytes moments, one compute-dtype copy; gradients (4) as they come
    moment    what is held then (boundary inputs [T, H], or kept activations, of every layer and micro-batch) + what the
              work of one layer on one micro-batch, or of one chunk of the head, takes on top

What a layer's work takes is not fitted: the layer runs twice on a few sequences of the wanted length while a ledger
counts every tensor that comes and goes, and the figures are extended linearly in the number of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamella.engine.walk import Walk
from lamella.models.layout import PackedBatch, pack_rows
from lamella.units import format_bytes

PROBE_TOKENS = 1024
"""Tokens of the larger of the two probes, at least one sequence; longer sequences are probed at this length."""
KERNEL_BYTES = 850_000
"""What oneDNN keeps per shape of a bf16 product (0.6 to 1.1 MB, measured)."""
RUNTIME_BYTES = 50 << 20
"""Code of the model's family, of kernels and libraries, and their first allocations: 30 MB where every block is mapped
by itself, 20 MB more in the heap (measured)."""
FP32_BYTES_PER_THREAD = 32 << 20
"""Buffers that the fp32 matmul library keeps per thread (measured)."""
FAULT_BYTES = 64 << 10
"""Pages of a mapped file that come with one that is touched."""


@dataclass(frozen=True)
class HeapShares:
    """What the C library's heap holds beyond the tensors in use, as shares; measured over the configurations of
    `bench.memory`, one set for all.

    Attributes:
        work: of one layer's work up to that moment. A freed block serves its like again only when it has grown together with a
            neighbour (aligned blocks need a little more than their size), so work is laid out more than once.
        kept: of kept activations, between which work's holes stay.
        head: of one chunk of the head.
    """

    work: float
    kept: float
    head: float


TUNED_HEAP = HeapShares(1.3, 0.19, 0.35)
DEFAULT_HEAP = HeapShares(1.6, 0.25, 0.3)
"""By whether `hardware.allocator` tuned the heap."""
PROGRAM = ("imports", "libraries", "compiled products")
"""Parts that `memory.budget` does not count."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "addmm_", "_addmm_activation")


class Ledger(TorchDispatchMode):
    """Counts bytes of tensors made while it is active: `live` now, `peak` since the last `mark`; and `shapes`, the
    different bf16 products on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.shapes: set[tuple[Any, ...]] = set()
        self._seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

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
class Use:
    """Bytes that work takes beyond its input: `forward` without gradients, `graph` held after a forward with them,
    `graph_peak` on the way there, `backward` from there to the end (the graph included); `shapes`: different products."""

    forward: float
    graph: float
    graph_peak: float
    backward: float
    shapes: int = 0


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


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak of a process that trains.

    Attributes:
        fixed: named parts that are there all the time (bytes).
        moments: moment of a step -> named parts that are there then (bytes).
        heap: moment -> bytes that the heap's shares apply to (`HeapShares`); zero on a device.
        shares: of the heap.
    """

    fixed: dict[str, float]
    moments: dict[str, dict[str, float]]
    kept: bool
    heap: dict[str, dict[str, float]] = field(default_factory=dict)
    shares: HeapShares = TUNED_HEAP
    formulas: dict[str, str] = field(default_factory=dict)

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()) + self.between(name))

    def between(self, moment: str) -> float:
        """Bytes that the heap holds beyond the tensors in use."""
        return sum(getattr(self.shares, name) * size for name, size in self.heap.get(moment, {}).items())

    @property
    def parts(self) -> dict[str, int]:
        """Part -> bytes at the peak."""
        now = self.moment
        parts = {**self.fixed, **self.moments[now], "heap between tensors": self.between(now)}
        return {name: round(size) for name, size in parts.items() if size >= 1}

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def beyond_program_bytes(self) -> int:
        """Without imports, libraries and what they compile: what the model, the adapter and the step take."""
        return self.peak_bytes - sum(self.parts.get(name, 0) for name in PROGRAM)

    def lines(self) -> list[str]:
        """One line per part, largest first, with its formula."""
        ordered = sorted(self.parts.items(), key=lambda item: -item[1])
        return [f"{format_bytes(size):>10}  {name}" + (f": {self.formulas[name]}" if name in self.formulas else "")
                for name, size in ordered]  # fmt: skip


def _base_parts(walk: Walk, tokens: int) -> dict[str, float]:
    weights = walk.weights
    residency = weights.residency
    buffer = float(weights.buffer_bytes)
    rows = 0 if residency.streamed else min(weights.mapped_table_bytes, FAULT_BYTES * tokens)
    return {
        "packed layers held": residency.packed_bytes,
        "two packed slots": residency.slot_bytes,
        "dequantised layer": buffer,
        "outer and small tensors": residency.fixed_bytes - buffer,
        "rows of a mapped table": rows,
    }


def _kinds(walk: Walk, first: int) -> list[int]:
    """One layer of each kind (class, shapes, adapted weights), lowest last, as the step begins there."""
    assert walk.adapter is not None
    found: dict[tuple[Any, ...], int] = {}
    for i in range(min(first, walk.weights.layers.stop - 1), walk.weights.layers.stop):
        layer = walk.skeleton.layers[i]
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        sites = tuple((s.path, s.parameter, s.rank) for s in walk.adapter.layer_sites(i))
        found.setdefault((type(layer), shapes, sites), i)
    return sorted(found.values(), reverse=True)


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
    adapter, skeleton = walk.adapter, walk.skeleton
    assert adapter is not None, "no adapter attached"
    held_layers = walk.weights.layers
    first, layers = max(adapter.first_layer, held_layers.start), held_layers.stop
    trained, size = max(layers - first, 1), skeleton.dtype.itemsize
    tokens = [walk.padded_tokens(sum(x)) for x in lengths]
    largest = max(tokens)
    longest = max(max(x) for x in lengths)
    probes = [probe_layer(walk, i, longest, largest) for i in _kinds(walk, first)]
    uses = [probe.at(largest) for probe in probes]
    boundary = float(int(skeleton.config.hidden_size) * size)
    per_layer = max(sum(s.numel for s in adapter.layer_sites(i)) for i in held_layers)
    parameters = sum(s.numel for i in held_layers for s in adapter.layer_sites(i))
    in_memory = per_layer if state_on_disk else parameters
    rows, chunk = probe_head(walk, max(positions))
    copies = float(size * parameters) if kept else float(size * per_layer)
    held = {"kept activations": max(sum(p.at(t).graph for t in tokens) for p in probes) * trained} if kept else {
        "boundary inputs": boundary * sum(tokens) * (trained + 1)}  # fmt: skip
    gradients = {"gradients at a boundary": boundary * sum(tokens)}
    work = max(u.backward - (u.graph if kept else 0) for u in uses)
    going_up = max(u.graph_peak - u.graph if kept else u.forward for u in uses)
    last = {name: value / trained for name, value in held.items()} if kept else {
        "boundary inputs": boundary * sum(tokens)}  # fmt: skip
    moments = {
        "forward, last layer": {**held, "one layer's forward": going_up},
        "head": {**held, **gradients, "one chunk of the head": chunk},
        "backward, last layer": {
            **held,
            **gradients,
            "one layer's backward": work,
            "adapter gradients": 4.0 * per_layer,
        },
        "backward, first layer": {
            **last,
            **gradients,
            "one layer's backward": work,
            "adapter gradients": 4.0 * in_memory,
        },
    }
    kernels = sum(u.shapes for u in uses) * len(set(tokens)) + 2
    fixed: dict[str, float] = {
        "imports": imports_bytes,
        **_base_parts(walk, sum(tokens)),
        "adapter values": 4.0 * in_memory,
        "moments": 8.0 * in_memory if updates else 0.0,
        "adapter in the compute dtype": copies,
        "libraries": RUNTIME_BYTES
        + (FP32_BYTES_PER_THREAD * torch.get_num_threads() if skeleton.dtype == torch.float32 else 0),
        "compiled products": float(KERNEL_BYTES * kernels) if walk.compiles_shapes else 0.0,
    }
    formulas = {
        "kept activations": f"{trained} layers x {uses[0].graph / largest:,.0f} B x {sum(tokens)} tokens",
        "boundary inputs": f"{trained + 1} boundaries x {sum(tokens)} tokens x {boundary:.0f} B",
        "one layer's backward": f"measured on a probe, extended to {largest} tokens",
        "one chunk of the head": f"{rows} positions, measured on a probe",
        "adapter values": f"4 B x {in_memory}", "moments": f"8 B x {in_memory}",
        "adapter in the compute dtype": f"{size} B x {copies / size:.0f}",
        "compiled products": f"{kernels} shapes x {KERNEL_BYTES} B",
    }  # fmt: skip
    if walk.weights.sharers > 1:
        formulas["packed layers held"] = f"1/{walk.weights.sharers} of a map that {walk.weights.sharers} ranks share"
    of_kept = held.get("kept activations", 0.0)
    heap = {
        "forward, last layer": {"work": going_up, "kept": of_kept},
        "head": {"work": going_up, "kept": of_kept, "head": chunk},
        "backward, last layer": {"work": work, "kept": of_kept},
        "backward, first layer": {"work": work},
    }
    return MemoryPlan(
        fixed, moments, kept, heap if walk.weights.device.type == "cpu" else {}, TUNED_HEAP if tuned_heap else DEFAULT_HEAP,
        formulas,
    )  # fmt: skip


def shape_of(batches: Sequence[PackedBatch]) -> tuple[list[list[int]], list[int]]:
    """Lengths and label positions of packed micro-batches, as `predict` takes them."""
    return [b.lengths for b in batches], [int(b.score_positions.numel()) for b in batches]

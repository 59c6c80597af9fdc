"""Peak memory of a training process in closed form, from parts that can be named.

    peak = process before the engine + base + adapter + kernels + largest moment of the step

    base      packed layers held + two slots when any is streamed + dequantised layer + outer and small tensors
              (of layers in a map that several ranks of a host share, this rank's part: bytes / ranks)
    adapter   per trained parameter: 4 bytes value, 8 bytes moments, one compute-dtype copy; gradients (4) as they come
    moment    what is held then (boundary inputs [T, H], or kept activations, of every layer and micro-batch) + what the
              work of one layer on one micro-batch, or of one chunk of the head, takes on top

`compose` puts the parts together: for an open engine with what probes measured (`engine.memory`), for a forecast with what
`use.py` says (`forecast.process`). Fitted are the constants of this file alone, over the configurations of `bench.memory`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from lamella.forecast.use import Use
from lamella.units import format_bytes

KERNEL_BYTES = 850_000
"""What oneDNN keeps per shape of a bf16 product (0.6 to 1.1 MB, measured)."""
MOST_KERNELS = 1024
"""That oneDNN keeps (its primitive cache's default capacity)."""
RUNTIME_BYTES = 50 << 20
"""Code of the model's family, of kernels and libraries, and their first allocations: 30 MB where every block is mapped
by itself, 20 MB more in the heap (measured)."""
FP32_BYTES_PER_THREAD = 32 << 20
"""Buffers that the fp32 matmul library keeps per thread (measured)."""
FAULT_BYTES = 64 << 10
"""Pages of a mapped file that come with one that is touched."""
CONTEXT_BYTES = 500_000_000
"""Of a CUDA context with cuBLAS and the kernels' code: an assumption, not measured here."""
MARGIN_SHARE = 0.05
"""Of what tensors take on a CUDA device, that the allocator keeps between them: an assumption."""


@dataclass(frozen=True)
class HeapShares:
    """What the C library's heap holds beyond the tensors in use, as shares; measured over the configurations of
    `bench.memory`, one set for all.

    A freed block serves its like again only when it has grown together with a neighbour (aligned blocks need a little more than
    their size). So each tensor that stays leaves a hole of its own size behind, which serves smaller ones alone (`unserved`).

    Attributes:
        work: of one layer's work up to that moment.
        kept: of kept activations.
        head: of one chunk of the head.
        boundaries: of boundary inputs.
    """

    work: float
    kept: float
    head: float
    boundaries: float = 0.0


TUNED_HEAP = HeapShares(0.3, 0.275, 0.0, 0.945)
DEFAULT_HEAP = HeapShares(1.6, 0.25, 0.3)
"""By whether `hardware.allocator` tuned the heap."""
HOLE_LAYERS = 16
"""Layers that holes are played through; their share changes little after."""
PROGRAM = ("imports", "libraries", "compiled products", "CUDA context")
"""Parts that `memory.budget` does not count."""
GROUPS = {
    "packed layers held": "base", "two packed slots": "base", "outer and small tensors": "base",
    "rows of a mapped table": "base", "dequantised layer": "dequantised buffer",
    "adapter values": "adapter", "adapter in the compute dtype": "adapter", "adapter gradients": "gradients",
    "moments": "optimizer", "kept activations": "activations", "one layer's forward": "activations",
    "one layer's backward": "activations", "one chunk of the head": "activations", "expert kernels": "activations",
    "heap between tensors": "activations", "boundary inputs": "boundaries", "gradients at a boundary": "boundaries",
    "between ranks": "boundaries", "imports": "program", "libraries": "program", "compiled products": "program",
    "CUDA context": "program", "margin": "margin",
}  # fmt: skip
"""Part -> what people call it."""


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak of a process that trains, or of its device.

    Attributes:
        fixed: named parts that are there all the time (bytes).
        moments: moment of a step -> named parts that are there then (bytes).
        heap: moment -> bytes that the heap's shares apply to (`HeapShares`); zero on a device.
        shares: of the heap.
        margin: share of all parts but the program's that is added to them.
        estimate: some layers are of a kind that is only bounded from above.
        spilled: bytes of boundary inputs that a device has no room for and page-locked host memory holds.
    """

    fixed: dict[str, float]
    moments: dict[str, dict[str, float]]
    kept: bool
    heap: dict[str, dict[str, float]] = field(default_factory=dict)
    shares: HeapShares = TUNED_HEAP
    formulas: dict[str, str] = field(default_factory=dict)
    margin: float = 0.0
    estimate: bool = False
    spilled: float = 0.0

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
        if self.margin:
            parts["margin"] = self.margin * sum(n for name, n in parts.items() if name not in PROGRAM)
        return {name: round(size) for name, size in parts.items() if size >= 1}

    @property
    def groups(self) -> dict[str, int]:
        """Parts summed up under the names people use (`GROUPS`)."""
        found: dict[str, int] = {}
        for name, size in self.parts.items():
            found[GROUPS[name]] = found.get(GROUPS[name], 0) + size
        return found

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


@dataclass(frozen=True)
class Work:
    """Work of a step's layers on its micro-batches, as probes measure or closed forms say it.

    Attributes:
        uses: of each kind of trained layer, on the largest micro-batch.
        graph_bytes: held by all trained layers' graphs of all micro-batches (in flight); last_graph_bytes: of the layer
            that the backward walk ends at.
        trained: layers; boundary_bytes: of one token.
        tokens: of each micro-batch, filling included; held_tokens: of those between forward and back, at most.
        head: positions of a chunk of the head and what it takes; (0, 0.0): the head is another rank's.
        said: where the figures come from.
    """

    uses: Sequence[Use]
    graph_bytes: float
    last_graph_bytes: float
    trained: int
    boundary_bytes: float
    tokens: Sequence[int]
    held_tokens: int
    head: tuple[int, float]
    said: str


@dataclass(frozen=True)
class Trained:
    """Numbers of trained parameters held here: of all layers, and of the one with the most."""

    parameters: int
    per_layer: int


@dataclass(frozen=True)
class Process:
    """What else decides a process's memory.

    Attributes:
        imports_bytes: resident set before the engine is opened.
        element: bytes of the compute dtype.
        threads: of the CPU.
        compiles: products are compiled by shape (bf16 on a CPU).
        cpu: the process computes on a CPU; else these are the parts of its device.
        tuned_heap: the allocator was tuned (`hardware.allocator`).
        updates: an optimizer is used, so moments are there.
        state_on_disk: adapter values, gradients and moments are in a file, one layer of them in memory.
        expert_bytes: kept by the expert kernels from call to call.
        between_ranks: boundaries on their way to and from other ranks.
        boundary_room: of boundary inputs that stay on a device; the others are in pinned host memory. None: all stay.
        sizes: different sizes of micro-batches in the whole run, where they are known: products are compiled for each.
    """

    imports_bytes: float
    element: int
    threads: int
    compiles: bool
    cpu: bool = True
    tuned_heap: bool = False
    updates: bool = True
    state_on_disk: bool = False
    expert_bytes: float = 0.0
    between_ranks: float = 0.0
    boundary_room: float | None = None
    sizes: int = 0


def compose(
    base: dict[str, float], work: Work, adapter: Trained, process: Process, *, kept: bool, sharers: int = 1,
    estimate: bool = False,
) -> MemoryPlan:  # fmt: skip
    """Peak of a process from its parts.

    Args:
        base: named parts of the base weights.
        kept: activations are kept; else layers are recomputed.
        sharers: ranks that read one copy of the base.
    """
    size = process.element
    tokens = sum(work.tokens)
    largest = max(work.tokens)
    in_memory = adapter.per_layer if process.state_on_disk else adapter.parameters
    copies = float(size * (adapter.parameters if kept else adapter.per_layer))
    moments = _moments(work, adapter, kept, in_memory, process)
    sizes = max(len(set(work.tokens)), process.sizes)
    kernels = min(sum(use.shapes for use in work.uses) * sizes + 2, MOST_KERNELS)
    fixed: dict[str, float] = {
        "imports": process.imports_bytes,
        **base,
        "adapter values": 4.0 * in_memory,
        "moments": 8.0 * in_memory if process.updates else 0.0,
        "adapter in the compute dtype": copies,
        "expert kernels": process.expert_bytes,
        "between ranks": process.between_ranks,
        "libraries": RUNTIME_BYTES + (FP32_BYTES_PER_THREAD * process.threads if size == 4 else 0),
        "compiled products": float(KERNEL_BYTES * kernels) if process.compiles else 0.0,
    }
    if not process.cpu:  # masters, moments and the program are in host memory
        for name in ("imports", "adapter values", "moments", "libraries"):
            del fixed[name]
        fixed["CUDA context"] = float(CONTEXT_BYTES)
    rows, boundary = work.head[0], work.boundary_bytes
    formulas = {
        "kept activations": f"{work.trained} layers x {work.graph_bytes / max(work.trained * work.held_tokens, 1):,.0f} B x "
        f"{work.held_tokens} tokens",
        "boundary inputs": f"{work.trained + 1} boundaries x {work.held_tokens} tokens x {boundary:.0f} B",
        "gradients at a boundary": f"{work.held_tokens} tokens x {boundary:.0f} B",
        "one layer's backward": f"{work.said}, for {largest} tokens",
        "one layer's forward": f"{work.said}, for {largest} tokens",
        "one chunk of the head": f"{rows} positions, {work.said}",
        "adapter values": f"4 B x {in_memory}", "moments": f"8 B x {in_memory}",
        "adapter in the compute dtype": f"{size} B x {copies / size:.0f}",
        "adapter gradients": f"4 B x {in_memory}",
        "compiled products": f"{kernels} shapes x {KERNEL_BYTES} B",
        "CUDA context": f"assumed {format_bytes(CONTEXT_BYTES)}",
        "margin": f"assumed {MARGIN_SHARE:.0%} of the device's tensors",
        "heap between tensors": "shares of the work above, measured once",
    }  # fmt: skip
    if sharers > 1:
        formulas["packed layers held"] = f"1/{sharers} of a map that {sharers} ranks share"
    assert tokens >= work.held_tokens
    spilled = 0.0
    if process.boundary_room is not None and not kept:
        one = boundary * work.held_tokens
        spilled = max(0.0, one * (work.trained + 1) - process.boundary_room - one)
    return MemoryPlan(
        fixed, moments, kept, _heap(work, kept) if process.cpu else {}, TUNED_HEAP if process.tuned_heap else DEFAULT_HEAP,
        formulas, 0.0 if process.cpu else MARGIN_SHARE, estimate, spilled,
    )  # fmt: skip


def _going_up(work: Work, kept: bool) -> float:
    return max(use.graph_peak - use.graph if kept else use.forward for use in work.uses)


def _coming_back(work: Work, kept: bool) -> float:
    return max(use.backward - (use.graph if kept else 0) for use in work.uses)


def _moments(work: Work, adapter: Trained, kept: bool, in_memory: int, process: Process) -> dict[str, dict[str, float]]:
    cpu, one = process.cpu, work.boundary_bytes * work.held_tokens
    boundaries = one * (work.trained + 1)
    if process.boundary_room is not None:
        boundaries = min(boundaries, process.boundary_room + one)
    held = {"kept activations": work.graph_bytes} if kept else {"boundary inputs": boundaries}
    last = {"kept activations": work.last_graph_bytes} if kept else {"boundary inputs": one}
    gradients = {"gradients at a boundary": one}
    backward = {"one layer's backward": _coming_back(work, kept)}
    per_layer = 4.0 * adapter.per_layer * (1 if cpu else 2)  # a device sends a layer's sums away beside the next layer
    moments = {
        "forward, last layer": {**held, "one layer's forward": _going_up(work, kept)},
        "head": {**held, **gradients, "one chunk of the head": work.head[1]},
        "backward, last layer": {**held, **gradients, **backward, "adapter gradients": per_layer},
        "backward, first layer": {
            **last,
            **gradients,
            **backward,
            "adapter gradients": 4.0 * in_memory if cpu else per_layer,
        },
    }
    return moments


def unserved(tokens: Sequence[int], layers: int) -> float:
    """Share of the holes that stay: going through `layers`, a micro-batch of so many tokens takes the smallest hole that is
    larger than it needs, or new memory, and leaves one of its own size. 1: micro-batches are alike."""
    holes: list[int] = []
    layers = max(1, min(layers, HOLE_LAYERS))
    for _ in range(layers):
        for n in tokens:
            at = bisect.bisect_right(holes, n)
            if at < len(holes):
                bisect.insort(holes, holes.pop(at) - n)
            bisect.insort(holes, n)
    return sum(holes) / (layers * sum(tokens))


def _heap(work: Work, kept: bool) -> dict[str, dict[str, float]]:
    share = unserved(work.tokens, work.trained)
    of_kept = share * work.graph_bytes if kept else 0.0
    bounds = 0.0 if kept else share * work.boundary_bytes * work.held_tokens * (work.trained + 1)
    up, back = _going_up(work, kept), _coming_back(work, kept)
    return {
        "forward, last layer": {"work": up, "kept": of_kept, "boundaries": bounds},
        "head": {"work": up, "kept": of_kept, "head": work.head[1], "boundaries": bounds},
        "backward, last layer": {"work": back, "kept": of_kept, "boundaries": bounds},
        "backward, first layer": {"work": back},
    }

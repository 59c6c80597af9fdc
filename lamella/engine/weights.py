"""Where the base weights are, and how a layer's come to its modules.

Every layer's weights are views of one shared buffer in the compute dtype, whatever their formats: dequantising layer i
into it is all that binding takes. (Weights that a store keeps in 16 bit count with the quantised ones.) On a CPU experts stay
packed (`models/packed.py`). Small tensors that were kept in
16 bit (norms, biases, routers) stay in memory. Packed layers are held in memory as far as the budget goes; the others are
read from the store into two slots, the next one ahead of its turn. On a GPU the budget is the device's memory; see
`device.py`.

Where several ranks run on one host, layers that stay in host memory are maps of the store's files: one copy for all of them
(`store/shared.py`). Streamed ones have two private slots a rank, and may be read together with other ranks (`gather.py`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import xxhash
from torch import Tensor, nn

from lamella.engine.device import (
    Copier,
    CudaCopier,
    CudaRegistrar,
    DeviceSlots,
    HostArena,
    PageLock,
    Registrar,
    arrived_from_disk,
    can_lock,
    default_budget,
)
from lamella.engine.gather import LayerGather, Peers
from lamella.engine.parts import Held, covers, held_of, ranges_of
from lamella.forecast.residency import HOST_SHARE, Residency, place_layers, plan_residency
from lamella.hardware.memory import memory_limit_bytes
from lamella.kernels import dequantize_nf4_many
from lamella.models.binding import plan_binding
from lamella.models.packed import ExpertBytes, can_stay_packed
from lamella.models.pieces import Cut, ParamPlan
from lamella.models.skeleton import Skeleton
from lamella.ranks.beats import PULSE
from lamella.store.manifest import TensorRecord, is_weight
from lamella.store.reader import GroupKey, PackedGroup, Store, block_of, in_order
from lamella.store.shared import SharedFile
from lamella.store.verify import read_exactly
from lamella.trace.recorder import RECORDER

T = TypeVar("T")

SHARED = "shared map"
ALIGN_BYTES = 64
MOST_JOBS = 64
"""Tensors of a layer dequantised in one call; stacks of experts go by runs that lie side by side instead."""
_PIECE_NUMEL = 8 << 20
"""Values converted at once."""


def aligned_bytes(n: int) -> Tensor:
    """uint8 [n], its data aligned to 64 bytes."""
    raw = torch.empty(n + ALIGN_BYTES, dtype=torch.uint8)
    skip = -raw.data_ptr() % ALIGN_BYTES
    return raw[skip : skip + n]


@dataclass(frozen=True)
class Fill:
    """Dequantise these stored tensors, one after the other, into `out`; or a part of one, of whole blocks. `stored`: of one
    tensor, in the order in which its values lie."""

    names: tuple[str, ...]
    out: Tensor
    part: Cut | None = None
    stored: bool = False

    def run(self, packed: PackedGroup) -> None:
        if self.part is None and self.stored:
            packed.dequantize_stored(self.names[0], self.out)
        elif self.part is None:
            packed.dequantize_many(self.names, self.out)
        elif self.part.dim:
            packed.dequantize_columns(self.names[0], self.part.first, self.part.last, self.out)
        else:
            packed.dequantize_slice(self.names[0], self.part.first * self.out[0].numel(), self.out)


class LayerWeights:
    """Base weights of one model on one device.

    Args:
        store: the layer store.
        skeleton: weightless model; gets its outer tensors, its small tensors and views for all others.
        device: where layers run.
        budget_bytes: for packed layers and fixed parts, of device memory on CUDA; None: everything stays in memory, or
            on CUDA what fits a share of its free memory.
        copier: copies packed layers to slots on the device ahead of their turn; None: of its own on CUDA, and on a
            CPU layers are dequantised where they lie.
        host_bytes: with a copier, for packed layers in pinned host memory; None: a share of this machine's memory, in all
            for ranks that share one copy, else an even part of it.
        ranks_here: ranks of the run on this host.
        sharers: those of them that hold the same layers and read one copy of them; None: all.
        registrar: page-locks host memory; None: of its own on CUDA, nothing is page-locked on a CPU.

    Attributes:
        base: "private", or "shared map" where ranks read one copy of the layers that stay in host memory. (Private in spite
            of sharers where a GPU's driver does not page-lock a mapped file; the reason stands there too.)
        sharers: ranks that share it, 1 when it is private.
        gather: how streamed layers are read together with other ranks (`gather_with`); None: each rank reads all of them.

    Raises:
        UserError: names, shapes or budget that do not work out.
    """

    def __init__(
        self,
        store: Store,
        skeleton: Skeleton,
        device: torch.device,
        budget_bytes: int | None = None,
        copier: Copier | None = None,
        host_bytes: int | None = None,
        ranks_here: int = 1,
        sharers: int | None = None,
        registrar: Registrar | None = None,
    ) -> None:
        self.store, self.skeleton, self.device = store, skeleton, device
        self.bound: int | None = None
        self._filled: int | None = None
        self._blanked = False
        self.gather: LayerGather | None = None
        self._together = False
        self.cuts: dict[str, Cut] = {}
        self._absent: frozenset[str] = frozenset()
        self._small: dict[str, Tensor] = {}
        self._packable: dict[str, bool] = {}
        shapes = {r.name: r.shape for key, _ in store.manifest.groups() for r in store.records(key)}
        self.plans = plan_binding(skeleton, shapes, str(store.path))
        self._stored_dtypes = {
            r.name: getattr(torch, r.dtype) for key, _ in store.manifest.groups() for r in store.records(key)
        }
        self._records = {r.name: r for key, _ in store.manifest.groups() for r in store.records(key)}
        by_layer: dict[int | None, list[ParamPlan]] = {}
        for plan in self.plans.values():
            by_layer.setdefault(plan.layer, []).append(plan)
        self._by_layer = by_layer
        layers = len(skeleton.layers)
        # On a device weights are copied to slots that the next copy may overwrite: they must leave at once.
        self._may_stay_packed = device.type == "cpu" and copier is None
        self._buffer = self._new_buffer()
        cuda = device.type == "cuda"
        self._registrar = CudaRegistrar() if registrar is None and cuda else registrar
        self.ranks_here = ranks_here
        self.sharers, self.base = self._sharing(ranks_here if sharers is None else sharers)
        self._maps = self.base == SHARED
        self.mapped_table_bytes = self._table_bytes()
        fixed = self._buffer.nbytes + self._kept_bytes()
        self.copier = CudaCopier(device) if copier is None and cuda else copier
        self.layers = range(layers)
        self._host_bytes = host_bytes
        self.residency = self._plan(fixed, budget_bytes, host_bytes)
        self._streamed = frozenset(self.residency.streamed)
        self._packed: dict[int, PackedGroup] = {}
        self._mapped: dict[str, Tensor] = {}
        self._pinned: dict[int, PackedGroup] = {}
        self._shared: dict[int, SharedFile] = {}
        self._arenas: list[HostArena | PageLock] = []
        self._bind_outer()
        for i in range(layers):
            self._hold_small(by_layer.get(i, []), i)
        self._bind_layers()
        self._on_device: DeviceSlots | None = None
        self._start_slots()

    def _sharing(self, sharers: int) -> tuple[int, str]:
        """Ranks that share the layers in host memory, and how to call it."""
        if sharers <= 1:
            return 1, "private"
        if self._registrar is not None:
            code = can_lock(self.store.share(0)[1].bytes, self._registrar)
            if code != 0:
                return 1, f"private: a mapped file cannot be page-locked here (CUDA error {code})"
        return sharers, SHARED

    def _plan(self, fixed: int, budget_bytes: int | None, host_bytes: int | None) -> Residency:
        first, sizes = self.layers.start, self.layer_bytes()
        self._budget = budget_bytes
        if self.copier is None:
            return plan_residency(sizes, fixed, budget_bytes, first, self.sharers)
        if host_bytes is None:
            host_bytes = int(memory_limit_bytes() * HOST_SHARE * self.sharers / self.ranks_here)
        if budget_bytes is None and self.device.type == "cuda":
            budget_bytes = default_budget(self.device) + self._buffer.nbytes
        return place_layers(sizes, fixed, budget_bytes, host_bytes, first)

    # ---- sizes ----------------------------------------------------------------------------------

    def _is_quantised(self, plan: ParamPlan) -> bool:
        """Whether a parameter is dequantised layer by layer: weights, also those that are kept in 16 bit."""
        return any(is_streamed(self._records[piece.source]) for piece in plan.pieces)

    def _quantised_numel(self, plans: list[ParamPlan]) -> int:
        wanted = [p for p in plans if self._is_quantised(p) and not self._stays_packed(p)]
        return sum(_padded(torch.Size(self._held(p).shape).numel()) for p in wanted)

    def _new_buffer(self) -> Tensor:
        layers = range(len(self.skeleton.layers))
        numel = max((self._quantised_numel(self._by_layer.get(i, [])) for i in layers), default=0)
        return torch.empty(numel, dtype=self.skeleton.dtype, device=self.device)

    def _held(self, plan: ParamPlan) -> Held:
        return held_of(plan, self.cuts.get(plan.name), self.store.manifest.block_size, self._records)

    def _ranges(self, i: int) -> list[tuple[int, int]] | None:
        """(offset, bytes) of what of layer i's file is read; None: all of it."""
        plans = self._by_layer.get(i, [])
        if self.copier is not None or self._maps or not any(p.name in self.cuts for p in plans):
            return None
        wanted = [(plan, self._held(plan) if self._is_quantised(plan) else None) for plan in plans]
        return ranges_of(wanted, {r.name: r for r in self.store.records(i)})

    def layer_bytes(self) -> list[int]:
        """Packed bytes of each of these layers that are read here."""
        found = [(self.store.group_bytes(i), self._ranges(i)) for i in self.layers]
        return [size if ranges is None else sum(n for _, n in ranges) for size, ranges in found]

    def _owner(self, plan: ParamPlan) -> tuple[nn.Module, str]:
        """Module that holds a layer's parameter, and its name there."""
        assert plan.layer is not None
        path, _, key = plan.name.removeprefix(f"{self.skeleton.prefix}.{plan.layer}.").rpartition(".")
        return self.skeleton.layers[plan.layer].get_submodule(path), key

    def _stays_packed(self, plan: ParamPlan) -> bool:
        if plan.name not in self._packable:
            quantised = self._may_stay_packed and plan.layer is not None and self._is_quantised(plan)
            block_size = self.store.manifest.block_size
            self._packable[plan.name] = quantised and can_stay_packed(
                plan, self._owner(plan)[0], block_size, self._records
            )
        return self._packable[plan.name]

    @property
    def buffer_bytes(self) -> int:
        """The dequantised layer's."""
        return self._buffer.nbytes

    def _kept_bytes(self) -> int:
        """Unquantised tensors; a mapped table of embeddings counts as nothing (rows are read as tokens come), but a
        mapped head does, being read whole: this rank's part of it where others read it too."""
        plans = [p for p in self.plans.values() if not self._is_quantised(p)]
        mapped = sum(torch.Size(p.shape).numel() for p in plans if p.layer is None and self._is_mapped(p))
        private = sum(torch.Size(p.shape).numel() for p in plans) - mapped
        size = self.skeleton.dtype.itemsize
        return private * size + -(-(mapped * size - self.mapped_table_bytes) // self.sharers)

    def _table_bytes(self) -> int:
        """Of mapped tables of which only some rows are read. (Binding parts tied ones: to be asked before.)"""
        head = self.skeleton.model.get_output_embeddings()
        heads = {id(p) for p in head.parameters()} if head is not None else set()
        outer = self.skeleton.model.state_dict(keep_vars=True)
        tables = (p for p in self.plans.values() if p.layer is None and self._is_mapped(p) and len(p.shape) == 2)
        numel = sum(torch.Size(p.shape).numel() for p in tables if id(outer[p.name]) not in heads)
        return numel * self.skeleton.dtype.itemsize

    # ---- binding --------------------------------------------------------------------------------

    def _bind_outer(self) -> None:
        """Embeddings, last norm, head: looked at in the mapped file where its dtype is the one computed in, else
        converted in pieces."""
        group, self._outer_map = self.store.map("outer")
        tensors = {}
        for plan in self._by_layer.get(None, []):
            (piece,) = plan.pieces
            stored = group.raw(piece.source)
            if self._is_mapped(plan):
                self._mapped[piece.source] = tensors[plan.name] = stored
            else:
                tensors[plan.name] = self._converted(stored, self._dtype_of(plan.name))
        self._outer_map.madvise(mmap.MADV_DONTNEED)
        for name, old in list(self.skeleton.model.state_dict(keep_vars=True).items()):
            if name in tensors:
                for module in self.skeleton.model.modules():  # every place that holds the old one: tied heads too
                    for key, p in {**module._parameters, **module._buffers}.items():
                        if p is old:
                            bind_tensor(module, key, tensors[name])

    def _is_mapped(self, plan: ParamPlan) -> bool:
        return self.device.type == "cpu" and self._stored_dtypes[plan.pieces[0].source] == self._dtype_of(plan.name)

    def _converted(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(stored.shape, dtype=dtype, device=self.device)
        flat, source = out.view(-1), stored.view(-1)
        for start in range(0, flat.numel(), _PIECE_NUMEL):
            flat[start : start + _PIECE_NUMEL].copy_(source[start : start + _PIECE_NUMEL])
            self._outer_map.madvise(mmap.MADV_DONTNEED)
        return out

    def _dtype_of(self, name: str) -> torch.dtype:
        return dtype_of(self.skeleton, name)

    def _hold_layers(self) -> None:
        """Bring the layers that stay on the device there, and those that stay in host memory into their arenas."""
        for i in self.residency.resident:
            if self._maps:
                packed = self._mapped_layer(i)
            else:
                packed = self._read(i, HostArena(self.store.group_bytes(i), pin=False).bytes)
            on_device = packed.buffer.to(self.device, copy=True)
            self._packed[i] = PackedGroup(on_device, packed.records, packed.block_size)
        self._shared.clear()  # what lies on the device needs its file no more
        for i in self.residency.pinned:
            if self._maps:
                self._pinned[i] = self._mapped_layer(i)
                if self._registrar is not None:
                    self._arenas.append(PageLock(self._pinned[i].buffer, self._registrar, read_only=True))
            else:
                host = self._arena(self.store.group_bytes(i))
                self._pinned[i] = self._read(i, host.bytes)
                self._arenas.append(host)

    def _arena(self, n: int) -> HostArena:
        return HostArena(n, self._registrar is not None, self._registrar)

    def _mapped_layer(self, i: int) -> PackedGroup:
        """Layer i in the map that ranks of this host share, all its pages brought in."""
        packed, self._shared[i] = self.store.share(i)
        self._shared[i].populate()
        return packed

    def _hold_small(self, plans: list[ParamPlan], i: int) -> None:
        """Keep layer i's unquantised tensors, whole."""
        small = [plan for plan in plans if not self._is_quantised(plan)]
        stored = read_raw(self.store, i, {piece.source for plan in small for piece in plan.pieces})
        for plan in small:
            whole = torch.empty(plan.shape, dtype=self._dtype_of(plan.name), device=self.device)
            for piece in plan.pieces:
                piece.view(whole).copy_(stored[piece.source])
            self._small[plan.name] = whole

    def _bind_layers(self) -> None:
        self._fills: list[list[Fill]] = []
        self._jobs: list[Tensor | None] = []
        self._experts: list[list[ExpertBytes]] = []
        self._at_work: list[ExpertBytes] = []
        for i in range(len(self.skeleton.layers)):
            plans = self._by_layer.get(i, [])
            self._fills.append(self._bind_layer(plans))
            self._jobs.append(self._jobs_of(i) if self.device.type == "cpu" else None)
            self._experts.append(self._bind_experts(plans))

    def _bind_layer(self, plans: list[ParamPlan]) -> list[Fill]:
        fills, offset = [], 0
        for plan in plans:
            module, key = self._owner(plan)
            cut = self.cuts.get(plan.name)
            if self._stays_packed(plan):
                continue
            if self._is_quantised(plan):
                held = self._held(plan)
                numel = torch.Size(held.shape).numel()
                view = self._buffer[offset : offset + numel].view(held.shape)
                offset += _padded(numel)
                record = self._records[held.names[0]] if held.names else None
                ordered = record is not None and bool(record.order)
                if numel:
                    fills.append(Fill(held.names, view, held.part, ordered))
                if record is not None and ordered:
                    view = in_order(record, view, held.shape)
                cut = held.cut
            else:
                view = self._small[plan.name]
            bind_tensor(module, key, None if plan.name in self._absent else view if cut is None else cut.of(view))
        return fills

    def _is_job(self, fill: Fill) -> bool:
        """Whether a fill is of whole NF4 tensors in the store's own blocks."""
        block_size = self.store.manifest.block_size
        records = [self._records[name] for name in fill.names]
        return fill.part is None and all(r.format == "nf4" and block_of(r, block_size) == block_size for r in records)

    def _jobs_of(self, i: int) -> Tensor | None:
        """Layer i's fills for one call of the kernels, where few; they are taken from `_fills`."""
        fills = [fill for fill in self._fills[i] if self._is_job(fill)]
        if not 0 < sum(len(fill.names) for fill in fills) <= MOST_JOBS:
            return None
        self._fills[i] = [fill for fill in self._fills[i] if not self._is_job(fill)]
        records = {record.name: record for record in self.store.records(i)}
        jobs = []
        for fill in fills:
            at = fill.out.storage_offset()
            for name in fill.names:
                parts = {part: offset for part, (offset, _) in records[name].parts.items()}
                kinds = ("codes", "absmax", "absmax_q", "absmax_code", "absmax2", "offset")
                jobs.append([*(parts.get(kind, -1) for kind in kinds), at, records[name].numel])
                at += records[name].numel
        return torch.tensor(jobs, dtype=torch.int64)

    def _bind_experts(self, plans: list[ParamPlan]) -> list[ExpertBytes]:
        """Hang the whereabouts of packed experts into their modules."""
        by_module: dict[int, tuple[nn.Module, dict[str, ParamPlan]]] = {}
        for plan in plans:
            if self._stays_packed(plan):
                module, key = self._owner(plan)
                by_module.setdefault(id(module), (module, {}))[1][key] = plan
        found = []
        for module, named in by_module.values():
            cut = self.cuts.get(next(iter(named.values())).name)
            block_size = self.store.manifest.block_size
            module.__dict__["lamella_packed"] = ExpertBytes(named, self._records, block_size, cut)
            found.append(module.__dict__["lamella_packed"])
        return found

    def assign(self, layers: range, budget_bytes: int | None, sharers: int | None = None) -> None:
        """Between passes: from now on hold these layers alone, as the budget has room; read together with nobody until
        `gather_with` is called again.

        Args:
            sharers: ranks of this host that hold these layers; None: as many as before.
        """
        self.gather = None
        self.layers = layers
        if sharers is not None and self._maps:
            self.sharers = max(sharers, 1)
        self._place(self._plan(self.residency.fixed_bytes, budget_bytes, self._host_bytes))

    def divide(self, cuts: Mapping[str, Cut], absent: Collection[str] = ()) -> None:
        """Between passes: hold only parts of some parameters from now on; what was read is read again. As with `assign`,
        layers are read together with nobody until `gather_with` is called again.

        On a CPU only the parts' bytes are read (of a shared map: all); on a device whole layers are copied, and parts of
        them dequantised.

        Args:
            cuts: full parameter name -> its part; no cuts: everything.
            absent: parameters (biases) that are None in their modules.
        """
        self._stop_slots()
        self.gather = None
        self.cuts, self._absent = dict(cuts), frozenset(absent)
        fixed = self.residency.fixed_bytes - self._buffer.nbytes
        self._packable.clear()
        self._buffer = self._new_buffer()
        self._bind_layers()
        self._packed.clear()
        self._shared.clear()
        self._place(self._plan(fixed + self._buffer.nbytes, self._budget, self._host_bytes))

    def _place(self, residency: Residency) -> None:
        """Between passes: hold these layers and stream the others."""
        self._stop_slots()
        self.residency = residency
        self._streamed = frozenset(residency.streamed)
        held = frozenset(residency.resident) if self.copier is None else frozenset[int]()
        self._packed = {i: packed for i, packed in self._packed.items() if i in held}
        self._shared = {i: shared for i, shared in self._shared.items() if i in held}
        self._pinned.clear()
        self._arenas.clear()
        self._start_slots()

    def limit(self, budget_bytes: int) -> None:
        """Between passes on a CPU: hold as many packed layers as this budget has room for, and stream the others."""
        assert self.copier is None, "layers are placed on the device when it is opened"
        self.assign(self.layers, budget_bytes)

    def _stop_slots(self) -> None:
        """Wait for what is being read, and let go of the layer at work."""
        if self._on_device is not None:
            self._on_device.close()
            self._on_device = None
        for future in (*self._first.values(), *self._loading.values()):
            future.result()
        self._reader.shutdown()
        self._let_go()

    def _let_go(self) -> None:
        """No layer is at work."""
        for experts in self._at_work:
            experts.group = None
        self._at_work = []
        self.bound = self._filled = None
        self._blanked = False

    # ---- together with other ranks ----------------------------------------------------------------

    def gather_with(self, peers: Peers) -> None:
        """Read streamed layers together with other ranks within `together`: each reads its part and gets the rest.

        All ranks of the group hold the same range of layers and call it, between passes, after `assign` and `limit`. What
        one of them streams all stream from now on.
        """
        gather = LayerGather(self.store, peers)
        old = self.residency
        streamed = gather.union(old.streamed)
        if not streamed:
            return
        resident = tuple(i for i in old.resident if i not in streamed)
        sharers = self.sharers if self.copier is None else 1
        kept = sum(-(-self.store.group_bytes(i) // sharers) for i in resident)
        slots = 2 * gather.padded_bytes(max(self.store.group_bytes(i) for i in streamed))
        self.gather = gather
        self._place(Residency(resident, streamed, old.fixed_bytes, kept, slots, old.pinned))

    @contextmanager
    def together(self) -> Iterator[None]:
        """A stretch (a step) in which all ranks of the group bind the same layers in the same order, whether they have rows
        or not (`pass_by`). Outside of it each reads what it streams by itself. Without a group: nothing.

        Raises:
            RunFailed: another rank failed in it.
        """
        if self.gather is None:
            yield
            return
        gather = self.gather
        if not self._in_reader(lambda: gather.begin(self._state())):
            self._forget()
        self._together = True
        try:
            yield
        except BaseException:
            self._together = False
            self._in_reader(lambda: gather.leave(failed=True))
            raise
        self._together = False
        self._in_reader(lambda: gather.leave(failed=False))

    def _in_reader(self, work: Callable[[], T]) -> T:
        """Have the thread that reads do this, after what it has to read."""
        return (self._on_device.submit(work) if self._on_device is not None else self._reader.submit(work)).result()

    def _state(self) -> int:
        """A digest of what decides which layers are asked for next."""
        holds = self._on_device.holds if self._on_device is not None else sorted(self._slot_of.items())
        return xxhash.xxh3_64_intdigest(f"{self.bound} {holds}".encode()) >> 1

    def _forget(self) -> None:
        """Empty the slots."""
        self._let_go()
        if self._on_device is not None:
            self._on_device.forget()
        for future in self._loading.values():
            future.result()
        self._loading.clear()
        self._slot_of.clear()

    def pass_by(self, layers: Iterable[int]) -> None:
        """The walk of a rank without rows through these layers: brings what the others bring, for their sake, and computes
        nothing. Nothing to do where layers are not read together."""
        if self._together:
            for i in layers:
                self.bind(i, fill=False)

    # ---- at work --------------------------------------------------------------------------------

    def _start_slots(self) -> None:
        self._slots: list[Tensor] = []
        self._loading: dict[int, Future[PackedGroup]] = {}
        self._first: dict[int, Future[PackedGroup]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="lamella-read")
        if self.copier is not None:
            self._hold_layers()
            if self.residency.streamed:
                size = self._slot_bytes()
                on_disk = len(self.residency.streamed) > len(self.residency.pinned)
                self._host_slots = [self._arena(size) for _ in range(2)] if on_disk else []
                slots = [arena.bytes for arena in self._host_slots]
                self._on_device = DeviceSlots(self.device, size, self.copier, self._read, slots, self.gather)
        elif self.residency.streamed:
            self._slots = [aligned_bytes(self._slot_bytes()) for _ in range(2)]
        self._slot_of: dict[int, int] = {}

    def _slot_bytes(self) -> int:
        size = max(self.store.group_bytes(i) for i in self.residency.streamed)
        return size if self.gather is None else self.gather.padded_bytes(size)

    def _request(self, i: int, keep: int | None) -> None:
        """Start reading layer i: a resident one for good, when it is first needed; a streamed one into the slot that does
        not hold layer `keep`."""
        if i in self._loading or i in self._packed or i in self._first:
            return
        if i not in self._streamed:
            self._first[i] = self._reader.submit(self._load_for_good, i)
            return
        slot = 1 - self._slot_of[keep] if keep in self._slot_of else 0
        for other in [k for k, s in self._slot_of.items() if s == slot]:
            del self._slot_of[other]
            self._loading.pop(other)
        self._slot_of[i] = slot
        load = self.gather.load if self.gather is not None and self._together else self._read
        self._loading[i] = self._reader.submit(load, i, self._slots[slot])

    def _load_for_good(self, i: int) -> PackedGroup:
        if self._maps:
            return self._mapped_layer(i)
        return self._read(i, aligned_bytes(self.store.group_bytes(i)))

    def _read(self, i: int, into: Tensor) -> PackedGroup:
        ranges = self._ranges(i)
        nbytes = self.store.group_bytes(i) if ranges is None else sum(n for _, n in ranges)
        with RECORDER.span("load", f"layer {i}", nbytes=nbytes, lane="read"):
            return self.store.load(i, into) if ranges is None else self.store.load_ranges(i, into, ranges)

    def packed(self, i: int) -> PackedGroup:
        """Layer i's bytes, read now if they are not here; the next layer of the walk is read ahead."""
        if i in self._packed:
            return self._packed[i]
        self._request(i, self.bound)
        if i in self._first:
            with RECORDER.span("load", f"layer {i}"):
                self._packed[i] = self._first.pop(i).result()
            return self._packed[i]
        return arrived_from_disk(self._loading[i], i)

    def bind(self, i: int, fill: bool = True) -> None:
        """Bring layer i's weights into its modules; nothing to do when it is the one at work. Without `fill` only its bytes
        are brought, as `pass_by` does.

        Raises:
            UserError: the layer cannot be read, or its file was changed while it is mapped.
            RunFailed: it is read together with other ranks, and one of them failed.
        """
        PULSE.beat()
        turned = self.bound != i
        if not turned and (not fill or self._filled == i):
            return
        if turned and self._streamed and self.copier is None:
            self._outer_map.madvise(mmap.MADV_DONTNEED)  # rows and head of the pass before; memory is short
        before = self.bound
        packed = self.packed(i) if self._on_device is None else self._take(i)
        if i in self._shared:
            self._shared[i].check()
        if fill:
            self._fill(i, packed)
        self.bound = i
        step = 1 if before is None or before < i else -1
        if self._on_device is not None:
            self._fetch_ahead(i, step if turned else 0)
        elif turned and i + step in self.layers:
            self._request(i + step, i if i in self._slot_of else None)

    def _fill(self, i: int, packed: PackedGroup) -> None:
        """Dequantise layer i into the place its modules look at."""
        self._blanked = False
        with RECORDER.span("dequantise", f"layer {i}"):
            jobs = self._jobs[i]
            if jobs is not None:
                dequantize_nf4_many(packed.buffer, jobs, self._buffer, packed.block_size)
            for fill in self._fills[i]:
                fill.run(packed)
        self._put_to_work(i, packed)
        self._filled = i

    def _put_to_work(self, i: int, packed: PackedGroup) -> None:
        for other in self._at_work:
            other.group = None
        self._at_work = self._experts[i]
        for experts in self._at_work:
            experts.group = packed
        torch.autograd.graph.increment_version(self._buffer)

    def blank(self, i: int) -> None:
        """Let layer i's modules look at zeros in the place of its quantised weights, until a layer is bound: for work whose
        memory is looked at and not its values. Nothing is read, where bytes would come from disk."""
        if self.copier is not None or self._maps or i in self._packed or self._ranges(i) is not None:
            self.bind(i)
            return
        if not self._blanked:
            self._buffer.zero_()
        self._put_to_work(i, self.store.blank(i))
        self._filled, self._blanked = None, True

    def _take(self, i: int) -> PackedGroup:
        """Layer i's bytes on the device."""
        if i in self._packed:
            return self._packed[i]
        assert self._on_device is not None
        self._on_device.fetch(i, self._pinned.get(i), () if self.bound is None else (self.bound,), self._together)
        return self._on_device.take(i)

    def _fetch_ahead(self, i: int, step: int) -> None:
        """Bring the next streamed layers of the walk: one beside the layer at work, two when that one stays here. (`step` 0:
        they have been asked for.)"""
        assert self._on_device is not None
        here = i not in self._packed
        if here:
            self._on_device.done(i)
        if step == 0:
            return
        end = self.layers.stop if step > 0 else self.layers.start - 1
        coming = [n for n in range(i + step, end, step) if n not in self._packed]
        coming = coming[: 1 if here else 2]
        for n in coming:
            self._on_device.fetch(n, self._pinned.get(n), (i, *coming), self._together)

    @property
    def copied_bytes(self) -> int:
        """Packed bytes brought to the device since it was opened, beyond those that stay there."""
        return self._on_device.copied_bytes if self._on_device is not None else 0

    def resident_checksum(self) -> str:
        """xxh3-128 over the checksums of the base's bytes in memory: of resident packed layers and mapped tensors as the
        manifest takes them, and of tensors that were converted.

        What no pass has read yet counts as what the manifest says. So the value before the first pass costs nothing,
        and equality later means equality with the store as it was written.
        """
        digest = xxhash.xxh3_128()
        for i in sorted((*self.residency.resident, *self.residency.pinned)):
            held, ranges = self._packed.get(i) or self._pinned.get(i), self._ranges(i)
            for record in self.store.records(i):
                read = ranges is None or covers(ranges, record)
                now = _checksum_in(held.buffer, record) if held is not None and read else record.checksum
                digest.update(now.encode())
        for record in self.store.records("outer"):
            if record.name in self._mapped:
                now = record.checksum if self.bound is None else self._mapped_checksum(self._mapped[record.name])
                digest.update(now.encode())
        outer = self.skeleton.model.state_dict(keep_vars=True)
        for plan in self.plans.values():
            if plan.layer is None:
                if self._is_mapped(plan):
                    continue
                bound = outer[plan.name]
            elif not self._is_quantised(plan):
                bound = self._small[plan.name]
            else:
                continue
            digest.update(bound.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def _mapped_checksum(self, tensor: Tensor) -> str:
        digest = xxhash.xxh3_128()
        for piece in tensor.view(-1).view(torch.uint8).split(_PIECE_NUMEL):
            digest.update(memoryview(piece.numpy().data))
            if self._streamed:
                self._outer_map.madvise(mmap.MADV_DONTNEED)
        return digest.hexdigest()

    def close(self) -> None:
        self._reader.shutdown()
        if self._on_device is not None:
            self._on_device.close()


def _checksum_in(buffer: Tensor, record: TensorRecord) -> str:
    """A packed tensor's checksum as the manifest takes it."""
    digest = xxhash.xxh3_128()
    for offset, nbytes in record.parts.values():
        digest.update(memoryview(buffer[offset : offset + nbytes].cpu().numpy().data))
    return digest.hexdigest()


def _padded(numel: int) -> int:
    return -(-numel // 64) * 64


def dtype_of(skeleton: Skeleton, name: str) -> torch.dtype:
    """What a parameter computes in: some families keep a few in fp32."""
    model = skeleton.model
    strict = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or [])]
    if skeleton.dtype == torch.float16:
        strict += [*(getattr(model, "_keep_in_fp32_modules", None) or [])]
    return torch.float32 if any(part in name.split(".") for part in strict) else skeleton.dtype


def bind_tensor(module: nn.Module, key: str, tensor: Tensor | None) -> None:
    """Put a tensor in the place of a module's parameter or buffer."""
    if key in module._parameters:
        module._parameters[key] = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[key] = tensor


def is_streamed(record: TensorRecord) -> bool:
    """Whether a tensor's values come to their parameter at each turn of its layer: all but the small ones in 16 bit or more."""
    return is_weight(record.format, record.tensor_class) and record.numel > 0


def read_raw(store: Store, i: GroupKey, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Only the `raw` tensors of a group (those named; None: all), without reading the rest of its file."""
    group = store.manifest.outer if i == "outer" else store.manifest.layers[i]
    file = store.path / group.file
    tensors = {}
    fd = os.open(file, os.O_RDONLY)
    try:
        for record in group.tensors:
            if record.format == "raw" and (names is None or record.name in names):
                offset, nbytes = record.parts["data"]
                data = torch.empty(nbytes, dtype=torch.uint8)
                read_exactly(fd, memoryview(data.numpy()), offset, file)  # type: ignore[arg-type]
                tensors[record.name] = data.view(getattr(torch, record.dtype)).view(record.shape)
    finally:
        os.close(fd)
    return tensors

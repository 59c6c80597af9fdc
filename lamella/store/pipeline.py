"""Read, quantise and write at the same time, in a fixed amount of memory.

    reader thread  --chunks-->  quantise (caller's thread; the kernel uses all cores)  --parts-->  writer thread

A chunk is a whole number of blocks, so a tensor cut into chunks gives the same codes and scales as a whole one.
The second level of scales is made when a tensor's last chunk is through: it needs all first-level scales.

Of a quantised source the chunks are fp32 values, decoded as they are read; a tensor that keeps its source's own form is
copied part by part, and only its scales are looked at.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.files import free_bytes, is_disk_full
from lamella.kernels import quantize_absmax, quantize_int8, quantize_mxfp4, quantize_nf4
from lamella.store.formats import TORCH_DTYPE
from lamella.store.journal import Journal
from lamella.store.layout import Planned, PlannedGroup
from lamella.units import format_bytes

CHUNK_BYTES = 16 << 20
_CHUNKS_IN_FLIGHT = 4
_WRITES_IN_FLIGHT = 8
_POLL_S = 0.1
_E8M0_NAN = 255
T = TypeVar("T")


class _StoppedError(Exception):
    """The other end of the pipeline is gone."""


@dataclass(frozen=True)
class _Chunk:
    group: PlannedGroup
    planned: Planned
    start: int
    """First value; of a part that is taken over, first byte."""
    data: Tensor
    """A slice of a pooled buffer: values, or uint8 of a part that is taken over."""
    pooled: Tensor
    source_bytes: int
    part: str = ""
    """The part that is taken over."""
    last_of_tensor: bool = False
    last_of_group: bool = False


@dataclass(frozen=True)
class _Write:
    group: PlannedGroup
    name: str
    offset: int
    data: Tensor
    pooled: Tensor | None = None
    last_of_tensor: bool = False
    last_of_group: bool = False


class _Pipe:
    """Queues and the one flag by which every side learns that another has failed."""

    def __init__(self, chunk_bytes: int) -> None:
        self.free: queue.Queue[Tensor] = queue.Queue()
        for _ in range(_CHUNKS_IN_FLIGHT):
            self.free.put(torch.empty(chunk_bytes, dtype=torch.uint8))
        self.chunks: queue.Queue[_Chunk | None] = queue.Queue(_CHUNKS_IN_FLIGHT)
        self.writes: queue.Queue[_Write | None] = queue.Queue(_WRITES_IN_FLIGHT)
        self.stop = threading.Event()
        self.error: BaseException | None = None

    def get(self, source: queue.Queue[Any]) -> Any:
        while True:
            try:
                return source.get(timeout=_POLL_S)
            except queue.Empty:
                if self.stop.is_set():
                    raise _StoppedError from None

    def put(self, target: queue.Queue[Any], item: Any) -> None:
        while True:
            try:
                return target.put(item, timeout=_POLL_S)
            except queue.Full:
                if self.stop.is_set():
                    raise _StoppedError from None

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except _StoppedError:
                pass
            except BaseException as error:  # noqa: BLE001  handed to the caller's thread, which raises it
                self.error = error
                self.stop.set()

        thread = threading.Thread(target=guarded, name=name)
        thread.start()
        return thread


def run_pipeline(
    checkpoint: Checkpoint,
    groups: list[PlannedGroup],
    journal: Journal,
    *,
    advance: Callable[[int, str], None],
    threads: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Quantise and write every group that the journal does not have yet.

    Args:
        advance: called with source bytes done and the name of their file.
        chunk_bytes: a multiple of four times every block size.

    Raises:
        UserError: NaN or infinity in a tensor (named), unreadable source, full disk. What is finished stays.
    """
    pending = [group for group in groups if group.key not in journal.done]
    made = [p.form for group in pending for p in group.tensors if p.format != "raw" and not p.form.native]
    assert all(chunk_bytes % (4 * form.block_size) == 0 for form in made)
    pipe = _Pipe(chunk_bytes)
    sides = [
        pipe.thread(lambda: _read(pipe, checkpoint, pending, chunk_bytes), "lamella-read"),
        pipe.thread(lambda: _Writer(pipe, journal, pending).run(), "lamella-write"),
    ]
    try:
        _quantise(pipe, advance, threads)
        pipe.put(pipe.writes, None)
        sides[1].join()
    except _StoppedError:
        pass
    finally:
        pipe.stop.set()
        for side in sides:
            side.join()
    if pipe.error is not None:
        raise pipe.error


def _read(pipe: _Pipe, checkpoint: Checkpoint, groups: list[PlannedGroup], chunk_bytes: int) -> None:
    for group in groups:
        for planned in group.tensors:
            end = planned is group.tensors[-1]
            if planned.form.native:
                chunks = _taken_chunks(pipe, checkpoint, group, planned, chunk_bytes)
            elif planned.tensor.packing is not None:
                chunks = _decoded_chunks(pipe, checkpoint, group, planned, chunk_bytes)
            else:
                chunks = _plain_chunks(pipe, checkpoint, group, planned, chunk_bytes)
            for chunk in chunks:
                pipe.put(pipe.chunks, replace(chunk, last_of_group=end and chunk.last_of_tensor))
    pipe.put(pipe.chunks, None)


def _plain_chunks(
    pipe: _Pipe, checkpoint: Checkpoint, group: PlannedGroup, planned: Planned, chunk_bytes: int
) -> Iterator[_Chunk]:
    tensor, total = planned.tensor, planned.tensor.nbytes
    dtype = getattr(torch, TORCH_DTYPE[tensor.dtype])
    for start in range(0, max(total, 1), chunk_bytes):  # an empty tensor is one empty chunk
        pooled = pipe.get(pipe.free)
        data = pooled[: min(chunk_bytes, total - start)]
        checkpoint.read_into(tensor, start, memoryview(data.numpy()))
        last = start + chunk_bytes >= total
        yield _Chunk(group, planned, start // tensor.itemsize, data.view(dtype), pooled, len(data), last_of_tensor=last)


def _decoded_chunks(
    pipe: _Pipe, checkpoint: Checkpoint, group: PlannedGroup, planned: Planned, chunk_bytes: int
) -> Iterator[_Chunk]:
    tensor, block = planned.tensor, max(planned.form.block_size, 2)
    step = max(min(checkpoint.piece(tensor), chunk_bytes // 4) // block, 1) * block
    for first in range(0, tensor.numel, step):
        pooled = pipe.get(pipe.free)
        stop = min(first + step, tensor.numel)
        data = pooled.view(torch.float32)[: stop - first]
        checkpoint.values(tensor, first, data.numpy())
        done = tensor.nbytes * stop // tensor.numel - tensor.nbytes * first // tensor.numel
        yield _Chunk(group, planned, first, data, pooled, done, last_of_tensor=stop == tensor.numel)


def _taken_chunks(
    pipe: _Pipe, checkpoint: Checkpoint, group: PlannedGroup, planned: Planned, chunk_bytes: int
) -> Iterator[_Chunk]:
    total = sum(nbytes for _, nbytes in planned.parts.values())
    done = 0
    for part, (_, nbytes) in planned.parts.items():
        for start in range(0, nbytes, chunk_bytes):
            pooled = pipe.get(pipe.free)
            data = pooled[: min(chunk_bytes, nbytes - start)]
            checkpoint.native_part(planned.tensor, part, start, memoryview(data.numpy()))
            before, done = done, done + len(data)
            told = planned.tensor.nbytes * done // total - planned.tensor.nbytes * before // total
            yield _Chunk(group, planned, start, data, pooled, told, part, done == total)


def _quantise(pipe: _Pipe, advance: Callable[[int, str], None], threads: int | None) -> None:
    scales = torch.empty(0)
    while (chunk := pipe.get(pipe.chunks)) is not None:
        form, tensor = chunk.planned.form, chunk.planned.tensor
        if chunk.part:
            pipe.put(pipe.writes, _taken(chunk))
        elif form.format == "raw":
            pipe.put(pipe.writes, _kept(chunk))
        else:
            if chunk.start == 0:
                dtype = torch.uint8 if form.format == "mxfp4" else torch.float32
                scales = torch.empty(-(-tensor.numel // form.block_size), dtype=dtype)
            codes = _codes(chunk, scales, threads)
            pipe.put(pipe.free, chunk.pooled)
            offset = chunk.planned.parts["codes"][0] + (chunk.start if form.format == "int8" else chunk.start // 2)
            pipe.put(pipe.writes, _Write(chunk.group, tensor.name, offset, codes.view(-1).view(torch.uint8)))
            if chunk.last_of_tensor:
                for write in _scale_writes(chunk, scales, threads):
                    pipe.put(pipe.writes, write)
        advance(chunk.source_bytes, chunk.group.file)


def _codes(chunk: _Chunk, scales: Tensor, threads: int | None) -> Tensor:
    """Quantise a chunk: its codes, and its place in the tensor's `scales` filled."""
    x, form = chunk.data, chunk.planned.form
    first = chunk.start // form.block_size
    here = scales[first : first + -(-x.numel() // form.block_size)]
    work: Callable[[], tuple[Tensor, Tensor]]
    if form.format == "mxfp4":
        work = partial(quantize_mxfp4, x, scales=here, threads=threads)
    elif form.format == "int8":
        work = partial(quantize_int8, x, form.block_size, scales=here, threads=threads)
    else:
        work = partial(quantize_nf4, x, form.block_size, absmax=here, threads=threads)
    return _named(chunk.planned.tensor, work)[0]


def _taken(chunk: _Chunk) -> _Write:
    """Bytes as they are; scales that are no numbers are refused."""
    planned = chunk.planned
    if chunk.part == "scales" and planned.format == "mxfp4":
        if bool((chunk.data == _E8M0_NAN).any()):
            raise _non_finite(planned.tensor)
    elif chunk.part not in ("codes", "absmax_q"):
        refuse_non_finite(chunk.data.view(torch.float32), planned.tensor)
    return _Write(chunk.group, planned.tensor.name, planned.parts[chunk.part][0] + chunk.start, chunk.data, chunk.pooled,
                  chunk.last_of_tensor, chunk.last_of_group)  # fmt: skip


def _kept(chunk: _Chunk) -> _Write:
    planned, x = chunk.planned, chunk.data
    if x.is_floating_point() and planned.tensor_class != "other":  # masks among the others may hold infinities
        refuse_non_finite(x, planned.tensor)
    target = getattr(torch, planned.dtype)
    data = x if x.dtype == target else x.to(target)
    return _Write(chunk.group, planned.tensor.name, planned.parts["data"][0] + chunk.start * target.itemsize,
                  data.view(torch.uint8), chunk.pooled, chunk.last_of_tensor, chunk.last_of_group)  # fmt: skip


def _scale_writes(chunk: _Chunk, scales: Tensor, threads: int | None) -> Iterable[_Write]:
    """Writes of a quantised tensor's scale parts, in the order of its parts; the last one ends the tensor."""
    parts = chunk.planned.parts
    if "absmax_q" in parts:
        state = _named(chunk.planned.tensor, partial(quantize_absmax, scales, threads=threads))
        values = {"absmax_q": state.q, "absmax_code": state.code, "absmax2": state.absmax2,
                  "offset": state.offset.reshape(1)}  # fmt: skip
    else:
        values = {"absmax" if "absmax" in parts else "scales": scales}
    for part, value in values.items():
        data = value.contiguous().view(torch.uint8).view(-1)
        assert data.numel() == parts[part][1], f"{chunk.planned.tensor.name}: {part} has {data.numel()} bytes"
        last = part == next(reversed(parts))
        yield _Write(chunk.group, chunk.planned.tensor.name, parts[part][0], data, None, last,
                     last and chunk.last_of_group)  # fmt: skip


def _named(tensor: TensorInfo, work: Callable[[], T]) -> T:
    """Kernels know no names: add the tensor's to what they refuse."""
    try:
        return work()
    except UserError as error:
        raise UserError(f"tensor {tensor.name!r}: {error.what}", fix=error.fix, path=tensor.file) from error


def refuse_non_finite(x: Tensor, tensor: TensorInfo) -> None:
    """Raises:
    UserError: `x` (values or block maxima) holds NaN or infinity; names the tensor.
    """
    if not bool(torch.isfinite(x).all()):
        raise _non_finite(tensor)


def _non_finite(tensor: TensorInfo) -> UserError:
    what = f"tensor {tensor.name!r} holds NaN or infinity"
    return UserError(what, fix="the checkpoint is damaged or overflowed: use another one", path=tensor.file)


class _Writer:
    """Writes parts at their places, hashes them, syncs and journals each finished file."""

    def __init__(self, pipe: _Pipe, journal: Journal, groups: list[PlannedGroup]) -> None:
        self.pipe = pipe
        self.journal = journal
        self.left_bytes = sum(group.nbytes for group in groups)

    def run(self) -> None:
        fd, digest, checksums = -1, xxhash.xxh3_128(), dict[str, str]()
        try:
            while (write := self.pipe.get(self.pipe.writes)) is not None:
                file = self.journal.folder / write.group.file
                if fd < 0:
                    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                view = memoryview(write.data.numpy())
                digest.update(view)
                self._pwrite(fd, view, write.offset)
                if write.pooled is not None:
                    self.pipe.free.put(write.pooled)
                if write.last_of_tensor:
                    checksums[write.name] = digest.hexdigest()
                    digest.reset()
                if write.last_of_group:
                    os.ftruncate(fd, write.group.nbytes)
                    os.fsync(fd)
                    os.close(fd)
                    self.journal.finish_group(write.group.key, checksums)
                    self.left_bytes -= write.group.nbytes
                    fd, checksums = -1, {}
        except OSError as error:
            raise self._explained(error) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)

    def _explained(self, error: OSError) -> UserError:
        return disk_error(error, self.journal.folder, self.left_bytes)


def disk_error(error: OSError, folder: Path, left_bytes: int) -> UserError:
    """A failed write, told with the bytes that are still needed and those that are free."""
    if is_disk_full(error):
        free = free_bytes(folder)
        what = f"disk is full: {format_bytes(left_bytes)} still to write, {format_bytes(free)} free"
        return UserError(what, fix="make room and run the same command again; finished layers are kept", path=folder)
    return UserError(f"cannot be written: {error.strerror}",
                     fix="check the disk and run the same command again; finished layers are kept",
                     path=folder)  # fmt: skip

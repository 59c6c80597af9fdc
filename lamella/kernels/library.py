"""The C kernels, loaded with ctypes (which releases the GIL around every call)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from lamella.kernels.layout import (
    ABSMAX_BLOCK,
    AbsmaxState,
    block_count,
    check_dequantize,
    check_int8,
    check_jobs,
    check_keep,
    check_mxfp4,
    check_part,
    check_state,
    drop_threshold,
    dynamic_code,
    dynamic_code_bins,
    non_finite,
    prepare_int8,
    prepare_mxfp4,
    prepare_quantize,
)

ISAS = {"c-portable": 0, "c-avx2": 1, "c-avx512": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STREAM_BYTES = 16 << 20
"""Outputs from this size on are written past the caches."""


def load(path: Path) -> ctypes.CDLL:
    """Load the library and declare its functions.

    Raises:
        OSError: the file is not a library for this machine.
    """
    lib = ctypes.CDLL(str(path))
    pointer = c_void_p
    lib.lamella_supported.argtypes = [c_int]
    lib.lamella_set_gomp_parallel.argtypes = [pointer]
    lib.lamella_quantize.argtypes = [c_int, pointer, c_int, c_int64, c_int64, pointer, pointer, c_int]
    lib.lamella_dequantize.argtypes = [
        c_int, pointer, pointer, pointer, pointer, pointer, c_float, pointer, c_int, c_int64, c_int64, c_int, c_int,
    ]  # fmt: skip
    lib.lamella_dequantize.restype = None
    lib.lamella_dequantize_many.argtypes = [
        c_int, pointer, pointer, c_int64, pointer, c_int, c_int64, c_int64, c_int,
    ]  # fmt: skip
    lib.lamella_dequantize_many.restype = None
    lib.lamella_quantize_absmax.argtypes = [pointer, c_float, pointer, c_int64, pointer, pointer, c_int]
    lib.lamella_dequantize_absmax.argtypes = [c_int, pointer, pointer, pointer, c_float, c_int64, pointer, c_int]
    lib.lamella_dequantize_absmax.restype = None
    lib.lamella_keep_mask.argtypes = [c_int, pointer, c_int64, c_int64, c_uint32, pointer, c_int]
    lib.lamella_keep_mask.restype = None
    lib.lamella_quantize_mx.argtypes = [c_int, pointer, c_int, c_int64, pointer, pointer, c_int]
    lib.lamella_dequantize_mx.argtypes = [c_int, pointer, pointer, pointer, c_int, c_int64, c_int, c_int]
    lib.lamella_dequantize_mx.restype = None
    lib.lamella_quantize_int8.argtypes = [c_int, pointer, c_int, c_int64, c_int64, pointer, pointer, c_int]
    lib.lamella_dequantize_int8.argtypes = [c_int, pointer, pointer, pointer, c_int, c_int64, c_int64, c_int, c_int]
    lib.lamella_dequantize_int8.restype = None
    # torch loads its OpenMP runtime into the global scope; where it has another one, C makes its own threads.
    gomp_parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if gomp_parallel is not None:
        lib.lamella_set_gomp_parallel(ctypes.cast(gomp_parallel, c_void_p))
    return lib


def _threads(threads: int | None) -> int:
    return torch.get_num_threads() if threads is None else threads


def _streams(out: Tensor, asked: bool | None) -> bool:
    return out.numel() * out.element_size() >= STREAM_BYTES if asked is None else asked


class CpuKernels:
    """The functions of `lamella.kernels` on CPU tensors, by one instruction set of the C library."""

    def __init__(self, lib: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._lib = lib
        self._isa = ISAS[name]

    @staticmethod
    def supported(lib: ctypes.CDLL, name: str) -> bool:
        return bool(lib.lamella_supported(ISAS[name]))

    def quantize_nf4(
        self,
        x: Tensor,
        block_size: int = 64,
        *,
        codes: Tensor | None = None,
        absmax: Tensor | None = None,
        threads: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        codes, absmax = prepare_quantize(x, block_size, codes, absmax)
        x = x.contiguous()
        status = self._lib.lamella_quantize(
            self._isa, x.data_ptr(), DTYPES[x.dtype], x.numel(), block_size, codes.data_ptr(), absmax.data_ptr(),
            _threads(threads),
        )  # fmt: skip
        if status:
            raise non_finite()
        return codes, absmax

    def quantize_absmax(self, absmax: Tensor, *, threads: int | None = None) -> AbsmaxState:
        n = absmax.numel()
        check_part("absmax", absmax, torch.float32, n, absmax.device)
        offset = absmax.view(-1).mean()
        q = torch.empty(n, dtype=torch.uint8)
        absmax2 = torch.empty(block_count(n, ABSMAX_BLOCK), dtype=torch.float32)
        status = self._lib.lamella_quantize_absmax(
            absmax.data_ptr(), offset.item(), dynamic_code_bins().data_ptr(), n, q.data_ptr(), absmax2.data_ptr(),
            _threads(threads),
        )  # fmt: skip
        if status:
            raise non_finite()
        return AbsmaxState(q, dynamic_code().clone(), absmax2, offset)

    def dequantize_absmax(self, state: AbsmaxState, *, out: Tensor | None = None, threads: int | None = None) -> Tensor:
        blocks = state.q.numel()
        out = torch.empty(blocks, dtype=torch.float32) if out is None else out
        check_state(state, blocks, state.q.device)
        check_part("out", out, torch.float32, blocks, state.q.device)
        self._lib.lamella_dequantize_absmax(
            self._isa, state.q.data_ptr(), state.code.data_ptr(), state.absmax2.data_ptr(), state.offset.item(), blocks,
            out.data_ptr(), _threads(threads),
        )  # fmt: skip
        return out

    def dequantize_nf4(
        self,
        codes: Tensor,
        absmax: Tensor | AbsmaxState,
        out: Tensor,
        block_size: int = 64,
        *,
        stream: bool | None = None,
        threads: int | None = None,
    ) -> Tensor:
        check_dequantize(codes, absmax, out, block_size)
        stream = _streams(out, stream)
        plain: int | None = None
        nested: tuple[int | None, int | None, int | None] = (None, None, None)
        offset = 0.0
        if isinstance(absmax, AbsmaxState):
            nested = (absmax.q.data_ptr(), absmax.code.data_ptr(), absmax.absmax2.data_ptr())
            offset = absmax.offset.item()
        else:
            plain = absmax.data_ptr()
        self._lib.lamella_dequantize(
            self._isa, codes.data_ptr(), plain, *nested, offset, out.data_ptr(), DTYPES[out.dtype], out.numel(),
            block_size, stream, _threads(threads),
        )  # fmt: skip
        return out

    def dequantize_nf4_many(
        self, base: Tensor, jobs: Tensor, out: Tensor, block_size: int = 64, *, threads: int | None = None
    ) -> Tensor:
        check_jobs(base, jobs, out)
        self._lib.lamella_dequantize_many(
            self._isa, base.data_ptr(), jobs.data_ptr(), len(jobs), out.data_ptr(), DTYPES[out.dtype], block_size,
            STREAM_BYTES, _threads(threads),
        )  # fmt: skip
        return out

    def quantize_mxfp4(
        self, x: Tensor, *, codes: Tensor | None = None, scales: Tensor | None = None, threads: int | None = None
    ) -> tuple[Tensor, Tensor]:
        codes, scales = prepare_mxfp4(x, codes, scales)
        x = x.contiguous()
        status = self._lib.lamella_quantize_mx(
            self._isa, x.data_ptr(), DTYPES[x.dtype], x.numel(), codes.data_ptr(), scales.data_ptr(), _threads(threads)
        )
        if status:
            raise non_finite()
        return codes, scales

    def dequantize_mxfp4(
        self, codes: Tensor, scales: Tensor, out: Tensor, *, stream: bool | None = None, threads: int | None = None
    ) -> Tensor:
        check_mxfp4(codes, scales, out)
        self._lib.lamella_dequantize_mx(
            self._isa, codes.data_ptr(), scales.data_ptr(), out.data_ptr(), DTYPES[out.dtype], out.numel(),
            _streams(out, stream), _threads(threads),
        )  # fmt: skip
        return out

    def quantize_int8(
        self,
        x: Tensor,
        block_size: int = 64,
        *,
        codes: Tensor | None = None,
        scales: Tensor | None = None,
        threads: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        codes, scales = prepare_int8(x, block_size, codes, scales)
        x = x.contiguous()
        status = self._lib.lamella_quantize_int8(
            self._isa, x.data_ptr(), DTYPES[x.dtype], x.numel(), block_size, codes.data_ptr(), scales.data_ptr(),
            _threads(threads),
        )  # fmt: skip
        if status:
            raise non_finite()
        return codes, scales

    def dequantize_int8(
        self,
        codes: Tensor,
        scales: Tensor,
        out: Tensor,
        block_size: int = 64,
        *,
        stream: bool | None = None,
        threads: int | None = None,
    ) -> Tensor:
        check_int8(codes, scales, out, block_size)
        self._lib.lamella_dequantize_int8(
            self._isa, codes.data_ptr(), scales.data_ptr(), out.data_ptr(), DTYPES[out.dtype], out.numel(), block_size,
            _streams(out, stream), _threads(threads),
        )  # fmt: skip
        return out

    def keep_mask(self, row_keys: Tensor, columns: int, p: float, *, threads: int | None = None) -> Tensor:
        check_keep(row_keys, columns, p)
        out = torch.empty(len(row_keys), columns, dtype=torch.bool)
        if out.numel():
            self._lib.lamella_keep_mask(
                self._isa, row_keys.contiguous().data_ptr(), len(row_keys), columns, drop_threshold(p), out.data_ptr(),
                _threads(threads),
            )  # fmt: skip
        return out

"""MXFP4 and int8 in Triton: the reference's bits."""

import pytest
import torch

from lamella.errors import UserError
from lamella.kernels import reference
from tests.kernels.triton import need_interpreter

need_interpreter()
from lamella.kernels.triton import formats  # noqa: E402
from tests.kernels.triton.test_nf4 import values  # noqa: E402

COUNTS = (1, 31, 32, 65, 640, 9000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mxfp4(dtype):
    for n in COUNTS:
        x = values(n, dtype, seed=n)
        codes, scales = formats.quantize_mxfp4(x)
        wanted = reference.quantize_mxfp4(x)
        assert torch.equal(codes, wanted[0]), n
        assert torch.equal(scales, wanted[1]), n
        found = formats.dequantize_mxfp4(codes, scales, torch.full((n,), 7.0, dtype=dtype))
        assert torch.equal(found, reference.dequantize_mxfp4(codes, scales, torch.empty(n, dtype=dtype))), n


def test_every_mxfp4_code_under_every_scale():
    codes = torch.arange(256, dtype=torch.uint8).repeat(255)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(16)
    for dtype in (torch.float32, torch.bfloat16):
        found = formats.dequantize_mxfp4(codes, scales, torch.empty(512 * 255, dtype=dtype))
        assert torch.equal(found, reference.dequantize_mxfp4(codes, scales, torch.empty_like(found)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [64, 100, 4096])
def test_int8(dtype, block_size):
    for n in (65, 640, 5000):
        x = values(n, dtype, seed=n)
        codes, scales = formats.quantize_int8(x, block_size)
        wanted = reference.quantize_int8(x, block_size)
        assert torch.equal(codes, wanted[0]), n
        assert torch.equal(scales, wanted[1]), n
        found = formats.dequantize_int8(codes, scales, torch.full((n,), 7.0, dtype=dtype), block_size)
        assert torch.equal(found, reference.dequantize_int8(codes, scales, torch.empty(n, dtype=dtype), block_size)), n


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_non_finite_values_are_refused(bad):
    x = torch.randn(5000)
    x[4999] = bad
    for quantise in (formats.quantize_mxfp4, formats.quantize_int8):
        with pytest.raises(UserError, match="NaN or infinite"):
            quantise(x)

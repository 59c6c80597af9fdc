"""MXFP4 and int8: every path against its torch twin bit for bit, and against independent decoders."""

import pytest
import torch

from lamella import kernels
from lamella.errors import UserError
from lamella.kernels import layout, reference
from tests.kernels.test_nf4 import runnable, values

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 31, 32, 33, 63, 111, 640, 33_000, 300_001)
INT8_BLOCKS = (1, 7, 32, 64, 100, 4096, 11_008)


@pytest.fixture(scope="module", params=runnable())
def backend(request):
    return kernels.resolve(request.param)[1]


def mx_spec(x: torch.Tensor) -> torch.Tensor:
    """A block as the OCP specification has it, in float64: nearest of the 8 magnitudes, ties to the even code."""
    x = x.double()
    largest = float(x.abs().max())
    exponent = -127 if largest == 0 else max(int(torch.tensor(largest).log2().floor()) - 2, -127)
    table = torch.tensor(layout.MXFP4_TABLE[:8], dtype=torch.float64)
    distance = ((x.abs() * 2.0**-exponent)[:, None] - table).abs()
    order = distance + torch.arange(8) % 2 * 1e-12  # even codes win ties
    return torch.sign(x) * table[order.argmin(1)] * 2.0**exponent


def test_mxfp4_follows_the_specification(backend):
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-30, 0.02, 1.0, 3e4):
        x = torch.randn(64, generator=generator) * scale
        x[:16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0] * 2) * scale  # ties where the scale is exact
        codes, scales = backend.quantize_mxfp4(x)
        back = backend.dequantize_mxfp4(codes, scales, torch.empty(64))
        wanted = torch.cat([mx_spec(block) for block in x.split(32)])
        assert torch.equal(back.double(), wanted)


def test_mxfp4_decodes_as_transformers_does(backend):
    """GPT-OSS's own layout: blocks [..., 16] with the low nibble first, scales biased by 127."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 8, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 8, 3), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)  # [E, I, O]
    out = backend.dequantize_mxfp4(blocks, scales, torch.empty(2, 8, 96, dtype=torch.bfloat16))
    assert torch.equal(out.transpose(1, 2), theirs)


def test_every_mxfp4_code_under_every_scale(backend):
    codes = torch.arange(256, dtype=torch.uint8).repeat(255)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(16)
    for dtype in DTYPES:
        for stream in (False, True):
            out = backend.dequantize_mxfp4(codes, scales, torch.empty(512 * 255, dtype=dtype), stream=stream)
            table = torch.tensor(layout.MXFP4_TABLE, dtype=torch.float64)
            nibbles = torch.stack([codes & 15, codes >> 4], 1).view(-1).long()
            wanted = table[nibbles] * torch.pow(2.0, scales.double() - 127).repeat_interleave(32)
            assert torch.equal(out, wanted.float().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_gives_the_bits_of_its_twin(backend, dtype):
    for n in COUNTS:
        x = values(n, dtype, seed=n)
        codes, scales = backend.quantize_mxfp4(x)
        wanted = reference.quantize_mxfp4(x)
        assert torch.equal(codes, wanted[0]), n
        assert torch.equal(scales, wanted[1]), n
        around = torch.full((n + 2,), 7.0, dtype=dtype)
        backend.dequantize_mxfp4(codes, scales, around[1:-1], stream=True)
        assert torch.equal(around[1:-1], reference.dequantize_mxfp4(codes, scales, torch.empty(n, dtype=dtype))), n
        assert around[0] == around[-1] == 7.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", INT8_BLOCKS)
def test_int8_gives_the_bits_of_its_twin(backend, dtype, block_size):
    for n in (n for n in COUNTS if n < 300_000):
        x = values(n, dtype, seed=n)
        codes, scales = backend.quantize_int8(x, block_size)
        wanted = reference.quantize_int8(x, block_size)
        assert torch.equal(codes, wanted[0]), n
        assert torch.equal(scales, wanted[1]), n
        around = torch.full((n + 2,), 7.0, dtype=dtype)
        for stream in (False, True):
            backend.dequantize_int8(codes, scales, around[1:-1], block_size, stream=stream)
            wanted_values = reference.dequantize_int8(codes, scales, torch.empty(n, dtype=dtype), block_size)
            assert torch.equal(around[1:-1], wanted_values), n
        assert around[0] == around[-1] == 7.0
        aligned = backend.dequantize_int8(codes, scales, torch.empty(n, dtype=dtype), block_size, stream=True)
        assert torch.equal(aligned, wanted_values), n


def test_int8_is_nearest_and_even_at_ties(backend):
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0])
    codes, scales = backend.quantize_int8(x, 8)
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, 126, -127]
    assert scales.tolist() == [1.0]
    tiny = torch.full((64,), 190 * 2.0**-149)  # the scale itself is rounded
    codes, scales = backend.quantize_int8(tiny)
    assert codes.abs().max() <= 127
    assert not backend.quantize_int8(torch.full((64,), 2.0**-149))[0].any()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_bit(backend, threads):
    n = 300_001
    x = values(n, torch.bfloat16)
    for quantise, dequantise in (
        ("quantize_mxfp4", "dequantize_mxfp4"),
        ("quantize_int8", "dequantize_int8"),
    ):
        made = getattr(backend, quantise)(x, threads=threads)
        wanted = getattr(reference, quantise)(x)
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
        out = getattr(backend, dequantise)(*made, torch.empty(n), threads=threads)
        assert torch.equal(out, getattr(reference, dequantise)(*wanted, torch.empty(n)))


def test_parts_that_do_not_fit_are_refused(backend):
    x = values(640, torch.float32)
    out = torch.empty(640)
    codes, scales = backend.quantize_mxfp4(x)
    with pytest.raises(UserError, match="scales must be 20"):
        backend.dequantize_mxfp4(codes, scales[:-1], out)
    with pytest.raises(UserError, match="codes must be 320"):
        backend.dequantize_mxfp4(codes[1:], scales, out)
    codes, scales = backend.quantize_int8(x)
    with pytest.raises(UserError, match="scales must be 5"):
        backend.dequantize_int8(codes, scales, out, 128)
    with pytest.raises(UserError, match="int8"):
        backend.dequantize_int8(codes.view(torch.uint8), scales, out)
    with pytest.raises(UserError, match="block size 0"):
        backend.quantize_int8(x, 0)
    for quantise in (backend.quantize_int8, backend.quantize_mxfp4):
        with pytest.raises(UserError, match="empty"):
            quantise(x[:0])
        with pytest.raises(UserError, match="float64"):
            quantise(x.double())

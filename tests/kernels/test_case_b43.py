"""B43 (bitsandbytes#1884): the last, partial block of odd shapes; large blocks; repeatability.

Reported: elements past the end were read from uninitialised memory and spoiled the last block's
scale; a CPU vector path lost accuracy with blocks of 2048 and 4096. In bitsandbytes 0.50.2 rows that
are a multiple of 16 but not of the block still get wrong scales when dequantised on AVX-512 (each
row is taken to start a block); right here is the flat layout that quantising writes.
"""

import pytest
import torch

from lamella import kernels
from lamella.errors import UserError
from tests.kernels.test_nf4 import runnable

DTYPES = (torch.float32, torch.bfloat16)
BLOCK_SIZES = (32, 64, 4096)
ERROR_BOUND = 0.152  # half the widest gap of the table (-1 .. -0.696), of a block's absmax


@pytest.fixture(scope="module", params=runnable())
def backend(request):
    return kernels.resolve(request.param)[1]


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(43)
    made = {
        f"{r}x{c}": torch.randn(r, c, generator=generator) for r, c in ((3, 37), (1, 1), (7, 64), (5, 130), (7, 80))
    }
    made["zeros"] = torch.zeros(5, 130)
    made["outlier"] = torch.randn(4, 64, generator=generator)
    made["outlier"][2, 17] = 1e4
    return made


def quantised(backend, kind, x, block_size, **buffers):
    if kind == "mxfp4":
        return backend.quantize_mxfp4(x, **buffers)
    return getattr(backend, f"quantize_{kind}")(x, block_size, **buffers)


def dequantised(backend, kind, parts, out, block_size):
    if kind == "mxfp4":
        return backend.dequantize_mxfp4(*parts, out)
    return getattr(backend, f"dequantize_{kind}")(*parts, out, block_size)


OTHERS = [("mxfp4", 32), ("int8", 32), ("int8", 64), ("int8", 4096)]
BOUNDS = {"mxfp4": 0.25, "int8": 0.5 / 127 * 1.01}
"""Of a block's absmax: half an int8 step; of MXFP4 what is cut off past 6 of 8 (OCP's scale is no larger than absmax / 4)."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "block_size"), OTHERS)
def test_b43_other_formats_same_bytes_50_times_and_error_within_bound(backend, kind, block_size, dtype):
    for name, made in inputs().items():
        x = made.to(dtype)
        n = x.numel()
        parts = quantised(backend, kind, x, block_size)
        assert parts[0].numel() == (n if kind == "int8" else -(-n // 2))
        assert parts[1].numel() == -(-n // block_size)
        back = dequantised(backend, kind, parts, torch.empty(x.shape), block_size)
        absmax = torch.stack([b.abs().max() for b in x.float().view(-1).split(block_size)])
        bound = absmax.repeat_interleave(block_size)[:n] * BOUNDS[kind]
        assert ((back.view(-1) - x.float().view(-1)).abs() <= bound).all(), name
        if name == "zeros":
            assert not back.any()
        names = ("codes", "scales")
        for _ in range(50):
            beside = torch.full((n + 5000,), float("nan"), dtype=dtype)
            beside[:n] = x.view(-1)
            spoilt = dict(zip(names, (torch.randint_like(p, 100) if p.dtype != torch.float32 else
                                      torch.full_like(p, float("nan")) for p in parts), strict=True))  # fmt: skip
            again = quantised(backend, kind, beside[:n], block_size, **spoilt)
            assert all(torch.equal(a, b) for a, b in zip(again, parts, strict=True)), name
            assert torch.equal(dequantised(backend, kind, parts, torch.full_like(back, float("nan")), block_size), back)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("kind", "block_size"), OTHERS)
def test_b43_other_formats_refuse_nan_and_infinity(backend, bad, dtype, kind, block_size):
    for position in (0, 70, 4159, 64 * 130 - 1):
        x = torch.randn(64, 130).to(dtype)
        x.view(-1)[position] = bad
        with pytest.raises(UserError, match="NaN or infinite"):
            quantised(backend, kind, x, block_size)


def round_trip(backend, x, block_size, dtype):
    codes, absmax = backend.quantize_nf4(x, block_size)
    return codes, absmax, backend.dequantize_nf4(codes, absmax, torch.empty(x.shape, dtype=dtype), block_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", inputs())
def test_b43_same_bytes_50_times_and_error_within_bound(backend, name, block_size, dtype):
    x = inputs()[name].to(dtype)
    codes, absmax, back = round_trip(backend, x, block_size, torch.float32)
    assert codes.numel() == -(-x.numel() // 2)
    assert absmax.numel() == -(-x.numel() // block_size)
    true_absmax = torch.stack([b.abs().max() for b in x.float().view(-1).split(block_size)])
    assert torch.equal(absmax.clamp(min=1e-38), true_absmax.clamp(min=1e-38))
    bound = true_absmax.repeat_interleave(block_size)[: x.numel()] * ERROR_BOUND
    assert ((back.view(-1) - x.float().view(-1)).abs() <= bound).all()
    for _ in range(50):
        # unrelated memory beside the input and in the buffers must never matter
        beside = torch.full((x.numel() + 5000,), float("nan"), dtype=dtype)
        beside[: x.numel()] = x.view(-1)
        again = backend.quantize_nf4(beside[: x.numel()], block_size, codes=torch.randint_like(codes, 256),
                                     absmax=torch.full_like(absmax, float("nan")))  # fmt: skip
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], absmax)
        out = backend.dequantize_nf4(codes, absmax, torch.full(x.shape, float("nan")), block_size)
        assert torch.equal(out, back)


def test_b43_3x37_at_block_64(backend):
    x = inputs()["3x37"]
    codes, absmax, back = round_trip(backend, x, 64, torch.float32)
    assert (codes.numel(), absmax.numel()) == (56, 2)
    assert codes[-1] & 15 == 7  # the unused nibble is zero's code
    assert (back - x).abs().max() <= ERROR_BOUND * x.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_b43_zeros_come_back_as_zeros(backend, block_size, dtype):
    _, _, back = round_trip(backend, torch.zeros(5, 130, dtype=dtype), block_size, dtype)
    assert torch.equal(back, torch.zeros(5, 130, dtype=dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", [(3, 37), (64, 130)])
def test_b43_nan_and_infinity_are_refused_wherever_they_stand(backend, bad, dtype, block_size, shape):
    for position in (0, 70, shape[0] * shape[1] // 2, shape[0] * shape[1] - 1):
        x = torch.randn(shape).to(dtype)
        x.view(-1)[position] = bad
        with pytest.raises(UserError, match="NaN or infinite"):
            backend.quantize_nf4(x, block_size)


def test_b43_nan_with_its_sign_bit_set_is_refused(backend):
    x = torch.zeros(128, dtype=torch.int16)
    x[3] = -1  # 0xffff: a NaN in bf16 and fp16
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(UserError, match="NaN or infinite"):
            backend.quantize_nf4(x.view(dtype))


def test_b43_rows_not_a_multiple_of_the_block_use_the_flat_scales(backend):
    x = torch.randn(7, 80)
    codes, absmax, back = round_trip(backend, x, 64, torch.float32)
    flat = backend.dequantize_nf4(codes, absmax, torch.empty(560), 64)
    assert torch.equal(back.view(-1), flat)

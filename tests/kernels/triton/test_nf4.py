"""NF4 and dropout masks in Triton: the reference's bits."""

import pytest
import torch

from lamella.errors import UserError
from lamella.kernels import layout, reference
from tests.kernels.triton import need_interpreter

need_interpreter()
from lamella.kernels.triton import nf4  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 31, 64, 65, 111, 640, 64 * 256 * 2 + 64, 64 * 700 + 17)


def values(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.05
    x[64:128] = 0
    x[128:192] *= 1e-30
    x[200:201] = 1e4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [32, 64, 4096])
def test_quantize(dtype, block_size):
    for n in COUNTS:
        x = values(n, dtype, seed=n)
        for found, wanted in zip(nf4.quantize_nf4(x, block_size), reference.quantize_nf4(x, block_size), strict=True):
            assert torch.equal(found, wanted), n


def test_quantize_at_every_midpoint():
    table = torch.tensor(layout.NF4_TABLE)
    middle = (table[:-1] + table[1:]) / 2
    near = torch.cat([middle, torch.nextafter(middle, torch.ones(15)), torch.nextafter(middle, -torch.ones(15))])
    for scale in (1.0, 3.7, 1e-20):
        x = torch.cat([torch.ones(1), near, torch.zeros(18)]) * scale
        assert torch.equal(nf4.quantize_nf4(x, 64)[0], reference.quantize_nf4(x, 64)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 100, 9999])
def test_quantize_refuses_non_finite_values(bad, at):
    x = torch.randn(10_000)
    x[at] = bad
    with pytest.raises(UserError, match="NaN or infinite"):
        nf4.quantize_nf4(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [32, 64, 4096])
@pytest.mark.parametrize("nested", [False, True])
def test_dequantize(dtype, block_size, nested):
    for n in COUNTS:
        codes, absmax = reference.quantize_nf4(values(n, torch.float32, seed=n), block_size)
        scales = reference.quantize_absmax(absmax) if nested else absmax
        found = nf4.dequantize_nf4(codes, scales, torch.full((n,), 7.0, dtype=dtype), block_size)
        assert torch.equal(found, reference.dequantize_nf4(codes, scales, torch.empty(n, dtype=dtype), block_size)), n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [256, 512])
def test_dequantize_run_of_strided_scales(dtype, blocks):
    """Scales of five tensors lie apart, as in a layer's file; each has its own offset."""
    tensors, n = 5, 64 * blocks
    parts = [reference.quantize_nf4(values(n, torch.float32, seed=t) * (t + 1)) for t in range(tensors)]
    states = [reference.quantize_absmax(absmax) for _, absmax in parts]
    q = torch.zeros(tensors, blocks + 64, dtype=torch.uint8)
    second, offset = torch.zeros(tensors, 16), torch.zeros(tensors, 16)
    for t, state in enumerate(states):
        q[t, :blocks], second[t, : blocks // 256], offset[t, 0] = state.q, state.absmax2, state.offset
    run = layout.AbsmaxRun(q[:, :blocks], states[0].code, second[:, : blocks // 256], offset[:, 0])
    codes = torch.cat([c for c, _ in parts])
    wanted = torch.cat([
        reference.dequantize_nf4(c, s, torch.empty(n, dtype=dtype)) for (c, _), s in zip(parts, states, strict=True)
    ])  # fmt: skip
    for backend in (nf4, reference):
        assert torch.equal(backend.dequantize_nf4_run(codes, run, torch.empty(tensors * n, dtype=dtype)), wanted)


def test_parts_that_do_not_belong_together():
    codes, absmax = reference.quantize_nf4(torch.randn(640))
    with pytest.raises(UserError, match="absmax must be 10"):
        nf4.dequantize_nf4(codes, absmax[:5], torch.empty(640))
    state = reference.quantize_absmax(absmax)
    run = layout.AbsmaxRun(state.q.view(1, -1)[:, :9], state.code, state.absmax2.view(1, -1), state.offset.view(1))
    with pytest.raises(UserError, match="out must be 576"):
        nf4.dequantize_nf4_run(codes, run, torch.empty(640))


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("columns", [0, 1, 31, 1000])
def test_keep_mask(p, columns):
    keys = torch.randint(-(2**63), 2**63 - 1, (13,), generator=torch.Generator().manual_seed(5))
    keys[:4] = torch.tensor([0, 1, -1, 2**62])
    assert torch.equal(nf4.keep_mask(keys, columns, p), reference.keep_mask(keys, columns, p))

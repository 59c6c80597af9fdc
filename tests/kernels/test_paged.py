"""Attention to a cache in blocks: the C kernel against its plain twin."""

import pytest
import torch

from lamella.kernels import paged

BLOCK = 8


@pytest.mark.skipif(not paged.takes(torch.zeros(1, 1, 1)), reason="needs AVX-512 BF16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (72, 40), (128, 96)])
@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}, {"sinks_H": torch.tensor([0.5, -1.0, 4.0, 0.1])}])
def test_the_kernel_equals_its_twin_and_no_row_sees_another(dtype, size, value_size, extra):
    generator = torch.Generator().manual_seed(0)
    kv_heads, blocks = 2, 12
    keys = torch.randn(blocks * BLOCK, kv_heads, size, generator=generator).to(dtype)
    values = torch.randn(blocks * BLOCK, kv_heads, value_size, generator=generator).to(dtype)
    q = torch.randn(4, 3, size, generator=generator).to(dtype).transpose(0, 1)  # heads before rows in memory
    table = torch.tensor([[3, 1, 0, 0], [2, 7, 9, 5], [11, 0, 0, 0]], dtype=torch.int32)
    lows, positions = [0, 9, 5], [12, 30, 5]
    out = paged.attend(q, keys, values, table, lows, positions, BLOCK, 0.3, **extra)
    at = torch.arange(4 * BLOCK)
    seen = (at >= torch.tensor(lows)[:, None]) & (at <= torch.tensor(positions)[:, None])
    k, v = (x.view(blocks, BLOCK, kv_heads, -1)[table.long()].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    wanted = paged.reference(q.float(), k.float(), v.float(), seen, 0.3, **extra)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    assert (out.float() - wanted).abs().max() <= near * wanted.abs().max()
    foreign = torch.ones(blocks * BLOCK, dtype=torch.bool)
    foreign[[3 * BLOCK + i for i in range(8)] + [BLOCK + i for i in range(5)]] = False
    keys[foreign] = float("nan")  # all that row 0 must not see
    values[foreign] = float("nan")
    assert torch.equal(paged.attend(q, keys, values, table, lows, positions, BLOCK, 0.3, **extra)[0], out[0])

"""LoRA of several adapters on a few rows: the C kernel against matmuls."""

import pytest
import torch

from lamella.kernels import lora_rows


@pytest.mark.skipif(not lora_rows.takes(torch.zeros(1, 1)), reason="needs AVX-512 BF16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (97, 131)])
@pytest.mark.parametrize("transposed", [True, False])
def test_every_run_has_its_own_pair_and_no_row_depends_on_others(dtype, inputs, outputs, transposed):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x, y = draw(12, inputs + 5)[:, 3 : inputs + 3], draw(12, outputs + 7)[:, :outputs]
    pairs = {rank: (draw(rank, inputs), draw(outputs, rank)) for rank in (1, 4, 22)}
    if transposed:
        pairs = {rank: (a, b.T.contiguous().T) for rank, (a, b) in pairs.items()}
    runs = [(0, 2, *pairs[4], 2.0), (2, 5, None, None, 0.0), (5, 6, *pairs[1], 0.5), (6, 12, *pairs[22], 1.0)]
    lora_rows.lora_rows(x, runs, y)
    for first, end, a, b, scale in runs:
        wanted = (
            torch.zeros(end - first, outputs) if a is None else x[first:end].float() @ a.float().T @ b.float().T * scale
        )
        assert (y[first:end].float() - wanted).abs().max() <= (
            1e-5 if dtype == torch.float32 else 8e-3
        ) * wanted.abs().max()
    alone = torch.empty(1, outputs, dtype=dtype)
    lora_rows.lora_rows(x[7:8], [(0, 1, *pairs[22], 1.0)], alone)
    assert torch.equal(alone[0], y[7])

"""Cross-entropy without logits in memory, and linear layers with LoRA in the epilogue, against their plain twins."""

import pytest
import torch

from lamella.kernels.triton import twins
from tests.kernels.triton import need_interpreter
from tests.oracle import relative_error

need_interpreter()
from lamella.kernels.triton import lora, loss  # noqa: E402

DTYPES = {torch.float32: 2e-6, torch.float16: 3e-3}


def head(n, vocab, hidden, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(n, hidden, generator=generator).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype)
    target = torch.randint(vocab, (n,), generator=generator)
    target[: min(n, 2)] = torch.tensor([vocab - 1, 0])[: min(n, 2)]
    return states, weight, target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "vocab"), [(1, 5), (16, 64), (37, 100), (3, 333)])
def test_losses_and_gradient(dtype, n, vocab):
    states, weight, target = head(n, vocab, 40, dtype)
    wanted, wanted_grad = twins.linear_cross_entropy(states, weight, target, 1 / 7)
    for slice_bytes in (1, 3000, 1 << 20):
        found, grad = loss.linear_cross_entropy(states, weight, target, 1 / 7, slice_bytes=slice_bytes)
        assert found.dtype == torch.float32
        assert grad.dtype == dtype
        assert relative_error(found, wanted) < DTYPES[dtype]
        assert relative_error(grad, wanted_grad) < DTYPES[dtype]
    assert loss.linear_cross_entropy(states, weight, target, 1.0, gradient=False)[1] is None


def test_large_logits_do_not_overflow():
    states, weight, target = head(5, 50, 40, torch.float32)
    found, grad = loss.linear_cross_entropy(states * 100, weight * 100, target, 1.0)
    wanted, wanted_grad = twins.linear_cross_entropy(states * 100, weight * 100, target, 1.0)
    assert relative_error(found, wanted) < 1e-5
    assert relative_error(grad, wanted_grad) < 1e-5


def test_no_positions():
    states, weight, target = head(0, 50, 40, torch.float32)
    found, grad = loss.linear_cross_entropy(states, weight, target, 1.0)
    assert found.shape == (0,)
    assert grad.shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 4, 20])
@pytest.mark.parametrize("bias", [False, True])
def test_lora_linear(dtype, rank, bias):
    generator = torch.Generator().manual_seed(rank)
    x, w, xa, b, bias_O = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((19, 48), (70, 48), (19, rank), (70, rank), (70,))
    )
    args = (x, w, xa, b, 0.3, bias_O if bias else None)
    assert relative_error(lora.lora_linear(*args), twins.lora_linear(*args)) < DTYPES[dtype]

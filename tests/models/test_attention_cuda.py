"""What of the CUDA attention can be seen without a GPU: its choice, the call's arguments, the deterministic backward."""

import pytest
import torch

from lamella.models import attention_cuda


class _Watched(torch.autograd.Function):
    """Product of three tensors whose backward notes whether deterministic algorithms are on."""

    seen: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q * k * v

    @staticmethod
    def backward(ctx, grad):
        _Watched.seen.append(torch.are_deterministic_algorithms_enabled())
        q, k, v = ctx.saved_tensors
        return grad * k * v, grad * q * v, grad * q * k


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (False, False, False)])
def test_only_the_backward_of_attention_is_deterministic(before, needs):
    tensors = [torch.randn(3).requires_grad_(n) for n in needs]
    _Watched.seen.clear()
    torch.use_deterministic_algorithms(before)
    try:
        out = attention_cuda.fenced(_Watched.apply, *tensors)
        assert torch.equal(out, tensors[0] * tensors[1] * tensors[2])
        if any(needs):
            leaves = [t for t in tensors if t.requires_grad]
            found = torch.autograd.grad(out.sum(), leaves)
            wanted = torch.autograd.grad((tensors[0] * tensors[1] * tensors[2]).sum(), leaves)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            assert _Watched.seen == [True]
        assert torch.are_deterministic_algorithms_enabled() == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("window", [None, 8])
def test_torchs_varlen_function_takes_our_arguments(window):
    run = attention_cuda._torch()
    if run is None:
        pytest.skip("this torch has no varlen attention")
    q = torch.empty(30, 4, 16, device="meta", dtype=torch.bfloat16)
    k = torch.empty(30, 2, 16, device="meta", dtype=torch.bfloat16)
    starts = torch.empty(3, device="meta", dtype=torch.int32)
    assert run(q, k, k, starts, 20, 0.25, window).shape == q.shape


def test_other_devices_keep_their_path():
    q = torch.randn(1, 4, 10, 16)
    assert attention_cuda.varlen(q, q, q, torch.tensor([0, 10], dtype=torch.int32), 10, 0.25, None) is None

"""`packed_attention` in bf16 against its own exact path in fp32, whichever kernel computes it."""

import pytest
import torch
from torch import nn

from lamella.kernels import attention as kernels
from lamella.models.attention import PATHS_USED, AttentionLayout, packed_attention
from lamella.models.layout import Tree, pack_rows, pack_trees

BATCHES = {
    "rows": pack_rows([([1] * n, [False] * n) for n in (20, 0, 70, 5)]),
    "tree": pack_trees([Tree([1] * 30, [], [Tree([1] * 9), Tree([1] * 40, [], [Tree([1] * 3), Tree([1] * 5)])]), Tree([1] * 12)]),
}  # fmt: skip


def attend(batch, dtype, size=32, needs=(True, True, True), **over):
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(batch.tokens, h, size, generator=g).bfloat16() for h in (4, 2, 2, 4)]
    q, k, v = (x.to(dtype).requires_grad_(need) for x, need in zip(drawn[:3], needs, strict=True))
    with AttentionLayout(batch).use():
        out, _ = packed_attention(nn.Identity(), *(x.transpose(0, 1)[None] for x in (q, k, v)), None, **over)
    wanted = [x for x in (q, k, v) if x.requires_grad]
    return out.detach(), torch.autograd.grad(out, wanted, drawn[3].to(dtype)[None])


def error(x, expected):
    return float((x.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("size", "over"),
    [
        (32, {}), (64, {"sliding_window": 8}), (32, {"scaling": 0.5}), (16, {}), (40, {"sliding_window": 8}),
        (32, {"softcap": 5.0}), (32, {"s_aux": torch.tensor([0.5, 1.0, -1.0, 0.0])}),
    ],
)  # fmt: skip
def test_bf16_is_near_fp32(batch, size, over):
    out, grads = attend(batch, torch.bfloat16, size, **over)
    true_out, true_grads = attend(batch, torch.float32, size, **over)
    assert out.dtype == torch.bfloat16
    assert out.shape == (1, batch.tokens, 4, size)
    assert error(out, true_out) < 1e-2
    for grad, expected in zip(grads, true_grads, strict=True):
        assert error(grad, expected) < 1e-2


@pytest.mark.parametrize(
    ("dtype", "size", "over", "path"),
    [
        (torch.bfloat16, 32, {}, kernels.implementation()), (torch.float32, 32, {}, "torch"), (torch.bfloat16, 40, {}, "torch"),
        (torch.bfloat16, 32, {"softcap": 5.0}, "torch"),
    ],
)  # fmt: skip
def test_the_path_is_recorded(dtype, size, over, path):
    PATHS_USED.clear()
    attend(BATCHES["rows"], dtype, size, **over)
    assert {path} == PATHS_USED


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True), (False, False, True)])
def test_gradients_of_some_arguments(needs):
    _, full = attend(BATCHES["rows"], torch.bfloat16)
    _, part = attend(BATCHES["rows"], torch.bfloat16, needs=needs)
    for grad, expected in zip(part, [g for g, need in zip(full, needs, strict=True) if need], strict=True):
        assert torch.equal(grad, expected)


@pytest.mark.skipif(kernels.implementation() == "torch", reason="no AVX-512 here")
def test_kept_for_backward_is_linear_in_tokens():
    kept: list[int] = []

    def pack(x):
        kept.append(x.numel() * x.element_size())
        return x

    batch = BATCHES["rows"]
    q, k, v = (torch.randn(1, h, batch.tokens, 32).bfloat16().requires_grad_() for h in (4, 2, 2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), AttentionLayout(batch).use():
        packed_attention(nn.Identity(), q, k, v, None)
        assert sum(kept) == batch.tokens * ((4 + 2 + 2 + 4) * 32 * 2 + 4 * 4)
        kept.clear()
        with torch.no_grad():
            packed_attention(nn.Identity(), q, k, v, None)
    assert not kept

"""The loss of a plain linear head on a CUDA device, slice by slice of the vocabulary, its logits never in memory.

Only where the model's head is its final norm and one linear layer, which is found by trying: the logits of some states
must equal, bit for bit, the product with the output layer's weight. Families that do more (soft caps, scales) keep the
model's own head.

Shape suffixes: T tokens, H hidden, N scored pairs, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lamella import kernels
from lamella.models.layout import PackedBatch
from lamella.models.skeleton import Skeleton


def plain_head(skeleton: Skeleton, device: torch.device) -> Tensor | None:
    """The output layer's weight [V, H] where it is all that turns normed states into logits, else None."""
    layer = skeleton.model.get_output_embeddings()
    config = skeleton.config
    if layer is None or getattr(layer, "bias", None) is not None or getattr(config, "final_logit_softcapping", None):
        return None
    weight: Tensor = layer.weight
    states_NH = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(0))
    states_NH = states_NH.to(device, skeleton.dtype)
    with torch.no_grad():
        logits_NV, normed_1NH = skeleton.head(states_NH), skeleton.normed(states_NH)
        return weight if torch.equal(F.linear(normed_1NH, weight)[0], logits_NV) else None


def vocabulary_head(skeleton: Skeleton, device: torch.device) -> Tensor | None:
    """`plain_head` on a CUDA device with Triton; None elsewhere."""
    return plain_head(skeleton, device) if kernels.by_triton(device) else None


def vocabulary_loss(
    skeleton: Skeleton, weight_VH: Tensor, hidden_TH: Tensor, batch: PackedBatch, label_tokens: int
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of the scored pairs (fp64), and the gradient of sum / label_tokens at hidden, [1, T, H]."""
    from lamella.kernels.triton.loss import linear_cross_entropy

    position_N = batch.score_positions
    leaf_NH = hidden_TH[position_N].detach().requires_grad_()
    grad_TH = torch.zeros_like(hidden_TH)
    if not position_N.numel():
        return torch.zeros((), dtype=torch.float64, device=hidden_TH.device), grad_TH[None]
    with torch.enable_grad():
        normed_1NH = skeleton.normed(leaf_NH)
    loss_N, dnormed_NH = linear_cross_entropy(
        normed_1NH[0].detach(), weight_VH, batch.score_tokens, 1 / label_tokens
    )  # fmt: skip
    assert dnormed_NH is not None
    (grad_NH,) = torch.autograd.grad(normed_1NH, leaf_NH, dnormed_NH[None])
    grad_TH.index_add_(0, position_N, grad_NH)
    return loss_N.double().sum(), grad_TH[None]

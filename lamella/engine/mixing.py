"""Whether a layer keeps sequences apart, tested on its loaded weights before it is used.

A layer whose only mixer is one module that goes through the attention interface obeys the packed layout, as
`models/attention.py` computes it. Any other layer (another mixer, several, or none) is run on random hidden states of two
short sequences, three times with the same shapes: the second sequence may not change with the first, and no token with
one that comes after it. What does is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamella.models.attention import AttentionLayout, AttentionRefused
from lamella.models.layout import pack_rows
from lamella.models.prove import signature
from lamella.models.skeleton import Skeleton

LENGTHS = (7, 5)
SCALE = 0.05
"""Of the hidden states: small beside what a layer adds to them, so that nothing is rounded away in 16 bits."""
NEAR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest change of a token's output, relative to what the layer does to it, that rounding explains: an expert's matmul may
have another number of rows."""


class MixingTest:
    """Remembers which kinds of layers have passed."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._passed: set[Any] = set()
        self._kinds: dict[int, Any] = {}

    def wanted(self, layer: int) -> bool:
        """Whether a layer has to be tested before it is used."""
        if not self._skeleton.mixing[layer].tested:
            return False
        if layer not in self._kinds:
            self._kinds[layer] = signature(self._skeleton.layers[layer])
        return self._kinds[layer] not in self._passed

    def run(self, layer: int, device: torch.device) -> None:
        """Test a layer whose weights are bound; it may not be dropping inputs.

        Raises:
            AttentionRefused: a sequence, or an earlier token, changed with what it must not see.
        """
        self.wanted(layer)
        skeleton = self._skeleton
        batch = pack_rows([([0] * n, []) for n in LENGTHS]).to(device)
        a, total = LENGTHS[0], sum(LENGTHS)
        generator = torch.Generator().manual_seed(0)
        hidden_size = int(skeleton.config.hidden_size)

        def draw() -> Tensor:
            return (torch.randn(1, total, hidden_size, generator=generator) * SCALE).to(device, skeleton.dtype)

        base, other = draw(), draw()
        first, last = base.clone(), base.clone()
        first[:, :a] = other[:, :a]
        ends = [a - 1, total - 1]
        last[:, ends] = other[:, ends]
        counts = [m.__dict__["lamella_hits"] for m in skeleton.layers[layer].modules() if "lamella_hits" in m.__dict__]
        before = [hits.clone() for hits in counts]
        with torch.no_grad():
            _, calls = skeleton.prologue(batch.input_ids, batch.position_ids)
            outs = []
            for hidden in (base, first, last):
                with AttentionLayout(batch).use():
                    outs.append((skeleton.run_layer(layer, hidden, calls[layer]) - hidden)[0].double())
        for hits, old in zip(counts, before, strict=True):
            hits.copy_(old)
        kept_T = torch.ones(total, dtype=torch.bool, device=device)
        kept_T[ends] = False
        name = type(skeleton.layers[layer]).__name__
        near = NEAR[skeleton.dtype]
        for out, seen_T, what in (
            (outs[1], torch.arange(total, device=device) >= a, "a sequence sees the one packed before it"),
            (outs[2], kept_T, "a token sees one that comes after it"),
        ):
            apart_T = (out - outs[0]).norm(dim=-1) / outs[0].norm(dim=-1).clamp_min(1e-30)
            worst = float(apart_T[seen_T].max())
            if not worst <= near:
                raise AttentionRefused(
                    f"layer {layer} ({name}) does not keep packed sequences apart: {what} (its output changes by {worst:.1e})",
                    fix="this model family is not supported yet",
                )
        self._passed.add(self._kinds[layer])

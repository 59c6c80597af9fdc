"""Seconds of each piece of a step on a device, from shapes and the device's rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StepTimes(Protocol):
    """Times of a model with its adapter on one device. `lengths`: of the sequences of one micro-batch, in tokens. A cause of a
    pass is one of: linear, experts, attention, lora, rows (norms, rotary, activations), calls (fixed cost of operations)."""

    def forward(self, layer: int, lengths: Sequence[int]) -> dict[str, float]:
        """Seconds of one layer's forward pass on one micro-batch, by cause."""
        ...

    def backward(self, layer: int, lengths: Sequence[int], recompute: bool) -> dict[str, float]:
        """Of its backward pass, the forward pass that is done again included."""
        ...

    def dequantise(self, layer: int) -> float:
        """Once per pass; 0 where kernels read 4-bit weights themselves."""
        ...

    def prologue(self, tokens: int) -> float:
        """Embedding of a micro-batch."""
        ...

    def head(self, label_tokens: int) -> float:
        """Loss and its gradient at the last boundary."""
        ...

    def update(self, parameters: int) -> float:
        """Gradient norm and optimizer."""
        ...

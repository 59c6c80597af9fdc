"""Seconds of each piece of a step on a device, from shapes and the device's rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lamella.errors import UserError
from lamella.forecast.layers import Linears, Pieces, pieces_of
from lamella.forecast.measured import Causes, KernelTimes
from lamella.forecast.shape import ModelShape, Site
from lamella.hardware.machine import DeviceFacts
from lamella.plan.costs import visible_pairs

CAUSES = ("linear", "experts", "attention", "lora", "rows", "calls")


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

    def hang(self, layer: int) -> float:
        """Once per pass: the layer's adapter in the compute dtype (counts as computing)."""
        ...

    def prologue(self, tokens: int) -> float:
        """Embedding of a micro-batch."""
        ...

    def head(self, label_tokens: int) -> float:
        """Loss and its gradient at the last boundary, of one micro-batch."""
        ...

    def update(self, parameters: int) -> float:
        """Gradient norm and optimizer."""
        ...


def times_of(shape: ModelShape, sites: Sequence[Site], device: DeviceFacts, dtype: str = "bf16") -> StepTimes:
    """Times of a model with these LoRA pairs on this device.

    Raises:
        UserError: the device's rates are of another dtype.
    """
    if dtype != device.dtype:
        raise UserError(
            f"the rates of device {device.name!r} are in {device.dtype}, not in {dtype}",
            fix=f'probe with compute.dtype = "{dtype}", or plan in {device.dtype}',
        )
    pieces = pieces_of(shape, sites)
    if device.kernels is None:
        return RateTimes(pieces, shape.hidden, shape.vocab, device)
    kept = pieces_of(shape, sites, kept=True)
    return KernelTimes(pieces, kept, shape.hidden, shape.vocab, device.kernels, device.dequantise_bytes_per_s)


class RateTimes:
    """`StepTimes` of a device of which only rates are known. T tokens of a micro-batch:

    linear, experts  FLOPs / (matmul rate x reached); forward 2 T O I, and as many for an input's gradient
    lora             2 T r (I + O) forward, twice that backward (less 2 T r I where no input gradient is needed), at the
                     same rate
    attention        2 (D + D_v) FLOPs per head and visible pair forward, twice that backward, at the same rate
    rows             bytes of norms, rotary positions, activations and residual sums / memory rate (experts' rows count to
                     `experts`)
    dequantise       16-bit bytes of 4-bit weights / dequantise rate, once per pass
    """

    def __init__(self, pieces: Sequence[Pieces], hidden: int, vocab: int, device: DeviceFacts) -> None:
        self.pieces, self.hidden, self.vocab, self.device = list(pieces), hidden, vocab, device
        self.flops_per_s = device.matmul_flops_per_s * device.reached

    def forward(self, layer: int, lengths: Sequence[int]) -> Causes:
        return self._pass(self.pieces[layer], lengths, backward=False)

    def backward(self, layer: int, lengths: Sequence[int], recompute: bool) -> Causes:
        pieces = self.pieces[layer]
        if not pieces.trains:
            return dict.fromkeys(CAUSES, 0.0)
        back = self._pass(pieces, lengths, backward=True)
        again = self._pass(pieces, lengths, backward=False) if recompute else {}
        return {cause: s + again.get(cause, 0.0) for cause, s in back.items()}

    def _pass(self, pieces: Pieces, lengths: Sequence[int], backward: bool) -> Causes:
        tokens = sum(lengths)
        flops = dict.fromkeys(CAUSES, 0.0)
        moved = 0
        values = 4.0 * pieces.hidden + 2.0 * pieces.gated  # norms and sums read and write the stream; activations
        for group in pieces.linears:
            flops["linear"] += 2.0 * tokens * group.inputs * group.width * (group.needs_input or not backward)
            flops["lora"] += _lora_flops(group, tokens, backward)
            values += group.width
        experts = pieces.experts
        if experts is not None:
            rows = tokens * experts.active
            flops["experts"] += 2.0 * rows * experts.macs * (experts.needs_input or not backward)
            first, last = experts.ranks
            lora = 2.0 * rows * (first * (experts.hidden + 2 * experts.inner) + last * (experts.inner + experts.hidden))
            flops["lora"] += (2 if backward else 1) * lora
            moved = experts.active * (2 * experts.hidden + 3 * experts.inner)
        core = pieces.core
        if core is not None and (pieces.core_trains or not backward):
            window = core.window if core.kind == "sliding" else None
            pairs = sum(visible_pairs(n, window) for n in lengths)
            flops["attention"] += 2.0 * (core.head_dim + core.value_dim) * core.heads * pairs * (2 if backward else 1)
            values += 2 * (core.heads + core.kv_heads) * core.head_dim
        seconds = {cause: value / self.flops_per_s for cause, value in flops.items()}
        each_s = (
            2.0 * 2 * tokens * (1.5 if backward else 1.0) / self.device.memory_bytes_per_s
        )  # 2 bytes, read and written
        seconds["rows"] = values * each_s
        seconds["experts"] += moved * each_s
        return seconds

    def dequantise(self, layer: int) -> float:
        pieces = self.pieces[layer]
        return 2.0 * (sum(pieces.dequantised) + pieces.quantised_experts) / self.device.dequantise_bytes_per_s

    def hang(self, layer: int) -> float:
        return 6.0 * self.pieces[layer].trained / self.device.memory_bytes_per_s

    def prologue(self, tokens: int) -> float:
        return 4.0 * tokens * self.hidden / self.device.memory_bytes_per_s

    def head(self, label_tokens: int) -> float:
        products = 4.0 * label_tokens * self.vocab * self.hidden / self.flops_per_s
        return products + 4.0 * label_tokens * self.vocab * 2 / self.device.memory_bytes_per_s

    def update(self, parameters: int) -> float:
        """The norm reads each gradient, clipping and AdamW read four fp32 values and write three."""
        return 40.0 * parameters / self.device.memory_bytes_per_s


def _lora_flops(group: Linears, tokens: int, backward: bool) -> float:
    outputs = sum(r * o for r, o in zip(group.ranks, group.outputs, strict=True))
    inputs = group.rank * group.inputs
    if not backward:
        return 2.0 * tokens * (inputs + outputs)
    return 2.0 * tokens * (inputs * (1 + group.needs_input) + 2 * outputs)

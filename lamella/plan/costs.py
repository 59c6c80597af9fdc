"""What a model costs per layer, and a row of a step per run of layers, in FLOPs and bytes. Plain Python numbers: every rank
computes the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

STATE_BYTES = 16
"""Of a trained parameter: value 4, gradient 4, moments 8."""
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class LayerCost:
    """One layer. FLOPs are those of a whole step: forward, backward and what is recomputed.

    Attributes:
        flops_per_token: of everything but attention's products.
        flops_per_pair: of attention, per visible (query, key) pair.
        forward_share: part of the FLOPs that the forward pass does.
        packed_bytes: as stored.
        dequantised_bytes: what a pass writes before it can compute.
        adapter_bytes: value, gradient and moments: 16 bytes a trained parameter.
        activation_bytes_per_token: live while one micro-batch passes the layer, forward or back.
        boundary_bytes_per_token: the layer's input, kept until its backward pass.
        divisible: share of FLOPs and bytes that an expert split divides (experts, heads); each rank has the rest whole.
        window: of sliding-window attention, in tokens.
    """

    flops_per_token: float
    flops_per_pair: float
    forward_share: float
    packed_bytes: int
    dequantised_bytes: int
    adapter_bytes: int
    activation_bytes_per_token: float
    boundary_bytes_per_token: int
    divisible: float = 0.0
    window: int | None = None


@dataclass(frozen=True)
class ModelCost:
    """A model's layers, and what lies outside them.

    Attributes:
        head_flops_per_label: forward and input gradient of the head, per label token.
        first_bytes: embeddings, held by the first stage.
        last_bytes: head, held by the last stage.
        recompute: layers run again in the backward walk.
        value_bytes: of one number of a boundary.
    """

    layers: tuple[LayerCost, ...]
    head_flops_per_label: float = 0.0
    first_bytes: int = 0
    last_bytes: int = 0
    recompute: bool = True
    value_bytes: int = 2

    @property
    def first_trained(self) -> int:
        """First layer with an adapter; 0 when none is known."""
        return next((i for i, layer in enumerate(self.layers) if layer.adapter_bytes), 0)

    def sums_of(self, kind: Literal["F", "B"], ranks: int) -> float:
        """Times that an expert split of so many ranks sums a layer's boundary in one pass: after attention and after the
        experts; going back, the gradients at their inputs too, besides what is recomputed. Three ranks or more sum 16-bit values
        in fp32."""
        count = 2 if kind == "F" else 4 if self.recompute else 2
        return count * (max(self.value_bytes, 4) / self.value_bytes if ranks > 2 else 1)


@dataclass(frozen=True)
class RowCost:
    """One sequence of a step: its tokens, and how many of them are labels."""

    tokens: int
    labels: int


def visible_pairs(tokens: int, window: int | None) -> int:
    """(query, key) pairs of one sequence under causal attention: t(t+1)/2, or w(w+1)/2 + (t-w)w with a window w < t."""
    if window is None or tokens <= window:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


class CostTable:
    """Prefix sums over a model's layers: any run of layers costs one subtraction.

    Attributes:
        layers: how many.
        packed, dequantised, adapter: bytes of the layers before each (length `layers` + 1).
    """

    def __init__(self, model: ModelCost) -> None:
        self.model = model
        self.layers = len(model.layers)
        self.packed = _sums([layer.packed_bytes for layer in model.layers])
        self.dequantised = _sums([layer.dequantised_bytes for layer in model.layers])
        self.adapter = _sums([layer.adapter_bytes for layer in model.layers])
        self._windows = sorted({layer.window for layer in model.layers}, key=lambda w: (w is None, w or 0))
        self._token = _sums([layer.flops_per_token for layer in model.layers])
        self._divisible = _sums([layer.flops_per_token * layer.divisible for layer in model.layers])
        self._token_forward = _sums([layer.flops_per_token * layer.forward_share for layer in model.layers])
        self._pair = {
            w: (_sums([x.flops_per_pair * (x.window == w) for x in model.layers]),
                _sums([x.flops_per_pair * x.forward_share * (x.window == w) for x in model.layers]))
            for w in self._windows
        }  # fmt: skip

    def flops(self, rows: Sequence[RowCost], first: int = 0, last: int | None = None) -> float:
        """FLOPs of these rows through layers [first, last), with the head where `last` is the end."""
        forward, back = self.passes(rows, first, last)
        return forward + back

    def passes(self, rows: Sequence[RowCost], first: int = 0, last: int | None = None) -> tuple[float, float]:
        """FLOPs of the forward pass (with the whole head: its gradient is taken with the loss) and of the backward pass."""
        last = self.layers if last is None else last
        tokens = sum(row.tokens for row in rows)
        total = tokens * (self._token[last] - self._token[first])
        forward = tokens * (self._token_forward[last] - self._token_forward[first])
        for window, (pair, pair_forward) in self._pair.items():
            pairs = sum(visible_pairs(row.tokens, window) for row in rows)
            total += pairs * (pair[last] - pair[first])
            forward += pairs * (pair_forward[last] - pair_forward[first])
        head = sum(row.labels for row in rows) * self.model.head_flops_per_label if last == self.layers else 0.0
        return forward + head, total - forward

    def divided(self, first: int, last: int) -> float:
        """Part of these layers' work that an expert split divides, weighted by FLOPs per token."""
        whole = self._token[last] - self._token[first]
        return (self._divisible[last] - self._divisible[first]) / whole if whole else 0.0

    def before(self, rows: Sequence[RowCost]) -> list[float]:
        """FLOPs of these rows through the layers before each (length `layers` + 1), without the head."""
        tokens = sum(row.tokens for row in rows)
        pairs = {w: sum(visible_pairs(row.tokens, w) for row in rows) for w in self._pair}
        return [
            tokens * self._token[i] + sum(pairs[w] * sums[i] for w, (sums, _) in self._pair.items())
            for i in range(self.layers + 1)
        ]


def row_flops(model: ModelCost, row: RowCost, first: int = 0, last: int | None = None) -> float:
    """FLOPs of one row through layers [first, last), the head included when `last` is the end."""
    return CostTable(model).flops([row], first, last)


def _sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0))

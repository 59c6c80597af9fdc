"""What a layer's work takes in memory beyond its input, in closed form by kind of layer and tokens.

Nothing is fitted: the work is played on paper (`tape.py`), tensor by tensor, as the modules in `lamella/models` make,
keep and free them. `tests/forecast/test_use.py` holds it to a ledger around the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamella.forecast import blocks
from lamella.forecast.shape import LayerShape, ModelShape, Site
from lamella.forecast.tape import Tape, Ways

LOGITS_BYTES, HEAD_ROWS, PAD_TOKENS = 64 << 20, 256, 32
"""As in `engine.walk`."""
SLICE_BYTES = 256 << 20
"""As in `kernels.triton.loss`."""


@dataclass(frozen=True)
class Use:
    """Bytes that work takes beyond its input.

    Attributes:
        forward: without gradients.
        graph: held after a forward pass with them; graph_peak: on the way there.
        backward: from there to the end, the graph included.
        shapes: different products that a library compiles for (bf16 on a CPU).
    """

    forward: float
    graph: float
    graph_peak: float
    backward: float
    shapes: int = 0


def layer_use(
    shape: ModelShape, layer: int, sites: Sequence[Site], lengths: Sequence[int], dtype_bytes: int, device_kind: str,
    *, dropout: bool = False, threads: int = 1, fused: bool = True,
) -> Use:  # fmt: skip
    """Of one layer on one micro-batch.

    Args:
        sites: LoRA pairs (of any layers).
        lengths: of the micro-batch's sequences, filling included.
        device_kind: "cpu" or "cuda".
        dropout: of the pairs' inputs.
        threads: of a CPU.
        fused: the CPU has the instructions that the fused kernels need.
    """
    return use_of(shape, layer, sites, lengths, Ways.of(device_kind, dtype_bytes, fused, dropout, threads))


def use_of(shape: ModelShape, layer: int, sites: Sequence[Site], lengths: Sequence[int], ways: Ways) -> Use:
    """`layer_use` for layers computed in given ways."""
    parts = blocks.parts_of(shape, layer, sites, ways)
    tokens = sum(lengths)
    t = Tape(ways.element, keeps=False)
    parts.forward(t, tokens, lengths)
    t_kept = Tape(ways.element, keeps=True)
    saved = parts.forward(t_kept, tokens, lengths)
    graph, graph_peak = t_kept.live, t_kept.peak
    t_kept.mark()
    parts.backward(t_kept, tokens, lengths, saved)
    counted = not ways.cuda and ways.element == 2
    return Use(t.peak, graph, graph_peak, t_kept.peak, len(t_kept.products) if counted else 0)


TYPICAL_TOKENS = 1024
"""Of a micro-batch, where a layer's work is asked for per token."""


def activation_bytes_per_token(
    shape: ModelShape, layer: int, sites: Sequence[Site], dtype_bytes: int, device_kind: str = "cpu"
) -> float:
    """What a layer's work takes per token while one micro-batch passes it: the larger of its two ways, recomputed."""
    use = layer_use(shape, layer, sites, (TYPICAL_TOKENS,), dtype_bytes, device_kind)
    return max(use.forward, use.backward) / TYPICAL_TOKENS


def is_estimate(layer: LayerShape) -> bool:
    """Whether a layer is of a kind that is only bounded from above: none of the known attention and MLP forms."""
    return not blocks.is_known(layer)


def head_rows(shape: ModelShape, dtype_bytes: int, device_kind: str, plain: bool = True) -> int:
    """Positions whose logits are alive at once."""
    per_logit, most = (dtype_bytes, HEAD_ROWS) if plain and device_kind == "cpu" else (4, 1 << 30)
    rows = max(16, min(most, LOGITS_BYTES // (per_logit * shape.vocab)))
    multiple = PAD_TOKENS if device_kind == "cpu" and dtype_bytes == 2 else 1
    return rows // multiple * multiple or rows


def head_use(
    shape: ModelShape, positions: int, dtype_bytes: int, device_kind: str, *, fused: bool = True
) -> tuple[int, float]:
    """Positions of a chunk of the head, and the bytes that its loss and gradient take.

    Args:
        positions: label positions of the micro-batch.
    """
    plain = fused and device_kind == "cpu"
    if device_kind == "cuda":
        return positions, _by_slices(positions, shape.hidden, shape.vocab, dtype_bytes)
    rows = max(1, min(head_rows(shape, dtype_bytes, device_kind, plain), positions))
    states = rows * shape.hidden
    if plain:
        multiple = PAD_TOKENS if dtype_bytes == 2 else 1
        filled = -(-rows // multiple) * multiple
        values = filled * shape.vocab + 4 * filled * shape.hidden + states
        return rows, float(dtype_bytes * values + 20 * rows)
    logits = rows * shape.vocab
    return rows, float(logits * (dtype_bytes + 4 * 3) + dtype_bytes * 4 * states + 3 * 4 * states)


def _by_slices(rows: int, hidden: int, vocab: int, element: int) -> float:
    """The loss of all label positions slice by slice of the vocabulary (`kernels/triton/loss.py`): a slice of probabilities,
    fp32 gradients and one product of them, states before and after the norm."""
    columns = min(vocab, max(128, SLICE_BYTES // (rows * element)))
    return float(rows * (columns * element + hidden * (2 * 4 + 4 * element + 2 * 4)))

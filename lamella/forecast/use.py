"""What a layer's work takes in memory beyond its input, in closed form by kind of layer and tokens."""

from __future__ import annotations

from dataclasses import dataclass


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

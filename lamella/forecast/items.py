"""A step as a list of single pieces of work, each with its device, bytes, FLOPs and what it waits for. The engine records the
same pieces under the same names (`lamella.trace`), so forecast and measurement are compared line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["load", "dequantise", "forward", "backward", "head", "spill", "fetch", "send", "reduce", "optimizer"]


@dataclass(frozen=True)
class Item:
    """One piece of work.

    Attributes:
        kind: what is done; name: as the engine's span is named (`forward 3`, `layer 3`, `head`, `update`).
        rank: whose work it is (the receiver's rank of a `send` is `peer`).
        lane: what it occupies: "compute", "read" (disk), "copy" (host to device), "spill", or "link" (see `link`); one item
            at a time on each lane of a rank; links are shared by all who use them at once.
        layer, group: None where it has none.
        nbytes, flops: what it moves and computes.
        seconds: on its own lane, undisturbed; of a transfer its latency, the bytes taking what the link allows.
        after: positions in the list of what has to be done before.
        links: names of the links its bytes pass, slowest share counts; () : none.
    """

    kind: Kind
    name: str
    rank: int
    lane: str
    seconds: float
    layer: int | None = None
    group: int | None = None
    nbytes: int = 0
    flops: float = 0.0
    peer: int | None = None
    after: tuple[int, ...] = ()
    links: tuple[str, ...] = ()

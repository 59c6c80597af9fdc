"""What the answers of two sides say side by side; `bench.train` prints these lines. No measuring here."""

from __future__ import annotations

import statistics
from typing import Any

Answer = dict[str, Any]
Line = dict[str, Any]

MEMORY_BAR = 0.5
"""Our peak memory beyond imports over the peer's: at most this."""
LOSS_BAR = 5e-3
"""Largest relative difference of the losses after the same steps that bf16 rounding explains."""


def middle(answers: list[Answer], name: str) -> float:
    """Median over runs of one figure; `beyond` is the peak resident set less what imports held."""
    if name == "beyond":
        return statistics.median(a["peak_rss_bytes"] - a["import_rss_bytes"] for a in answers)
    return statistics.median(a[name] for a in answers)


def compare(ours: list[Answer], theirs: list[Answer]) -> list[Line]:
    """Speed, memory (whole, and beyond imports) and losses against one peer.

    Raises:
        RuntimeError: the sides do not train the same number of parameters.
    """
    if ours[0]["trainable"] != theirs[0]["trainable"]:
        raise RuntimeError(f"{ours[0]['trainable']} and {theirs[0]['trainable']} trainable parameters")
    a, b = middle(ours, "tokens_per_s"), middle(theirs, "tokens_per_s")
    lines = [
        _line("tokens_per_s", round(a, 1), round(b, 1), a / b, ours_range=_spread(ours), peer_range=_spread(theirs))
    ]
    for figure, name in (("peak_rss_bytes", "peak_rss_bytes"), ("peak_rss_beyond_imports_bytes", "beyond")):
        a, b = middle(ours, name), middle(theirs, name)
        lines.append(_line(figure, int(a), int(b), b / a))
    a, b = ours[0]["losses"][-1], theirs[0]["losses"][-1]
    lines.append(
        _line(
            "loss_after_steps", round(a, 5), round(b, 5), a / b, steps=len(ours[0]["losses"]),
            ours_first=round(ours[0]["losses"][0], 5), peer_first=round(theirs[0]["losses"][0], 5),
            ours_dead_tensors=ours[0]["dead_tensors"], peer_dead_tensors=theirs[0]["dead_tensors"],
            peer_frozen_bytes=theirs[0]["frozen_bytes"], peer_trains_in=theirs[0]["trainable_dtypes"],
            peer_versions=theirs[0]["versions"],
        )
    )  # fmt: skip
    return lines


def fastest_peer(ours: list[Answer], theirs: dict[str, list[Answer]], speed_bar: float) -> Line:
    """Ratios to the peer with the most tokens/s, and whether every bar is met.

    Args:
        theirs: peer's name -> its answers.
        speed_bar: asked ratio in tokens/s.
    """
    name = max(theirs, key=lambda peer: middle(theirs[peer], "tokens_per_s"))
    speed = middle(ours, "tokens_per_s") / middle(theirs[name], "tokens_per_s")
    memory = middle(ours, "beyond") / middle(theirs[name], "beyond")
    leanest = min(theirs, key=lambda peer: middle(theirs[peer], "beyond"))
    loss = abs(ours[0]["losses"][-1] / theirs[name][0]["losses"][-1] - 1)
    met = {"speed": speed >= speed_bar, "memory": memory <= MEMORY_BAR, "loss": loss <= LOSS_BAR}
    return {
        "figure": "fastest_peer",
        "peer": name,
        "tokens_per_s_ratio": round(speed, 3),
        "speed_bar": speed_bar,
        "memory_share": round(memory, 3),
        "memory_bar": MEMORY_BAR,
        "loss_difference": round(loss, 6),
        "leanest_peer": leanest,
        "memory_share_of_leanest": round(middle(ours, "beyond") / middle(theirs[leanest], "beyond"), 3),
        "met": met,
        "all_met": all(met.values()),
    }


def _line(figure: str, ours: float, peer: float, ratio: float, **more: Any) -> Line:
    return {"figure": figure, "ours": ours, "value_of_peer": peer, "ratio": round(ratio, 3), **more}


def _spread(answers: list[Answer]) -> list[float]:
    rates = [a["tokens_per_s"] for a in answers]
    return [round(min(rates), 1), round(max(rates), 1)]

"""One step's sums of every rank as one vector of numbers, so that they travel in a sum that is taken anyway.

Each rank fills its own slot of a vector of `world` slots and zeros elsewhere; the sum over ranks is everybody's numbers.
An interval goes from one such sum to the next: it holds a step's passes, and what the step before did after its sum
(gradients, update, saving).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lamella.trace.recorder import CAUSES, Totals

BUSY = ("compute", "dequantise", "optimizer", "save")
"""Causes that are work; the others move bytes (`send`, `receive`, `reduce`) or wait."""
_HEAD = ("step_s", "tokens", "rows", *CAUSES, "read_s", "disk_bytes", "host_bytes", "reduce_bytes", "group_bytes",
         "peak_bytes")  # fmt: skip


def slot_size(world: int) -> int:
    """Numbers per rank: the head, then by peer: waits, transfers, bytes sent."""
    return len(_HEAD) + 3 * world


def totals_vector(totals: Totals, rank: int, world: int, tokens: int, rows: int, peak_bytes: int = 0) -> list[float]:
    """This rank's numbers in its slot, zeros in the others' [world * slot_size(world)].

    Args:
        totals: as `Recorder.take_totals()` gave them.
        tokens, rows: that this rank took in this step.
        peak_bytes: of memory that its process (or GPU) has held so far.
    """
    size = slot_size(world)
    vector = [0.0] * (world * size)
    seconds, nbytes = totals.seconds, totals.nbytes
    head = [time.perf_counter() - totals.start_s, tokens, rows, *(seconds.get(cause, 0.0) for cause in CAUSES),
            totals.read_s, nbytes.get("load", 0), nbytes.get("wait_host", 0), nbytes.get("reduce", 0),
            nbytes.get("send", 0) + nbytes.get("receive", 0) - totals.by_peer_bytes, peak_bytes]  # fmt: skip
    start = rank * size
    vector[start : start + len(head)] = map(float, head)
    by_peers: list[Mapping[int, float]] = [totals.wait_s, totals.link_s, totals.sent]
    for n, by_peer in enumerate(by_peers):
        for peer, value in by_peer.items():
            vector[start + len(head) + n * world + peer] = float(value)
    return vector


def devices_of(vector: Sequence[float], world: int) -> list[dict[str, Any]]:
    """The summed vector as `devices` of a line of `metrics.jsonl`, by rank.

    Waits at a meeting of all ranks name no peer: they are for the rank that waited least there, which came last.

    Returns:
        per rank: `rank`, `step_s` (the interval), `busy_s`, `compute_s`, `wait_s` by what is waited for ("rank 1", "disk",
        "host"), `move_s` by link ("rank 1", "reduce", "group": what a group of ranks gathers), `read_s` (beside the
        walk), `tokens`, `rows`, `peak_bytes` (memory), and `bytes` by link ("disk", "host", "reduce", "group", "rank 1": sent
        there). Links without any are left out.
    """
    size = slot_size(world)
    slots = [vector[r * size : (r + 1) * size] for r in range(world)]
    heads = [dict(zip(_HEAD, slot, strict=False)) for slot in slots]
    peers = [[slot[len(_HEAD) + n * world :][:world] for n in range(3)] for slot in slots]
    meeting = [max(head["wait_peer"] - sum(waits[0]), 0.0) for head, waits in zip(heads, peers, strict=True)]
    last = meeting.index(min(meeting))
    devices = []
    for rank, (head, (waits, links, sent)) in enumerate(zip(heads, peers, strict=True)):
        wait = {f"rank {peer}": seconds for peer, seconds in enumerate(waits)}
        move = {f"rank {peer}": seconds for peer, seconds in enumerate(links)}
        together = move if rank == last else wait
        together_with = "reduce" if rank == last else f"rank {last}"
        wait |= {"disk": head["wait_disk"] + head["load"], "host": head["wait_host"]}
        move |= {"reduce": head["reduce"], "group": head["send"] + head["receive"] - sum(links)}
        together[together_with] = together.get(together_with, 0.0) + meeting[rank]
        nbytes = {
            "disk": head["disk_bytes"],
            "host": head["host_bytes"],
            "reduce": head["reduce_bytes"],
            "group": head["group_bytes"],
        }
        nbytes |= {f"rank {peer}": count for peer, count in enumerate(sent)}
        devices.append(
            {"rank": rank, "step_s": head["step_s"], "busy_s": sum(head[cause] for cause in BUSY),
             "compute_s": head["compute"], "wait_s": _some(wait), "move_s": _some(move), "read_s": head["read_s"],
             "tokens": int(head["tokens"]), "rows": int(head["rows"]), "peak_bytes": int(head["peak_bytes"]),
             "bytes": {link: int(count) for link, count in nbytes.items() if count}}
        )  # fmt: skip
    return devices


def _some(seconds: dict[str, float]) -> dict[str, float]:
    return {cause: value for cause, value in seconds.items() if value > 0}

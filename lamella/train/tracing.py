"""The run's side of the trace: when it is kept, and how all ranks' spans come into one file."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lamella.console import notice
from lamella.hardware.memory import peak_rss_bytes
from lamella.ranks.group import Ranks
from lamella.trace.chrome import RankSpans, pack, unpack, write_trace
from lamella.trace.clock import clocks_of, read_clock
from lamella.trace.recorder import RECORDER
from lamella.trace.summary import DeviceFacts
from lamella.trace.totals import devices_of, slot_size, totals_vector

TRACE = "trace.json"


def begin(ranks: Ranks, steps: int, engine: dict[str, Any]) -> list[DeviceFacts]:
    """Keep the spans of so many last steps from here on.

    Args:
        engine: what this rank's engine says of itself (`Engine.facts`).

    Returns:
        what each rank says of its device, by rank.
    """
    RECORDER.keep(steps)
    RECORDER.take_totals()
    streamed, slots = int(engine.get("layers_streamed") or 0), int(engine.get("slot_bytes") or 0)
    label = str(engine.get("device", ""))
    mine = (label, socket.gethostname(), streamed, slots // 2)
    everyone = ranks.gather(mine)
    several_hosts = len({host for _, host, _, _ in everyone}) > 1
    return [
        DeviceFacts(f"{label} on {host}" if several_hosts else label, streamed, layer_bytes)
        for label, host, streamed, layer_bytes in everyone
    ]


def numbers(ranks: Ranks, tokens: int, rows: int) -> list[float]:
    """This rank's share of a sum of numbers, from which `devices` tells what each rank did since the last one.

    Args:
        tokens, rows: that this rank took in this step.
    """
    return totals_vector(RECORDER.take_totals(), ranks.rank, ranks.world, tokens, rows, _peak_bytes())


def _peak_bytes() -> int:
    """Most memory so far: of this process, or of its GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    return peak_rss_bytes()


def no_numbers(ranks: Ranks) -> list[float]:
    """As many zeros, from a rank that failed."""
    return [0.0] * (ranks.world * slot_size(ranks.world))


def devices(ranks: Ranks, summed: Sequence[float]) -> list[dict[str, Any]]:
    """`devices` of a line of metrics, from the sum over ranks of `numbers`."""
    return devices_of(summed, ranks.world)


def write(ranks: Ranks, path: Path, facts: Sequence[DeviceFacts]) -> None:
    """Write the last steps of all ranks to `path` from rank 0; all ranks call it. Nothing when no steps are kept."""
    if not RECORDER.steps.maxlen:
        return
    readings = [read_clock(lambda: ranks.sum_numbers([0.0]))]
    packed = [zlib.compress(json.dumps(pack(RECORDER.steps)).encode(), 1)]
    if ranks.world > 1:
        readings, packed = ranks.gather(readings[0]), ranks.gather(packed[0])
    if ranks.first:
        steps = [unpack(json.loads(zlib.decompress(one))) for one in packed]
        clocks = clocks_of(readings)
        _put(path, [RankSpans(r, facts[r].label, steps[r], clocks[r]) for r in range(ranks.world)])


def write_alone(ranks: Ranks, path: Path, facts: Sequence[DeviceFacts]) -> None:
    """Write this rank's last steps without asking the others, which may be gone."""
    if RECORDER.steps:
        others = [rank for rank in range(ranks.world) if rank != ranks.rank]
        _put(path, [RankSpans(ranks.rank, facts[ranks.rank].label, list(RECORDER.steps))], others)


def kind_of(split: dict[str, Any] | None) -> str:
    """ "tokens", "stages" or "experts", from a split as checkpoints have it."""
    stages = split["stages"] if split else []
    return "stages" if len(stages) > 1 else str(stages[0]["way"]) if stages else "tokens"


def _put(path: Path, spans: Sequence[RankSpans], missing: Sequence[int] = ()) -> None:
    """A trace that cannot be written is said, and costs the run nothing else."""
    try:
        write_trace(path, spans, missing)
    except OSError as error:
        notice(f"warning: {path} cannot be written: {error.strerror}")

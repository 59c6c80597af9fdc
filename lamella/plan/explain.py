"""A choice of split in plain lines."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.plan.devices import Device
from lamella.plan.search import Choice
from lamella.units import format_bytes, format_seconds


def explain(choice: Choice, devices: Sequence[Device]) -> list[str]:
    """What was chosen, what each device does and holds, which one limits, what was rejected, and what would help."""
    split, timeline = choice.split, choice.timeline
    lines = [f"split: {choice.reasons[0]}"]
    if len(split.stages) > 1:
        lines.append(f"  {len(choice.plan.groups)} groups of micro-batches in flight")
    for s, stage in enumerate(split.stages):
        for rank, share in zip(stage.ranks, stage.shares, strict=True):
            memory = choice.memory[rank]
            what = "experts" if stage.way == "experts" else "sequences"
            part = "" if len(stage.ranks) == 1 else f", {share:.1%} of the {what}"
            where = f"stage {s}, " if len(split.stages) > 1 else ""
            lines.append(
                f"  {devices[rank].name}: {where}layers {stage.first} to {stage.last - 1}{part}; "
                f"busy {format_seconds(timeline.busy_s[rank])} of {format_seconds(timeline.step_s)} "
                f"(idle {max(timeline.idle[rank], 0):.1%}); {memory.line()}"
            )
            if memory.streamed_bytes:
                lines.append(
                    f"    {memory.layers_held} of {stage.last - stage.first} layers stay, "
                    f"{format_bytes(memory.streamed_bytes)} are read in every pass"
                )
    lines.append(f"limited by {limiting(choice, devices)}")
    lines += [f"rejected: {line.removeprefix('not ')}" for line in choice.reasons[1:]]
    lines += [f"would help: {line}" for line in choice.suggestions]
    return lines


def limiting(choice: Choice, devices: Sequence[Device]) -> str:
    """The device that the step waits for, and whether by computing, reading or links."""
    timeline = choice.timeline
    taken: dict[int, float] = {}
    for span in timeline.spans:
        taken[span.rank] = taken.get(span.rank, 0.0) + span.end_s - span.start_s
    rank = max(sorted(taken), key=lambda r: taken[r])
    stage = choice.split.stages[choice.split.stage_of(rank)]
    share = stage.shares[stage.ranks.index(rank)]
    if taken[rank] < 0.5 * timeline.step_s:
        return f"links and the order of stages: {devices[rank].name} works longest, {taken[rank] / timeline.step_s:.0%} of a step"
    if timeline.busy_s[rank] >= 0.95 * taken[rank]:
        why = "computing"
    elif timeline.read_bytes[rank]:
        why = f"reading layers at {format_bytes(devices[rank].read_bytes_per_s)}/s"
    else:
        why = "the exchange within its group"
    return f"{devices[rank].name} ({why}), which has {share:.1%} of its stage's work"

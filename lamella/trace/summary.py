"""What each device did over a run, which device or link holds the others up, and what would relieve it.

Made from the `devices` of `metrics.jsonl` alone, so a run that was interrupted, or goes on, has it too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from lamella.console import out
from lamella.units import format_bytes, format_seconds

MATTERS = 0.05
"""Share of a device's time below which a wait is not worth a word."""
_MOST = 4  # findings
_FEW_BYTES = 1e6  # what takes long about fewer is coming together


@dataclass(frozen=True)
class DeviceFacts:
    """What one rank says of itself: its device, its streamed layers, and the packed bytes of one."""

    label: str = ""
    streamed: int = 0
    layer_bytes: int = 0


@dataclass
class _Sums:
    """One rank's sums over steps."""

    seconds: float = 0.0
    busy_s: float = 0.0
    compute_s: float = 0.0
    read_s: float = 0.0
    tokens: int = 0
    rows: int = 0
    wait_s: Counter[str] = field(default_factory=Counter)
    move_s: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)

    def add(self, device: dict[str, Any]) -> None:
        self.seconds += device["step_s"]
        self.busy_s += device["busy_s"]
        self.compute_s += device["compute_s"]
        self.read_s += device["read_s"]
        self.tokens += device["tokens"]
        self.rows += device["rows"]
        for sums, name in ((self.wait_s, "wait_s"), (self.move_s, "move_s"), (self.nbytes, "bytes")):
            sums.update(device[name])

    def share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0

    @property
    def other_s(self) -> float:
        """Outside of all spans: data, bookkeeping."""
        return max(self.seconds - self.busy_s - sum(self.wait_s.values()) - sum(self.move_s.values()), 0.0)


@dataclass(frozen=True)
class Finding:
    """A cause of idleness: `share` of all devices' time, what holds up, and what to do."""

    share: float
    where: str
    text: str


def summarise(
    lines: Sequence[dict[str, Any]], facts: Sequence[DeviceFacts] = (), split: str = "tokens"
) -> dict[str, Any] | None:
    """Busy and idle by cause of each device, bytes by link, the bottleneck and what would relieve it.

    Args:
        lines: of `metrics.jsonl`; steps with another number of devices than the last one are left out.
        facts: of each rank, by rank; may be missing.
        split: "tokens", "stages" or "experts": what can be changed when one device holds up others.

    Returns:
        A JSON tree, as `devices` in the receipt; None when no line has devices.
    """
    lines = [line for line in lines if line.get("devices")]
    if not lines:
        return None
    world = len(lines[-1]["devices"])
    lines = [line for line in lines if len(line["devices"]) == world]
    sums = [_Sums() for _ in range(world)]
    for line in lines:
        for one, device in zip(sums, line["devices"], strict=True):
            one.add(device)
    facts = [facts[rank] if rank < len(facts) else DeviceFacts() for rank in range(world)]
    findings = sorted(_findings(sums, facts, split, len(lines)), key=lambda f: -f.share)
    return {
        "steps": len(lines),
        "split": split if world > 1 else None,
        "each": [_device(rank, one, facts[rank].label) for rank, one in enumerate(sums)],
        "links": _links(sums, len(lines)),
        "bottleneck": findings[0].where if findings else "arithmetic",
        "findings": [f.text for f in findings[:_MOST]] or [_all_busy(sums)],
    }


def _device(rank: int, one: _Sums, label: str) -> dict[str, Any]:
    return {
        "rank": rank, "device": label, "seconds": one.seconds, "busy": one.share(one.busy_s),
        "wait": {cause: one.share(s) for cause, s in sorted(one.wait_s.items()) if s},
        "move": {link: one.share(s) for link, s in sorted(one.move_s.items()) if s},
        "other": one.share(one.other_s), "tokens": one.tokens, "rows": one.rows,
        "tokens_per_busy_s": one.tokens / one.busy_s if one.busy_s else None,
    }  # fmt: skip


def _links(sums: Sequence[_Sums], steps: int) -> list[dict[str, Any]]:
    """Bytes by link, with rates of disks and sums; a transfer beside the walk does not tell how long it took."""
    links = []

    def put(name: str, nbytes: float, seconds: float) -> None:
        if nbytes:
            rate = nbytes / seconds if seconds else None
            links.append({"link": name, "bytes": int(nbytes), "bytes_per_step": nbytes / steps, "bytes_per_s": rate})

    for rank, one in enumerate(sums):
        put(f"disk of rank {rank}", one.nbytes["disk"], one.read_s)
        put(f"host memory of rank {rank}", one.nbytes["host"], 0.0)
        for peer in range(len(sums)):
            put(f"rank {rank} to rank {peer}", one.nbytes[f"rank {peer}"], 0.0)
        put(f"group of rank {rank}", one.nbytes["group"], one.move_s["group"])
    put("sums over ranks", max(one.nbytes["reduce"] for one in sums), min(one.move_s["reduce"] for one in sums))
    return links


# --- what holds up whom


def _findings(sums: Sequence[_Sums], facts: Sequence[DeviceFacts], split: str, steps: int) -> list[Finding]:
    found: list[Finding | None] = [_of_peer(sums, q, split, steps) for q in range(len(sums))]
    for rank in range(len(sums)):
        found += [_of_disk(sums, rank, facts[rank]), _of_host(sums, rank, facts[rank])]
        found += [_of_link(sums, rank, peer, split, steps) for peer in range(rank + 1, len(sums))]
    found.append(_of_reduce(sums, split, steps))
    return [f for f in found if f is not None]


def _total(sums: Sequence[_Sums]) -> float:
    return sum(one.seconds for one in sums) or math.inf


def _of_peer(sums: Sequence[_Sums], q: int, split: str, steps: int) -> Finding | None:
    """Others wait for rank q."""
    waits = {r: one.share(one.wait_s[f"rank {q}"]) for r, one in enumerate(sums)}
    waits = {r: share for r, share in waits.items() if share >= MATTERS}
    if not waits:
        return None
    slow = sums[q]
    who = ", ".join(f"rank {r} waits {share:.0%}" for r, share in waits.items())
    text = f"{who} for rank {q} (busy {slow.share(slow.busy_s):.0%}): "
    behind = {cause: s for cause, s in slow.wait_s.items() if cause not in {f"rank {r}" for r in waits}}
    cause, seconds = max(behind.items(), key=lambda item: item[1], default=("", 0.0))
    if slow.share(seconds) >= 0.2:
        text += f"it waits itself {slow.share(seconds):.0%} for {_named(cause)}; see there"
    elif mutual := [r for r in waits if slow.share(slow.wait_s[f"rank {r}"]) >= MATTERS]:
        text += _each_other(sums, q, mutual[0], split, steps)
    elif split == "stages":
        text += (
            "give its stage fewer layers (split.layers; None finds them), or another device beside it (split.stages)"
        )
    elif split == "experts":
        text += f"give it fewer experts (split.shares = {_shares(_speeds(sums))})"
    else:
        text += _less_for(sums, q, steps)
    return Finding(sum(one.wait_s[f"rank {q}"] for one in sums) / _total(sums), f"rank {q}", text)


def _each_other(sums: Sequence[_Sums], a: int, b: int, split: str, steps: int) -> str:
    """Two ranks wait for each other: what lies between them, not one of them, is slow."""
    nbytes = sums[a].nbytes[f"rank {b}"] + sums[b].nbytes[f"rank {a}"]
    text = f"which itself waits {sums[a].share(sums[a].wait_s[f'rank {b}']):.0%} for rank {b}"
    if nbytes:
        text += f", and {format_bytes(nbytes / steps)} a step pass between them"
    if split == "stages":
        return text + ": more groups in flight (split.groups), or a faster link"
    return text + ": uneven rows in turn; more rows per step even them out" if split == "tokens" else text


def _speeds(sums: Sequence[_Sums]) -> list[float]:
    """Tokens per second of each rank's own time: busy, or waiting for its own disk and host."""
    own = [one.busy_s + one.other_s + one.wait_s["disk"] + one.wait_s["host"] for one in sums]
    return [one.tokens / s if s else 0.0 for one, s in zip(sums, own, strict=True)]


def _shares(speeds: Sequence[float]) -> str:
    total = sum(speeds) or math.inf
    return "[" + ", ".join(f"{v / total:.2f}" for v in speeds) + "]"


def _less_for(sums: Sequence[_Sums], q: int, steps: int) -> str:
    speeds = _speeds(sums)
    tokens = sum(one.tokens for one in sums) / steps
    others = sum(speeds) - speeds[q]
    if not speeds[q] or not others:
        return "give it less (split.shares), or leave it out"
    balanced_s, without_s, now_s = tokens / sum(speeds), tokens / others, max(one.seconds for one in sums) / steps
    text = f"give it less (split.shares = {_shares(speeds)} by what was measured: {format_seconds(balanced_s)} a step "
    text += f"in place of {format_seconds(now_s)})"
    if without_s <= 1.1 * balanced_s:
        text += f", or leave it out ({format_seconds(without_s)})"
    return text


def _of_disk(sums: Sequence[_Sums], rank: int, facts: DeviceFacts) -> Finding | None:
    one = sums[rank]
    wait_s = one.wait_s["disk"]
    if one.share(wait_s) < MATTERS:
        return None
    rate = f" ({format_bytes(one.nbytes['disk'] / one.read_s)}/s)" if one.read_s else ""
    text = f"rank {rank} waits {one.share(wait_s):.0%} for its disk{rate}: "
    if facts.streamed and one.read_s:
        more = min(math.ceil(facts.streamed * min(wait_s / one.read_s, 1.0)), facts.streamed)
        text += (f"raise its budget by {format_bytes(more * facts.layer_bytes)} to hold {more} more of {facts.streamed} "
                 "streamed layers, or take more tokens per step")  # fmt: skip
    else:
        text += "its layers are held in memory; reading them the first time took this, which longer runs spread"
    return Finding(wait_s / _total(sums), f"disk of rank {rank}", text)


def _of_host(sums: Sequence[_Sums], rank: int, facts: DeviceFacts) -> Finding | None:
    one = sums[rank]
    if one.share(one.wait_s["host"]) < MATTERS:
        return None
    held = f" ({facts.streamed} layers come from there)" if facts.streamed else ""
    text = (f"rank {rank} waits {one.share(one.wait_s['host']):.0%} for copies from host memory{held}: raise its budget to "
            "hold more layers on the device, or take more tokens per step")  # fmt: skip
    return Finding(one.wait_s["host"] / _total(sums), f"host memory of rank {rank}", text)


def _of_link(sums: Sequence[_Sums], a: int, b: int, split: str, steps: int) -> Finding | None:
    """Walks stand still while bytes pass between two ranks."""
    ends = ((sums[a], f"rank {b}"), (sums[b], f"rank {a}"))
    share = max(one.share(one.move_s[peer]) for one, peer in ends)
    if share < MATTERS:
        return None
    nbytes, seconds = sum(one.nbytes[peer] for one, peer in ends), max(one.move_s[peer] for one, peer in ends)
    rate = f" at {format_bytes(nbytes / seconds)}/s" if nbytes and seconds else ""
    text = (
        f"ranks {a} and {b} exchange {format_bytes(nbytes / steps)} a step{rate}, which takes {share:.0%} of the time: "
    )
    text += {"stages": "put the cut elsewhere, or split by tokens if each device can hold or stream all layers",
             "experts": "split by stages, which sends less", "tokens": "split by stages"}[split]  # fmt: skip
    return Finding(
        sum(one.move_s[peer] for one, peer in ends) / _total(sums), f"link between rank {a} and rank {b}", text
    )


def _of_reduce(sums: Sequence[_Sums], split: str, steps: int) -> Finding | None:
    seconds = sum(one.move_s["reduce"] for one in sums)
    share = seconds / _total(sums)
    if share < MATTERS:
        return None
    per_step, taken_s = (
        max(one.nbytes["reduce"] for one in sums) / steps,
        min(one.move_s["reduce"] for one in sums) / steps,
    )
    if per_step < _FEW_BYTES:
        text = f"meeting for sums of {format_bytes(per_step)} a step takes {share:.0%}: steps are short; take more tokens per step"
        return Finding(share, "links (sums over ranks)", text)
    rate = f" at {format_bytes(per_step / taken_s)}/s" if taken_s else ""
    text = (
        f"adding up {format_bytes(per_step)} a step over ranks{rate} takes {share:.0%}: take more tokens per step, a "
    )
    text += "lower lora.rank" + ("" if split == "stages" else ", or split by stages")
    return Finding(share, "links (sums over ranks)", text)


def _named(cause: str) -> str:
    return {"disk": "its disk", "host": "host memory"}.get(cause, cause)


def _all_busy(sums: Sequence[_Sums]) -> str:
    busy = [one.share(one.busy_s) for one in sums]
    if len(sums) == 1:
        return f"no wait takes {MATTERS:.0%}"
    return f"no wait takes {MATTERS:.0%} of any device's time; busy {min(busy):.0%} to {max(busy):.0%}"


# --- the printed form


def show(summary: dict[str, Any]) -> None:
    """Print the summary to stdout: a table for several devices, one line for one."""
    for part in rendered(summary):
        out.print(part)


def rendered(summary: dict[str, Any]) -> list[Table | Text]:
    """The summary's printed parts, in order."""
    each = summary["each"]
    if len(each) == 1:
        (one,) = each
        waits = ", ".join(
            f"{share:.0%} waiting for {_named(cause)}" for cause, share in one["wait"].items() if share >= 0.005
        )
        links = ", ".join(links_of(summary))
        words = [f"{one['busy']:.0%} busy", waits, f"{one['other']:.0%} other", links, *summary["findings"]]
        return [Text(f"  device {one['device']}".rstrip() + ": " + "; ".join(filter(None, words)))]
    table = Table(show_edge=False, pad_edge=False)
    for title in HEAD:
        table.add_column(title, justify="left" if title in ("device", "waits for") else "right")
    for cells in rows_of(summary):
        table.add_row(*cells)
    below = [Text("  " + text) for text in links_of(summary)]
    findings = [Text("  " + text) for text in summary["findings"]]
    return [table, *below, Text(f"  bottleneck: {summary['bottleneck']}"), *findings]


HEAD = ("device", "tokens", "busy", "idle", "waits for", "links", "other")


def rows_of(summary: dict[str, Any]) -> list[list[str]]:
    """One row of cells per device, under `HEAD`."""
    rows = []
    for one in summary["each"]:
        waits = [f"{cause} {share:.1%}" for cause, share in one["wait"].items() if share >= 0.0005]
        idle, links = sum(one["wait"].values()), sum(one["move"].values())
        name = f"rank {one['rank']} {one['device']}".rstrip()
        rows.append([name, str(one["tokens"]), f"{one['busy']:.1%}", f"{idle:.1%}", ", ".join(waits) or "-",
                     f"{links:.1%}", f"{one['other']:.1%}"])  # fmt: skip
    return rows


def links_of(summary: dict[str, Any]) -> list[str]:
    """What each link carries, one text each."""
    texts = []
    for link in summary["links"]:
        rate = f" at {format_bytes(link['bytes_per_s'])}/s" if link["bytes_per_s"] else ""
        texts.append(f"{link['link']}: {format_bytes(link['bytes_per_step'])} a step{rate}")
    return texts

"""What each computer of a run holds: RAM, page-locked RAM and disk, by part."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.forecast.outcome import HostForecast
from lamella.forecast.places import RankPlace
from lamella.forecast.process import Choice, import_bytes
from lamella.forecast.question import Question
from lamella.forecast.shape import Site
from lamella.plan.costs import STATE_BYTES
from lamella.plan.split import Stage

SAVED_BYTES = 12
"""Of a trained parameter in a checkpoint: value and moments."""


def hosts_of(
    question: Question, sites: Sequence[Site], places: Sequence[RankPlace], stages: Sequence[Stage], chosen: Sequence[Choice]
) -> tuple[HostForecast, ...]:  # fmt: skip
    """One for each computer that a rank is on."""
    found = []
    for h, host in enumerate(question.machine.hosts):
        here = [k for k, place in enumerate(places) if place.host == h]
        if not here:
            continue
        ram, pinned = _memory(question, sites, places, stages, chosen, here)
        disk = host.disk
        found.append(
            HostForecast(
                host.name, ram, host.limit_bytes, pinned, host.pinned_bytes, _disk(question, sites, chosen, here),
                None if disk is None else disk.free_bytes, {},
            )
        )  # fmt: skip
    return tuple(found)


def _memory(
    question: Question, sites: Sequence[Site], places: Sequence[RankPlace], stages: Sequence[Stage],
    chosen: Sequence[Choice], here: Sequence[int],
) -> tuple[dict[str, int], dict[str, int]]:  # fmt: skip
    ram: dict[str, int] = {}
    pinned: dict[str, int] = {}

    def add(parts: dict[str, int], name: str, nbytes: float) -> None:
        if nbytes:
            parts[name] = parts.get(name, 0) + round(nbytes)

    layers: set[int] = set()
    for k in here:
        if places[k].facts.kind == "cpu":
            for name, nbytes in chosen[k].plan.groups.items():
                add(ram, name, nbytes)
            continue
        own = range(stages[k].first, stages[k].last)
        add(ram, "program", import_bytes(question.machine.hosts[places[k].host]))
        add(ram, "adapter state", STATE_BYTES * sum(s.parameters for s in sites if s.layer in own))
        layers |= set(chosen[k].residency.pinned)
        on_disk = len(chosen[k].residency.streamed) > len(chosen[k].residency.pinned)
        largest = max(question.shape.layers[i].store_bytes for i in own)
        add(pinned, "slots of layers from disk", 2 * largest if on_disk else 0)
    add(pinned, "layers", sum(question.shape.layers[i].store_bytes for i in layers))
    for name, nbytes in pinned.items():
        add(ram, name, nbytes)
    return ram, pinned


def _disk(question: Question, sites: Sequence[Site], chosen: Sequence[Choice], here: Sequence[int]) -> dict[str, int]:
    """New bytes on the disk; the first host holds what the run saves."""
    parameters = sum(site.parameters for site in sites)
    disk: dict[str, int] = {}
    if not question.quantised:
        disk["store"] = question.shape.store_bytes
    if 0 in here:
        disk["checkpoints"] = (question.checkpoint.keep + 2) * SAVED_BYTES * parameters
        disk["adapter"] = 4 * parameters
        if any(chosen[k].state_on_disk for k in here):
            disk["adapter state"] = STATE_BYTES * parameters
    return disk

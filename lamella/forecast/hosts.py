"""What each computer of a run holds: RAM, page-locked RAM and disk, by part."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.forecast.host import RankMemory, disk_parts, host_needs, quantise_parts
from lamella.forecast.outcome import HostForecast
from lamella.forecast.places import RankPlace
from lamella.forecast.process import Choice
from lamella.forecast.question import Question
from lamella.forecast.shape import Site
from lamella.plan.split import Stage


def hosts_of(
    question: Question, sites: Sequence[Site], places: Sequence[RankPlace], stages: Sequence[Stage], chosen: Sequence[Choice]
) -> tuple[HostForecast, ...]:  # fmt: skip
    """One for each computer that a rank is on."""
    found = []
    for h, host in enumerate(question.machine.hosts):
        here = [k for k, place in enumerate(places) if place.host == h]
        if not here:
            continue
        ranks = []
        for k in here:
            layers = range(stages[k].first, stages[k].last)
            trained = sum(site.parameters for site in sites if site.layer in layers)
            ranks.append(RankMemory(chosen[k], layers, trained, places[k].facts.kind == "cuda"))
        ram, pinned = host_needs(question.shape, ranks, host)
        new_store = not question.quantised
        found.append(HostForecast(
            host.name, ram, host.limit_bytes, pinned, host.pinned_bytes,
            disk_parts(question.shape, sites, keep=question.checkpoint.keep, with_store=new_store, with_run=0 in here,
                       state_on_disk=any(chosen[k].state_on_disk for k in here)),
            None if host.disk is None else host.disk.free_bytes,
            quantise_parts(question.shape) if new_store and 0 in here else {},
        ))  # fmt: skip
    return tuple(found)

"""From a question (model, machine, settings, rows) to its forecast: which way of running it, what that takes, whether it fits, what
was rejected, and what one change would help most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lamella.config import DeviceConfig
from lamella.errors import UserError
from lamella.forecast.cores import mixes_otherwise
from lamella.forecast.outcome import Change, Forecast, RankForecast, Rejected
from lamella.forecast.places import RankPlace
from lamella.forecast.question import Question
from lamella.forecast.ways import Forecaster, Variant, identity_of
from lamella.hardware.machine import Machine
from lamella.plan.split import Split
from lamella.units import format_bytes, format_seconds

__all__ = ["Question", "forecast"]

IMPORTS_S = 6.0
"""From the command to the first layer: Python, torch and the tokenizer (seen on two cores)."""
QUANTISE_BYTES_PER_S_AND_CORE = 3.0e8
"""Checkpoint bytes that a core quantises (`bench.quantize`: 6.3 GB in 10 s on two)."""
WORTH = 1.03
"""A change is told when it makes steps so many times faster."""


def forecast(question: Question) -> Forecast:
    """What the run will take.

    Raises:
        UserError: settings that contradict the model, the machine or each other. (Not when it does not fit: see `fits`.)
    """
    forecaster = Forecaster(question)
    variants = forecaster.variants()
    best = variants[0]
    q, steps = question, question.rows.steps(question.train)
    run_tokens = q.rows.run_tokens(q.train)
    step_tokens = run_tokens / steps
    step_s = best.step_s * step_tokens / forecaster.tokens
    start_s = _start_s(q, forecaster, best)
    rate = sum(place.facts.matmul_flops_per_s for place in forecaster.places)
    dtypes = dict.fromkeys(forecaster.dtypes)
    return Forecast(
        fits=best.fits,
        shortfall=tuple(_shortfall(best)),
        changes=() if best.fits else tuple(_changes(q, forecaster, best)),
        sites=tuple(forecaster.sites),
        dtype=" and ".join(dtypes),
        split=best.split,
        plan=best.plan,
        played=best.played,
        ranks=best.ranks,
        hosts=best.hosts,
        step_tokens=step_tokens,
        step_s=step_s,
        flops=best.flops,
        tokens_per_s=step_tokens / step_s,
        utilisation=best.flops / best.step_s / rate,
        steps=steps,
        run_tokens=run_tokens,
        run_s=start_s + steps * step_s,
        start_s=start_s,
        quantise_s=0.0 if q.quantised else _quantise_s(q),
        reasons=tuple(_reasons(forecaster, best)),
        rejected=tuple(_rejected(forecaster, best, variants[1:])),
        helps=tuple(_helps(q, forecaster, best)) if best.fits else (),
        settled=_settled(q, forecaster, best),
        notes=tuple(_notes(q, forecaster, best)),
    )


# ---- beside the steps -----------------------------------------------------------------------------


def _start_s(q: Question, forecaster: Forecaster, best: Variant) -> float:
    """Imports, and reading once what stays in memory."""
    seconds = 0.0
    for h, host in enumerate(q.machine.hosts):
        held = [c.residency.packed_bytes for c, p in zip(best.held, forecaster.places, strict=True) if p.host == h]
        if host.disk is not None and held:
            seconds = max(seconds, sum(held) / host.disk.read_bytes_per_s)
    return IMPORTS_S + seconds


def _quantise_s(q: Question) -> float:
    host = q.machine.hosts[0]
    rate = QUANTISE_BYTES_PER_S_AND_CORE * host.cores
    if host.disk is not None:
        rate = min(rate, host.disk.read_bytes_per_s)
    return q.shape.checkpoint_bytes / rate


# ---- why ------------------------------------------------------------------------------------------


def _shortfall(best: Variant) -> list[str]:
    short = [f"{rank.name}: {rank.line()}" for rank in best.ranks if not rank.fits]
    return short + [line for host in best.hosts for line in host.short()]


def _reasons(forecaster: Forecaster, best: Variant) -> list[str]:
    found = []
    if best.choice is not None:
        tried = best.choice.reasons[0].rpartition("of ")[2]
        found.append(f"split: {_kind(best.split)}, {format_seconds(best.step_s)} a step; {tried}")
    elif len(best.ranks) > 1:
        found.append("split: the one that comes nearest to fitting")
    layers = len(forecaster.q.shape.layers)
    for rank in best.ranks if len(best.ranks) <= 8 else best.ranks[:8]:
        count = rank.last - rank.first
        where = [f"{n} {what}" for n, what in ((rank.on_device, "stay"), (rank.in_host, "in host memory"),
                                               (rank.on_disk, "on disk")) if n]  # fmt: skip
        which = "" if count == layers else f" ({rank.first} to {rank.last - 1})"
        part = "" if rank.share == 1 else f", {rank.share:.1%} of its stage"
        does = "activations kept" if rank.keeps else "layers recomputed"
        found.append(f"{rank.name}: {count} layers{which}{part}: {', '.join(where)}; {does}")
    return found


def _rejected(forecaster: Forecaster, best: Variant, others: list[Variant]) -> list[Rejected]:
    found = []
    ways = {"always": "layers recomputed", "never": "activations kept", "auto": "activations kept where there is room"}
    for other in others:
        what = ways[other.recompute] if other.split == best.split else _kind(other.split)
        why = (
            f"{other.step_s / best.step_s:.3g} times as long" if other.fits else f"does not fit: {_shortfall(other)[0]}"
        )
        found.append(Rejected(what, other.step_s if other.fits else None, why))
    if forecaster.q.memory.recompute == "auto" and not any(rank.keeps for rank in best.ranks):
        need, have = forecaster.kept_need(best.split, best.choice), max(rank.have for rank in best.ranks)
        if need > have:
            why = f"does not fit: need {format_bytes(need)}, have {format_bytes(have)}"
            found.append(Rejected("activations kept", None, why))
    if best.choice is not None:
        played = {variant.split for variant in (best, *others)}
        found += [Rejected(_kind(r.split), r.step_s, r.why) for r in best.choice.rejected if r.split not in played]
    return sorted(found, key=lambda r: float("inf") if r.step_s is None else r.step_s)


def _kind(split: Split) -> str:
    if len(split.stages) == 1:
        return f"{split.stages[0].way} over {len(split.stages[0].ranks)}"
    inside = {stage.way for stage in split.stages if len(stage.ranks) > 1}
    return f"{len(split.stages)} stages" + "".join(f", {way} within" for way in sorted(inside))


def _notes(q: Question, forecaster: Forecaster, best: Variant) -> list[str]:
    notes = list(forecaster.roads.notes)
    for place, dtype in zip(forecaster.places, forecaster.dtypes, strict=True):
        if dtype == "fp32" and place.facts.dtype == "fp16":
            notes.append(f"{place.facts.name} has no bf16: it trains in fp32, at 1/8 of its fp16 rate")
    layers = q.shape.layers
    mixing = sum(map(mixes_otherwise, layers))
    if mixing:
        notes.append(f"{mixing} of {len(layers)} layers mix tokens by other means than attention: time is counted as attention's, and "
                     "what their recurrence keeps is not in the memory; a run's memory.budget is checked on a measured layer")  # fmt: skip
    if any(choice.plan.estimate for choice in best.held) and mixing < len(layers):
        notes.append("memory of this family's other layers is bounded from above, not known exactly" if mixing else
                     "memory of this family's layers is bounded from above, not known exactly")  # fmt: skip
    if q.calibration is not None:
        for place, dtype, rank in zip(forecaster.places, forecaster.dtypes, best.ranks, strict=True):
            notes += q.calibration.lines(identity_of(place, dtype, rank.keeps))
        notes += q.calibration.notices
    notes.append(f"assumed: {IMPORTS_S:g} s from the command to the first layer, besides reading what stays in memory")
    return list(dict.fromkeys(notes))


# ---- settings that were chosen ----------------------------------------------------------------------


def _settled(q: Question, forecaster: Forecaster, best: Variant) -> dict[str, Any]:
    keeps = {rank.keeps for rank in best.ranks}
    settled: dict[str, Any] = {
        "memory": {"recompute": ("never" if keeps == {True} else "always" if keeps == {False} else "auto")},
        "compute": {"dtype": forecaster.dtypes[0]} if len(set(forecaster.dtypes)) == 1 else {},
    }
    place, rank = forecaster.places[0], best.ranks[0]
    if len(forecaster.places) == 1:
        if place.facts.kind == "cpu":
            settled["compute"]["threads"] = place.threads
            settled["memory"]["state"] = "disk" if rank.state_on_disk else "ram"
        else:
            settled["compute"]["device"] = "cuda"
        if best.budgets[0] is not None:
            settled["memory"]["budget"] = f"{best.budgets[0]}B"
        return settled
    entries = [_entry(p, q.devices[p.rank] if q.devices else None) for p in forecaster.places]
    for entry, budget in zip(entries, best.budgets, strict=True):
        if budget is not None:
            entry["budget"] = f"{budget}B"
    settled["devices"] = entries
    split = best.split
    settled["split"] = {"kind": "stages" if len(split.stages) > 1 else split.stages[0].way}
    if len(split.stages) > 1:
        settled["split"] |= {
            "stages": [len(stage.ranks) for stage in split.stages],
            "layers": [stage.last - stage.first for stage in split.stages],
            "groups": split.groups,
        }
    shares = {rank: share for stage in split.stages for rank, share in zip(stage.ranks, stage.shares, strict=True)}
    settled["split"]["shares"] = [shares[k] for k in range(len(forecaster.places))]
    return settled


def _entry(place: RankPlace, asked: DeviceConfig | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"device": "cpu" if place.facts.kind == "cpu" else "cuda"}
    if asked is not None:
        entry = {name: value for name, value in asked.model_dump(mode="json").items() if value is not None}
    if place.threads is not None:
        entry["threads"] = place.threads
    return entry


# ---- what would help ------------------------------------------------------------------------------


def _helps(q: Question, forecaster: Forecaster, best: Variant) -> list[Change]:
    """Single changes that make a token cheaper, best first. The split stays, where there are several devices."""
    now = best.step_s / forecaster.tokens
    found = []
    for what, changed, same in _faster(q, forecaster, best):
        split = best.split if same is True else _wider(best.split) if same else None
        other = _best(changed, split, None if "keep activations" in what else best.recompute)
        if other is None or not other[1].fits:
            continue
        times = now / (other[1].step_s / other[0].tokens)
        if times >= WORTH:
            found.append(Change(what, times, other[1].step_s))
    return sorted(found, key=lambda change: -(change.times or 0.0))


def _best(q: Question, split: Split | None, recompute: str | None = None) -> tuple[Forecaster, Variant] | None:
    """The best way of a changed question; under a given split and `memory.recompute` there is one alone."""
    try:
        forecaster = Forecaster(q, split)
        if split is not None and recompute is not None:
            return forecaster, forecaster.given_way(split, recompute)
        return forecaster, forecaster.variants()[0]
    except UserError:  # a change that contradicts settings is none that can be made
        return None


def _faster(q: Question, forecaster: Forecaster, best: Variant) -> Iterator[tuple[str, Question, bool | str]]:
    """Changes to try: what, the question with it, and whether the split stays ("more": over twice the devices)."""
    m = q.machine
    on_disk = sum(rank.on_disk for rank in best.ranks)
    layer = max(x.store_bytes for x in q.shape.layers)
    gpu = forecaster.places[0].facts.kind == "cuda"
    streamed = max(rank.on_disk + rank.in_host for rank in best.ranks)
    unlike = dict.fromkeys(place.facts.name for place in forecaster.places)
    if len(unlike) > 1 and q.split.kind == "auto" and q.split.shares is None:
        slowest = min(forecaster.places, key=lambda place: place.facts.matmul_flops_per_s).facts.name
        out = [place.rank for place in forecaster.places if place.facts.name == slowest]
        yield f"leave out {slowest}", _without(q, forecaster, out), False
    if on_disk:
        hosts = tuple(h.model_copy(update={"disk": h.disk and h.disk.model_copy(
            update={"read_bytes_per_s": 2 * h.disk.read_bytes_per_s})}) for h in m.hosts)  # fmt: skip
        yield "a disk that reads twice as fast", replace(q, machine=m.model_copy(update={"hosts": hosts})), True
        more = round(1.5 * on_disk * layer)
        yield (
            f"+{format_bytes(more)} of RAM",
            replace(_more_budget(q, 0 if gpu else more), machine=_more_ram(m, more)),
            True,
        )
    if gpu and streamed:
        more = round(1.7 * streamed * layer)
        yield f"+{format_bytes(more)} of memory on each GPU", replace(q, machine=_more_memory(m, more)), True
        links = tuple(
            x.model_copy(update={n: v * 2 for n, v in x if n.endswith("bytes_per_s") and v}) for x in m.host_links
        )
        yield "links to the host twice as fast", replace(q, machine=m.model_copy(update={"host_links": links})), True
    if q.train.rows_per_step is None:
        tokens = 4 * q.train.tokens_per_step
        train = q.train.model_copy(update={"tokens_per_step": tokens})
        yield f"train.tokens_per_step = {tokens} (fewer, larger steps)", replace(q, train=train), True
    if not all(rank.keeps for rank in best.ranks) and q.memory.recompute == "auto" and not gpu:
        more = _kept_bytes(best)
        yield f"+{format_bytes(more)} of RAM, to keep activations", replace(
            _more_budget(q, more), machine=_more_ram(m, 2 * more)), True  # fmt: skip
    if (
        not q.devices
        and q.split.shares is None
        and len(best.split.stages) == 1
        and len(m.hosts) == 1
        and len(m.devices) < 8
        and gpu
        and len(set(d.name for d in m.devices)) == 1
    ):
        yield (
            f"{2 * len(m.devices)} x {m.devices[0].name} in place of {len(m.devices)}",
            replace(q, machine=_doubled(m)),
            "more",
        )


def _wider(split: Split) -> Split:
    """One stage over twice the ranks, evenly."""
    (stage,) = split.stages
    n = 2 * len(stage.ranks)
    return replace(split, stages=(replace(stage, ranks=tuple(range(n)), shares=(1 / n,) * n),))


def _kept_bytes(best: Variant) -> int:
    """About what kept activations would take on the rank where they are most."""
    return max(round(4 * rank.parts.get("activations", 0)) for rank in best.ranks) + (1 << 30)


def _more_ram(m: Machine, nbytes: int) -> Machine:
    hosts = tuple(
        h.model_copy(update={"ram_bytes": h.ram_bytes + nbytes, "limit_bytes": h.limit_bytes + nbytes}) for h in m.hosts
    )
    devices = tuple(
        d.model_copy(update={"memory_bytes": d.memory_bytes + nbytes}) if d.kind == "cpu" else d for d in m.devices
    )
    return m.model_copy(update={"hosts": hosts, "devices": devices})


def _more_memory(m: Machine, nbytes: int) -> Machine:
    devices = tuple(
        d.model_copy(
            update={
                "memory_bytes": d.memory_bytes + nbytes,
                "free_bytes": None if d.free_bytes is None else d.free_bytes + nbytes,
            }
        )
        if d.kind == "cuda"
        else d
        for d in m.devices
    )
    return m.model_copy(update={"devices": devices})


def _more_budget(q: Question, nbytes: int) -> Question:
    """Budgets that were asked for grow too."""
    from lamella.units import parse_bytes

    def grown(budget: str | None) -> str | None:
        return None if budget is None else f"{parse_bytes(budget) + nbytes}B"

    memory = q.memory.model_copy(update={"budget": grown(q.memory.budget)})
    devices = tuple(d.model_copy(update={"budget": grown(d.budget)}) for d in q.devices)
    return replace(q, memory=memory, devices=devices)


def _doubled(m: Machine) -> Machine:
    """Twice the devices in one host, linked as the first ones are."""
    n = len(m.devices)
    links = tuple(x.model_copy(update={"device": x.device + n}) for x in m.host_links)
    peers = {frozenset((p.a, p.b)): p for p in m.peer_links}
    more = []
    if m.peer_links:
        like = m.peer_links[0]
        more = [
            like.model_copy(update={"a": a, "b": b})
            for a in range(2 * n)
            for b in range(a + 1, 2 * n)
            if frozenset((a, b)) not in peers
        ]
    return m.model_copy(
        update={
            "devices": m.devices * 2,
            "host_links": (*m.host_links, *links),
            "peer_links": (*m.peer_links, *more),
        }
    )


# ---- what would make it fit -------------------------------------------------------------------------


def _changes(q: Question, forecaster: Forecaster, best: Variant) -> list[Change]:
    """The smallest changes that make everything fit: settings that leave the result as it is, memory, settings that do not."""
    found = []
    short = [rank for rank in best.ranks if not rank.fits]
    if not best.fits_memory:
        for what, changed in _smaller(q, forecaster, best):
            other = _best(changed, None)
            if other is not None and other[1].fits_memory:
                found.append(Change(what, None, other[1].step_s))
                break
    if short:
        found.append(_memory_change(max(short, key=lambda rank: rank.need - rank.have), len(short)))
    for host in best.hosts:
        need, have = sum(host.ram.values()), host.ram_have
        if have is not None and need > have:
            found.append(Change(f"+{format_bytes(need - have)} of RAM in {host.name}"))
        disk, free = sum(host.disk.values()), host.disk_have
        if free is not None and disk > free:
            found.append(Change(f"+{format_bytes(disk - free)} of disk in {host.name}"))
    return found


def _without(q: Question, forecaster: Forecaster, out: list[int]) -> Question:
    """The other devices alone."""
    gpus = [k for k, device in enumerate(q.machine.devices) if device.kind == "cuda"]
    entries = []
    for place in forecaster.places:
        if place.rank not in out:
            asked = q.devices[place.rank] if q.devices else DeviceConfig(device=place.facts.kind)
            device = f"cuda:{gpus.index(place.index)}" if place.facts.kind == "cuda" else asked.device
            entries.append(asked.model_copy(update={"device": device}))
    return replace(q, devices=tuple(entries))


def _memory_change(rank: RankForecast, count: int) -> Change:
    more = f" (and on {count - 1} more)" if count > 1 else ""
    return Change(f"+{format_bytes(rank.need - rank.have)} of memory for {rank.name}{more}")


def _smaller(q: Question, forecaster: Forecaster, best: Variant) -> Iterator[tuple[str, Question]]:
    """Settings to try, those first that leave the result as it is."""
    short = [rank.rank for rank in best.ranks if not rank.fits]
    if 0 < len(short) < len(best.ranks) and q.split.kind == "auto" and q.split.shares is None:
        names = dict.fromkeys(best.ranks[k].name.partition(" (")[2].rstrip(")") for k in short)
        yield f"leave out {' and '.join(names)}", _without(q, forecaster, short)
    if q.memory.recompute == "never":
        yield 'memory.recompute = "auto"', replace(q, memory=q.memory.model_copy(update={"recompute": "auto"}))
    if q.memory.state == "ram" and len(q.devices) < 2:
        yield 'memory.state = "disk"', replace(q, memory=q.memory.model_copy(update={"state": "disk"}))
    tokens = q.train.micro_batch_tokens
    longest = max(q.rows.lengths)
    while tokens > max(longest // 2, 64):
        tokens //= 2
        train = q.train.model_copy(update={"micro_batch_tokens": tokens})
        yield f"train.micro_batch_tokens = {tokens}", replace(q, train=train)
    if q.train.rows_per_step is None:
        for part in (2, 4, 8):
            size = q.train.tokens_per_step // part
            if size >= longest:
                train = q.train.model_copy(update={"tokens_per_step": size})
                yield f"train.tokens_per_step = {size}", replace(q, train=train)
    ranks = [rank for rank in (q.lora.rank // 2, q.lora.rank // 4, 1) if rank >= 1]
    for rank in dict.fromkeys(ranks):
        lora = q.lora.model_copy(update={"rank": rank})
        yield f"lora.rank = {rank}", replace(q, lora=lora)

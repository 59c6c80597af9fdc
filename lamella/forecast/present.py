"""A plan as people read it: the verdict first, then tables that fit 80 columns; or in a few lines, for `lamella train`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lamella.forecast.money import format_hours, format_usd
from lamella.forecast.number import Number
from lamella.forecast.outcome import Change, Forecast, HostForecast, RankForecast
from lamella.forecast.serving import Serve, Serving
from lamella.forecast.shape import ModelShape
from lamella.forecast.trainable import alternatives, trainable_set
from lamella.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from lamella.forecast.document import PlanFile
    from lamella.forecast.forecast import Question

_COLUMNS = 4
"""Kinds of ranks that get a column of their own."""
_SHOWN = 8


def verdict(plan: PlanFile, found: Forecast) -> list[str]:
    """Does it fit, how long, what does it cost. The first line says it; where it does not fit the others say what lacks."""
    rows = f"{plan.rows.rows:,} rows"
    if not found.fits:
        lines = [f"does not fit on {plan.machine.name}: {_lack(found)}"]
        lines += [f"  {text}" for text in found.shortfall]
        return [*lines, f"  smallest change that would: {changes_of(found)}"]
    held = Counter((_device(rank), _of(rank.need, rank.have)) for rank in found.ranks)
    if len(held) == 1:
        ((name, used), count), *_ = held.items()
        where = f"{used} on " + (f"each of {count} x {name}" if count > 1 else name)
    else:
        parts = [f"{used} on {f'{n} x ' if n > 1 else ''}{name}" for (name, used), n in held.items()]
        where = ", ".join(parts[:_COLUMNS]) + (f" and {len(parts) - _COLUMNS} more" if len(parts) > _COLUMNS else "")
    money = plan.money
    cost = f" and {format_usd(money.usd)}" if money.usd is not None else ""
    return [f"fits: {where}; {format_hours(money.hours)}{cost} for {rows}"]


def _device(rank: RankForecast) -> str:
    """`H100-80` of `rank 3 (H100-80)`."""
    return rank.name.partition("(")[2].rpartition(")")[0] if rank.name.startswith("rank ") else rank.name


def _of(need: int, have: int) -> str:
    """`44.9 of 85.5 GB`."""
    used, limit = format_bytes(need), format_bytes(have)
    number, _, unit = used.partition(" ")
    return f"{number if limit.endswith(f' {unit}') else used} of {limit}"


def _lack(found: Forecast) -> str:
    """What there is too little of, in few words."""
    short = Counter(f"{_device(rank)}: need {_of(rank.need, rank.have)}" for rank in found.ranks if not rank.fits)
    if not short:
        return "; ".join(": ".join(text.split(": ")[:3]) for text in found.shortfall)
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in short.items())


def changes_of(found: Forecast) -> str:
    """The smallest changes that would make it fit."""
    return "; or ".join(change.what for change in found.changes) or "take a larger machine, or a smaller model"


def short(plan: PlanFile, found: Forecast) -> list[str]:
    """Five to eight lines."""
    lines = [f"plan: {verdict(plan, found)[0]}", *verdict(plan, found)[1:]]
    if found.played is None:
        return lines
    trained = sum(site.parameters for site in found.sites)
    lines.append(f"  trained: {format_count(trained)} parameters in {len(found.sites)} pairs, {found.dtype}")
    lines += [f"  {text}" for text in found.reasons[:2]]
    lines.append(
        f"  {found.steps} steps of {format_seconds(found.step_s)}, {format_count(found.tokens_per_s)} tokens/s; "
        + _chain(found, 3)
    )
    if found.helps:
        lines.append(f"  would help most: {_change(found.helps[0])}")
    if plan.machine.notes and plan.machine.notes[0].startswith("rough"):
        lines.append(f"  {plan.machine.notes[0]}")
    return lines


def _chain(found: Forecast, most: int) -> str:
    """What a step's time goes to, largest part first."""
    assert found.played is not None
    parts = [part for part in found.played.bottleneck[:most] if part.share >= 0.005]
    return ", ".join(f"{part.share:.0%} {part.what}" for part in parts)


def _change(change: Change) -> str:
    return change.what if change.times is None else f"{change.what}: {change.times:.3g}x"


def whole(plan: PlanFile, question: Question, found: Forecast) -> Iterable[RenderableType]:
    """Everything, for a console of 80 columns or more."""
    from rich.text import Text

    shape = question.shape
    yield Text(verdict(plan, found)[0], style="bold green" if found.fits else "bold red")
    yield from _section(
        f"Model: {plan.model.name} ({plan.model.model_type}, {len(shape.layers)} layers, of {shape.source})"
    )
    yield _parameters(shape)
    yield Text(_sizes(shape))
    yield from _section("Trained")
    yield _trained(question, found)
    if found.ranks:
        yield from _section("Memory at the peak")
        yield from _memory(found.ranks)
        for host in found.hosts:
            for line in _host_lines(host):
                yield Text(line)
    if found.played is not None:
        yield from _section(f"A step of {found.step_tokens:,.0f} tokens: {format_seconds(found.step_s)}")
        yield from _time(found)
    yield from _section("The run")
    for line in _run_lines(plan, found):
        yield Text(line)
    yield from _section("Chosen, and what else was looked at")
    yield from _choices(found)
    if plan.serving is not None:
        yield from _section("Serving the result")
        yield from _serving(plan.serving)
    yield from _section("Assumptions")
    for note in plan.notes:
        yield Text(f"- {note}", overflow="fold")


def _section(title: str) -> Iterable[RenderableType]:
    from rich.text import Text

    yield Text("")
    yield Text(title, style="bold")


def _table(*titles: str, left: int = 1) -> Table:
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for k, title in enumerate(titles):
        table.add_column(title, justify="left" if k < left else "right", overflow="fold")
    return table


def _parameters(shape: ModelShape) -> Table:
    table = _table("parameters", "total", "share", "active", "share")
    total, active = shape.total_parameters, shape.active_parameters
    rows = sorted(shape.parameters.items(), key=lambda item: -item[1])
    for kind, count in [*((k, n) for k, n in rows if n), ("all", total)]:
        used = active if kind == "all" else shape.active.get(kind, 0)
        table.add_row(kind, format_count(count), f"{count / total:.1%}", format_count(used), f"{used / active:.1%}")
    return table


def _sizes(shape: ModelShape) -> str:
    layers = [layer.store_bytes for layer in shape.layers]
    low, high = format_bytes(min(layers)), format_bytes(max(layers))
    text = f"checkpoint {format_bytes(shape.checkpoint_bytes)}; store {format_bytes(shape.store_bytes)}: "
    text += f"{len(layers)} layers of {low if low == high else f'{low} to {high}'} and {format_bytes(shape.outer_store_bytes)} outside"
    if shape.beyond_parameters:
        text += f"; {format_count(shape.beyond_parameters)} parameters beyond the decoder are not used"
    return text


def _trained(question: Question, found: Forecast) -> Table:
    """What is trained, and what else the same rank could train: on experts the difference is a cliff."""
    table = _table("set", "parameters", "adapter", "gradients", "optimizer")
    asked = trainable_set(found.sites)
    for other in [asked, *alternatives(question.shape, question.lora)]:
        name = (
            other.name
            if other.expert_rank is None or "shared" in other.name
            else f"{other.name} ({other.expert_rank} on experts)"
        )
        style = "bold" if other is asked else "" if other.total != asked.total else "dim"
        cells = (other.adapter_bytes, other.gradient_bytes, other.optimizer_bytes)
        table.add_row(name, format_count(other.total), *map(format_bytes, cells), style=style)
    return table


def _groups(ranks: Sequence[RankForecast]) -> list[list[RankForecast]]:
    """Ranks that are alike to three figures, together."""
    groups: dict[tuple[object, ...], list[RankForecast]] = {}
    for rank in ranks:
        shown = tuple((part, format_bytes(value)) for part, value in rank.parts.items())
        groups.setdefault((_device(rank), shown, rank.on_device, rank.in_host, rank.on_disk), []).append(rank)
    return list(groups.values())


def _title(ranks: Sequence[RankForecast]) -> str:
    if len(ranks) == 1:
        return ranks[0].name
    numbers = [rank.rank for rank in ranks]
    whole_run = numbers == list(range(numbers[0], numbers[-1] + 1))
    which = f"{numbers[0]}-{numbers[-1]}" if whole_run else ", ".join(map(str, numbers))
    return f"ranks {which} ({_device(ranks[0])})"


def _memory(ranks: Sequence[RankForecast]) -> Iterable[RenderableType]:
    from rich.text import Text

    groups = _groups(ranks)
    if len(groups) > _COLUMNS:
        for group in groups:
            yield Text(f"{_title(group)}: {group[0].line()}")
            yield Text(f"    {_layers(group[0])}")
        return
    table = _table("", *(_title(group) for group in groups))
    names = dict.fromkeys(part for group in groups for part, value in group[0].parts.items() if value)
    for part in names:
        table.add_row(part, *(format_bytes(group[0].parts.get(part, 0)) for group in groups))
    table.add_row("need", *(format_bytes(group[0].need) for group in groups), style="bold")
    table.add_row("have", *(format_bytes(group[0].have) for group in groups))
    yield table
    for group in groups:
        yield Text((f"{_title(group)}: " if len(groups) > 1 else "") + _layers(group[0]))


def _layers(rank: RankForecast) -> str:
    parts = [f"{n} {where}" for n, where in ((rank.on_device, "on the device"), (rank.in_host, "in host RAM"),
                                             (rank.on_disk, "on disk")) if n]  # fmt: skip
    text = f"layers {rank.first} to {rank.last - 1}: " + ", ".join(parts)
    if rank.share < 0.9995:
        text += f"; {rank.share:.0%} of their work"
    text += "; activations kept" if rank.keeps else "; layers recomputed"
    return text + ("; adapter state in a file" if rank.state_on_disk else "")


def _host_lines(host: HostForecast) -> Iterable[str]:
    for what, parts, have in (("RAM", host.ram, host.ram_have), ("page-locked RAM", host.pinned, host.pinned_have),
                              ("disk", host.disk, host.disk_have), ("RAM while quantising", host.quantise, host.ram_have)):  # fmt: skip
        if need := sum(parts.values()):
            shown = ", ".join(
                f"{name} {format_bytes(n)}" for name, n in sorted(parts.items(), key=lambda x: -x[1]) if n
            )
            limit = "" if have is None else f" of {format_bytes(have)}"
            yield f"{host.name}: {what}: {format_bytes(need)}{limit}: {shown}"


def _time(found: Forecast) -> Iterable[RenderableType]:
    from rich.text import Text

    assert found.played is not None
    yield Text(f"longest chain: {_chain(found, 5)}")
    table = _table("rank", "busy", "idle", "most time goes to", left=1)
    table.columns[3].justify = "left"
    alike: dict[tuple[str, str, str, str], list[RankForecast]] = {}
    for rank in found.ranks:
        cells = (_device(rank), f"{rank.busy:.0%}", f"{rank.idle:.0%}", _spent(rank))
        alike.setdefault(cells, []).append(rank)
    for (_, busy, idle, spent), ranks in list(alike.items())[:_SHOWN]:
        table.add_row(_title(ranks), busy, idle, spent)
    yield table
    if len(alike) > _SHOWN:
        yield Text(f"and {len(alike) - _SHOWN} more")
    used = [(name, use) for name, use in found.played.links.items() if use.nbytes]
    if used:
        table = _table("link", "a step", "busy")
        for name, use in sorted(used, key=lambda item: -item[1].busy_s)[:_SHOWN]:
            table.add_row(name, format_bytes(use.nbytes), f"{use.share:.0%}")
        yield table


def _spent(rank: RankForecast) -> str:
    spent = Counter(rank.causes)
    spent.update({kind: s for kind, s in rank.seconds.items() if kind not in ("forward", "backward")})
    spent.update({f"waiting for {what}": s for what, s in rank.wait_s.items()})
    return ", ".join(f"{what} {format_seconds(s)}" for what, s in spent.most_common(4) if s > 0)


def _run_lines(plan: PlanFile, found: Forecast) -> Iterable[str]:
    rows = plan.rows
    lengths = ", ".join(f"{name} {value:,}" for name, value in rows.lengths.items())
    if len(set(rows.lengths.values())) == 1:
        lengths = f"{rows.lengths['max']:,} each"
    labels = f"{rows.label_tokens / rows.tokens:.0%} labels"
    yield f"{rows.source}: {rows.rows:,} rows, {format_count(rows.tokens)} tokens ({lengths}), {labels}"
    if found.played is None:
        return
    yield (
        f"{found.steps:,} steps, {format_count(found.tokens_per_s)} tokens/s, {found.utilisation:.0%} of the matmul rate; "
        f"{format_seconds(found.start_s)} to start"
    )
    if found.quantise_s:
        yield f"quantising once, before: about {format_seconds(found.quantise_s)}"
    money = plan.money
    yield money.line()
    if money.usd is not None and money.usd_per_epoch is not None and money.usd_per_million_tokens is not None:
        yield f"{format_usd(money.usd_per_epoch)} an epoch, {format_usd(money.usd_per_million_tokens)} per million tokens"
    for price in money.prices:
        yield f"price: {price}"


def _choices(found: Forecast) -> Iterable[RenderableType]:
    from rich.text import Text

    for text in found.reasons:
        if not any(text.startswith(f"{rank.name}:") for rank in found.ranks):  # the memory's table has said it
            yield Text(text)
    if found.rejected:
        table = _table("not taken", "a step", "", left=1)
        table.columns[2].justify = "left"
        for other in found.rejected[:_SHOWN]:
            seconds = "" if other.step_s is None else format_seconds(other.step_s)
            table.add_row(other.what, seconds, other.why)
        yield table
    for change in found.helps[:3]:
        yield Text(f"would help: {_change(change)}")


def _serving(serving: Serving) -> Iterable[RenderableType]:
    from rich.text import Text

    yield Text("weights: " + ", ".join(f"{form} {format_bytes(n)}" for form, n in serving.weights.items()))
    cache = ", ".join(f"{_length(n)} {format_bytes(nbytes)}" for n, nbytes in serving.kv_bytes.items())
    yield Text(f"KV cache: {format_bytes(serving.kv_bytes_per_token)} a token; of one sequence: {cache}")
    entries = [("here", entry) for entry in serving.here] + [("smallest", entry) for entry in serving.smallest]
    if entries:
        length = entries[0][1].length
        table = _table("format", "on", f"{_length(length)} at once", "tokens/s, 1", "tokens/s, all", "$ per M", left=2)
        for where, entry in entries:
            table.add_row(entry.format, f"{entry.machine}{' (here)' if where == 'here' else ''}", *_serve_cells(entry))
        yield table
    for form in serving.nowhere:
        yield Text(f"{form}: eight of no known device hold it")
    for note in serving.notes:
        yield Text(f"- {note}", style="dim")


def _serve_cells(entry: Serve) -> tuple[str, str, str, str]:
    first, last = entry.decode[0], entry.decode[-1]
    usd = "" if last.usd_per_million_tokens is None else format_usd(last.usd_per_million_tokens)
    return str(last.sequences), f"< {first.tokens_per_s:,.0f}", f"< {last.tokens_per_s:,.0f}", usd


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def explained(numbers: Sequence[Number]) -> Iterable[str]:
    """Every figure with its formula and inputs."""
    for number in numbers:
        yield f"{number.name} = {_shown(number.value)} {number.unit}".rstrip()
        yield f"    = {number.formula}"
        if number.inputs:
            yield "    with " + ", ".join(
                f"{name} = {value if isinstance(value, str) else _shown(value)}"
                for name, value in number.inputs.items()
            )


def _shown(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"

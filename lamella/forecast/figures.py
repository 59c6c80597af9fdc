"""Every figure of a forecast with its formula and inputs, for `--explain`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lamella.forecast.number import Number
from lamella.forecast.outcome import Forecast, RankForecast
from lamella.forecast.shape import ModelShape
from lamella.plan.costs import STATE_BYTES

if TYPE_CHECKING:
    from lamella.forecast.forecast import Question


def numbers_of(question: Question, found: Forecast) -> list[Number]:
    """Model, trained set, data, memory, time."""
    return [
        *_model(question.shape),
        *_trained(found),
        *_rows(question),
        *(number for rank in found.ranks for number in _memory(rank)),
        *_hosts(found),
        *_time(question, found),
        *_links(found),
    ]


def _number(name: str, value: float, unit: str, formula: str, **inputs: float | str) -> Number:
    return Number(name=name, value=value, unit=unit, formula=formula, inputs=inputs)


def _model(shape: ModelShape) -> list[Number]:
    held: dict[str, Counter[tuple[int, ...]]] = {}
    passed: dict[str, Counter[tuple[int, ...]]] = {}
    for layer in shape.layers:
        for m in layer.matrices:
            held.setdefault(m.kind, Counter())[m.experts, m.outputs, m.inputs] += 1
            passed.setdefault(m.kind, Counter())[m.active, m.outputs, m.inputs] += 1
    numbers = []
    for what, sums, terms in (("parameters", shape.parameters, held), ("active", shape.active, passed)):
        for kind, value in sums.items():
            formula, inputs = "of the tensors' shapes", {"source": shape.source}
            if kind in terms and _product(terms[kind]) == value:
                formula, inputs = _terms(terms[kind]), {}
            elif kind in ("embedding", "head") and value == shape.vocab * shape.hidden:
                formula, inputs = f"{shape.vocab} * {shape.hidden}", {}
            numbers.append(_number(f"model.{what}.{kind}", value, "parameters", formula, **inputs))
        numbers.append(_sum(f"model.{what}.total", "parameters", sums))
    layers = sum(layer.store_bytes for layer in shape.layers)
    numbers.append(
        _number(
            "model.checkpoint", shape.checkpoint_bytes, "B", "of the tensors' shapes and dtypes", source=shape.source
        )
    )
    numbers.append(
        _number("model.store", shape.store_bytes, "B", "layers + outer", layers=layers, outer=shape.outer_store_bytes)
    )
    return numbers


def _product(terms: Counter[tuple[int, ...]]) -> int:
    return sum(count * a * b * c for (a, b, c), count in terms.items())


def _terms(terms: Counter[tuple[int, ...]]) -> str:
    return " + ".join(
        " * ".join(str(factor) for factor in (count, *shape) if factor != 1) or "1" for shape, count in terms.items()
    )


def _sum(name: str, unit: str, parts: dict[str, int]) -> Number:
    named = {re.sub(r"\W+", "_", part): float(value) for part, value in parts.items() if value}
    assert len(named) == sum(map(bool, parts.values())), parts
    return Number(name=name, value=sum(parts.values()), unit=unit, formula=" + ".join(named) or "0", inputs=dict(named))


def _trained(found: Forecast) -> list[Number]:
    pairs: dict[str, Counter[tuple[int, int, int, int]]] = {}
    for site in found.sites:
        m = site.matrix
        kind: str = "shared_experts" if m.shared else m.kind
        pairs.setdefault(kind, Counter())[m.experts, site.rank, m.inputs, m.outputs] += 1
    numbers, total = [], 0
    for kind, terms in pairs.items():
        value = sum(n * e * r * (i + o) for (e, r, i, o), n in terms.items())
        formula = " + ".join(
            f"{n} * {e} * {r} * ({i} + {o})" if e > 1 else f"{n} * {r} * ({i} + {o})"
            for (e, r, i, o), n in terms.items()
        )
        numbers.append(_number(f"trained.{kind}", value, "parameters", formula))
        total += value
    for what, each in (("file", 4), ("gradients", 4), ("moments", 8), ("state", STATE_BYTES)):
        numbers.append(
            _number(f"trained.{what}", each * total, "B", "bytes_each * parameters", bytes_each=each, parameters=total)
        )
    return numbers


def _rows(question: Question) -> list[Number]:
    rows = question.rows
    counted = {"counted": "counted", "sampled": "counted in a sample, the others from their bytes",
               "characters": "characters / 4", "given": "as given"}[rows.how]  # fmt: skip
    return [
        _number("data.rows", len(rows.lengths), "rows", counted, source=rows.source),
        _number("data.tokens", rows.tokens, "tokens", counted, source=rows.source),
        _number("data.labels", rows.label_tokens, "tokens", counted, source=rows.source),
    ]


def _memory(rank: RankForecast) -> list[Number]:
    start = f"memory.rank {rank.rank}"
    numbers = [
        _number(f"{start}.{part}", value, "B", rank.formulas.get(part, "see docs/cost-model.md"), device=rank.name)
        for part, value in rank.parts.items()
    ]
    numbers.append(_sum(f"{start}.need", "B", rank.parts))
    numbers.append(
        _number(f"{start}.have", rank.have, "B", "of the machine, or the budget asked for", device=rank.name)
    )
    return numbers


def _hosts(found: Forecast) -> Iterable[Number]:
    for host in found.hosts:
        for what, parts in (
            ("RAM", host.ram),
            ("page-locked", host.pinned),
            ("disk", host.disk),
            ("quantising", host.quantise),
        ):
            for part, value in parts.items():
                yield _number(f"host {host.name}.{what}.{part}", value, "B", "see docs/cost-model.md", host=host.name)
            if parts:
                yield _sum(f"host {host.name}.{what}.need", "B", parts)


def _time(question: Question, found: Forecast) -> list[Number]:
    if found.played is None:
        return []
    chain = {part.what: part.seconds for part in found.played.bottleneck}
    numbers = [
        Number(name="step.seconds", value=found.played.step_s, unit="s",
               formula="sum of the longest chain of pieces of the typical step, played", inputs=dict(chain)),
        _number("step.mean", found.step_s, "s", "the typical step, scaled to a step of mean length",
                typical=found.played.step_s, tokens=found.step_tokens),
        _number("step.flops", found.flops, "FLOP", "useful products of the typical step (docs/cost-model.md)", model=question.shape.name),
        _number("speed", found.tokens_per_s, "tokens/s", "step_tokens / step_s", step_tokens=found.step_tokens, step_s=found.step_s),
        _number("run.steps", found.steps, "steps", "train.steps, or as many as train.epochs passes take",
                rows=len(question.rows.lengths), epochs=question.train.epochs),
        _number("run.seconds", found.run_s, "s", "steps * step_s + start_s", steps=found.steps, step_s=found.step_s,
                start_s=found.start_s),
        _number("run.hours", found.run_s / 3600, "h", "seconds / 3600", seconds=found.run_s),
    ]  # fmt: skip
    for rank in found.ranks:
        for kind, seconds in rank.seconds.items():
            causes = (
                {f"{cause} s": value for cause, value in rank.causes.items()} if kind in ("forward", "backward") else {}
            )
            numbers.append(Number(name=f"time.rank {rank.rank}.{kind}", value=seconds, unit="s",
                                  formula="sum of this rank's pieces of this kind", inputs={**causes, "device": rank.name}))  # fmt: skip
        for what, seconds in rank.wait_s.items():
            numbers.append(
                _number(
                    f"time.rank {rank.rank}.wait for {what}",
                    seconds,
                    "s",
                    "gaps in its computing while it waited for this",
                    device=rank.name,
                )
            )
        numbers.append(_number(f"time.rank {rank.rank}.idle", rank.idle, "share", "1 - busy", busy=rank.busy))
    return numbers


def _links(found: Forecast) -> list[Number]:
    if found.played is None:
        return []
    return [
        _number(f"link.{name}", use.nbytes, "B", "bytes of all pieces that pass it in a step", busy_s=use.busy_s, of_step=use.share)
        for name, use in found.played.links.items()
    ]  # fmt: skip

"""All candidates of a comparison, one after the other; `compare.json` when all have answered."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lamella.compare.answers import Answers
from lamella.compare.ask import Asker
from lamella.compare.here import answer_baseline, answer_here, check_here
from lamella.compare.settings import Candidate, CompareConfig
from lamella.compare.spans import SpanMetrics, SpanTask, is_span_task, load_span_task, measure_spans, span_difference
from lamella.compare.statistics import confusion, difference
from lamella.console import notice, progress
from lamella.endpoint.cache import AnswerCache
from lamella.endpoint.limits import Ledger
from lamella.errors import UserError
from lamella.eval.metrics import WARN_SHARE, Prediction, measure
from lamella.eval.task import load_task
from lamella.files import make_folder, write_json, write_text

CACHE = "answers.sqlite"


def compare(config: CompareConfig, out: Path, *, transport: Any = None, sleep: Any = asyncio.sleep) -> dict[str, Any]:
    """Ask every candidate and write `compare.json`, `predictions.jsonl` and `changed.jsonl` to `out`.

    Args:
        transport, sleep: for tests, of endpoints.

    Raises:
        UserError: bad input, a candidate that refuses; nothing is lost: answers are kept in `out`.
        RunFailed: the ceiling is reached, or rows stayed without an answer.
    """
    task: Any = load_span_task(config.task) if is_span_task(config.task) else load_task(config.task)
    if config.limit is not None:
        task = task.limited(config.limit)
    for note in task.notes:
        notice(note)
    make_folder(out)
    cache = AnswerCache(out / CACHE)
    try:
        ledger = Ledger(config.ceiling_amount, cache.money())
        askers = {c.name: Asker(c, task, config.seed, cache, ledger, transport=transport, sleep=sleep)
                  for c in config.candidates if c.endpoint is not None}  # fmt: skip
        for candidate in config.candidates:
            _check(candidate, task, config, askers)
        answers: dict[str, Answers] = {}
        for candidate in config.candidates:
            answers[candidate.name] = _answer(candidate, task, config, out, cache, askers)
        tree = document(config, task, answers, ledger.spent)
    finally:
        cache.close()
    write_text(out / "predictions.jsonl", _lines(answers))
    write_text(out / "changed.jsonl", (json.dumps(line, ensure_ascii=False) + "\n" for line in changed(task, answers)))
    write_json(out / "compare.json", tree)
    return tree


def _check(candidate: Candidate, task: Any, config: CompareConfig, askers: dict[str, Asker]) -> None:
    if isinstance(task, SpanTask) and (
        candidate.baseline is not None or candidate.answering not in ("think", "generate")
    ):
        raise UserError(f"candidate {candidate.name!r}: a task of spans is answered by generate or think",
                        fix='set answering = "generate"')  # fmt: skip
    if candidate.name in askers:
        asker = askers[candidate.name]
        asker.check()
        if asker.price is not None and asker.price.currency != config.currency:
            raise UserError(f"the price of {candidate.name!r} is in {asker.price.currency}, the comparison in {config.currency}",
                            fix="give all in one currency")  # fmt: skip
    else:
        check_here(candidate, task)


def _answer(
    candidate: Candidate, task: Any, config: CompareConfig, out: Path, cache: AnswerCache, askers: dict[str, Asker]
) -> Answers:
    if candidate.baseline is not None:
        return answer_baseline(candidate, task, config.seed, config.resamples)
    if candidate.name not in askers:
        return answer_here(candidate, task, out, cache, config.seed, config.resamples)
    with progress(f"ask {candidate.name}", len(task.test), "rows") as meter:
        return asyncio.run(askers[candidate.name].ask_all(meter))


def _lines(answers: dict[str, Answers]) -> Iterator[str]:
    for name, given in answers.items():
        for p in given.predictions:
            yield json.dumps({"candidate": name, **asdict(p), "correct": p.correct}, ensure_ascii=False) + "\n"


def changed(task: Any, answers: dict[str, Answers]) -> Iterator[dict[str, Any]]:
    """Rows where a candidate is right and the first is wrong, or the other way round."""
    rows = {(r.tenant, r.id): r for r in task.test}
    first, *others = answers
    for name in others:
        for before, after in zip(answers[first].predictions, answers[name].predictions, strict=True):
            if before.correct != after.correct:
                row = rows[before.tenant, before.id]
                yield {
                    "before": first, "after": name, "change": "gained" if after.correct else "lost", "tenant": row.tenant, "id": row.id,
                    "text": row.text, "entity": getattr(row, "entity", ""), "gold": row.label,
                    "before_said": before.label or before.status, "after_said": after.label or after.status,
                }  # fmt: skip


def document(config: CompareConfig, task: Any, answers: dict[str, Answers], spent: float) -> dict[str, Any]:
    """`compare.json`."""
    spans = None
    if isinstance(task, SpanTask):
        spans = {name: measure_spans(task, a.predictions, config.resamples, config.seed) for name, a in answers.items()}
        figures = {name: (found.tree, _span_warnings(found.tree)) for name, found in spans.items()}
    else:
        resampled = {"resamples": config.resamples, "seed": config.seed}
        measured = {name: measure(a.predictions, task.labels, **resampled) for name, a in answers.items()}
        figures = {name: (found.to_json(), found.warnings) for name, found in measured.items()}
    candidates = [_candidate(c, len(task.test), answers[c.name], *figures[c.name], config) for c in config.candidates]
    first, *others = answers
    return {
        "kind": "compare", "version": 1, "name": config.name, "task": task.config.name,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "rows": len(task.test),
        "documents": len({(r.tenant, r.document) for r in task.test}), "tenants": list(task.tenants), "seed": config.seed,
        "resamples": config.resamples, "notes": list(task.notes), "candidates": candidates,
        "differences": [_difference(first, name, answers, spans, task, config) for name in others],
        "confusion": {} if spans is not None else {name: confusion(a.predictions, task.labels) for name, a in answers.items()},
        "changed": {name: _changes(answers[first].predictions, answers[name].predictions) for name in others},
        "spent": {"currency": config.currency, "total": spent, "ceiling": config.ceiling_amount},
        "asked": config.model_dump(mode="json"), "in_effect": {name: a.in_effect for name, a in answers.items()},
    }  # fmt: skip


def _changes(before: Sequence[Prediction], after: Sequence[Prediction]) -> dict[str, int]:
    pairs = list(zip(before, after, strict=True))
    return {
        "gained": sum(b.correct > a.correct for a, b in pairs),
        "lost": sum(b.correct < a.correct for a, b in pairs),
    }


def _span_warnings(tree: dict[str, Any]) -> list[str]:
    return [f"{t}: {100 * m[f'{s}_rate']:.1f} % of answers {s}: their entities are missed" for t, m in tree["tenants"].items()
            for s in ("truncated", "empty", "invalid") if m[f"{s}_rate"] > WARN_SHARE]  # fmt: skip


def _candidate(
    c: Candidate, rows: int, given: Answers, metrics: dict[str, Any], warnings: list[str], config: CompareConfig
) -> dict[str, Any]:
    spent = given.spent
    money = None
    if spent.money is not None:
        prices = (
            given.price.to_json()
            if given.price is not None
            else {"machine_per_hour": c.machine_per_hour, "source": "given"}
        )
        money = {
            "currency": config.currency,
            "total": spent.money,
            "per_1000_documents": 1000 * spent.money / rows,
            "prices": prices,
        }
    where = "endpoint" if c.endpoint else "baseline" if c.baseline else "here"
    return {
        "name": c.name, "where": where, "role": c.part, "model": c.model or c.baseline or str(c.store or c.checkpoint),
        "adapter": None if c.adapter is None else str(c.adapter), "answering": "fit" if c.baseline else c.answering,
        "metrics": metrics, "tokens": spent.tokens(), "latency_s": spent.latency(), "money": money, "errors": 0,
        "retries": spent.retries, "from_cache": spent.from_cache, "wall_s": spent.seconds or spent.wall_s,
        "documents_per_s": rows / spent.seconds if spent.seconds else None, "notes": [*given.notes, *warnings],
    }  # fmt: skip


def _difference(
    before: str,
    after: str,
    answers: dict[str, Answers],
    spans: dict[str, SpanMetrics] | None,
    task: Any,
    config: CompareConfig,
) -> dict[str, Any]:
    if spans is not None:
        average, tenants = span_difference(spans[before], spans[after])
    else:
        average, tenants = difference(answers[before].predictions, answers[after].predictions, task.labels,
                                      resamples=config.resamples, seed=config.seed)  # fmt: skip
    return {
        "before": before,
        "after": after,
        "average": average.to_json(),
        "tenants": {t: d.to_json() for t, d in tenants.items()},
    }

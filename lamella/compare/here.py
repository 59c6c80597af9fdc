"""Candidates that run on this machine: stores, checkpoints, and what needs no model. Answers are kept tenant by tenant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamella.compare.answers import Answers, Spent, in_order, plain
from lamella.compare.settings import Candidate
from lamella.compare.spans import SpanTask
from lamella.console import notice, progress
from lamella.endpoint.cache import AnswerCache, key_of
from lamella.errors import UserError
from lamella.eval.metrics import Prediction
from lamella.eval.run import Mode
from lamella.eval.task import Task
from lamella.files import file_checksum
from lamella.units import parse_bytes

if TYPE_CHECKING:
    from lamella.engine import Engine
    from lamella.engine.engine import Generation

MODES: dict[str, Mode] = {
    "likelihood": "likelihood",
    "constrained": "constrained",
    "think": "generate",
    "generate": "generate",
}
COPY = "copies"
KEPT = ("predictions", "input", "output", "seconds")
"""Keys of a tenant's answers in the cache."""


class Counting:
    """An engine that counts the tokens it writes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.written = 0

    @property
    def config(self) -> Any:
        return self._engine.config

    def score(self, batches: Any) -> Any:
        return self._engine.score(batches)

    def generate(self, prompts: Any, max_new_tokens: int, stop_ids: set[int]) -> Sequence[Generation]:
        found = self._engine.generate(prompts, max_new_tokens, stop_ids)
        self.written += sum(len(g.ids) for g in found)
        return found


def part_of(task: Any, tenant: str) -> Any:
    """The same task with one tenant's test rows."""
    return replace(task, labels={tenant: task.labels[tenant]}, test=tuple(task.rows_of(tenant)))


def store_of(candidate: Candidate, out: Path) -> Path:
    """The candidate's store; a checkpoint is copied into one in its own precision, once.

    Raises:
        UserError: a checkpoint that cannot be read, no room on the disk.
    """
    if candidate.store is not None:
        return candidate.store
    assert candidate.checkpoint is not None
    from lamella.store.formats import Formats, NameRule
    from lamella.store.quantize import QuantizeSettings, quantize_checkpoint

    target = out / COPY / key_of({"checkpoint": str(Path(candidate.checkpoint).resolve())})[:16]
    if not (target / "manifest.json").is_file():
        notice(
            f"{candidate.name}: the checkpoint is copied, in its own precision, to {target}; delete {out / COPY} when done"
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        own = Formats(names=(NameRule(match="*", format="source"),))
        quantize_checkpoint(candidate.checkpoint, target, QuantizeSettings(formats=own))
    return target


def check_here(candidate: Candidate, task: Any) -> None:
    """What can be refused before anything works."""
    if candidate.baseline == "tfidf":
        for tenant in task.tenants:
            if not task.pool_of(tenant):
                raise UserError(
                    f"tenant {tenant!r} has no training rows for {candidate.name!r}", fix="add `train` to the task"
                )
    if candidate.store is not None and not (candidate.store / "manifest.json").is_file():
        raise UserError("is no layer store", fix="make one with `lamella quantize`", path=candidate.store)
    if candidate.adapter is not None and not candidate.adapter.is_dir():
        raise UserError("no such folder", fix="give an adapter's folder", path=candidate.adapter)
    if candidate.baseline is None:
        for tenant in task.tenants:
            task.choose_shots(tenant, candidate.few_shot, 0)


def answer_baseline(candidate: Candidate, task: Task, seed: int, resamples: int) -> Answers:
    """TF-IDF or the majority label."""
    from lamella.eval.baseline import majority_baseline, tfidf_baseline

    make = tfidf_baseline if candidate.baseline == "tfidf" else majority_baseline
    found = make(task, seed=seed, resamples=resamples)
    return Answers(list(found.predictions), Spent(seconds=found.seconds), list(found.notes))


def answer_here(candidate: Candidate, task: Any, out: Path, cache: AnswerCache, seed: int, resamples: int) -> Answers:
    """A store or checkpoint, with or without an adapter.

    Raises:
        UserError: what `Store.open`, `Engine.open`, `Adapter.load` and `evaluate` refuse.
    """
    from lamella.store.reader import Store

    store = Store.open(store_of(candidate, out))
    asked = _asked(candidate, store.manifest.checksum, seed)
    keys = {tenant: key_of({**asked, "rows": _rows(task, tenant)}) for tenant in task.tenants}
    kept = {tenant: cache.get(key, KEPT) for tenant, key in keys.items()}
    spent, notes, in_effect = Spent(), [], {}
    if any(answer is None for answer in kept.values()):
        worker = _Worker(candidate, store, seed, resamples)
        notes, in_effect = list(worker.notes), worker.engine.facts()
        for tenant, answer in kept.items():
            if answer is None:
                kept[tenant] = worker.answer(part_of(task, tenant))
                cache.put(keys[tenant], {**kept[tenant], "notes": notes, "cost": 0.0})  # type: ignore[dict-item]
            else:
                spent.from_cache += len(answer["predictions"])
        worker.engine.close()
    else:
        spent.from_cache = len(task.test)
    found: list[Prediction] = []
    for answer in kept.values():
        assert answer is not None
        found += [Prediction(**p) for p in answer["predictions"]]
        spent.input += answer["input"]
        spent.output += answer["output"]
        spent.seconds += answer["seconds"]
        notes = notes or list(answer.get("notes", []))
    if candidate.machine_per_hour is not None:
        spent.money = spent.seconds / 3600 * candidate.machine_per_hour
    return Answers(in_order(found, [(r.tenant, r.id) for r in task.test]), spent, notes, None, in_effect)


def _asked(candidate: Candidate, store: str, seed: int) -> dict[str, Any]:
    weights = None
    if candidate.adapter is not None:
        files = sorted(
            p for p in candidate.adapter.iterdir() if p.suffix in (".safetensors", ".json", ".jinja", ".npz")
        )
        weights = {p.name: file_checksum(p) for p in files if p.name not in ("receipt.json", "plan.json", "trace.json")}
    return {
        "here": 1, "store": store, "adapter": weights, "answering": candidate.answering, "few_shot": candidate.few_shot,
        "thinking_budget": candidate.thinking_budget if candidate.answering == "think" else None,
        "max_new_tokens": candidate.max_new_tokens, "dtype": candidate.dtype, "device": candidate.device, "seed": seed,
    }  # fmt: skip


def _rows(task: Any, tenant: str) -> list[Any]:
    """What decides a tenant's prompts and labels."""
    test = [[r.id, r.text, getattr(r, "entity", ""), r.label] for r in task.rows_of(tenant)]
    pool = [[r.text, getattr(r, "entity", ""), r.label] for r in task.pool_of(tenant)]
    return [tenant, list(task.labels[tenant]), task.config.model_dump(mode="json"), test, pool]


class _Worker:
    """An engine with the candidate's adapter."""

    def __init__(self, candidate: Candidate, store: Any, seed: int, resamples: int) -> None:
        from lamella.adapter import Adapter
        from lamella.engine import Engine
        from lamella.eval.encoder import StoreEncoder
        from lamella.eval.systems import run_notes

        self.candidate, self.seed, self.resamples = candidate, seed, resamples
        self.encoder = StoreEncoder.open(store.path, candidate.adapter)
        budget = None if candidate.budget is None else parse_bytes(candidate.budget)
        self.engine = Engine.open(
            store, dtype=candidate.dtype, device=candidate.device, budget_bytes=budget, threads=candidate.threads
        )
        self.notes: tuple[str, ...] = ()
        if candidate.adapter is not None:
            self.notes = run_notes(candidate.adapter)
            self.engine.attach(Adapter.load(candidate.adapter, self.engine.skeleton))

    def answer(self, task: Any) -> dict[str, Any]:
        """One tenant's rows, as the cache keeps them."""
        from lamella.eval.run import encode_questions, evaluate, generate_rows

        c = self.candidate
        limit = c.max_new_tokens or task.config.max_new_tokens
        if c.answering == "think":
            limit += c.thinking_budget
        mode = MODES[c.answering]
        questions = encode_questions(
            task, self.engine.config, self.encoder, mode=mode, shots=c.few_shot, seed=self.seed, max_new_tokens=limit
        )
        start_s = time.monotonic()
        counting = Counting(self.engine)
        found: Sequence[Prediction]
        if isinstance(task, SpanTask):
            ((rows, asked, _),) = questions.tenants
            with progress(f"ask {c.name}", len(rows), "rows") as meter:
                found = generate_rows(task, counting, self.encoder, rows, asked, limit, 4096, meter.advance)  # type: ignore[arg-type]
        else:
            found = evaluate(
                task, counting, self.encoder, questions=questions, mode=mode, shots=c.few_shot, name=c.name, max_new_tokens=limit,
                seed=self.seed, resamples=self.resamples,
            ).predictions  # fmt: skip
        prompts = sum(len(ids) for _, asked, _ in questions.tenants for ids in asked)
        return {"predictions": [plain(p) for p in found], "input": prompts, "output": counting.written,
                "seconds": time.monotonic() - start_s + questions.seconds}  # fmt: skip

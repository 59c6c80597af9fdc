"""The systems of one table, from a store: zero-shot, few-shot, one per adapter, and the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamella.adapter import Adapter
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.eval.baseline import majority_baseline, tfidf_baseline
from lamella.eval.encoder import StoreEncoder
from lamella.eval.run import Mode, SystemResult, evaluate
from lamella.eval.task import Task
from lamella.store.reader import Store


def measure_systems(
    task: Task, store_path: Path, adapters: Sequence[Path] = (), *, mode: Mode = "likelihood", shots: int = 8,
    baseline: bool = True, budget_bytes: int | None = None, batch_tokens: int = 4096, length_normalise: bool = False,
    max_new_tokens: int | None = None, dtype: str = "auto", device: str = "cpu", threads: int | None = None,
    seed: int = 0, resamples: int = 1000,
) -> tuple[list[SystemResult], dict[str, Any]]:  # fmt: skip
    """Measure the base without and with examples, every adapter, and the baselines, on the same rows and prompts.

    Where the task has no system text, an adapter's prompts get the one it was trained with; the result says so.

    Args:
        adapters: folders in PEFT format; each is named `tuned` (or `tuned: FOLDER` if there are several).
        shots: examples of the few-shot prompt; 0 leaves that system out. Other names as in `evaluate`.

    Returns:
        The systems in that order, and what was in effect in the engine.

    Raises:
        UserError: what `Store.open`, `Engine.open`, `Adapter.load` and `evaluate` refuse; adapters of one name.
    """
    names = ["tuned"] if len(adapters) == 1 else [f"tuned: {folder.resolve().name}" for folder in adapters]
    if len(set(names)) < len(names):
        names = [f"tuned: {folder}" for folder in adapters]
    if len(set(names)) < len(names):
        raise UserError(f"an adapter is named twice: {[str(a) for a in adapters]}", fix="name each --adapter once")
    store = Store.open(store_path)
    encoder = StoreEncoder.open(store.path)
    engine = Engine.open(store, dtype=dtype, device=device, budget_bytes=budget_bytes, threads=threads)

    def ask(name: str, examples: int, using: StoreEncoder) -> SystemResult:
        return evaluate(
            task, engine, using, mode=mode, shots=examples, name=name, batch_tokens=batch_tokens,
            length_normalise=length_normalise, max_new_tokens=max_new_tokens, seed=seed, resamples=resamples,
        )  # fmt: skip

    results = [ask("zero-shot", 0, encoder)]
    if shots:
        results.append(ask(f"{shots}-shot", shots, encoder))
    for name, folder in zip(names, adapters, strict=True):
        engine.attach(Adapter.load(folder, engine.skeleton))
        results.append(ask(name, 0, StoreEncoder.open(store.path, folder)))
    facts = engine.facts()
    engine.close()
    if baseline:
        results += [
            majority_baseline(task, seed=seed, resamples=resamples),
            tfidf_baseline(task, seed=seed, resamples=resamples),
        ]
    return results, facts

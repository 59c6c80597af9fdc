"""The systems of one table, from a store: zero-shot, few-shot, one per adapter, and the baselines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamella.adapter import Adapter
from lamella.console import notice
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.eval.baseline import majority_baseline, tfidf_baseline
from lamella.eval.encoder import StoreEncoder
from lamella.eval.run import Mode, SystemResult, encode_questions, evaluate
from lamella.eval.task import Task
from lamella.store.reader import Store


def measure_systems(
    task: Task, store_path: Path, adapters: Sequence[Path] = (), *, mode: Mode = "likelihood", shots: int = 8,
    baseline: bool = True, budget_bytes: int | None = None, batch_tokens: int = 4096, length_normalise: bool = False,
    max_new_tokens: int | None = None, dtype: str = "auto", device: str = "cpu", threads: int | None = None,
    seed: int = 0, resamples: int = 1000,
) -> tuple[list[SystemResult], dict[str, Any]]:  # fmt: skip
    """Measure the base without and with examples, every adapter, and the baselines, on the same rows and prompts.

    The baselines come first, and all prompts and adapters are checked, before the model works: an error that can be
    foreseen costs no measurement.

    Where the task has no system text, an adapter's prompts get the one it was trained with; the result says so.

    Args:
        adapters: folders of any known layout; each is named `tuned` (or `tuned: FOLDER` if there are several).
        shots: examples of the few-shot prompt; 0 leaves that system out. Other names as in `evaluate`.

    Returns:
        The systems in that order, and what was in effect in the engine.

    Raises:
        UserError: what `Store.open`, `Engine.open`, `Adapter.load` and `evaluate` refuse; what the baselines refuse; adapters of one name.
    """
    names = ["tuned"] if len(adapters) == 1 else [f"tuned: {folder.resolve().name}" for folder in adapters]
    if len(set(names)) < len(names):
        names = [f"tuned: {folder}" for folder in adapters]
    if len(set(names)) < len(names):
        raise UserError(f"an adapter is named twice: {[str(a) for a in adapters]}", fix="name each --adapter once")
    # All that can be refused is refused before the first walk through the layers: nothing measured gets lost.
    baselines = []
    if baseline:
        baselines = [make(task, seed=seed, resamples=resamples) for make in (majority_baseline, tfidf_baseline)]
    store = Store.open(store_path)
    encoder = StoreEncoder.open(store.path)
    systems: list[tuple[str, int, StoreEncoder, Path | None]] = [("zero-shot", 0, encoder, None)]
    if shots:
        systems.append((f"{shots}-shot", shots, encoder, None))
    for name, folder in zip(names, adapters, strict=True):
        systems.append((name, 0, StoreEncoder.open(store.path, folder), folder))
    engine = Engine.open(store, dtype=dtype, device=device, budget_bytes=budget_bytes, threads=threads)
    questions = [
        encode_questions(
            task, engine.config, using, mode=mode, shots=examples, seed=seed, max_new_tokens=max_new_tokens
        )
        for _, examples, using, _ in systems
    ]
    notes = [() if own is None else run_notes(own) for *_, own in systems]
    for (name, _, _, own), told in zip(systems, notes, strict=True):
        for line in told:
            notice(f"warning: {name}: {line}")
        if own is not None:
            Adapter.load(own, engine.skeleton)
    results = []
    for (name, examples, using, own), asked, told in zip(systems, questions, notes, strict=True):
        if own is not None:
            engine.attach(Adapter.load(own, engine.skeleton))
        result = evaluate(
            task, engine, using, questions=asked, notes=told, mode=mode, shots=examples, name=name,
            batch_tokens=batch_tokens, length_normalise=length_normalise, max_new_tokens=max_new_tokens, seed=seed,
            resamples=resamples,
        )  # fmt: skip
        results.append(result)
    facts = engine.facts()
    engine.close()
    return [*results, *baselines], facts


def run_notes(adapter: Path) -> tuple[str, ...]:
    """What the receipt beside an adapter says against it; nothing when there is none, or a good one."""
    path = adapter / "receipt.json"
    if not path.exists():
        return ()
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return (f"{path} cannot be read ({error}), so nothing says that its training run ended well",)
    status = receipt.get("status") if isinstance(receipt, dict) else None
    if status == "ok":
        return ()
    reason = receipt.get("reason") if isinstance(receipt, dict) else None
    return (f"its training run did not end well: {path} says status {status!r}, reason: {reason or 'none given'}",)

"""The whole job on real weights and data: prepare, quantise, measure, train, measure again, report."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.text import Text

from lamella.adapter import Adapter
from lamella.config import CheckpointConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from lamella.console import notice, out
from lamella.demo.prepare import Model, Prepared, prepare
from lamella.engine import Engine
from lamella.eval.baseline import tfidf_baseline
from lamella.eval.encoder import StoreEncoder
from lamella.eval.run import SystemResult, evaluate
from lamella.eval.table import compare_table, write_results
from lamella.eval.task import Task, load_task
from lamella.hardware.memory import peak_rss_bytes
from lamella.report.page import write_report
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from lamella.store.report import print_report
from lamella.train.loop import train_run
from lamella.train.parts import TrainResult
from lamella.units import format_seconds

SHOTS = 8
"""Examples of the few-shot prompt."""


def run_demo(*, model: Model, steps: int, runs_dir: Path, cache: Path) -> dict[str, Any]:
    """Do everything and print it; the figures of the last line come back.

    Args:
        model: "dense" is SmolLM2-135M-Instruct, "moe" the same with its MLPs cut into experts.
        steps: optimizer steps of 8 rows.
        runs_dir: the run goes to `<runs_dir>/demo` (dense) or `<runs_dir>/demo-moe`.
        cache: downloads, checkpoint, rows and store, made once.

    Raises:
        UserError: the packages cannot be fetched, or what the stages refuse.
    """
    started_s = time.monotonic()
    made = prepare_apart(cache, model)
    store = cache / "stores" / made.checkpoint.name
    if not store.exists():
        _say(f"quantising {made.checkpoint.name}")
        quantize_checkpoint(str(made.checkpoint), store, QuantizeSettings())
    print_report(Store.open(store).manifest, store)
    return run_job(load_task(made.task), run_config(made, store, model, steps, runs_dir), started_s)


def run_job(task: Task, config: RunConfig, started_s: float) -> dict[str, Any]:
    """Measure, train, measure again, report; `started_s` is the `time.monotonic()` at which everything began."""
    prepared_s = time.monotonic() - started_s
    for note in task.notes:
        notice(note)
    _say(f"measuring before: {len(task.test)} rows of {len(task.tenants)} tenants, zero-shot and {SHOTS}-shot")
    zero_shot, few_shot = _measure_base(task, config.store)
    baseline = tfidf_baseline(task)
    _say(f"training {config.train.steps} steps")
    trained = train_run(config, mode="fresh")
    _say("measuring after")
    tuned = _measure_tuned(task, config.store, trained.run_dir)
    results = [zero_shot, few_shot, tuned, baseline]
    facts = {"store": str(config.store), "adapter": str(trained.run_dir)}
    write_results(trained.run_dir / "eval", task, results, facts)
    out.print(compare_table(results))
    page = write_report(trained.run_dir)
    total_s = time.monotonic() - started_s
    out.print(f"report: {page}", markup=False)
    out.print(
        f"prepared in {format_seconds(prepared_s)}, trained in {format_seconds(trained.train_s)}, "
        f"all in {format_seconds(total_s)}",
        markup=False,
    )
    return summary(results, trained, total_s)


def run_config(made: Prepared, store: Path, model: Model, steps: int, runs_dir: Path) -> RunConfig:
    """The run: LoRA of rank 16 on every linear layer (and expert), 8 rows a step."""
    return RunConfig(
        name="demo" if model == "dense" else f"demo-{model}",
        runs_dir=runs_dir,
        store=store,
        data=DataConfig(train=(made.messages,), max_tokens=512),
        lora=LoraConfig(rank=16, alpha=32.0),
        train=TrainConfig(steps=steps, rows_per_step=8, learning_rate=1e-3, warmup_steps=10),
        checkpoint=CheckpointConfig(every_steps=50, keep=1),
    )


def summary(results: list[SystemResult], trained: TrainResult, total_s: float) -> dict[str, Any]:
    """The figures of the demo's last line. `peak_rss_bytes` is the whole job's, its preparation aside."""
    keys = ("zero_shot", "few_shot", "tuned", "tfidf")
    named = dict(zip(keys, results, strict=True))
    tenants = results[0].metrics.tenants
    return {
        **{f"macro_f1_{key}": round(r.metrics.average.value, 4) for key, r in named.items()},
        "by_tenant": {
            tenant: {key: round(r.metrics.tenants[tenant].macro_f1.value, 4) for key, r in named.items()}
            for tenant in tenants
        },
        "train_s": round(trained.train_s, 2),
        "total_s": round(total_s, 2),
        "peak_rss_bytes": peak_rss_bytes(),
        "tokens_per_s": round(trained.tokens_per_s, 1),
        "receipt": str(trained.receipt_path),
    }


def _say(text: str) -> None:
    out.print(Text(f"== {text}", style="bold"))


def prepare_apart(cache: Path, model: Model) -> Prepared:
    """Prepare in a process of its own: converting the model needs memory that is not the job's."""
    _say("preparing model and tenants")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(prepare, cache, model).result()


def _measure_base(task: Task, store_path: Path) -> tuple[SystemResult, SystemResult]:
    store = Store.open(store_path)
    engine = Engine.open(store)
    encoder = StoreEncoder.open(store_path)
    zero_shot = evaluate(task, engine, encoder)
    few_shot = evaluate(task, engine, encoder, shots=SHOTS)
    engine.close()
    return zero_shot, few_shot


def _measure_tuned(task: Task, store_path: Path, adapter: Path) -> SystemResult:
    engine = Engine.open(Store.open(store_path))
    engine.attach(Adapter.load(adapter, engine.skeleton))
    result = evaluate(task, engine, StoreEncoder.open(store_path, adapter), name="tuned")
    engine.close()
    return result

"""Training, top to bottom: open, check, step, measure, save, prove.

Step k takes the rows that the plan gives it, adds up gradients of sum(CE) / n over its n label tokens, and updates
the adapter once. Everything is a function of the configuration, the seed and k, so a run resumed from a checkpoint
ends with the bits of an unbroken one.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import xxhash

from lamella.adapter.lora import is_finite
from lamella.config import RunConfig
from lamella.console import notice, progress
from lamella.errors import RankLost, RunFailed, UserError
from lamella.forecast.document import PlanFile, write_plan
from lamella.hardware.collector import settle
from lamella.hardware.memory import peak_rss_bytes, rss_bytes
from lamella.ranks.group import Ranks, reason_of
from lamella.ranks.place import place_of
from lamella.ranks.preflight import preflight
from lamella.trace.recorder import RECORDER
from lamella.trace.summary import DeviceFacts, summarise
from lamella.track import Tracking, check_installed
from lamella.train import receipt as receipts
from lamella.train import tracing
from lamella.train.checkpoint import load_optimizer, load_state
from lamella.train.folder import Beginning, Mode, RunFolder, report_beginning
from lamella.train.optimizer import Optimizer
from lamella.train.parts import Parts, Spread, StepRows, TrainResult
from lamella.train.shards import Shards
from lamella.train.spread import EvenRows
from lamella.train.state import (
    Best,
    RunState,
    Start,
    check_validation,
    digest_of,
    digests,
    direction,
    sibling,
    unit_names,
    without_gradient,
)

_BAD_SHARE = 0.05  # of all steps may be skipped as bad, whatever max_bad_steps says of steps in a row
Assemble = Callable[[RunConfig, Ranks, bool], Parts]


@dataclass
class Run:
    """One run in progress."""

    config: RunConfig
    ranks: Ranks
    folder: RunFolder
    parts: Parts
    optimizer: Optimizer
    state: RunState
    start: Start
    memory: str
    matmul_flops_per_s: float
    """Of all ranks together; utilisation is a share of it."""
    started_s: float
    spread: Spread
    shards: Shards
    device_facts: list[DeviceFacts]
    stop: bool = False
    saving: bool = False
    traced: bool = False
    tracking: Tracking = field(default_factory=Tracking)
    devices: list[dict[str, Any]] = field(default_factory=list)
    """What each rank did since the step before, as `metrics.jsonl` has it."""

    @property
    def total_steps(self) -> int:
        return self.parts.data.steps

    def warn(self, text: str) -> None:
        """Say it once, and keep it for the receipt."""
        if text not in self.state.warnings:
            self.state.warnings.append(text)
            if self.ranks.first:
                notice(f"warning: {text}")


def train_run(
    config: RunConfig, mode: Mode = "auto", assemble: Assemble | None = None, plan: PlanFile | None = None,
    machine: Path | None = None,
) -> TrainResult:  # fmt: skip
    """Train as `config` says and leave adapter, metrics and receipt in `<runs_dir>/<name>`.

    Args:
        mode: `auto` goes on from a complete checkpoint of the same configuration, `resume` insists on one, `fresh`
            drops what an earlier run of this name left.
        assemble: opens store, data, engine and adapter; the real rooms by default.
        plan: that this run follows; None: one is made.
        machine: file of this machine as `lamella probe` wrote it, to make a plan with.

    Raises:
        UserError: bad input, nothing trained.
        RunFailed: training that cannot be trusted; `receipt.json` says why.
        KeyboardInterrupt: stopped by a signal, after saving.
    """
    if assemble is None:
        from lamella.train.assemble import assemble_parts

        assemble = assemble_parts
    check_validation(config.validation)
    check_installed(config.log)
    ranks = _join(config)
    folder = RunFolder(config)
    try:
        preflight(ranks, _device_of(config))
        beginning = ranks.on_first(lambda: _begin(folder, mode))
        parts = assemble(config, ranks, beginning.checkpoint is None)
        try:
            if plan is None and ranks.first and parts.forecast is not None:
                plan = parts.forecast(machine)
            run = _open_run(config, ranks, folder, parts, beginning)
            ranks.on_first(lambda: _start(folder, beginning, plan))
            if ranks.first:
                run.tracking = Tracking.begin(config, folder.path, run.warn)
            return _train(run)
        finally:
            parts.engine.close()
    finally:
        folder.close()
        ranks.leave(sys.exception())


def _device_of(config: RunConfig) -> str:
    """This rank's device, as its launcher numbered it."""
    return place_of(config, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))).device


def _join(config: RunConfig) -> Ranks:
    device = _device_of(config) if "RANK" in os.environ else config.compute.device
    if device.startswith("cuda:") and torch.cuda.is_available():
        torch.cuda.set_device(device)  # NCCL takes the current one
    return Ranks.join(device)


def _begin(folder: RunFolder, mode: Mode) -> Beginning:
    folder.open()
    beginning = folder.begin(mode)
    report_beginning(beginning)
    return beginning


def _start(folder: RunFolder, beginning: Beginning, plan: PlanFile | None) -> None:
    folder.start(beginning)
    if plan is not None:
        write_plan(folder.plan_path, plan)


def _open_run(config: RunConfig, ranks: Ranks, folder: RunFolder, parts: Parts, beginning: Beginning) -> Run:
    parameters = parts.adapter.parameters()
    start = Start(parameters, parts.class_of, parts.redraw, later=parts.pages is not None)
    state = RunState(
        config=config.model_dump(mode="json"),
        data_fingerprint=parts.data.fingerprint,
        store_fingerprint=parts.base.fingerprint,
        initial=start.checksum,
        untouched=unit_names(parameters, parts.class_of),
        start=dict(parts.start),
    )
    ranks.agree("configuration", state.config)
    ranks.agree("data", state.data_fingerprint)
    ranks.agree("store", state.store_fingerprint)
    ranks.agree("initial adapter", state.initial if ranks.world == 1 else digest_of(start.digests()))
    optimizer = Optimizer(parameters, config.train, parts.data.steps, parts.pages)
    if parts.validator is not None:
        if config.validation.metric not in parts.validator.names:
            raise UserError(
                f"validation.metric = {config.validation.metric!r} is not measured",
                fix=f"choose one of: {', '.join(parts.validator.names)}",
            )
        state.best = Best(config.validation.metric, direction(config.validation))
    if beginning.checkpoint is not None:
        state.resume(load_state(beginning.checkpoint))
        if state.step > parts.data.steps:
            raise UserError(
                f"the checkpoint has {state.step} steps done, but the configuration asks for {parts.data.steps}",
                fix="raise train.steps (or train.epochs), set another name, or start over with --fresh",
                path=beginning.checkpoint,
            )
        parts.adapter.load_state(beginning.checkpoint)
        optimizer.load_state_tensors(load_optimizer(beginning.checkpoint))
    (rate,) = ranks.sum_numbers([parts.engine.matmul_rate().best])
    spread = EvenRows(ranks, parts.data) if parts.spread is None else parts.spread(state.split)
    state.split = spread.state()
    memory = parts.base.in_memory()
    facts = tracing.begin(ranks, config.trace.steps, parts.engine.facts())
    return Run(config, ranks, folder, parts, optimizer, state, start, memory, rate, time.perf_counter(),
               spread, Shards(ranks, spread, optimizer), facts)  # fmt: skip


def _train(run: Run) -> TrainResult:
    if run.ranks.first:
        run.ranks.on_loss(lambda error: _write_failure(run, error))
    run.ranks.beat(step=run.state.step)
    try:
        receipts.check_before(run.config, run.parts)
        if run.state.step == 0 and run.state.start:
            _check_start(run)
        settle()
        whole = _all_steps(run)
        tracing.write(run.ranks, run.folder.trace_path, run.device_facts)
        run.traced = True
        if not whole:
            raise KeyboardInterrupt
        _finish(run)
    except (Exception, KeyboardInterrupt) as error:
        if run.ranks.first:
            _write_failure(run, error)
        raise
    run.tracking.finish("ok")
    return _result(run)


def _write_failure(run: Run, error: BaseException) -> None:
    """The receipt of a run that did not end well; its adapter stays in the checkpoints alone."""
    status: Literal["interrupted", "failed"] = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    run.tracking.finish(status)
    reason = str(error) or type(error).__name__
    try:
        run.folder.checkpoints.settle()
    except (OSError, UserError) as second:
        notice(f"warning: the last checkpoint is lost: {second}")
    if not run.traced:
        tracing.write_alone(run.ranks, run.folder.trace_path, run.device_facts)
    steps = run.folder.checkpoints.steps()
    kept = run.folder.checkpoints.path(steps[-1]) if steps else None
    try:
        run.folder.drop_result()
        receipts.write(run.folder.receipt_path, {**receipts.gather(_facts(run), status, reason), "kept": kept})
    except OSError as second:  # the disk may be what failed; the first error must not be lost
        notice(f"warning: {run.folder.receipt_path} cannot be written: {second.strerror}")
    if kept is not None and status == "failed":
        notice(f"the adapter as it was after step {steps[-1]} is kept in {kept}")


def _check_start(run: Run) -> None:
    """The fresh adapter changes nothing yet, and the loss is one a language model can have."""
    base, adapted = run.state.start["base"], run.state.start["adapter"]
    if not math.isfinite(base):
        raise RunFailed(
            f"the base model's loss on the first rows is {base}, before any training",
            fix="check the store with `lamella store verify`; with fp16 try compute.dtype bf16 or fp32",
        )
    if run.parts.fresh and base != adapted:
        raise RunFailed(f"a fresh adapter must change nothing, but the loss goes from {base} to {adapted}")
    uniform = math.log(run.parts.vocab_size)
    if base > 1.5 * uniform:
        run.warn(
            f"loss before training is {base:.2f}, far above ln(vocabulary) = {uniform:.2f}: "
            "a model that guesses would do better; check chat template, tokenizer and checkpoint"
        )


def _all_steps(run: Run) -> bool:
    """Take the steps that are left; False when asked to stop before the last."""
    every, state = run.config.checkpoint.every_steps, run.state
    with _stop_signals(run), progress("train", run.total_steps, "steps") as meter:
        meter.advance(state.step)
        while state.step < run.total_steps:
            line, asked_to_stop = _take_step(run)
            if run.ranks.first:
                run.folder.metrics.append(line)
                run.tracking.log(line)
            loss = "skipped" if line["loss"] is None else f"loss {line['loss']:.4f}"
            meter.advance(1, f"{loss}, {line['tokens_per_s']:.0f} tokens/s, {_speed(line)}")
            _check_moved(run)
            _stop_if_bad(run)
            _adapt(run)
            last = state.step == run.total_steps
            new_best = _validate(run) if last or state.step % run.config.validation.every_steps == 0 else False
            if last or asked_to_stop or new_best or (every and state.step % every == 0):
                _save(run)
            if last or asked_to_stop:
                _settle(run)
            if asked_to_stop and not last:
                if run.ranks.first:
                    notice(f"stopped after step {state.step} of {run.total_steps}, saved; go on with --resume")
                return False
    return True


def _speed(line: dict[str, Any]) -> str:
    return f"{line['flop_per_s'] / 1e9:.0f} GFLOP/s, {line['utilisation']:.0%} of matmul rate"


def _take_step(run: Run) -> tuple[dict[str, Any], bool]:
    """One optimizer step, or its skipping. Returns its metrics line, and whether any rank was asked to stop."""
    state, data, k = run.state, run.parts.data, run.state.step
    run.ranks.beat(step=k, doing=f"computing step {k + 1}")
    begin_s = time.perf_counter()
    RECORDER.begin_step(k)
    rows = data.rows_of(k)
    tokens = sum(data.tokens(row) for row in rows.rows)
    label_tokens = sum(data.label_tokens(row) for row in rows.rows)
    run.optimizer.zero_grad()
    loss_sum, aux, flops, present, asked_to_stop, where = _gradients(run, k, rows, label_tokens)
    norm, rate, reason = math.nan, None, ""
    if label_tokens == 0:
        reason = "no label tokens"
        state.empty_steps += 1
    elif not math.isfinite(loss_sum + aux):
        reason = f"non-finite loss ({loss_sum / label_tokens}, router balancing {aux}){where}"
    else:
        _check_present(run, present)
        run.shards.sum_gradients(present)
        with RECORDER.span("optimizer", "gradient norm"):
            norm = run.shards.grad_norm()
        if math.isfinite(norm):
            _note_touched(run)
            _settle(run)
            with RECORDER.span("optimizer", "update"):
                rate = run.optimizer.step(k, norm)
        else:
            reason = f"non-finite gradient (norm {norm})"
    if not reason:
        state.updates += 1
    bad = bool(reason) and label_tokens > 0
    state.bad_steps += bad
    state.bad_in_row = state.bad_in_row + 1 if bad else 0
    if bad and run.ranks.first:
        notice(f"warning: step {k + 1} skipped: {reason}")
    state.step, state.epoch, state.index = k + 1, rows.epoch, rows.index + len(rows.rows)
    run.ranks.beat(step=k + 1, doing=f"between steps {k + 1} and {k + 2}")
    step_s = time.perf_counter() - begin_s
    line = {
        "step": k + 1,
        "epoch": rows.epoch,
        "loss": None if reason else loss_sum / label_tokens,
        "aux": aux if math.isfinite(aux) and label_tokens and run.ranks.world == 1 else None,
        "total_loss": None if reason else loss_sum / label_tokens + run.parts.aux_coef * aux,
        "grad_norm": norm if math.isfinite(norm) else None,
        "learning_rate": rate,
        "rows": len(rows.rows),
        "rows_hash": xxhash.xxh3_64_hexdigest(",".join(map(str, rows.rows)).encode()),
        "tokens": tokens,
        "label_tokens": label_tokens,
        "step_s": step_s,
        "tokens_per_s": tokens / max(step_s, 1e-9),
        "flops": flops,
        "flop_per_s": flops / max(step_s, 1e-9),
        "utilisation": flops / max(step_s, 1e-9) / run.matmul_flops_per_s,
        "devices": run.devices,
        "planned_s": run.spread.planned_s(rows.rows) if run.ranks.first else None,
        "rss_bytes": rss_bytes(),
        "skipped": reason or None,
    }
    return line, asked_to_stop


def _gradients(
    run: Run, k: int, rows: StepRows, label_tokens: int
) -> tuple[float, float, float, list[bool], bool, str]:
    """This rank's share of the step, then the sums over ranks: loss, aux, FLOPs, which parameters have a gradient,
    stop; and, from this rank alone, in which layer numbers stopped being finite.

    A rank that fails still takes part in the sum, so that the others learn of it and end too.
    """
    ranks, parameters = run.ranks, run.optimizer.parameters
    loss_sum, aux, flops, where = 0.0, 0.0, 0.0, ""
    start: dict[str, float] | None = {}
    try:
        work = run.spread.take(rows.rows) if label_tokens else None
        if work is not None:
            more: dict[str, Any] = {} if run.state.start or run.state.updates else {"beside_base": True}
            out = run.parts.engine.step(
                work, step_index=k, label_tokens=label_tokens, aux_coef=run.parts.aux_coef, **more
            )
            start = out.start if more else {}
            loss_sum, aux, flops = out.loss_sum, out.aux, out.flops
            bad_layer = out.first_bad_layer()
            where = "" if bad_layer is None else f" from layer {bad_layer} on"
    except Exception as error:
        if run.spread.pipelined:  # the others wait for this rank in the middle of their steps: they learn it by its end
            if isinstance(error, RankLost):
                ranks.blame(error)
            raise
        ranks.meet(f"step {k + 1}")
        ranks.sum_numbers([0.0, 0.0, 0.0, 1.0, 0.0, *[0.0] * len(parameters), *tracing.no_numbers(ranks)])
        ranks.gather(reason_of(error))
        raise
    present = [0.0 if p.grad is None else 1.0 for p in parameters.values()]
    ranks.meet(f"step {k + 1}")
    times = tracing.numbers(ranks, *run.spread.counts(work))
    total = ranks.sum_numbers([loss_sum, aux, float(run.stop), 0.0, flops, *present, *times])
    total, times = total[: -len(times)], total[-len(times) :]
    if total[3]:
        failures = enumerate(ranks.gather(""))
        rank, text = next((rank, text) for rank, text in failures if text)
        raise RunFailed(f"rank {rank} failed in step {k + 1}: {text}")
    run.devices = tracing.devices(ranks, times)
    if label_tokens and not (run.state.start or run.state.updates):
        run.state.start = next((found for found in ranks.gather(start) if found), {})
        if run.state.start:
            _check_start(run)
    return total[0], total[1], total[4], [n > 0 for n in total[5:]], total[2] > 0, where


def _adapt(run: Run) -> None:
    """Divide the steps to come by what this one took on each rank."""
    if run.ranks.world == 1 or run.state.step == run.total_steps:
        return
    busy = [device["compute_s"] for device in run.devices]
    owners = {name: run.spread.owners(name) for name in run.optimizer.parameters}
    moved = run.spread.adapt(run.parts.data.rows_of(run.state.step - 1).rows, busy)
    if moved is None:
        return
    if moved:
        _settle(run)  # a save under way reads what is about to change
        run.shards.hand_over({name: owners[name] for name in moved})
        _check_memory(run)  # of the layers held so far
    run.spread.settle()
    run.memory = run.parts.base.in_memory()
    run.state.split = run.spread.state()
    if run.ranks.first:
        notice(f"after step {run.state.step}: {'; '.join(run.spread.lines())}")


def _check_present(run: Run, present: list[bool]) -> None:
    missing = [name for name, there in zip(run.optimizer.parameters, present, strict=True) if not there]
    if missing:
        raise RunFailed(
            f"{len(missing)} of {len(present)} trainable tensors have no gradient in step {run.state.step + 1}: "
            + _some(missing),
            fix="remove them from lora.targets, or report this: they would never train",
        )


def _note_touched(run: Run) -> None:
    """Strike units off the list of those that never saw a gradient other than zero.

    An expert's A has a zero gradient as long as its B is zero or no token comes. When B moved in an earlier update
    and has a gradient now, then a token came, and A must have one too.
    """
    state, parameters, class_of = run.state, run.optimizer.parameters, run.parts.class_of
    if not state.untouched:
        return

    def silent_of(units: list[str]) -> list[str]:
        found = run.shards.with_gradient(units, without_gradient(units, parameters, class_of))
        return [unit for unit in units if unit not in found]

    before = set(state.untouched)
    state.untouched = silent_of(state.untouched)
    waiting = [sibling(unit) for unit in state.untouched if "lora_A" in unit and sibling(unit) not in before]
    silent = set(silent_of(waiting))
    state.dead += [sibling(unit) for unit in waiting if unit not in silent and sibling(unit) not in state.dead]


def _check_moved(run: Run) -> None:
    """After two updates B and then A must have moved everywhere, except in experts that no token reached."""
    if run.state.updates != 2 or run.state.bad_in_row:
        return
    run.shards.bring(range(run.ranks.world), moments=False)
    table = receipts.moved_table(run.parts, run.start, run.state)
    dead = [name for row in table for name in row["dead"]]
    if dead:
        raise RunFailed(
            f"{len(dead)} trainable tensors did not move in two updates: {_some(dead)}",
            fix="a far too high train.learning_rate saturates attention and does this; if it is not that, report it",
        )


def _stop_if_bad(run: Run) -> None:
    """Raises `RunFailed` after too many bad steps in a row, or in all (`max_bad_steps`, or 5 % of the run's steps)."""
    asked, state = run.config.train.max_bad_steps, run.state
    most = max(asked, int(_BAD_SHARE * run.total_steps))
    if state.bad_in_row >= max(asked, 1):
        what = f"{state.bad_in_row} steps in a row (to step {state.step}) had a non-finite loss or gradient"
    elif state.bad_steps > most:
        what = (
            f"{state.bad_steps} of {state.step} steps had a non-finite loss or gradient; at most {most} of "
            f"{run.total_steps} may"
        )
    else:
        return
    raise RunFailed(
        what,
        fix="lower train.learning_rate, set train.clip_norm, or use bf16 or fp32; the last good checkpoint is kept",
    )


def _validate(run: Run) -> bool:
    """Measure, log, and say whether this is the best so far."""
    if run.parts.validator is None or run.state.best is None:
        return False
    values = run.parts.validator.measure()
    chosen = values[run.state.best.metric]
    for name, value in values.items():
        if not math.isfinite(value):
            run.warn(f"validation {name} is {value} after step {run.state.step}")
    better = run.state.best.offer(chosen, run.state.step)
    if run.ranks.first:
        shown = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": run.state.step, **shown, "best": better}
        run.folder.validations.append(line)
        run.tracking.log_validation(line)
    return better


def _save(run: Run) -> None:
    run.shards.bring([0], moments=True)
    run.ranks.on_first(lambda: _save_here(run))
    run.saving = True


def _settle(run: Run) -> None:
    """Wait for the save under way: adapter and optimizer are about to change, or the run is about to end."""
    if run.saving:
        run.saving = False
        run.ranks.on_first(run.folder.checkpoints.settle)


def _save_here(run: Run) -> None:
    step, parameters, moments = run.state.step, run.optimizer.parameters, run.optimizer.state_tensors()
    need_bytes = sum(t.numel() * t.element_size() for t in [*parameters.values(), *moments.values()])
    best = run.state.best.step if run.state.best else None

    def adapter(folder: Path) -> dict[str, str] | None:
        broken = [name for name, p in parameters.items() if not is_finite(p)]
        if broken:
            raise RunFailed(f"{len(broken)} adapter tensors are not finite after step {step}: {_some(broken)}")
        return run.parts.adapter.save(folder)

    with RECORDER.span("save", f"step {step}"):
        run.folder.checkpoints.save(step, adapter, moments, run.state.to_json(), need_bytes, best)


def _finish(run: Run) -> None:
    """Save the adapter under the run's name, prove it, write the receipt."""
    if run.state.updates == 0:
        raise RunFailed(f"none of {run.state.step} steps updated the adapter")
    _check_memory(run)
    run.shards.bring(range(run.ranks.world), moments=False)
    run.ranks.agree("trained adapter", digest_of(digests(run.optimizer.parameters, run.parts.class_of)))
    best = run.state.best
    if best is not None and best.step is not None and not run.folder.checkpoints.path(best.step).is_dir():
        run.warn(f"the best checkpoint (step {best.step}) is gone: {run.folder.checkpoints.path(best.step)}")
    facts = replace(_facts(run), expert_load=_summed(run.ranks.gather(run.parts.engine.expert_load())))
    run.ranks.on_first(lambda: receipts.prove(facts, run.folder))


def _result(run: Run) -> TrainResult:
    if run.ranks.first:
        receipts.show(run.folder.receipt_path)
    lines = run.folder.metrics.read()
    return TrainResult(
        run_dir=run.folder.path,
        receipt_path=run.folder.receipt_path,
        tokens_per_s=receipts.tokens_per_s(lines),
        peak_rss_bytes=peak_rss_bytes(),
        train_s=time.perf_counter() - run.started_s,
        final_loss=receipts.final_loss(lines),
    )


def _check_memory(run: Run) -> None:
    """The base in memory has the bytes it started with, on every rank."""
    changed = run.ranks.gather(run.parts.base.in_memory() != run.memory)
    if any(changed):
        damaged = run.ranks.on_first(run.parts.base.verify)  # what was read from a changed file is changed too
        if damaged:
            raise RunFailed(f"{len(damaged)} frozen tensors changed on disk, e.g. {damaged[0]}", fix="quantize again")
        on_rank = f" of rank {changed.index(True)}" if run.ranks.world > 1 else ""
        raise RunFailed(
            f"the frozen base in memory{on_rank} changed during training",
            fix="do not use this run's adapters; when it happens again, test the machine's memory, else report it",
        )


def _summed(loads: Sequence[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Counts of all ranks together."""
    total: dict[str, list[int]] = {}
    for load in loads:
        for name, counts in load.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0] * len(counts)), counts, strict=True)]
    return total


def _facts(run: Run) -> receipts.Facts:
    metrics = run.folder.metrics.read()
    split = tracing.kind_of(run.state.split)
    return receipts.Facts(
        config=run.config, parts=run.parts, state=run.state, optimizer=run.optimizer, start=run.start,
        metrics=metrics, checkpoints=run.folder.checkpoints,
        train_s=time.perf_counter() - run.started_s, world=run.ranks.world, memory=run.memory,
        matmul_flops_per_s=run.matmul_flops_per_s, devices=summarise(metrics, run.device_facts, split),
        expert_load=run.parts.engine.expert_load(),
    )  # fmt: skip


@contextmanager
def _stop_signals(run: Run) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after the step under way; a later Ctrl-C ends it at once.

    A launcher passes the terminal's Ctrl-C on, so it may come twice within a moment; that counts as one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked_s = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_s
        if run.stop:
            if number == signal.SIGINT and time.monotonic() - asked_s > 1:
                raise KeyboardInterrupt
            return
        run.stop, asked_s = True, time.monotonic()
        if run.ranks.first:
            notice("stopping after this step; once more to stop at once, without saving")

    wanted = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

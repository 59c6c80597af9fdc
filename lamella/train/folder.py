"""A run's folder: who may write to it, whether a run goes on or starts, and its line-by-line metrics.

runs/<name>/config.json                   the resolved configuration
            plan.json                     what the run was expected to take
            metrics.jsonl                 one line per step
            validation.jsonl              one line per measurement
            checkpoints/                  see `checkpoint.py`
            adapter_model.safetensors, adapter_config.json, generation_config.json, ...     when the run ends
            trace.json                    what each device did in the last steps
            receipt.json                  how it ended
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from lamella.config import RunConfig, differences
from lamella.console import notice
from lamella.errors import UserError
from lamella.files import write_json, write_text
from lamella.train.checkpoint import Checkpoints, load_state
from lamella.train.tracing import TRACE

Mode = Literal["auto", "resume", "fresh"]

RESULT = ("adapter_model.safetensors", "adapter_config.json", "lamella_adapter.json", "chat_template.jinja",
          "generation_config.json")  # fmt: skip
"""The adapter's files: in the folder itself only while the run is `ok`."""
PLAN = "plan.json"
TRACKED = ("track.json", "tensorboard", "wandb")
"""What trackers leave in the folder."""
OURS = (
    "config.json",
    PLAN,
    "metrics.jsonl",
    "validation.jsonl",
    "receipt.json",
    TRACE,
    "checkpoints",
    *RESULT,
    *TRACKED,
)
RESULT_PARTIAL = ".adapter.partial"

_WRITTEN_BY_US = {  # keys by which a file of ours is known
    "config.json": {"name", "runs_dir", "store", "data", "lora", "train", "checkpoint"},
    "receipt.json": {"status", "name", "config", "base", "figures"},
    PLAN: {"kind", "format_version", "asked", "settled"},
}

FREE_KEYS = (
    "name", "runs_dir", "store", "init_adapter", "data.train", "data.chat_template", "validation.data",  # places
    "train.steps", "train.epochs", "checkpoint.every_steps", "checkpoint.keep", "train.max_bad_steps",
    "memory.budget", "memory.recompute", "memory.state", "train.micro_batch_tokens", "compute.threads",  # rounding at most
    "devices", "split.kind", "split.stages", "split.layers", "split.shares", "split.groups", "split.rebalance",
    "split.gather", "trace.steps", "launch.restarts", "log", "track.project", "track.mlflow_uri",
)  # fmt: skip
"""Settings that may change when a run is resumed. What lies behind the paths is compared by fingerprint."""


class JsonLines:
    """A file of one JSON object per line, appended as the run goes; each line has a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def keep_until(self, step: int) -> None:
        """Drop lines past `step` and a torn last line, atomically."""
        kept = [line for line in self.read() if line["step"] <= step]
        write_text(self.path, (json.dumps(line, allow_nan=False) + "\n" for line in kept))

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a last line without its newline is what a kill left, and is not read."""
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def append(self, line: dict[str, Any]) -> None:
        try:
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot be written: {error.strerror}", fix="free some space, then go on with --resume", path=self.path
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class Beginning:
    """How a run begins: from this checkpoint after `step` steps, or (None) from the start; plus what was worth saying."""

    checkpoint: Path | None
    step: int = 0
    notices: list[str] = field(default_factory=list)


class RunFolder:
    """`open` and `begin` only look; `start` is the first to change what is there, when all else was opened and checked.

    Raises:
        UserError: from `open`, when the folder cannot be written, another process trains in it, files in it are not
            a run's although they have their names, or the configuration reads what the run writes.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = config.runs_dir / config.name
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.validations = JsonLines(self.path / "validation.jsonl")
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.checkpoint.keep)
        self.receipt_path = self.path / "receipt.json"
        self.trace_path = self.path / TRACE
        self.plan_path = self.path / PLAN
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Make the folder, prove that it can be written, and lock it against a second process."""
        self._refuse_own_inputs()
        self._refuse_foreign()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".write-probe"
            probe.write_bytes(b"x")
            probe.unlink()
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise UserError(
                f"the run folder cannot be written: {error.strerror}",
                fix="choose another runs_dir, or change its permissions",
                path=self.path,
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise UserError(
                "another process is training in this folder", fix="wait for it, or set another name", path=self.path
            ) from error
        self._lock = lock

    def close(self) -> None:
        self.checkpoints.close()
        self.metrics.close()
        self.validations.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, mode: Mode) -> Beginning:
        """Decide between going on and starting; changes nothing.

        Raises:
            UserError: `resume` without a complete checkpoint; a finished run without `fresh`; a checkpoint of another
                configuration, with what differs.
        """
        if mode == "fresh":
            return Beginning(None)
        found = self.checkpoints.latest()
        notices = [f"checkpoint {name} is incomplete and not used: {fault}" for name, fault in found.incomplete.items()]
        status = self._status()
        if found.path is None:
            if mode == "resume":
                raise UserError(
                    "; ".join(["no complete checkpoint to resume from", *notices]),
                    fix="start without --resume",
                    path=self.path,
                )
            if status == "ok":
                raise self._finished()
            if self.checkpoints.steps():
                raise UserError(
                    "; ".join(["the run has checkpoints but none is complete", *notices]),
                    fix="put a whole checkpoint back, set another name, or start over with --fresh",
                    path=self.path,
                )
            return Beginning(None, notices=notices)
        state = load_state(found.path)
        notices += self._check_same(state["config"], found.path)
        if status == "ok" and mode != "resume":
            raise self._finished()
        notices.append(f"resuming {self.path} after step {state['step']} ({found.path.name})")
        return Beginning(found.path, state["step"], notices)

    def start(self, beginning: Beginning) -> None:
        """Leave the folder ready for the first step: without an earlier run's files, or without what came later."""
        self.receipt_path.unlink(missing_ok=True)  # first: from here on the folder is no finished run
        self.drop_result()
        self.trace_path.unlink(missing_ok=True)
        if beginning.checkpoint is None:
            self.plan_path.unlink(missing_ok=True)
            self.checkpoints.clear()
            self.metrics.path.unlink(missing_ok=True)
            self.validations.path.unlink(missing_ok=True)
            (self.path / TRACKED[0]).unlink(missing_ok=True)
            for name in TRACKED[1:]:
                shutil.rmtree(self.path / name, ignore_errors=True)
        else:
            self.metrics.keep_until(beginning.step)
            self.validations.keep_until(beginning.step)
        write_json(self.path / "config.json", self.config.model_dump(mode="json"))

    def drop_result(self) -> None:
        """Take the adapter's files out of the folder; checkpoints stay."""
        for name in RESULT:
            (self.path / name).unlink(missing_ok=True)
        if (self.path / RESULT_PARTIAL).is_dir():
            shutil.rmtree(self.path / RESULT_PARTIAL)

    def _refuse_own_inputs(self) -> None:
        """What the run reads must not lie where it clears and writes."""
        config, here = self.config, self.path.resolve()
        inputs = {"store": [config.store], "data.train": config.data.train, "validation.data": config.validation.data,
                  "init_adapter": [config.init_adapter], "data.chat_template": [config.data.chat_template]}  # fmt: skip
        for name, paths in inputs.items():
            for path in paths:
                if path is None or not (place := path.resolve()).is_relative_to(here):
                    continue
                inside = place.relative_to(here).parts
                if not inside or inside[0] in OURS:
                    raise UserError(
                        f"{name} = {str(path)!r} lies in the run's own folder, whose files the run replaces",
                        fix="copy it to another place, or set another name for this run",
                        path=self.path,
                    )

    def _refuse_foreign(self) -> None:
        """Files that have names of ours must be a run's: starting over would delete them."""
        present = [name for name in OURS if os.path.lexists(self.path / name)]
        marks = {name: self._is_ours(name) for name in _WRITTEN_BY_US if name in present}
        foreign = [name for name, ours in marks.items() if not ours] if marks else present
        if foreign:
            raise UserError(
                f"the folder holds {', '.join(foreign)}, and no config.json or receipt.json shows that a run left it there",
                fix="set another name or runs_dir, or move these files away",
                path=self.path,
            )

    def _is_ours(self, name: str) -> bool:
        try:
            tree = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(tree, dict) and tree.keys() >= _WRITTEN_BY_US[name]

    def _finished(self) -> UserError:
        return UserError(
            "this run is finished",
            fix="set another name, start over with --fresh, or raise train.steps and go on with --resume",
            path=self.path,
        )

    def _status(self) -> str:
        if not self.receipt_path.is_file():
            return ""
        return str(json.loads(self.receipt_path.read_text(encoding="utf-8")).get("status", ""))

    def _check_same(self, saved: dict[str, Any], checkpoint: Path) -> list[str]:
        changed = differences(saved, self.config.model_dump(mode="json"))
        bad = {key: values for key, values in changed.items() if key not in FREE_KEYS}
        if bad:
            raise UserError(
                "the checkpoint was made with another configuration:\n"
                + "\n".join(f"    {key}: {old!r} there, {new!r} now" for key, (old, new) in bad.items()),
                fix="restore these settings, set another name, or start over with --fresh",
                path=checkpoint,
            )
        return [f"changed since the checkpoint: {key} {old!r} -> {new!r}" for key, (old, new) in changed.items()]


def report_beginning(beginning: Beginning) -> None:
    for line in beginning.notices:
        notice(line)

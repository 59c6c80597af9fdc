"""A run's folder: who may write to it, whether a run goes on or starts, and its line-by-line metrics.

runs/<name>/config.json                   the resolved configuration
            metrics.jsonl                 one line per step
            validation.jsonl              one line per measurement
            checkpoints/                  see `checkpoint.py`
            adapter_model.safetensors, adapter_config.json, receipt.json     when the run ends
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from lamella.config import RunConfig
from lamella.console import notice
from lamella.errors import UserError
from lamella.train.checkpoint import Checkpoints, load_state, write_json

Mode = Literal["auto", "resume", "fresh"]

OURS = ("config.json", "metrics.jsonl", "validation.jsonl", "receipt.json", "adapter_model.safetensors",
        "adapter_config.json", "lamella_adapter.json", "chat_template.jinja", "checkpoints")  # fmt: skip

FREE_KEYS = (
    "name", "runs_dir", "store", "init_adapter", "data.train", "data.chat_template", "validation.data",  # places
    "train.steps", "train.epochs", "checkpoint.every_steps", "checkpoint.keep", "train.max_bad_steps",
    "memory.budget", "memory.recompute", "train.micro_batch_tokens", "compute.threads",  # rounding at most
)  # fmt: skip
"""Settings that may change when a run is resumed. What lies behind the paths is compared by fingerprint."""


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


def differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted settings that differ between two resolved configs: name -> (saved, now)."""
    a, b = flat(saved), flat(now)
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


class JsonLines:
    """A file of one JSON object per line, appended as the run goes; each line has a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def keep_until(self, step: int) -> None:
        """Drop lines past `step` and a torn last line, atomically."""
        kept = [line for line in self.read() if line["step"] <= step]
        temp = self.path.with_name(self.path.name + ".partial")
        temp.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in kept), encoding="utf-8")
        os.replace(temp, self.path)

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
    """How a run begins: from this checkpoint, or (None) from the start; plus what was worth saying."""

    checkpoint: Path | None
    notices: list[str] = field(default_factory=list)


class RunFolder:
    """Raises `UserError` from `open` when the folder cannot be written or another process trains in it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = config.runs_dir / config.name
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.validations = JsonLines(self.path / "validation.jsonl")
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.checkpoint.keep)
        self.receipt_path = self.path / "receipt.json"
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Make the folder, prove that it can be written, and lock it against a second process."""
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
        self.metrics.close()
        self.validations.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, mode: Mode) -> Beginning:
        """Decide between going on and starting, and leave the folder ready for it.

        Raises:
            UserError: `resume` without a complete checkpoint; a finished run without `fresh`; a checkpoint of another
                configuration, with what differs.
        """
        if mode == "fresh":
            self._clear()
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
            self._clear()
            self._write_config()
            return Beginning(None, notices)
        state = load_state(found.path)
        notices += self._check_same(state["config"], found.path)
        if status == "ok" and mode != "resume":
            raise self._finished()
        notices.append(f"resuming {self.path} after step {state['step']} ({found.path.name})")
        self.metrics.keep_until(state["step"])
        self.validations.keep_until(state["step"])
        self.receipt_path.unlink(missing_ok=True)
        self._write_config()
        return Beginning(found.path, notices)

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

    def _write_config(self) -> None:
        write_json(self.path / "config.json", self.config.model_dump(mode="json"))

    def _clear(self) -> None:
        for name in OURS:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def report_beginning(beginning: Beginning) -> None:
    for line in beginning.notices:
        notice(line)

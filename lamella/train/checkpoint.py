"""Checkpoints that are either complete or not there.

    checkpoints/step-00000050/            adapter_model.safetensors, adapter_config.json (PEFT)
                                          optimizer.safetensors, state.json
                                          complete.json: sizes and checksums of the others, written last
    checkpoints/step-00000100.partial/    what a killed save leaves behind

A save fills a `.partial` folder, flushes every file to disk, writes `complete.json` and only then takes its
name by one rename. Reading trusts a folder only when every file has the recorded size and checksum.

All of it happens in a thread, beside the next step's passes: adapter and optimizer do not change until that step's
update, so they are written from where they lie, without a copy; the update waits for the save. So the checkpoint of
step k is complete before step k + 1 changes anything, and when the run ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from lamella.adapter.tensors_file import TensorsFile, write_tensors
from lamella.errors import UserError
from lamella.files import file_checksum, free_bytes, fsync_path, is_disk_full, write_json
from lamella.trace.recorder import RECORDER
from lamella.units import format_bytes

_NAME = re.compile(r"step-(\d+)")
RECORD = "complete.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_MARGIN_BYTES = 1 << 20  # JSON files, headers, directory blocks


def fault_of(folder: Path) -> str:
    """Why a checkpoint folder must not be used; empty when it is complete."""
    try:
        files = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"no {RECORD}: the save did not finish"
    except (ValueError, KeyError):
        return f"{RECORD} is damaged"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if file_checksum(path) != entry["xxh3_128"]:
            return f"{name} does not match its checksum"
    return ""


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint (None: there is none), and newer or unfinished ones with their fault."""

    path: Path | None
    incomplete: dict[str, str]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds them; made on the first save.
        keep: how many to keep besides the best one.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamella-save")
        self._pending: Future[None] | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a folder under its final name, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name)))

    def latest(self) -> Found:
        incomplete = {}
        if self.folder.is_dir():
            for path in sorted(self.folder.glob("step-*.partial")):
                incomplete[path.name.removesuffix(".partial")] = "the save did not finish"
        for step in reversed(self.steps()):
            fault = fault_of(self.path(step))
            if not fault:
                return Found(self.path(step), incomplete)
            incomplete[self.path(step).name] = fault
        return Found(None, incomplete)

    def check_space(self, need_bytes: int) -> None:
        """Raises `UserError` when the disk has less than `need_bytes` (plus a margin) free."""
        parent = next(p for p in (self.folder, *self.folder.parents) if p.is_dir())
        free = free_bytes(parent)
        if free < need_bytes + _MARGIN_BYTES:
            raise _disk_full(self.folder, need_bytes + _MARGIN_BYTES, free)

    def save(
        self,
        step: int,
        save_adapter: Callable[[Path], Mapping[str, str] | None],
        optimizer: dict[str, Tensor],
        state: dict[str, Any],
        need_bytes: int,
        best: int | None = None,
    ) -> Path:
        """Begin the checkpoint of `step` (updates made so far); it is complete after the next `save` or `settle`.

        Until then adapter and optimizer must stay as they are.

        Returns:
            The folder that it will be.

        Args:
            save_adapter: writes the adapter's files into the folder given; may tell their checksums by name.
            need_bytes: size to expect; checked against free space first.
            best: step of the best checkpoint so far, which is kept.

        Raises:
            UserError: disk full, for this save or the one before; earlier checkpoints are untouched and nothing half-made stays.
        """
        self.settle()
        self.check_space(need_bytes)
        text = json.dumps(state, indent=1, allow_nan=False) + "\n"
        final = self.path(step)
        temp = final.with_name(final.name + ".partial")

        def work() -> None:
            with (
                self._cleaning(temp, need_bytes),
                RECORDER.span("save", f"step {step}", nbytes=need_bytes, lane="save"),
            ):
                if temp.exists():
                    shutil.rmtree(temp)
                temp.mkdir(parents=True)
                known = dict(save_adapter(temp) or {})
                moments = {name: (tuple(t.shape), partial(_same, t)) for name, t in optimizer.items()}
                known[OPTIMIZER] = write_tensors(temp / OPTIMIZER, moments)
                (temp / STATE).write_text(text, encoding="utf-8")
                _complete(step, temp, known)
            if final.exists():
                self._remove(final)
            os.rename(temp, final)
            fsync_path(self.folder)
            self.prune(best)

        self._pending = self._thread.submit(work)
        return final

    def settle(self) -> None:
        """Wait until the save under way is complete.

        Raises:
            UserError: it failed (disk full); earlier checkpoints are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with RECORDER.span("save", "the one under way"):
                pending.result()

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._thread.shutdown()

    @contextmanager
    def _cleaning(self, temp: Path, need_bytes: int) -> Iterator[None]:
        """Of a save that fails nothing half-made stays."""
        try:
            yield
        except UserError:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        except (OSError, SafetensorError) as error:  # an adapter may be written by safetensors itself
            free = free_bytes(self.folder.parent)
            shutil.rmtree(temp, ignore_errors=True)
            if is_disk_full(error):
                raise _disk_full(self.folder, need_bytes + _MARGIN_BYTES, free) from error
            raise

    def prune(self, best: int | None) -> None:
        """Drop all but the newest `keep` checkpoints and the best one, and what killed saves left."""
        others = [step for step in self.steps() if step != best]
        for step in others[: -self.keep]:
            self._remove(self.path(step))
        for pattern in ("step-*.partial", "step-*.removed"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path)

    def clear(self) -> None:
        """Drop all checkpoints, and what killed saves left; other files stay."""
        if self.folder.is_dir():
            for path in [p for p in self.folder.iterdir() if _NAME.match(p.name) and p.is_dir()]:
                shutil.rmtree(path)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(path.name + ".removed")  # a kill half-way must not leave a torn checkpoint by its name
        if gone.exists():
            shutil.rmtree(gone)
        os.rename(path, gone)
        shutil.rmtree(gone)


def _complete(step: int, folder: Path, known: Mapping[str, str]) -> None:
    """Flush a filled folder's files and record them (checksums of some are known): now it is a checkpoint."""
    files = sorted(p for p in folder.iterdir() if p.is_file())
    for path in files:
        fsync_path(path)
    record = {p.name: {"bytes": p.stat().st_size, "xxh3_128": known.get(p.name) or file_checksum(p)} for p in files}
    write_json(folder / RECORD, {"step": step, "files": record})


def load_optimizer(folder: Path) -> Mapping[str, Tensor]:
    """The optimizer's tensors by name, each read when it is asked for."""
    return TensorsFile(folder / OPTIMIZER)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def load_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return state


def _disk_full(folder: Path, need_bytes: int, left_bytes: int) -> UserError:
    return UserError(
        f"not enough disk space for a checkpoint: {format_bytes(need_bytes)} ({need_bytes} bytes) needed, "
        f"{format_bytes(left_bytes)} ({left_bytes} bytes) free",
        fix="free some space, lower checkpoint.keep or move runs_dir; then run again with --resume. "
        "Earlier checkpoints are intact",
        path=folder,
    )

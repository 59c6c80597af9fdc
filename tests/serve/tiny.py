"""A tiny store with a tokenizer, adapters with clear answers, a task, and a `lamella serve` process on them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from lamella.engine import Engine
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.fixtures import dense_config, make_tokenizer, write_checkpoint
from tests.serve.conftest import TASK
from tests.serve.tenants import save_adapters

START_S = 120


@dataclass(frozen=True)
class Tiny:
    """`adapters`: name -> folder; `task`: with the tenants left and right."""

    folder: Path
    store: Path
    adapters: dict[str, Path]
    task: Path

    def settings(self, folder: Path, names=("t0", "t1"), keys: Path | None = None, **limits) -> Path:
        """A serve.toml of these adapters in `folder`; t0 has the tenant left, t1 the tenant right."""
        lines = [f'store = "{self.store}"', "port = 0", *([f'keys = "{keys}"'] if keys else [])]
        lines += ["[engine]", 'dtype = "fp32"', "threads = 1", 'kv_cache = "8MiB"', "max_rows = 32"]
        lines += ["[limits]", *(f"{name} = {json.dumps(value)}" for name, value in limits.items())]
        for name in names:
            lines += ["[[adapters]]", f'name = "{name}"', f'path = "{self.adapters[name]}"']
            if name in ("t0", "t1"):
                lines += [f'task = "{self.task}"', f'tenant = "{"left" if name == "t0" else "right"}"']
        path = folder / "serve.toml"
        path.write_text("\n".join(lines) + "\n")
        return path


def make_tiny(folder: Path) -> Tiny:
    tokenizer = make_tokenizer()
    config = dense_config(max_position_embeddings=1024)
    write_checkpoint(folder / "checkpoint", config, tokenizer=tokenizer, std=0.2)
    quantize_checkpoint(folder / "checkpoint", folder / "store", threads=1)
    engine = Engine.open(Store.open(folder / "store"), dtype="fp32", threads=1)
    adapters = save_adapters(engine, folder, 3)
    engine.close()
    (folder / "task.toml").write_text(TASK)
    return Tiny(folder, folder / "store", adapters, folder / "task.toml")


class Served:
    """A running `lamella serve`; at the end of the block it is gone.

    Attributes:
        url: where it answers; log: file of what it says.
    """

    def __init__(self, settings: Path) -> None:
        self.log = settings.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lamella", "serve", str(settings), "--json"], stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            raise AssertionError(f"the server does not start: {self.log.read_text()}")
        self.started = json.loads(line)
        self.url = self.started["url"]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def until(self, holds, seconds: float = 20) -> None:
        """Wait for something that must become true."""
        end_s = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.02)

"""Trainings in processes of their own that can be killed; forked from one server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

LIMIT_S = 60


def _main(runs_dir: str, sections: dict, mode: str, options: dict, env: dict[str, str], stderr: str) -> None:
    os.environ.update(env)
    with open(stderr, "w") as file:
        os.dup2(file.fileno(), 2)
    with open(os.devnull, "w") as file:
        os.dup2(file.fileno(), 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    from lamella.errors import UserError
    from tests.train import fake

    torch.set_num_threads(1)
    try:
        fake.run(Path(runs_dir), fake.Options(**options), mode, **sections)
    except UserError as error:  # as the command line does
        print(f"error: {error.render()}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


@dataclass
class Training:
    process: BaseProcess
    stderr: Path

    def finish(self, deadline_s: float | None = None) -> tuple[int, str]:
        """Exit code and stderr; fails when it takes longer than the limit."""
        left = LIMIT_S if deadline_s is None else max(deadline_s - time.monotonic(), 0.1)
        self.process.join(left)
        hung = self.process.is_alive()
        self.process.kill()
        self.process.join()
        assert not hung, f"still running after {LIMIT_S} s: {self.stderr.read_text()}"
        return self.process.exitcode, self.stderr.read_text()

    def send(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, number)


def start(runs_dir: Path, sections: dict, mode: str = "auto", options: dict | None = None, env=None) -> Training:
    """Start one fake training (see `fake.Options`)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.fake"])
    runs_dir.parent.mkdir(parents=True, exist_ok=True)
    stderr = runs_dir.parent / f"stderr-{runs_dir.name}-{time.monotonic_ns()}"
    process = context.Process(target=_main, args=(str(runs_dir), sections, mode, options or {}, env or {}, str(stderr)))
    process.start()
    return Training(process, stderr)


def torchrun_env(world: int, rank: int, port: int) -> dict[str, str]:
    """What `torchrun` sets for a rank, with all ranks on this host."""
    return {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(
    world: int, runs_dir: Path, sections: dict, options: dict | None = None, mode: str = "auto"
) -> tuple[list[int], list[str]]:
    """Exit codes and stderr of the `world` processes of one fake training."""
    port = free_port()
    ranks = [start(runs_dir, sections, mode, options, torchrun_env(world, rank, port)) for rank in range(world)]
    deadline_s = time.monotonic() + LIMIT_S
    try:
        ended = [rank.finish(deadline_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.send(signal.SIGKILL)
    return [code for code, _ in ended], [text for _, text in ended]

"""Runs a job (`jobs.py`) on ranks that are processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from tests.ranks.netns import enter
from tests.train.processes import LIMIT_S, Training, free_port, torchrun_env


def _main(job: str, folder: str, arguments: dict, env: dict[str, str], stderr: str, netns: str) -> None:
    os.environ.update(env)
    with open(stderr, "w") as file:
        os.dup2(file.fileno(), 2)
    if netns:
        enter(netns)
    import torch

    from lamella.errors import UserError
    from lamella.ranks.group import Ranks
    from tests.ranks import jobs

    torch.set_num_threads(1)
    try:
        ranks = Ranks.join()
        try:
            result = getattr(jobs, job)(ranks, Path(folder), **arguments)
        finally:
            ranks.leave(sys.exception())
    except UserError as error:  # as the command line does
        print(f"error: {error.render()}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    torch.save(result, Path(folder) / f"result-{env['RANK']}")


def start_job(job: str, folder: Path, arguments: dict, env: dict[str, str], netns: str = "") -> Training:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.fake"])
    stderr = folder / f"stderr-{env['RANK']}-{time.monotonic_ns()}"
    process = context.Process(target=_main, args=(job, str(folder), arguments, env, str(stderr), netns))
    process.start()
    return Training(process, stderr)


def run_job(
    job: str, world: int, folder: Path, env: dict[str, str] | None = None, lost: int | None = None, **arguments
):
    """Exit codes and stderr by rank; `lost` is not waited for (it may be frozen), its code is None."""
    port = free_port()
    ranks = [start_job(job, folder, arguments, torchrun_env(world, r, port) | (env or {})) for r in range(world)]
    deadline_s = time.monotonic() + LIMIT_S
    try:
        ended = [(None, "") if r == lost else rank.finish(deadline_s) for r, rank in enumerate(ranks)]
    finally:
        for rank in ranks:
            rank.send(signal.SIGKILL)
    return [code for code, _ in ended], [text for _, text in ended]

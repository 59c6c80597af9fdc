"""A group of processes over gloo, forked from one server that has imported torch and the engine already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.train.processes import free_port

LIMIT_S = 120


def _main(function: Callable[..., Any], rank: int, world: int, port: int, args: tuple, pipe: Any) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1"})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        pipe.send(("done", function(rank, world, *args)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is told to the test
        pipe.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        time.sleep(0.1 * (rank == 0))
        os._exit(0)


def start_group(world: int, function: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """Processes that run `function(rank, world, *args)`, and the pipes on which they tell how it ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.fake", "lamella.engine"])
    port = free_port()
    processes, pipes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe()
        process = context.Process(target=_main, args=(function, rank, world, port, args, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes


def run_group(world: int, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
    """("done", result) or (name of the exception, its text) of each rank; ("gone", None) of one that was killed."""
    processes, pipes = start_group(world, function, *args)
    deadline_s = time.monotonic() + LIMIT_S
    ended: list[tuple[str, Any]] = []
    try:
        for pipe in pipes:
            assert pipe.poll(max(deadline_s - time.monotonic(), 0.1)), f"no end within {LIMIT_S} s; so far {ended}"
            try:
                ended.append(pipe.recv())
            except EOFError:
                ended.append(("gone", None))
    finally:
        for process in processes:
            if process.is_alive():
                process.join(2)
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
    return ended

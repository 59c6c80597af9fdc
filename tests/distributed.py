"""A function in several processes that are ranks of one group; forked from one server that has imported torch already."""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests.train.processes import LIMIT_S, free_port


def _enter(
    rank: int, world: int, port: int, function: Callable[..., Any], args: tuple, results: Any, join: bool
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    from lamella.ranks.group import Ranks

    torch.set_num_threads(1)
    try:
        ranks = Ranks.join() if join else None
        value = io.BytesIO()  # tensors would go by shared file, which ends with this process
        torch.save(function(ranks, *args) if ranks is not None else function(*args), value)
        results.put((rank, value.getvalue(), ""))
        if ranks is not None:
            ranks.leave()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def run_as_ranks(
    world: int, function: Callable[..., Any], *args: Any, preload: str = "tests.train.fake", join: bool = True
) -> list[Any]:
    """`function(ranks, *args)` on each of `world` ranks (it and its arguments must pickle); what each returned.

    Without `join` it is `function(*args)`, which joins the group itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.fake", preload])
    results, port = context.Queue(), free_port()
    processes = [
        context.Process(target=_enter, args=(r, world, port, function, args, results, join)) for r in range(world)
    ]
    for process in processes:
        process.start()
    found, faults = {}, []
    try:
        for _ in range(world):
            rank, value, fault = results.get(timeout=4 * LIMIT_S)
            found[rank] = value
            faults += [f"rank {rank}: {fault}"] if fault else []
            if faults:
                break
    finally:
        for process in processes:
            process.join(5 if not faults else 0.5)
            process.kill()
    assert not faults, "\n".join(faults)
    return [torch.load(io.BytesIO(found[r]), weights_only=False) for r in range(world)]

"""What ranks do in processes of their own: each job is `job(ranks, folder, **arguments)`; what it returns is saved."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from lamella.hardware.memory import rss_bytes
from lamella.ranks.group import Ranks
from lamella.ranks.preflight import TorchLinks, preflight


def groups(ranks: Ranks, folder: Path):
    """Two groups of three ranks: sums, gathered bytes; and a group of one."""
    low, high, alone = ranks.subgroup((0, 1)), ranks.subgroup([2, 1]), ranks.subgroup((2,))
    assert ranks.subgroup((1, 0)) is low
    result = {"members": (low.members, high.members), "index": (low.index, high.index)}
    g = torch.Generator().manual_seed(ranks.rank)
    mine = [torch.randn(3, generator=g), torch.randn(2, 2, generator=g).bfloat16(), torch.zeros(0)]
    result["mine"] = [t.clone() for t in mine]
    if low.index is not None:
        low.sum_tensors_(mine)
        result["low"] = mine
        into = torch.zeros(8, dtype=torch.uint8)
        low.all_gather_bytes(into, torch.full((4,), 10 + ranks.rank, dtype=torch.uint8))
        result["gathered"] = into
    if high.index is not None:
        one = torch.tensor([1.0 + ranks.rank])
        high.all_reduce_(one)
        result["high"] = one
        into = torch.full((4,), 20 + ranks.rank, dtype=torch.uint8).repeat(2)
        high.all_gather_bytes(into, into.split(4)[high.index])
        result["in place"] = into
    if alone.index is not None:
        one, into = torch.tensor([5.0]), torch.zeros(2, dtype=torch.uint8)
        alone.sum_tensors_([one])
        alone.all_gather_bytes(into, torch.tensor([1, 2], dtype=torch.uint8))
        result["alone"] = (one, into)
    else:
        try:
            alone.all_reduce_(torch.zeros(1))
        except ValueError as error:
            result["foreign"] = str(error)
    return result


def transfers(ranks: Ranks, folder: Path):
    """Rank 0 sends in one order, rank 1 receives in another, by tag; all dtypes a boundary may have."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8)
    g = torch.Generator().manual_seed(5)
    sent = [(torch.randn(1000, generator=g) * 50).to(dtype).view(10, 100) for dtype in dtypes]
    if ranks.rank == 0:
        for pending in [ranks.send(t, 1, tag) for tag, t in enumerate(sent)]:
            pending.wait()
    else:
        out = [torch.empty_like(t) for t in sent]
        order = [3, 0, 4, 2, 1]
        for pending in [ranks.receive(out[tag], 0, tag) for tag in order]:
            pending.wait()
        assert all(torch.equal(a, b) for a, b in zip(out, sent, strict=True))
    return True


def spans(ranks: Ranks, folder: Path):
    from lamella.trace.recorder import RECORDER

    RECORDER.begin_step(0)
    t = torch.ones(256)
    if ranks.rank == 0:
        time.sleep(0.3)
        ranks.send(t, 1, 0).wait()
    else:
        ranks.receive(t, 0, 0).wait()
    ranks.sum_numbers([1.0, 2.0])
    step = RECORDER.steps[-1]
    return [
        (s.cause, s.nbytes, s.peer, s.lane, s.end_s - s.start_s)
        for s in (step[1] if isinstance(step, tuple) else step.spans)
    ]


def go_away(how: str, cgroup: str) -> None:
    match how:
        case "ram full":  # the kernel kills it
            Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
            held = []
            while True:
                held.append(torch.ones(1 << 22))
        case "ram limit":  # the kernel gives it no more
            used = rss_bytes()
            resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 30), used + (1 << 30)))
            torch.ones(1 << 32)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stall":
            time.sleep(600)
        case "memory":
            raise MemoryError
        case "exit":
            sys.exit(7)


def lose(ranks: Ranks, folder: Path, op: str, how: str, cgroup: str = ""):
    """Rank 1 goes away after two steps while the others wait for it in `op`."""
    ranks.on_loss(lambda error: write(folder / f"last-words-{ranks.rank}", str(error)))
    group = ranks.subgroup((0, 1)) if op == "group" else None
    for step in (1, 2):
        ranks.meet(f"step {step}")
        ranks.beat(step=step, doing=f"computing step {step + 1}")
    if ranks.rank == 1:
        time.sleep(0.5)
        go_away(how, cgroup)
    write(folder / f"began-{ranks.rank}", str(time.time()))
    try:
        wait_for_rank_1(ranks, op, group)
    finally:
        write(folder / f"ended-{ranks.rank}", str(time.time()))


def wait_for_rank_1(ranks: Ranks, op: str, group) -> None:
    if op == "receive":
        ranks.receive(torch.empty(4), 1, 3).wait()
    elif op == "send":
        ranks.send(torch.empty(50_000_000), 1, 3).wait()
    elif op == "group" and group.index is not None:
        group.all_reduce_(torch.zeros(3))
    elif op == "compute":
        for _ in range(6000):
            time.sleep(0.01)
            ranks.beat(doing="computing step 3, layer 5")
    elif op == "deaf compute":
        time.sleep(600)
    else:
        ranks.sum_numbers([1.0])


def steps(ranks: Ranks, folder: Path, count: int, step_s: float = 0.1):
    """`count` steps: compute, send 100 kB to the other, sum."""
    total = 0.0
    for k in range(count):
        ranks.beat(step=k, doing=f"computing step {k + 1}")
        time.sleep(step_s)
        data = torch.full((25_000,), float(k + ranks.rank))
        into = torch.empty_like(data)
        pending = [ranks.send(data, 1 - ranks.rank, k), ranks.receive(into, 1 - ranks.rank, k)]
        for each in pending:
            each.wait()
        ranks.meet(f"step {k + 1}")
        total += ranks.sum_numbers([float(into[7])])[0]
        write(folder / f"step-{ranks.rank}", str(k + 1))
    return total


def write(file: Path, text: str) -> None:
    file.write_text(text)


class Broken(TorchLinks):
    """A link that hangs, or delivers zeros, on one rank."""

    def __init__(self, op: str, how: str, here: bool) -> None:
        self.op, self.how, self.here = op, how, here

    def all_reduce(self, tensor):
        if self.op == "sum" and self.how == "hangs" and self.here:
            time.sleep(600)
        super().all_reduce(tensor)
        if self.op == "sum" and self.how == "zeros" and self.here:
            tensor.zero_()

    def exchange(self, out, to, into, source):
        if self.op == "copy" and self.how == "hangs" and self.here:
            time.sleep(600)
        super().exchange(out, to, into, source)
        if self.op == "copy" and self.how == "zeros" and self.here:
            into[1000:].zero_()


def check_links(ranks: Ranks, folder: Path, op: str = "", how: str = "", limit_s: float = 2.0):
    begin_s = time.monotonic()
    try:
        preflight(ranks, links=Broken(op, how, ranks.rank == 1), limit_s=limit_s)
    finally:
        (folder / f"took-{ranks.rank}").write_text(str(time.monotonic() - begin_s))
    return "fine"


def notes(ranks: Ranks, folder: Path):
    ranks.note(f"a/{ranks.rank}", f"from {ranks.rank}")
    return ranks.noted(f"a/{1 - ranks.rank}", timedelta(seconds=20)), ranks.noted("never", timedelta(seconds=0.2))

"""Several processes on one step (`torchrun`), over gloo.

Each rank takes whole rows of the step; the loss divides by the label tokens of the whole step, which every rank
knows from the plan, so gradients only have to be added. Whatever decides the course of the run (loss, norm,
failure, stop request) is decided from reduced numbers, so all ranks decide the same and none waits for another
that went elsewhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lamella.errors import RankLost, RunFailed, UserError
from lamella.trace.recorder import RECORDER, Cause

T = TypeVar("T")

TIMEOUT = "LAMELLA_RANK_TIMEOUT_S"
"""Environment variable: how long ranks wait for each other (seconds)."""
_TIMEOUT_S = 1800.0  # rank 0 alone verifies the store and saves; the others wait meanwhile


class Ranks:
    """The group of processes this one belongs to; one process alone makes no calls."""

    def __init__(self, rank: int, world: int, timeout_s: float = _TIMEOUT_S) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._where = "before the first step"
        self._groups: dict[tuple[int, ...], Group] = {}

    @classmethod
    def join(cls) -> Ranks:
        """Join the group that `torchrun` describes (WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT).

        A rank that keeps the others waiting longer than `LAMELLA_RANK_TIMEOUT_S` (default 1800) ends the run.

        Raises:
            UserError: WORLD_SIZE above 1 without RANK; a time-out that is no number above 0.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world <= 1:
            return cls(0, 1)
        if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
            raise UserError(
                f"WORLD_SIZE is {world} but RANK or MASTER_ADDR is not set",
                fix="start with torchrun, or unset WORLD_SIZE",
            )
        timeout_s = _timeout_s()
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        return cls(dist.get_rank(), dist.get_world_size(), timeout_s)

    @property
    def first(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0

    def leave(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _call(
        self, collective: Callable[[], T], name: str = "numbers", cause: Cause = "reduce", nbytes: int = 0,
        peer: int | None = None,
    ) -> T:  # fmt: skip
        try:
            with RECORDER.span(cause, name, nbytes=nbytes, peer=peer):
                return collective()
        except RuntimeError as error:  # gloo's way to say that a peer is gone or the time is up
            raise RankLost(
                f"rank {self.rank} lost the other ranks, {self._where}: {error}",
                fix=f"see the first error of the other ranks; {TIMEOUT} sets how long they are waited for",
            ) from error

    def meet(self, where: str) -> None:
        """Wait here for all ranks. `where` stands in the message about a rank that does not come, with its number."""
        self._where = f"in {where}"
        if self.world > 1:
            patience = timedelta(seconds=self.timeout_s)
            self._call(lambda: dist.monitored_barrier(timeout=patience, wait_all_ranks=True), "meet", "wait_peer")

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Sum over ranks, in float64."""
        if self.world == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        self._call(lambda: dist.all_reduce(total), nbytes=total.nbytes)
        result: list[float] = total.tolist()
        return result

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter], present: Sequence[bool]) -> None:
        """Add gradients over ranks in one flat fp32 buffer. `present[i]`: some rank has a gradient for parameter i;
        where this rank has none it adds zeros."""
        if self.world == 1:
            return
        live = [p for p, there in zip(parameters, present, strict=True) if there]
        if not live:
            return
        flat = torch.zeros(sum(p.numel() for p in live), dtype=torch.float32)
        views: list[Tensor] = list(flat.split([p.numel() for p in live]))
        for p, view in zip(live, views, strict=True):
            if p.grad is not None:
                view.copy_(p.grad.reshape(-1))
        self._call(lambda: dist.all_reduce(flat), "gradients", nbytes=flat.nbytes)
        for p, view in zip(live, views, strict=True):
            p.grad = view.view_as(p).to(p.device)

    def subgroup(self, ranks: tuple[int, ...]) -> Group:
        """The group of these ranks; every rank asks for the same ones in the same order."""
        if ranks not in self._groups:
            self._groups[ranks] = Group(self, ranks, dist.new_group(list(ranks)) if self.world > 1 else None)
        return self._groups[ranks]

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start sending; the tensor must stay as it is until `wait`."""
        return Pending(self, _plain(tensor), lambda t: dist.isend(t, to, tag=tag), f"send to rank {to}")

    def receive(self, out: Tensor, source: int, tag: int) -> Pending:
        """Start receiving into `out` (contiguous)."""
        return Pending(self, _plain(out), lambda t: dist.irecv(t, source, tag=tag), f"receive from rank {source}")

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Rank `source`'s tensor, on every rank, in place."""
        if self.world > 1:
            self._call(lambda: dist.broadcast(_plain(tensor), source))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; small picklable values only."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        self._call(lambda: dist.all_gather_object(values, value), "objects")
        return values

    def agree(self, what: str, value: Any) -> None:
        """Raises `UserError` when ranks hold different values of something they must share."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UserError(
                    f"ranks differ in {what}: rank 0 has {values[0]!r}, rank {rank} has {other!r}",
                    fix="start all ranks with the same files and settings",
                )

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and give its small picklable result to all; its failure ends all ranks."""
        if self.world == 1:
            return action()
        if not self.first:
            failure, result = self.from_first(("", None))
            if failure:
                raise RunFailed(f"rank 0 failed: {failure}")
            return result  # type: ignore[return-value]
        try:
            result = action()
        except Exception as error:
            self.from_first((str(error) or repr(error), None))
            raise
        return self.from_first(("", result))[1]

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        cause: Cause = "reduce" if self.first else "wait_peer"
        self._call(lambda: dist.broadcast_object_list(box, src=0), "from rank 0", cause, peer=0)
        return box[0]


def _plain(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor in a type that every backend passes on."""
    return tensor.view(-1).view(torch.uint8)


class Pending:
    """A transfer under way."""

    def __init__(self, ranks: Ranks, tensor: Tensor, start: Callable[[Tensor], Any], what: str) -> None:
        self._ranks, self._tensor, self._what = ranks, tensor, what
        self._work = ranks._call(lambda: start(tensor))

    def wait(self) -> None:
        self._ranks._call(self._work.wait)


class Group:
    """Some of the ranks."""

    def __init__(self, ranks: Ranks, members: tuple[int, ...], group: Any) -> None:
        self._ranks, self.members, self._group = ranks, members, group

    def sum_tensors_(self, tensors: Sequence[Tensor]) -> None:
        """Add fp32 tensors up over the group, in place."""
        if len(self.members) == 1 or not tensors:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        self._ranks._call(lambda: dist.all_reduce(flat, group=self._group))
        for t, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(total.view_as(t))


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else _TIMEOUT_S
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"{TIMEOUT} is {text!r}", fix="set it to seconds, such as 600, or unset it")
    return seconds

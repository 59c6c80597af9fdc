"""Several processes on one step (`torchrun`), over gloo, and NCCL between GPUs.

Each rank takes whole rows of the step, or a run of layers; the loss divides by the label tokens of the whole step,
which every rank knows from the plan, so gradients only have to be added. Whatever decides the course of the run (loss,
norm, failure, stop request) is decided from reduced numbers, so all ranks decide the same and none waits for another
that went elsewhere. What happens when one is lost: `beats.py`.
"""

from __future__ import annotations

import errno
import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lamella.errors import RankLost, RunFailed, UserError
from lamella.hardware.memory import rss_bytes
from lamella.ranks.beats import PULSE, Beats
from lamella.ranks.judge import DONE, Verdict
from lamella.trace.recorder import RECORDER, Cause, Span
from lamella.units import format_bytes

T = TypeVar("T")

TIMEOUT = "LAMELLA_RANK_TIMEOUT_S"
"""Environment variable: how long a rank may keep others waiting without doing anything (seconds)."""
_TIMEOUT_S = 1800.0  # rank 0 alone verifies the store and saves; the others wait meanwhile
SILENCE = "LAMELLA_SILENCE_S"
"""Environment variable: how long a rank may give no sign of life (seconds)."""
_SILENCE_S = 90.0  # after a link was cut for 30 s, TCP may try again only 51 s after the cut
_MARGIN_S = 30.0  # torch's own time-out comes after ours, whose message says more


class Pending:
    """A transfer under way; its tensor must not be touched before `wait` returns."""

    def __init__(self, ranks: Ranks, work: dist.Work, cause: Cause, name: str, tensor: Tensor, peer: int) -> None:
        self._ranks, self._work, self._cause, self._name = ranks, work, cause, name
        self._tensor, self._peer = tensor, peer

    def wait(self) -> None:
        """Until the data are here, or are gone from the tensor.

        Raises:
            RankLost: the peer is lost.
        """
        start_s = time.perf_counter()
        self._ranks.call(self._name, self._work.wait, peer=self._peer)
        if self._cause == "receive":  # a send's bytes were told when it began
            end_s, nbytes = time.perf_counter(), self._tensor.nbytes
            RECORDER.add(Span("receive", self._name, start_s, end_s, nbytes, self._peer, "receive"))


class Group:
    """Some of the ranks (`Ranks.subgroup`), in rising order; all of its calls are made by all of its ranks.

    Attributes:
        members: its ranks.
        index: this rank's place among them; None: it is not one.
    """

    def __init__(self, ranks: Ranks, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        self.members = members
        self.index = members.index(ranks.rank) if ranks.rank in members else None
        self._all, self._group = ranks, group
        self._name = f"of ranks {', '.join(map(str, members))}"

    def all_reduce_(self, tensor: Tensor, what: str = "") -> None:
        """Sum over the group, in place. `what`: how the trace calls it."""
        if self._is_alone():
            return
        name = what or f"sum {self._name}"
        self._all.call(name, lambda: dist.all_reduce(tensor, group=self._group), "reduce", tensor.nbytes)

    def sum_tensors_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each of the tensors over the group, in place, in one flat fp32 buffer. Shapes are the same on all ranks."""
        if self._is_alone() or not tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        self.all_reduce_(flat, "sum of gradients")
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def all_gather_bytes(self, into: Tensor, part: Tensor) -> None:
        """Put the members' parts (uint8, all of one size) side by side into `into`, by rank. `part` may be the place in
        `into` where it belongs."""
        if self._is_alone():
            if into.data_ptr() != part.data_ptr():
                into.copy_(part)
            return
        if into.numel() != len(self.members) * part.numel():
            raise ValueError(f"{len(self.members)} parts of {part.numel()} bytes do not fill {into.numel()}")
        self._all.call(
            f"gather {self._name}",
            lambda: dist.all_gather(list(into.split(part.numel())), part, group=self._group),
            "receive",
            into.nbytes - part.nbytes,
        )

    def _is_alone(self) -> bool:
        if self.index is None:
            raise ValueError(f"rank {self._all.rank} is none {self._name}")
        return len(self.members) == 1


class Ranks:
    """The group of processes this one belongs to; one process alone makes no calls."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.beats: Beats | None = None
        self._notes: dist.Store | None = None
        self._patience = timedelta(seconds=_TIMEOUT_S)
        self._where = "before the first step"
        self._groups: dict[tuple[int, ...], Group] = {}

    @classmethod
    def join(cls, device: str = "cpu") -> Ranks:
        """Join the group that `torchrun` describes (WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT).

        A rank without a sign of life for `LAMELLA_SILENCE_S` (default 90), or that keeps others waiting without doing
        anything for `LAMELLA_RANK_TIMEOUT_S` (default 1800), ends the run on all ranks.

        Args:
            device: this rank's; with "cuda..." CUDA tensors go over NCCL and CPU tensors over gloo. (The caller makes
                it the current device before.)

        Raises:
            UserError: WORLD_SIZE above 1 without RANK; a time-out that is no number above 0.
            RankLost: the ranks do not find each other.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world <= 1:
            return cls(0, 1)
        timeout_s, silence_s = _seconds(TIMEOUT, _TIMEOUT_S), _seconds(SILENCE, _SILENCE_S)
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(
                f"WORLD_SIZE is {world} but {' and '.join(missing)} is not set",
                fix="start with torchrun, or unset WORLD_SIZE",
            )
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        patience = timedelta(seconds=timeout_s + _MARGIN_S)
        ranks = cls(int(os.environ["RANK"]), world)
        ranks._patience = patience
        hosts_store = ranks.first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        try:
            store = _attempt(_connect(patience, world, hosts_store))
            dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=world, timeout=patience)
            signs, notes = _connect(patience), _connect(patience)
        except RuntimeError as error:
            raise RankLost(
                f"the ranks do not find each other: rank {ranks.rank} of {world} at {place}: {error}",
                fix="see that all ranks run, and that MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME (the network "
                "interface to use) fit all hosts",
            ) from error
        run = ranks.from_first(uuid.uuid4().hex)
        signs, ranks._notes = (dist.PrefixStore(f"lamella/{run}", each) for each in (signs, notes))
        beats = Beats(ranks.rank, world, signs, place, hosts_store, silence_s, timeout_s)
        ranks.meet("joining")  # all first beats are in the store
        beats.start()
        ranks.beats = beats
        return ranks

    @property
    def first(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0

    @property
    def patience_s(self) -> float:
        """How long ranks wait for each other (seconds)."""
        return self._patience.total_seconds()

    def beat(self, step: int | None = None, doing: str = "") -> None:
        """Say what this rank is doing now, and after how many completed steps; microseconds. From the main thread.

        Raises:
            RunFailed: another rank is lost.
        """
        news = step is not None and step != PULSE.step
        PULSE.beat(step, doing)
        if self.beats is not None:
            if news:
                self.beats.hurry()  # the others are to know of the last step even when this rank dies now
            self.beats.check()

    def note(self, key: str, text: str) -> None:
        """Leave a note for the others in the store: a way that does not depend on collectives."""
        if self._notes is not None:
            self._notes.set(key, text)

    def noted(self, key: str, patience: timedelta) -> str:
        """Another rank's note; "" when there is none in time."""
        if self._notes is None:
            return ""
        try:
            self._notes.wait([key], patience)
        except dist.DistStoreError:
            return ""
        return self._notes.get(key).decode()

    def on_loss(self, last_words: Callable[[RunFailed], None]) -> None:
        """What to do when another rank is lost while this one is stuck waiting for it, before the process ends. Called in
        another thread than the main one."""
        if self.beats is not None:
            self.beats.last_words = last_words

    def leave(self, error: BaseException | None = None) -> None:
        """Part from the others. `error`: what ended this rank; they show it."""
        if self.beats is not None:
            self.beats.leave(DONE if error is None else reason_of(error))
        if self.world > 1 and error is None and dist.is_initialized():
            dist.destroy_process_group()  # after an error a call may be under way that never returns

    def call(
        self, op: str, collective: Callable[[], T], cause: Cause = "wait_peer", nbytes: int = 0, peer: int | None = None
    ) -> T:
        """Run a call that waits for other ranks (all, or `peer`).

        Raises:
            RankLost: one of them is lost; says which.
            RunFailed: one of them ended with an error; shows it.
        """
        if self.beats is not None:
            self.beats.check()
        before = PULSE.doing
        PULSE.doing, PULSE.waits = f"waiting for {'the others' if peer is None else f'rank {peer}'} in {op}", True
        PULSE.count += 1
        try:
            with RECORDER.span(cause, op, nbytes, peer):
                return collective()
        except RuntimeError as error:  # gloo's way to say that a peer is gone or the time is up
            self._explain(op, error)
        finally:
            PULSE.doing, PULSE.waits = before, False
            PULSE.count += 1

    def _explain(self, op: str, error: RuntimeError) -> NoReturn:
        lost = f"rank {self.rank} lost the other ranks, {self._where}, in {op}: {error}"
        if self.beats is None:
            raise RankLost(lost, fix="see the first error of the other ranks") from error
        verdict = self.beats.explain()
        if verdict is None:
            verdict = Verdict(
                None,
                f"{lost} ({self.beats.told()})",
                f"see the first error of the other ranks; {TIMEOUT} sets how long they are waited for",
            )
        self.beats.fail(verdict, error)

    def blame(self, error: RankLost) -> None:
        """Of an error that says that some rank is gone: raises one that says which, when that can be found."""
        verdict = None if self.beats is None else self.beats.explain()
        if self.beats is not None and verdict is not None:
            self.beats.fail(verdict, error)

    def meet(self, where: str) -> None:
        """Wait here for all ranks. `where` stands in messages until the next meeting."""
        self._where = f"in {where}"
        if self.world > 1:
            self.call(f"meeting, {where}", lambda: dist.all_reduce(torch.zeros(1)))

    def subgroup(self, members: Sequence[int]) -> Group:
        """Some of the ranks as a group of their own, kept for the next time. Called by all ranks, members or not, in the
        same order, before any of them is used."""
        key = tuple(sorted(members))
        if key not in self._groups:
            if key[0] < 0 or key[-1] >= self.world or len(set(key)) < len(key):
                raise ValueError(f"{members} are no ranks of {self.world}")
            group = None
            if self.world > 1 and len(key) > 1:
                group = self.call("making groups", lambda: dist.new_group(list(key), timeout=self._patience))
            self._groups[key] = Group(self, key, group)
        return self._groups[key]

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Begin to send a contiguous tensor of any dtype; `tag` tells transfers between the same two ranks apart."""
        name = f"send to rank {to}"
        work = self.call(name, lambda: dist.isend(tensor, to, tag=tag), "send", tensor.nbytes, to)
        return Pending(self, _sure(work), "send", name, tensor, to)

    def receive(self, out: Tensor, source: int, tag: int) -> Pending:
        """Begin to receive into a contiguous tensor of the sender's shape and dtype."""
        name = f"receive from rank {source}"
        work = self.call(name, lambda: dist.irecv(out, source, tag=tag), "receive", peer=source)
        return Pending(self, _sure(work), "receive", name, out, source)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Rank `source`'s tensor, on every rank, in place."""
        if self.world > 1:
            cause: Cause = "reduce" if self.rank == source else "wait_peer"
            self.call("broadcast", lambda: dist.broadcast(tensor, source), cause, tensor.nbytes)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Sum over ranks, in float64."""
        if self.world == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        self.call("sum of numbers", lambda: dist.all_reduce(total), "reduce", total.nbytes)
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
        self.call("sum of gradients", lambda: dist.all_reduce(flat), "reduce", flat.nbytes)
        for p, view in zip(live, views, strict=True):
            p.grad = view.view_as(p).to(p.device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; small picklable values only."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        self.call("gather", lambda: dist.all_gather_object(values, value), "reduce")
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
            self.from_first((reason_of(error), None))
            raise
        return self.from_first(("", result))[1]

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        cause: Cause = "reduce" if self.first else "wait_peer"
        peer = None if self.first else 0
        self.call("word of rank 0", lambda: dist.broadcast_object_list(box, src=0), cause, peer=peer)
        return box[0]


def reason_of(error: BaseException) -> str:
    """An error in words, for other ranks: says so when memory ran out."""
    text = (str(error) or repr(error)) if isinstance(error, Exception) else f"{type(error).__name__} {error}".rstrip()
    if is_out_of_memory(error):
        text = f"probably out of memory, with {format_bytes(rss_bytes())} in use: {text}"
    return text


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _connect(patience: timedelta, world: int | None = None, hosts: bool = False) -> dist.Store:
    """A connection to the group's store, which the launcher holds, or else rank 0 (`hosts`). `world`: wait for so many."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, hosts, patience,
        wait_for_workers=world is not None, multi_tenant=True,
    )  # fmt: skip


def _attempt(store: dist.Store) -> dist.Store:
    """The part of the store that belongs to this start of the ranks.

    When `torchrun` is given a fixed port, its store outlives the ranks, with addresses in it at which nobody listens any
    more. (Where several of its agents work together each start has a store of its own, and their counts may differ.)
    """
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        return store
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _sure(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank belongs to the group of all"
    return work


def _seconds(name: str, default_s: float) -> float:
    text = os.environ.get(name, "")
    try:
        seconds = float(text) if text else default_s
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"{name} is {text!r}", fix="set it to seconds, such as 600, or unset it")
    return seconds

"""Do the links between ranks work? A sum and a copy whose results are known, before anything is loaded.

Some machines claim transfers between cards that hang or deliver zeros. Each check has its own deadline, and what each
rank found is told through the store, not through the links under test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lamella.errors import UserError
from lamella.ranks.group import Ranks

LIMIT_S = 10.0
"""For each of the two checks; with the wait for the others' findings both take less than 30 s."""
_EXTRA_S = 3.0  # ranks begin a check at slightly different times
COPY_BYTES = 1 << 20
_OK = "ok"


class Links(Protocol):
    """The two kinds of transfer that training makes."""

    def all_reduce(self, tensor: Tensor) -> None: ...
    def exchange(self, out: Tensor, to: int, into: Tensor, source: int) -> None: ...


class TorchLinks:
    """Those of the process group: gloo for CPU tensors, NCCL for CUDA tensors."""

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def exchange(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        operations = [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def preflight(ranks: Ranks, device: str = "cpu", links: Links | None = None, limit_s: float = LIMIT_S) -> None:
    """Sum ones over all ranks, and copy 1 MB from each rank to the next, compared bit for bit; milliseconds.

    Args:
        device: where this rank's tensors live.
        links: what to test; the process group's by default.

    Raises:
        UserError: a transfer does not end, fails, or delivers something else; names the ranks and what to set.
    """
    if ranks.world == 1:
        return
    links = links or TorchLinks()
    to, source = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world

    def sums() -> str:
        ones = torch.ones(1024, device=device)
        links.all_reduce(ones)
        wrong = ones[ones != ranks.world]
        return (
            f"{len(wrong)} of {len(ones)} sums of ones are {wrong[0].item():g}, not {ranks.world}" if len(wrong) else ""
        )

    def copies() -> str:
        into = torch.full((COPY_BYTES,), 255, dtype=torch.uint8, device=device)
        links.exchange(_pattern(ranks.rank).to(device), to, into, source)
        wrong = int((into.cpu() != _pattern(source)).sum())
        return f"{wrong} of {COPY_BYTES} bytes from rank {source} arrived wrong" if wrong else ""

    _check(ranks, "sum of ones over all ranks", sums, device, limit_s)
    _check(ranks, "copy from each rank to the next", copies, device, limit_s)


def _pattern(rank: int) -> Tensor:
    """1 MB that no other rank sends, without a zero."""
    return ((torch.arange(COPY_BYTES) * 31 + rank * 17) % 251 + 1).to(torch.uint8)


def _check(ranks: Ranks, what: str, action: Callable[[], str], device: str, limit_s: float) -> None:
    ranks.beat(doing=f"testing the links: {what}")
    deadline_s = time.monotonic() + limit_s + _EXTRA_S
    ranks.note(f"{what}/{ranks.rank}", _within(action, limit_s) or _OK)
    found = {}
    for rank in range(ranks.world):
        left_s = max(deadline_s - time.monotonic(), 0.1)
        text = ranks.noted(f"{what}/{rank}", timedelta(seconds=left_s))
        if text != _OK:
            found[rank] = text or "says nothing"
    if not found:
        return
    told = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
    raise UserError(f"the links between the {ranks.world} ranks do not work: {what}: {told}", fix=_fix(device))


def _fix(device: str) -> str:
    if device.startswith("cuda"):
        return (
            "set NCCL_P2P_DISABLE=1 (copies between cards then go through the host's memory); between hosts set "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the network interface that joins them; NCCL_DEBUG=INFO says more"
        )
    return "set GLOO_SOCKET_IFNAME to the network interface that joins the hosts (`ip addr` lists them)"


def _within(action: Callable[[], str], limit_s: float) -> str:
    """What `action` found, run in a thread that is left behind when it does not end in time."""
    found = [f"no end within {limit_s:g} s"]

    def run() -> None:
        try:
            found[0] = action()
        except RuntimeError as error:  # gloo's and NCCL's way to say that a transfer failed
            found[0] = str(error).partition("\n")[0]

    thread = threading.Thread(target=run, name="lamella-preflight", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0]

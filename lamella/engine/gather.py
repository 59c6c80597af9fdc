"""Ranks with fast links among them read a streamed layer together: each one its part, then they give theirs to each other.

A layer's file is cut into equal parts of whole pages, one per rank. A rank reads its part to the place in the slot where it
belongs; then comes a *meeting*, then the parts are gathered into all slots. Every rank does this in its reader thread, over a
process group of its own, in the order in which its walk asks for layers.

Why nobody waits for ever. Between `begin` and `leave` (a step) all ranks ask for the same layers in the same order: the order
of the walk, which depends on neither rows nor activations, from slots in the same state (compared at `begin`; forgotten
everywhere when they differ). A rank asks for a layer when it comes to the layer before, and what it waited for to get there
was asked for earlier in that order. So of all gathers that are not done the first is one that every rank comes to: a rank
ahead waits there, the others pass on towards it. A rank that fails says so where the others expect it next, at the next
meeting, and the one that ends a step is one; so it ends them all, at the same layer. A rank that dies closes its connections,
one that hangs runs into the group's time-out; both give `RunFailed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lamella.errors import RankLost, RunFailed, UserError
from lamella.store.reader import GroupKey, PackedGroup, Store
from lamella.trace.recorder import RECORDER

PART_BYTES = 4096
"""Parts are multiples of this."""
_BEGIN, _LEAVE = -1, -2


class Peers(Protocol):
    """Ranks that give bytes to each other; calls match in order."""

    rank: int
    world: int

    def all_gather_bytes(self, into: Tensor, sizes: Sequence[int]) -> None:
        """Fill `into` (uint8 [sum of sizes]) with the parts of all ranks; this rank's is in its place already.

        On a GPU the work is ordered with the current stream.

        Raises:
            RankLost: a rank is gone, or did not come in time.
        """


class GroupPeers:
    """Over torch.distributed: gloo for host memory, NCCL for a GPU's.

    Args:
        ranks: global ranks of the group, ascending.
        host, device: their process groups; `device` None on a CPU.
    """

    def __init__(self, ranks: Sequence[int], host: Any, device: Any = None) -> None:
        self.ranks = tuple(ranks)
        self.rank, self.world = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._host, self._device = host, device

    @classmethod
    def open(cls, groups: Sequence[Sequence[int]], device: torch.device, timeout_s: float) -> GroupPeers | None:
        """Every rank of the run calls this alike, with all groups; gives the one it is in, None when it is in none.

        Args:
            groups: disjoint, each of two global ranks or more, ascending.
        """
        mine = None
        patience = timedelta(seconds=timeout_s)
        for ranks in groups:
            host = dist.new_group(list(ranks), timeout=patience, backend="gloo")
            fast = dist.new_group(list(ranks), timeout=patience, backend="nccl") if device.type == "cuda" else None
            if dist.get_rank() in ranks:
                mine = cls(ranks, host, fast)
        return mine

    def all_gather_bytes(self, into: Tensor, sizes: Sequence[int]) -> None:
        try:
            if into.device.type == "cpu":
                # gloo gathers into a copy of its own; broadcasts work in place
                works = [
                    dist.broadcast(part, src=source, group=self._host, async_op=True)
                    for source, part in zip(self.ranks, into.split(list(sizes)), strict=True)
                ]
                for work in works:
                    work.wait()
            else:
                assert len(set(sizes)) == 1, "NCCL gathers parts of one size"
                own = into.split(list(sizes))[self.rank]
                dist.all_gather_into_tensor(into, own, group=self._device)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.ranks[self.rank]} lost the ranks {list(self.ranks)} that it reads layers with: {error}",
                fix="see the first error of the other ranks",
            ) from error


class LayerGather:
    """Reads layers together with other ranks, in place of `Store.load`.

    Attributes:
        read_bytes: read from the store by this rank.
        gathered_bytes: of whole layers that came so.
    """

    def __init__(self, store: Store, peers: Peers) -> None:
        self.store, self.peers = store, peers
        self.read_bytes = self.gathered_bytes = 0
        self._over = False

    # ---- sizes ----------------------------------------------------------------------------------

    def part_bytes(self, nbytes: int) -> int:
        """Of each rank's part of so many bytes, the last ones padded."""
        return -(-nbytes // (self.peers.world * PART_BYTES)) * PART_BYTES

    def padded_bytes(self, nbytes: int) -> int:
        """What a slot for so many bytes must have: equal parts."""
        return self.peers.world * self.part_bytes(nbytes)

    def own_part(self, i: GroupKey) -> tuple[int, int]:
        """First byte of this rank's part of a group's file, and the byte after its last."""
        nbytes = self.store.group_bytes(i)
        part = self.part_bytes(nbytes)
        return min(self.peers.rank * part, nbytes), min((self.peers.rank + 1) * part, nbytes)

    # ---- meetings -------------------------------------------------------------------------------

    def begin(self, state: int) -> bool:
        """Meet before a step: whether all ranks' slots are in the same state (a digest of it, below 2^63)."""
        return len(set(self._meet(_BEGIN, state, failed=False))) == 1

    def leave(self, failed: bool) -> None:
        """Meet after a step, or take leave of the others because this rank has failed."""
        if not self._over:
            self._meet(_LEAVE, 0, failed)

    def meet(self, layer: int, failed: bool) -> None:
        """Meet before a layer's parts are exchanged."""
        self._meet(layer, 0, failed)

    def _meet(self, where: int, state: int, failed: bool) -> list[int]:
        """All ranks' states.

        Raises:
            RunFailed: another rank has failed, or is gone.
        """
        if self._over:
            raise RunFailed("layers can no longer be read together: a rank has failed")
        peers = self.peers
        said = torch.zeros(peers.world, 3, dtype=torch.int64)
        said[peers.rank] = torch.tensor([where, state, int(failed)])
        self._over = True  # until it turns out well
        with RECORDER.span("wait_peer", _name(where), lane="read"):
            peers.all_gather_bytes(said.view(-1).view(torch.uint8), [said[0].nbytes] * peers.world)
        broken = [rank for rank in range(peers.world) if said[rank, 2]]
        if broken:
            if failed:
                return []
            raise RunFailed(
                f"{_ranks(peers, broken)} failed while layers were read together ({_name(where)})",
                fix="see the error of that rank",
            )
        places: list[int] = said[:, 0].tolist()
        assert len(set(places)) == 1, f"ranks of one group read different layers: {places}"
        self._over = False
        states: list[int] = said[:, 1].tolist()
        return states

    def union(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Layers that at least one rank names."""
        count, world = self.store.manifest.num_layers, self.peers.world
        named = torch.zeros(world, count, dtype=torch.uint8)
        named[self.peers.rank, list(layers)] = 1
        self.peers.all_gather_bytes(named.view(-1), [count] * world)
        return tuple(named.any(0).nonzero().flatten().tolist())

    # ---- layers ---------------------------------------------------------------------------------

    def read_own(self, i: int, into: Tensor) -> None:
        """Read this rank's part into `into` (uint8 [its bytes], host memory), and meet. A rank that cannot read says so to
        the others before it raises."""
        first, last = self.own_part(i)
        try:
            with RECORDER.span("load", f"layer {i}, own part", last - first, lane="read"):
                self.store.read(i, into, first)
        except UserError:
            self.meet(i, failed=True)
            raise
        self.read_bytes += last - first
        self.meet(i, failed=False)

    def exchange(self, i: int, slot: Tensor) -> None:
        """Give this rank's part to the others and get theirs.

        Args:
            slot: uint8 [`padded_bytes` or more], with this rank's part in its place.
        """
        nbytes = self.store.group_bytes(i)
        part, (first, last) = self.part_bytes(nbytes), self.own_part(i)
        with RECORDER.span("receive", f"layer {i}, other parts", nbytes - (last - first), lane="read"):
            self.peers.all_gather_bytes(slot[: part * self.peers.world], [part] * self.peers.world)
        self.gathered_bytes += nbytes

    def load(self, i: int, into: Tensor) -> PackedGroup:
        """As `Store.load`, in host memory; every rank of the group calls it for the same layers in the same order.

        Args:
            into: uint8 [`padded_bytes` or more], contiguous, aligned to 64 bytes.

        Raises:
            UserError: this rank's part cannot be read.
            RunFailed: another rank has failed.
        """
        first, last = self.own_part(i)
        self.read_own(i, into[first:last])
        self.exchange(i, into)
        return self.store.view(i, into)

    def facts(self) -> dict[str, int]:
        """For the receipt."""
        return {"ranks": self.peers.world, "read_bytes": self.read_bytes, "layer_bytes": self.gathered_bytes}


def _name(where: int) -> str:
    return {_BEGIN: "before a step", _LEAVE: "after a step"}.get(where, f"layer {where}")


def _ranks(peers: Peers, numbers: Sequence[int]) -> str:
    known = peers.ranks if isinstance(peers, GroupPeers) else range(peers.world)
    return "rank " + ", ".join(str(known[n]) for n in numbers)

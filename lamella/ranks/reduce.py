"""Sums among the ranks that share a layer's work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lamella.errors import RunFailed
from lamella.trace.recorder import RECORDER


class SumGroup:
    """Ranks that hold parts of the same layers.

    Args:
        ranks: of the world, ascending.
        group: of `torch.distributed`, these ranks; None: the whole world.

    Attributes:
        position: this rank's place among `ranks`; size: how many they are.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        self.ranks = tuple(ranks)
        self.position, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._group = group

    @classmethod
    def form(cls, members: Sequence[Sequence[int]]) -> SumGroup | None:
        """This rank's group, or None where it is in none of two or more. All ranks call this with the same arguments.

        Args:
            members: ranks of every group of the run.
        """
        mine = None
        for ranks in members:
            if len(ranks) > 1:
                group = dist.new_group(list(ranks))
                if dist.get_rank() in ranks:
                    mine = cls(ranks, group)
        return mine

    def all_reduce_(self, tensor: Tensor, name: str) -> None:
        """Sum in place; every rank gets the same bits.

        Raises:
            RunFailed: a rank of the group is gone, or did not come in time.
        """
        with RECORDER.span("reduce", name, nbytes=tensor.nbytes):
            try:
                dist.all_reduce(tensor, group=self._group)
            except RuntimeError as error:  # gloo's way to say that a peer is gone or the time is up
                raise RunFailed(
                    f"rank {self.ranks[self.position]} lost one of the ranks {list(self.ranks)} in the sum of {name}: {error}",
                    fix="see the first error of the other ranks",
                ) from error

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        smallest = torch.tensor(value)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._group)
        return int(smallest)

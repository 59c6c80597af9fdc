"""Which rank has the newest value of what: with stages, a parameter and its moments are updated by its owners alone.

Others get them when they need them: rank 0 for a checkpoint, everybody at the end, new owners when layers change hands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lamella.ranks.group import Ranks
from lamella.train.optimizer import Optimizer
from lamella.train.parts import Spread

_FLAT_NUMEL = 16 << 20
"""Values sent at once."""
_TAG = 3  # engine/stages.py has 0 to 2 of every four


class Shards:
    """The adapter's state over ranks.

    Args:
        optimizer: of the whole adapter; only owned parameters have gradients here, so only they change.
    """

    def __init__(self, ranks: Ranks, spread: Spread, optimizer: Optimizer) -> None:
        self._ranks, self.spread, self._optimizer = ranks, spread, optimizer

    @property
    def whole(self) -> bool:
        """Every rank has everything."""
        everybody = tuple(range(self._ranks.world))
        return all(self.spread.owners(name) == everybody for name in self._optimizer.parameters)

    def owned(self) -> list[str]:
        """Parameters that this rank trains."""
        return [name for name in self._optimizer.parameters if self._ranks.rank in self.spread.owners(name)]

    def sum_gradients(self, present: Sequence[bool]) -> None:
        """Add gradients up over their owners. `present[i]`: some rank has a gradient for parameter i."""
        parameters = self._optimizer.parameters
        by_owners: dict[tuple[int, ...], list[str]] = {}
        for name, there in zip(parameters, present, strict=True):
            if there:
                by_owners.setdefault(self.spread.owners(name), []).append(name)
        for owners, names in by_owners.items():
            if self._ranks.rank not in owners or len(owners) == 1:
                continue
            if len(owners) == self._ranks.world:
                self._ranks.sum_gradients([parameters[name] for name in names], [True] * len(names))
                continue
            for name in names:
                if parameters[name].grad is None:
                    parameters[name].grad = torch.zeros_like(parameters[name])
            gradients = [grad for name in names if (grad := parameters[name].grad) is not None]
            self._ranks.subgroup(owners).sum_tensors_(gradients)

    def grad_norm(self) -> float:
        """Global L2 norm of the summed gradients, the same on every rank."""
        if self.whole:
            return self._ranks.from_first(self._optimizer.grad_norm())
        names = [name for name in self.owned() if self.spread.owners(name)[0] == self._ranks.rank]
        grads = [self._optimizer.parameters[name].grad for name in names]
        norms = [torch.linalg.vector_norm(g.double()) for g in grads if g is not None]
        mine = float(torch.stack(norms).square().sum()) if norms else 0.0
        (total,) = self._ranks.sum_numbers([mine])
        return float(total**0.5)

    def with_gradient(self, units: Iterable[str], still_without: Iterable[str]) -> set[str]:
        """Of these units, those that have a gradient with some owner; `still_without` is this rank's own finding."""
        mine = set(units) - set(still_without)
        return set().union(*self._ranks.gather(mine)) if not self.whole else mine

    def bring(self, to: Sequence[int], moments: bool) -> None:
        """Send the newest values (and moments) of every parameter to these ranks, where they are not."""
        owners = {name: self.spread.owners(name) for name in self._optimizer.parameters}
        self._move(
            {name: (ranks[0], tuple(r for r in to if r not in ranks)) for name, ranks in owners.items()}, moments
        )

    def hand_over(self, before: dict[str, tuple[int, ...]]) -> None:
        """Parameters have new owners: give them values and moments of the first of the old ones.

        Args:
            before: parameter -> old owners, of those that changed hands.
        """
        self._move({
            name: (old[0], tuple(r for r in self.spread.owners(name) if r not in old)) for name, old in before.items()
        }, True)  # fmt: skip

    def _move(self, routes: dict[str, tuple[int, tuple[int, ...]]], moments: bool) -> None:
        """Send tensors of each parameter from a rank to others, those of like routes together."""
        rank = self._ranks.rank
        batches: dict[tuple[int, tuple[int, ...]], list[list[str]]] = {}
        room = 0
        for name, route in routes.items():
            size = self._optimizer.parameters[name].numel()
            lists = batches.setdefault(route, [])
            if not lists or room + size > _FLAT_NUMEL:
                lists.append([])
                room = 0
            lists[-1].append(name)
            room += size
        for (source, targets), lists in batches.items():
            if rank != source and rank not in targets:
                continue
            for names in lists:
                tensors = [t for name in names for t in self._optimizer.tensors_of(name, moments)]
                flat = torch.cat([t.detach().reshape(-1).cpu() for t in tensors])
                if rank == source:
                    for pending in [self._ranks.send(flat, target, _TAG) for target in targets]:
                        pending.wait()
                    continue
                self._ranks.receive(flat, source, _TAG).wait()
                with torch.no_grad():
                    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                        t.copy_(part.view_as(t))

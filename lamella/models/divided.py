"""A layer's experts, attention heads and MLP columns divided among ranks that all take the same tokens.

As in Megatron-LM (Shoeybi et al. 2019): hidden states are whole on every rank. A divided module starts with `enter`
(nothing forward, the ranks' gradients summed backward) and ends with `leave` (the ranks' outputs summed forward, nothing
backward). In between a rank computes with its own experts, heads or columns, and what its LoRA pairs get there is its
part of their gradient. Modules that are not divided run whole on every rank, on the same bits; their adapters'
gradients count on the group's first rank alone.

All ranks run the same modules on the same micro-batches, so their sums meet in the same order, whatever a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lamella.models.attention import AttentionLayout
from lamella.models.divisible import Prover, is_experts, mlp_is_known
from lamella.models.fused import Fused, Normed
from lamella.models.linear import FrozenLinear
from lamella.models.pieces import Cut


class Group(Protocol):
    """The ranks that share a layer; see `lamella.ranks.group.Group`."""

    members: tuple[int, ...]
    index: int | None

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum in place over the group; the same bits on all ranks."""


def apportion(units: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Divide `units` in order into (first, last) ranges by share, by largest remainder (ties: the lower rank)."""
    total = sum(shares)
    exact = [units * share / total for share in shares]
    counts = [int(x + 1e-9) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda r: (counts[r] - exact[r], r))
    for r in by_remainder[: units - sum(counts)]:
        counts[r] += 1
    bounds = [sum(counts[:r]) for r in range(len(counts) + 1)]
    return list(pairwise(bounds))


def columns_at_once(columns: int, ranks: int) -> int:
    """MLP columns that stay together: blocks of the quantised weights where ranks have several each, else fewer."""
    for unit in (64, 32, 16, 8, 4, 2):
        if columns % unit == 0 and columns // unit >= 4 * ranks:
            return unit
    return 1


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, division: Division, *tensors: Tensor) -> Any:
        ctx.division, ctx.alone = division, division.is_alone
        same = tuple(t.view_as(t) for t in tensors)
        return same if len(same) > 1 else same[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        given = [g for g, n in zip(grads, needed, strict=True) if n]
        sums = iter(given if ctx.alone else ctx.division.summed(given))
        return None, *(next(sums) if n else None for n in needed)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, division: Division, x: Tensor) -> Tensor:
        return division.summed([x])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class _Nothing(torch.autograd.Function):
    """Zeros like the first tensor, and zero gradients for all: the part of a rank that has nothing to compute. It keeps
    the graph of every rank alike, so that all of them reach the same sums."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype) for t in tensors]
        return torch.zeros_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            grad.new_zeros(shape, dtype=dtype) if needed else None
            for (shape, dtype), needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


def nothing(*tensors: Tensor) -> Tensor:
    """Zeros of the first tensor's shape that depend on all of them."""
    return _Nothing.apply(*tensors)


class DividedModule(Fused):
    """Stands in the place of an attention or MLP whose linear layers hold a rank's part.

    Args:
        own: the module, fused or the family's own.
        empty: this rank has no part of it.
        attends: it is an attention.
        tuple_answer: it answers with (output, None).
    """

    def __init__(self, own: nn.Module, division: Division, *, empty: bool, attends: bool, tuple_answer: bool) -> None:
        super().__init__(own)
        self.__dict__["division"] = division
        self.empty, self.attends, self.tuple_answer = empty, attends, tuple_answer

    @property
    def own_calls(self) -> int:  # type: ignore[override]
        return int(getattr(self.__dict__["own"], "own_calls", 0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        division: Division = self.__dict__["division"]
        given = args[0] if args else kwargs["hidden_states"]
        x = _Enter.apply(division, given)
        normed = Normed.of(given)
        if normed is not None:
            x.lamella_normed = Normed(normed.x_NH, normed.norm, x._version)
        if self.empty:
            out: Any = self._nothing(x)
        else:
            args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})
            out = self.__dict__["own"](*args, **kwargs)
        rest = out[1:] if isinstance(out, tuple) else None
        out = _Leave.apply(division, out if rest is None else out[0])
        return out if rest is None else (out, *rest)

    def _nothing(self, x: Tensor) -> Any:
        layout = AttentionLayout.current
        if self.attends and layout is not None:
            layout.calls += 1
        linears = [m for m in self._modules.values() if isinstance(m, FrozenLinear) and m.lora is not None]
        out = nothing(x, *(t for m in linears if m.lora is not None for t in (m.lora.a, m.lora.b)))
        return (out, None) if self.tuple_answer else out


@dataclass(frozen=True)
class ExpertPart:
    """The experts that this rank holds of a module; hung into it as `lamella_part`."""

    division: Division
    held: Cut

    def mine(self, index_TK: Tensor) -> Tensor:
        """Which of a router's choices are this rank's: bool [T, K]."""
        return (index_TK >= self.held.first) & (index_TK < self.held.last)

    def enter(self, hidden_TH: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        x, w = _Enter.apply(self.division, hidden_TH, weights_TK)
        return x, w

    def leave(self, out_TH: Tensor) -> Tensor:
        return _Leave.apply(self.division, out_TH)


@dataclass
class Division:
    """What one rank of a group holds of a model.

    Attributes:
        group: of the ranks.
        shares: of the work, by position in the group.
        cuts: full parameter name -> the part held here; others are whole on every rank.
        absent: parameters that count on the group's first rank and not here (biases of summed outputs).
        counts: modules divided, by kind.
        whole: class -> why modules of it run whole on every rank.
    """

    group: Group
    shares: tuple[float, ...]
    cuts: dict[str, Cut] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    _replaced: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    _experts: list[nn.Module] = field(default_factory=list)
    is_alone: bool = False

    @property
    def first(self) -> bool:
        """True on the rank where what all ranks compute alike is counted."""
        return self.position == 0

    @property
    def position(self) -> int:
        """This rank's place in the group."""
        assert self.group.index is not None, "this rank is not in the group"
        return self.group.index

    @property
    def share(self) -> float:
        """This rank's part of the work, of 1."""
        return self.shares[self.position] / sum(self.shares)

    def least(self, value: int, values: int) -> int:
        """The smallest of the ranks' values, of 0 .. `values` - 1."""
        counts = torch.zeros(values)
        counts[value] = 1
        self.group.all_reduce_(counts)
        return int(counts.nonzero()[0])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, sums (and those of the graphs made here) are this rank's part alone: for measurements that the other
        ranks do not take at the same time."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the group, as new tensors.

        With three ranks or more 16-bit values are summed in fp32; two sum exactly as well in 16 bit, rounding once.
        """
        if self.is_alone:
            return [t.clone() for t in tensors]
        kinds = {t.dtype for t in tensors}
        if len(kinds) > 1:
            return [self.summed([t])[0] for t in tensors]
        if not tensors:
            return []
        flat = torch.cat([t.reshape(-1) for t in tensors]) if len(tensors) > 1 else tensors[0].contiguous().view(-1)
        if len(self.shares) > 2 and flat.element_size() < 4:
            flat = flat.float()
        elif len(tensors) == 1:
            flat = flat.clone()
        self.group.all_reduce_(flat)
        pieces = flat.to(tensors[0].dtype).split([t.numel() for t in tensors])
        return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]

    def range_of(self, units: int) -> tuple[int, int]:
        """This rank's (first, last) of `units` things."""
        return apportion(units, self.shares)[self.position]

    def site_cuts(self, key: str, parameter: str | None) -> tuple[Cut | None, Cut | None] | None:
        """Parts of a LoRA pair's A and B that are held here (None: whole, its gradient summed over the ranks); None
        for a weight that is not divided."""
        cut = self.cuts.get(key if parameter is not None else f"{key}.weight")
        if cut is None:
            return None
        if parameter is not None:
            return cut, cut
        return (None, Cut(0, cut.first, cut.last)) if cut.dim == 0 else (Cut(1, cut.first, cut.last), None)

    def facts(self) -> dict[str, Any]:
        """What is in effect, for the receipt."""
        return {"way": "experts", "ranks": list(self.group.members), "position": self.position, "shares": list(self.shares),
                "divided": dict(self.counts), "parts": dict(self.parts), "whole": dict(self.whole)}  # fmt: skip

    def undo(self) -> None:
        """Put the modules back; weights stay as they are bound."""
        for parent, name, own in self._replaced:
            parent._modules[name] = own
        for module in self._experts:
            module.__dict__.pop("lamella_part", None)
        self._replaced.clear()
        self._experts.clear()

    # ---- making one -------------------------------------------------------------------------------------------------

    def _note(self, kind: str, what: str, first: int, last: int, units: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.parts[what] = f"{first}..{last - 1} of {units}" if last > first else f"none of {units}"

    def _put(self, parent: nn.Module, name: str, standing: DividedModule) -> None:
        self._replaced.append((parent, name, standing.__dict__["own"]))
        parent._modules[name] = standing

    def _cut_linear(self, at: str, linear: nn.Module, dim: int, first: int, last: int) -> None:
        self.cuts[f"{at}.weight"] = Cut(dim, first, last)
        if linear.bias is None:
            return
        if dim == 0:
            self.cuts[f"{at}.bias"] = Cut(0, first, last)
        elif not self.first:
            self.absent.add(f"{at}.bias")

    def _divide_experts(self, at: str, module: nn.Module) -> bool:
        experts = int(module.num_experts)  # type: ignore[arg-type]
        own = {n: p for n, p in module._parameters.items() if p is not None}
        odd = [n for n, p in own.items() if p.shape[0] != experts]
        if odd:
            self.whole[type(module).__name__] = f"its {odd[0]} is not a stack of {experts} experts"
            return False
        held = Cut(0, *self.range_of(experts))
        for name in own:
            self.cuts[f"{at}.{name}"] = held
        module.__dict__["lamella_part"] = ExpertPart(self, held)
        self._experts.append(module)
        self._note("experts", f"experts of {experts}", held.first, held.last, experts)
        return True

    def _divide_mlp(self, at: str, parent: nn.Module, name: str, module: nn.Module, prover: Prover) -> bool:
        why = prover.why_not_mlp(module)
        if why:
            self.whole[type(prover.own(module)).__name__] = why
            return False
        columns = int(module._modules["down_proj"].in_features)  # type: ignore[union-attr, arg-type]
        unit = columns_at_once(columns, len(self.shares))
        first, last = (unit * n for n in self.range_of(columns // unit))
        for child, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            linear = module._modules[child]
            assert linear is not None
            self._cut_linear(f"{at}.{child}", linear, dim, first, last)
        empty = first == last
        self._put(parent, name, DividedModule(module, self, empty=empty, attends=False, tuple_answer=False))
        self._note("mlp", f"MLP columns of {columns}", first, last, columns)
        return True

    def _divide_attention(self, at: str, parent: nn.Module, name: str, module: nn.Module, prover: Prover) -> bool:
        why, heads = prover.why_not_attention(module)
        if heads is None:
            self.whole[type(prover.own(module)).__name__] = why
            return False
        first, last = self.range_of(heads.groups)
        for child, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            size = heads.size * (heads.per_group if child in ("q_proj", "o_proj") else 1)
            linear = module._modules[child]
            assert linear is not None
            self._cut_linear(f"{at}.{child}", linear, dim, first * size, last * size)
        standing = DividedModule(module, self, empty=first == last, attends=True, tuple_answer=heads.tuple_answer)
        self._put(parent, name, standing)
        self._note("attention", f"key/value heads of {heads.groups}", first, last, heads.groups)
        return True

    def _divide_layer(self, layer: nn.Module, prefix: str, prover: Prover) -> None:
        done: list[str] = []
        for path, parent in list(layer.named_modules()):
            for name, child in list(parent._modules.items()):
                at = f"{path}.{name}" if path else name
                if child is None or any(at.startswith(f"{d}.") for d in done):
                    continue
                full = f"{prefix}.{at}"
                if is_experts(child):
                    divided = self._divide_experts(full, child)
                elif mlp_is_known(child):
                    divided = self._divide_mlp(full, parent, name, child, prover)
                elif prover.is_attention(child):
                    divided = self._divide_attention(full, parent, name, child, prover)
                else:
                    continue
                if divided:
                    done.append(at)
        for path, module in layer.named_modules():
            if isinstance(module, FrozenLinear) and not any(path.startswith(f"{d}.") for d in done):
                owner = prover.own(layer.get_submodule(path.rpartition(".")[0]))
                self.whole.setdefault(
                    type(owner).__name__, f"{path.rpartition('.')[2]} belongs to no module of a known form"
                )


def divide(layers: Sequence[nn.Module], prefix: str, group: Group, shares: Sequence[float]) -> Division:
    """Divide a skeleton's layers by share; this rank's parts are found by its place in the group.

    What is divided is proven by running it (`divisible.py`); everything else stays whole, with the reason. Weights are
    bound by `LayerWeights.divide`.

    Args:
        prefix: dotted name of the layer list.
        shares: one for each rank of the group, none negative.
    """
    assert len(shares) == len(group.members)
    division = Division(group, tuple(shares))
    prover = Prover()
    for i, layer in enumerate(layers):
        division._divide_layer(layer, f"{prefix}.{i}", prover)
    return division

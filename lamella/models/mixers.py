"""Token mixers that are not attention (gated delta nets, Mamba, short convolutions, Lightning attention) on packed layouts.

Such a module runs along its rows, so it must never be given several sequences as one. `stand_in` finds these modules in a
family's layers and puts a `Mixer` in the place of each: it lays the packed tokens out as right-padded rows of similar
length, one for each sequence (of a tree: one for each path from the root to a leaf), calls the family's own module on
them, and takes every token's output once. A mixer is causal, so padding at the right reaches no token; a prefix that
several paths share is computed in each, and its gradient is their sum. Both claims are tested on the loaded weights of
each kind of layer before it is used (`engine/mixing.py`).

With a cache (generation) a mixer's inputs are kept, and every new token runs its row again: exact for any family, and
slower than carrying a state.

Shape suffixes: T packed tokens, n rows of a group, L padded length, B new tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lamella.models.attention import AttentionLayout, AttentionRefused, Cache
from lamella.models.fused import Fused
from lamella.models.linear import DropoutClock, FrozenLinear
from lamella.models.padded import join, split
from lamella.models.several import RowRuns

_CACHES = {"cache", "cache_params", "past_key_values", "past_key_value", "layer_past"}
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
FAILS = (TypeError, AttributeError, RuntimeError, ValueError, KeyError, IndexError, AssertionError)


# ---- the stand-in ---------------------------------------------------------------------------------------------------


class _Arguments:
    """A call's arguments, with those that have a value for each token told apart."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
        self.leaves, self.form = tree_flatten((args, kwargs))
        self.by_token = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.dim()]
        for x in (self.leaves[i] for i in self.by_token):
            if tuple(x.shape[:2]) != (1, tokens):
                raise AttentionRefused(
                    f"{type(module).__name__} is given a tensor of shape {list(x.shape)}, which has no value for each of "
                    f"{tokens} tokens",
                    fix="this model family is not supported yet",
                )

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.by_token]

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call again with other tensors in the same places."""
        leaves = list(self.leaves)
        for i, x in zip(self.by_token, tensors, strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self.form)
        return args, kwargs


@contextmanager
def _dropout_of(index: Tensor | None) -> Iterator[None]:
    """Inside, dropout is seeded by the rows' tokens."""
    keys_T = DropoutClock.row_keys_T
    if keys_T is not None and index is not None:
        DropoutClock.row_keys_T = keys_T.index_select(0, index.flatten())
    try:
        yield
    finally:
        DropoutClock.row_keys_T = keys_T


class Kept:
    """What is told of every tensor that autograd keeps inside a mixer (hooks outside are not asked there); None: nobody."""

    watch: Callable[[Tensor], Any] | None = None


@contextmanager
def weights_by_name(own: nn.Module) -> Iterator[None]:
    """Inside, autograd keeps no view of a weight but its place: backward finds what is bound there then.

    A family's code may use a weight apart from its layer (`dt_proj.weight @ x`); what it lies in is another layer's by then.
    """
    if not torch.is_grad_enabled():
        yield
        return
    places: dict[int, list[tuple[nn.Module, str, Tensor]]] = {}
    for module in own.modules():
        for name, p in module._parameters.items():
            if p is not None:
                places.setdefault(p.untyped_storage().data_ptr(), []).append((module, name, p.detach()))

    def pack(x: Tensor) -> Any:
        for module, name, p in places.get(x.untyped_storage().data_ptr(), ()):
            offset = x.storage_offset() - p.storage_offset()
            if x.dtype == p.dtype and 0 <= offset < max(p.numel(), 1):
                return module, name, x.shape, x.stride(), offset
        if Kept.watch is not None:
            Kept.watch(x)
        return x.detach()  # itself would hold the graph that holds it

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        module, name, shape, stride, offset = kept
        p = module._parameters[name].detach()
        return p.as_strided(shape, stride, p.storage_offset() + offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class Mixer(Fused):
    """Stands in the place of a family's token mixer and calls it on rows."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layout = AttentionLayout.current
        assert layout is not None, "no layout in use"
        layout.mixed += 1
        given = _Arguments(self.__dict__["own"], args, kwargs, layout.batch.tokens)
        if layout.cache is not None:
            layout.cache.remember(id(self), given.tensors)
            if layout.cache.decoding:
                return self._next(layout.cache, given)
        laid_out = [split(x, layout.rows) for x in given.tensors]
        outs, is_tuple, more = [], False, 0
        for at, group in enumerate(layout.rows.groups):
            out, is_tuple, more = self._call(given, [parts[at] for parts in laid_out], group.index_nL)
            outs.append(out)
        joined = join(layout.rows, outs)
        return (joined, *[None] * more) if is_tuple else joined

    def _call(self, given: _Arguments, tensors: Sequence[Tensor], index: Tensor | None) -> tuple[Tensor, bool, int]:
        """The family's module on rows: output [n, L, H], whether it answered with a tuple, how many more were in it."""
        own, layout = self.__dict__["own"], AttentionLayout.current
        assert layout is not None
        args, kwargs = given.with_tensors(tensors)
        calls = layout.calls
        before = [(m, k, v) for m in own.modules() for k, v in vars(m).items() if v is None or isinstance(v, Tensor)]
        with _dropout_of(index), RowRuns.picked(index), weights_by_name(own):
            out = own(*args, **kwargs)
        for module, name, value in before:  # a state that it left on itself would keep this call's graph
            if vars(module).get(name) is not value:
                vars(module)[name] = value
        if layout.calls != calls:
            raise AttentionRefused(
                f"{type(own).__name__} mixes tokens in a way of its own and through the attention interface",
                fix="this model family is not supported yet",
            )
        if isinstance(out, tuple):
            return out[0], True, len(out) - 1
        return out, False, 0

    # ---- generation -------------------------------------------------------------------------------------------------

    def _next(self, cache: Cache, given: _Arguments) -> Any:
        """One new token for each row, [1, B, H]: all rows again up to it."""
        histories, last_B = cache.recall(id(self))
        rows, length = histories[0].shape[:2]
        row_BL = torch.arange(rows)[:, None].expand(rows, length)
        out, is_tuple, more = self._call(given, histories, row_BL)
        found = cache.filled(out[torch.arange(rows, device=out.device), last_B])[None]
        return (found, *[None] * more) if is_tuple else found


# ---- finding them ---------------------------------------------------------------------------------------------------


def of_class(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Functions of a module's class and its bases."""
    for kind in type(module).__mro__:
        if kind is nn.Module:
            return
        for value in vars(kind).values():
            if inspect.isfunction(value):
                yield inspect.unwrap(value)


def calls_interface(module: nn.Module) -> bool:
    """Whether its class looks attention functions up in transformers' registry."""
    return any(_INTERFACE in f.__code__.co_names for f in of_class(module))


def _takes_cache(module: nn.Module) -> bool:
    return bool(_CACHES & set(inspect.signature(inspect.unwrap(type(module).forward)).parameters))


def _may_mix(module: nn.Module) -> bool:
    return _takes_cache(module) or any(isinstance(c, nn.Conv1d) for c in module.children())


def _found(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Innermost modules of a layer that may mix tokens, by path."""
    found = [(path, m) for path, m in layer.named_modules() if path and not isinstance(m, nn.Conv1d) and _may_mix(m)]
    return [(p, m) for p, m in found if not any(other.startswith(f"{p}.") for other, _ in found)]


def mark_bypassed(layer: nn.Module, hidden_size: int) -> None:
    """Mark linear layers whose weight a mixer uses without calling them (Jamba's `dt_proj`): seen by a run on `meta`."""
    for _, module in _found(layer):
        linears = [m for m in module.modules() if isinstance(m, FrozenLinear)]
        if calls_interface(module) or not linears:
            continue
        called: set[int] = set()
        handles = [m.register_forward_hook(lambda m, *_, to=called: to.add(id(m))) for m in linears]
        try:
            _run_on_meta(module, hidden_size)
        except FAILS:
            called |= {id(m) for m in linears}  # not known: the test on loaded weights says more
        finally:
            for handle in handles:
                handle.remove()
        for m in linears:
            m.bypassed = id(m) not in called


def _run_on_meta(module: nn.Module, hidden_size: int) -> None:
    tokens = 4
    given: dict[str, Any] = {
        "position_ids": torch.zeros(1, tokens, dtype=torch.int64, device="meta"), "use_cache": False,
        "position_embeddings": (torch.empty(1, tokens, 2, device="meta"), torch.empty(1, tokens, 2, device="meta")),
    }  # fmt: skip
    parameters = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters.values())[1:]
    dtype = next(module.parameters()).dtype
    kwargs = {p.name: given.get(p.name) for p in parameters[1:] if p.name in given or p.default is p.empty}
    with torch.no_grad():
        module(torch.empty(1, tokens, hidden_size, device="meta", dtype=dtype), **{
            p.name: kwargs[p.name] for p in parameters[1:] if p.name in kwargs and p.kind is not p.VAR_KEYWORD
        })  # fmt: skip


@dataclass(frozen=True)
class Mixing:
    """How a layer mixes tokens: its stand-ins, whether that is to be tested before use (all but one attention alone), and
    how many attentions go through the interface."""

    mixers: tuple[Mixer, ...]
    tested: bool
    attentions: int = 1


def stand_in(layer: nn.Module) -> Mixing:
    """Put a `Mixer` in the place of each innermost module of a layer that may mix tokens and is no attention."""
    inner = _found(layer)
    attentions = [m for _, m in inner if calls_interface(m)]
    mixers = []
    for path, module in inner:
        if not calls_interface(module):
            parent, _, name = path.rpartition(".")
            mixers.append(Mixer(module))
            layer.get_submodule(parent)._modules[name] = mixers[-1]
    return Mixing(tuple(mixers), bool(mixers) or len(attentions) != 1, len(attentions))

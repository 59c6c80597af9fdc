"""Which of a family's modules give the same when each rank computes some heads, or some columns, and the parts are
summed: found by their structure, proven by running narrow copies whole and in two parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lamella.models.fused import Fused
from lamella.models.linear import FrozenLinear
from lamella.models.pieces import Cut
from lamella.models.prove import (
    FAILS,
    INNER,
    NARROW,
    NEAR,
    TOKENS,
    Refused,
    apart,
    draw,
    is_attention,
    mlp_parts,
    narrow_linear,
    narrow_norm,
    probed,
    rotated_part,
    run_both_ways,
    shallow,
    signature,
)


def is_experts(module: nn.Module) -> bool:
    """Whether it is a stack of experts that goes through transformers' `ExpertsInterface`."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "num_experts")


def mlp_is_known(module: nn.Module) -> bool:
    """Whether it is built as a gated MLP."""
    return mlp_parts(module) is not None


@dataclass(frozen=True)
class Heads:
    """An attention's shape: key/value heads (`groups`), query heads for each, head size; how it answers."""

    groups: int
    per_group: int
    size: int
    tuple_answer: bool


def _part(linear: nn.Module, cut: Cut, bias: bool) -> FrozenLinear:
    """A linear layer with a part of another's weight."""
    made = FrozenLinear(1, 1, False, device="meta")
    made._parameters["weight"] = nn.Parameter(cut.of(linear.weight.detach()), requires_grad=False)  # type: ignore[operator]
    if linear.bias is not None and bias:
        whole: Tensor = linear.bias.detach()  # type: ignore[operator]
        made._parameters["bias"] = nn.Parameter(whole if cut.dim else cut.of(whole), requires_grad=False)
    return made


def _compare(
    whole: nn.Module, cuts: list[dict[str, Cut]], kwargs: dict[str, Any], linears: dict[str, nn.Module]
) -> None:
    """Raise Refused where the parts' outputs and input gradients do not add up to the whole's."""
    x = draw((1, TOKENS, NARROW), 1.0, 0)
    out, grad = run_both_ways(whole, x, kwargs)
    sums = [torch.zeros_like(out), torch.zeros_like(grad)]
    for number, part in enumerate(cuts):
        children: dict[str, nn.Module] = {
            n: _part(linears[n], cut, bias=cut.dim == 0 or number == 0) for n, cut in part.items()
        }
        for total, found in zip(sums, run_both_ways(shallow(whole, children, {}), x, kwargs), strict=True):
            total += found
    for what, found, wanted in zip(("outputs", "input gradients"), sums, (out, grad), strict=True):
        off = apart(found, wanted)
        if not off <= NEAR:
            raise Refused(f"the parts' {what} differ from the whole's by {off:.1e}")


def _prove_mlp(own: nn.Module) -> None:
    parts = mlp_parts(own)
    assert parts is not None
    if parts[0] != ("gate_proj", "up_proj"):
        raise Refused(f"its first layer, {parts[0][0]}, holds gate and up in one")
    made: dict[str, nn.Module] = {
        "gate_proj": narrow_linear(own._modules["gate_proj"], NARROW, INNER, 0),  # type: ignore[arg-type]
        "up_proj": narrow_linear(own._modules["up_proj"], NARROW, INNER, 10),  # type: ignore[arg-type]
        "down_proj": narrow_linear(own._modules["down_proj"], INNER, NARROW, 50),  # type: ignore[arg-type]
    }
    cuts = [
        {"gate_proj": Cut(0, a, b), "up_proj": Cut(0, a, b), "down_proj": Cut(1, a, b)}
        for a, b in ((0, 20), (20, INNER))
    ]
    _compare(shallow(own, made, {}), cuts, {}, made)


def _prove_attention(own: nn.Module) -> Heads:
    if any(p is not None for p in own._parameters.values()):
        raise Refused(f"has a parameter of its own, {next(iter(own._parameters))}")
    size = int(own.head_dim)  # type: ignore[arg-type]
    q, k, v, o = (own._modules[f"{x}_proj"] for x in "qkvo")
    rows = int(q.out_features)  # type: ignore[union-attr, arg-type]
    kv_rows = int(k.out_features)  # type: ignore[union-attr, arg-type]
    groups = kv_rows // size
    if v.out_features != kv_rows or o.in_features != rows or kv_rows % size or rows % max(kv_rows, 1):  # type: ignore[union-attr]
        raise Refused(f"its projections are not whole heads of {size}")
    if groups < 2:
        raise Refused("it has one key/value head")
    for which in "qk":
        norm = own._modules.get(f"{which}_norm")
        if norm is not None and norm.weight.shape != (size,):
            raise Refused(f"its {which}_norm is not over one head")
    made: dict[str, nn.Module] = {
        "q_proj": narrow_linear(q, NARROW, rows, 0), "k_proj": narrow_linear(k, NARROW, kv_rows, 10),  # type: ignore[arg-type]
        "v_proj": narrow_linear(v, NARROW, kv_rows, 20), "o_proj": narrow_linear(o, rows, NARROW, 30),  # type: ignore[arg-type]
    }  # fmt: skip
    norms = {n: own._modules.get(n) for n in ("q_norm", "k_norm")}
    for n, norm in norms.items():
        if norm is not None:
            made[n] = narrow_norm(norm, size, 70)
    whole = probed(shallow(own, made, {}))
    angle = draw((1, TOKENS, rotated_part(own, size)), 2.0, 1)
    kwargs = {"position_embeddings": (angle.cos(), angle.sin()), "attention_mask": None}
    per_group = rows // kv_rows
    cuts = []
    for a, b in ((0, 1), (1, groups)):
        kv, query = (a * size, b * size), (a * size * per_group, b * size * per_group)
        cuts.append({"q_proj": Cut(0, *query), "k_proj": Cut(0, *kv), "v_proj": Cut(0, *kv), "o_proj": Cut(1, *query)})
    _compare(whole, cuts, kwargs, made)
    with torch.no_grad():
        answer = whole(draw((1, TOKENS, NARROW), 1.0, 0), **kwargs)
    return Heads(groups, per_group, size, isinstance(answer, tuple))


class Prover:
    """Remembers proofs and refusals by signature."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[str, Any]] = {}

    @staticmethod
    def own(module: nn.Module) -> nn.Module:
        """The family's module, whatever stands in its place."""
        while isinstance(module, Fused):
            module = module.__dict__["own"]
        return module

    def is_attention(self, module: nn.Module) -> bool:
        return is_attention(module)

    def _ask(self, module: nn.Module, prove: Callable[[nn.Module], Any]) -> tuple[str, Any]:
        own = self.own(module)
        key = signature(own)
        if key not in self._known:
            try:
                self._known[key] = "", prove(own)
            except Refused as error:
                self._known[key] = str(error), None
            except FAILS as error:
                self._known[key] = f"{type(error).__name__}: {error}", None
        return self._known[key]

    def why_not_mlp(self, module: nn.Module) -> str:
        """Empty where its columns can be divided."""
        return self._ask(module, _prove_mlp)[0]

    def why_not_attention(self, module: nn.Module) -> tuple[str, Heads | None]:
        """Why its heads cannot be divided, or its shape."""
        return self._ask(module, _prove_attention)

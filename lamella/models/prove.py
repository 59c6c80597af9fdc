"""Which of a family's modules are what their structure suggests, proven by running them.

A module with the children of a known kind (an RMS norm, a gated MLP, rotary attention) is replaced by a fused one
only after both gave the same outputs and input gradients on random tokens: in fp32 to rounding, and in bf16 as close
to fp32 as the family's own. Inputs are small, usual and large, so that an epsilon or a clamp shows. The runs use
narrow copies with random weights, one for each class and set of attributes; every further attention layer is only
asked whether it does the same as the first of its kind. What is not proven stays, with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lamella.kernels import rows
from lamella.models.attention import packed_attention
from lamella.models.fused import Fused, FusedAttention, FusedMlp, FusedNorm
from lamella.models.linear import FrozenLinear

PROBE = "lamella_probe"
NARROW, INNER, TOKENS = 32, 48, 5
SCALES = (1e-3, 1.0, 1e3)
NEAR = 2e-5
"""Relative difference (Frobenius) that fp32 rounding explains."""
FAILS = (TypeError, AttributeError, RuntimeError, ValueError, KeyError, IndexError, AssertionError)


@dataclass
class Report:
    """What was fused: modules per kind, and class name -> why it was left alone."""

    fused: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def facts(self, modules: Sequence[nn.Module]) -> dict[str, Any]:
        calls = sum(m.own_calls for root in modules for m in root.modules() if isinstance(m, Fused))
        return {**self.fused, "kept": dict(self.kept), "own_calls": calls}


class _Seen:
    """Arguments the probe was called with."""

    arguments: dict[str, Any] | None = None


def _probe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """In attention's place: a sum of query, key and value, in which each shows at any size."""
    _Seen.arguments = kwargs
    repeat = query.shape[1] // key.shape[1]
    summed = query + 2 * key.repeat_interleave(repeat, dim=1) + 3 * value.repeat_interleave(repeat, dim=1)
    return summed.transpose(1, 2).contiguous(), None


AttentionInterface.register(PROBE, _probe)


class Refused(Exception):
    """Why a module is not what its structure suggests."""


# ---- narrow copies --------------------------------------------------------------------------------------------------


def draw(shape: Sequence[int], scale: float, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def shallow(module: nn.Module, children: dict[str, nn.Module], parameters: dict[str, Tensor | None]) -> nn.Module:
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **children}
    twin.__dict__["_parameters"] = {
        k: None if p is None else nn.Parameter(p, requires_grad=False) for k, p in parameters.items()
    }
    return twin


def narrow_linear(linear: nn.Module, inputs: int, outputs: int, seed: int) -> FrozenLinear:
    assert isinstance(linear, FrozenLinear)
    made = FrozenLinear(inputs, outputs, linear.bias is not None, device="meta")
    made._parameters["weight"] = nn.Parameter(draw((outputs, inputs), inputs**-0.5, seed), requires_grad=False)
    if linear.bias is not None:
        made._parameters["bias"] = nn.Parameter(draw((outputs,), 0.3, seed + 1), requires_grad=False)
    return made


def narrow_norm(norm: nn.Module, width: int, seed: int) -> nn.Module:
    own = norm.__dict__["own"] if isinstance(norm, Fused) else norm
    return shallow(own, {}, {"weight": 1 + draw((width,), 0.3, seed)})


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in this dtype. Values are rounded to bf16 first, so that both dtypes have the same."""
    children = {n: _cast(c, dtype) for n, c in module._modules.items() if c is not None}
    parameters = {n: None if p is None else p.bfloat16().to(dtype) for n, p in module._parameters.items()}
    return shallow(module, children, parameters)


# ---- comparing ------------------------------------------------------------------------------------------------------


def run_both_ways(module: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and the gradient at the input, in fp64."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        out = module(leaf, **kwargs)
        if isinstance(out, tuple):
            if len(out) != 2 or out[1] is not None:
                raise Refused("answers with more than its output")
            out = out[0]
        if out.shape != x.shape or out.dtype != x.dtype:
            raise Refused("changes shape or dtype")
        (grad,) = torch.autograd.grad(out, leaf, draw(out.shape, 1.0, 9).to(out.dtype))
    return out.detach().double(), grad.double()


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def _compare(own: nn.Module, make: Callable[[nn.Module], Fused], x: Tensor, tables: Sequence[Tensor] = ()) -> None:
    """Raise Refused where `make(own)` does not compute what `own` does."""
    for scale in SCALES:
        truth: tuple[Tensor, ...] = ()
        for dtype in (torch.float32, torch.bfloat16):
            twin = _cast(own, dtype)
            value = (x * scale).bfloat16().to(dtype)
            kwargs: dict[str, Any] = {}
            if tables:
                cos, sin = (t.bfloat16().to(dtype) for t in tables)
                kwargs = {"position_embeddings": (cos, sin), "attention_mask": None}
            theirs = run_both_ways(twin, value, kwargs)
            made = make(twin)
            ours = run_both_ways(made, value, kwargs)
            if made.own_calls:
                raise Refused("takes another kind of input")
            truth = truth or theirs
            for what, a, b, exact in zip(("outputs", "input gradients"), ours, theirs, truth, strict=True):
                off = apart(a, exact)
                allowed = NEAR if dtype == torch.float32 else 1.5 * apart(b, exact) + 2e-3
                if not off <= allowed:
                    raise Refused(f"{what} differ by {off:.1e} at inputs near {scale:g} in {dtype}")


# ---- kinds ----------------------------------------------------------------------------------------------------------


def _is_norm(module: nn.Module) -> bool:
    given = {n for n, p in module._parameters.items() if p is not None}
    return given == {"weight"} and not module._modules and module.weight.dim() == 1 and _eps(module) is not None  # type: ignore[operator]


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _prove_norm(module: nn.Module) -> tuple[float, float]:
    """(eps, offset) of an RMS norm."""
    own = narrow_norm(module, INNER, 1)
    eps = _eps(module)
    assert eps is not None
    x = draw((1, TOKENS, INNER), 1.0, 0)
    try:
        _compare(own, lambda twin: FusedNorm(twin, eps, 0.0), x)
        return eps, 0.0
    except Refused as plain:
        try:
            _compare(own, lambda twin: FusedNorm(twin, eps, 1.0), x)
        except Refused:
            raise plain from None
        return eps, 1.0


def mlp_parts(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """Names of the first layers, and of the activation, of a gated MLP."""
    linears = {n for n, c in module._modules.items() if isinstance(c, FrozenLinear)}
    others = [n for n, c in module._modules.items() if n not in linears and c is not None]
    if len(others) != 1 or module._parameters:
        return None
    activation = module._modules[others[0]]
    if activation is None or activation._modules or activation._parameters:
        return None
    for first in (("gate_proj", "up_proj"), ("gate_up_proj",)):
        if linears == {*first, "down_proj"}:
            return first, others[0]
    return None


def _activation(module: nn.Module) -> str:
    x = torch.linspace(-8, 8, 257)
    with torch.no_grad():
        for name in rows.ACTIVATIONS:
            if torch.allclose(module(x), rows.gated(x[None], torch.ones(1, len(x)), name)[0], rtol=1e-5, atol=1e-6):
                return name
    raise Refused(f"its activation {type(module).__name__} is none of {', '.join(rows.ACTIVATIONS)}")


def _prove_mlp(module: nn.Module) -> tuple[tuple[str, ...], str]:
    parts = mlp_parts(module)
    assert parts is not None
    first, activation_name = parts
    activation = _activation(module._modules[activation_name])  # type: ignore[arg-type]
    wide = INNER if len(first) == 2 else 2 * INNER
    made = {n: narrow_linear(module._modules[n], NARROW, wide, 10 * i) for i, n in enumerate(first)}  # type: ignore[arg-type]
    made["down_proj"] = narrow_linear(module._modules["down_proj"], INNER, NARROW, 50)  # type: ignore[arg-type]
    x = draw((1, TOKENS, NARROW), 1.0, 0)
    _compare(shallow(module, made, {}), lambda twin: FusedMlp(twin, first, activation), x)  # type: ignore[arg-type]
    return first, activation


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def is_attention(module: nn.Module) -> bool:
    named = {n for n, c in module._modules.items() if c is not None}
    linear = all(isinstance(module._modules.get(n), FrozenLinear) for n in _PROJECTIONS)
    norms = named - set(_PROJECTIONS)
    return linear and norms in (set(), {"q_norm", "k_norm"}) and isinstance(getattr(module, "head_dim", None), int)


def rotated_part(attention: nn.Module, size: int) -> int:
    """How many values of a head of `size` are rotated."""
    config = getattr(attention, "config", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    part = ropes.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(size * part)


def probed(twin: nn.Module) -> nn.Module:
    """An attention's copy, made to call the probe instead of attention."""
    twin.config = copy.copy(twin.config)
    twin.config._attn_implementation = PROBE  # type: ignore[union-attr]
    return twin


@dataclass
class _AttentionForm:
    arguments: dict[str, Any]
    q_form: tuple[float, float] | None
    k_form: tuple[float, float] | None
    rotary: int

    def fused(self, own: nn.Module, attend: Any) -> FusedAttention:
        return FusedAttention(own, attend, self.arguments, self.q_form, self.k_form, self.rotary)


class _AttentionProof:
    """One proof for all attention layers of a kind; the first is run in full."""

    def __init__(self, module: nn.Module) -> None:
        if module._parameters:
            raise Refused(f"has a parameter of its own, {next(iter(module._parameters))}")
        self.children = self._narrow(module)
        size = int(module.head_dim)  # type: ignore[arg-type]
        self.rotary = rotated_part(module, size)
        if size > rows.head_max() or self.rotary % 2:
            raise Refused(f"heads of {size} values, {self.rotary} of them rotated")
        self.x = draw((1, TOKENS, NARROW), 1.0, 0)
        angle = draw((1, TOKENS, self.rotary), 2.0, 1)  # the halves differ: no structure of the tables is relied on
        self.tables = (angle.cos(), angle.sin())
        forms = [self._norm_form(module, which, size) for which in "qk"]
        own = self._copy(module)
        self.seen = self._call(own)
        self.form = _AttentionForm(self.seen[1], forms[0], forms[1], self.rotary)
        _compare(own, lambda twin: self.form.fused(twin, _probe), self.x, self.tables)

    def _narrow(self, module: nn.Module) -> dict[str, nn.Module]:
        made: dict[str, nn.Module] = {}
        for i, name in enumerate(_PROJECTIONS):
            linear = module._modules[name]
            assert isinstance(linear, FrozenLinear)
            inputs, outputs = (linear.in_features, NARROW) if name == "o_proj" else (NARROW, linear.out_features)
            made[name] = narrow_linear(linear, inputs, outputs, 10 * i)
        for name in ("q_norm", "k_norm"):
            norm = module._modules.get(name)
            if norm is not None:
                made[name] = narrow_norm(norm, norm.weight.shape[0], 70)  # type: ignore
        return made

    def _norm_form(self, module: nn.Module, which: str, size: int) -> tuple[float, float] | None:
        norm = module._modules.get(f"{which}_norm")
        if norm is None:
            return None
        if not isinstance(norm, FusedNorm):
            raise Refused(f"its {which}_norm is no proven RMS norm")
        if norm.weight.shape != (size,):
            raise Refused(f"its {which}_norm is not over one head")
        return norm.eps, norm.offset

    def _copy(self, module: nn.Module) -> nn.Module:
        return probed(shallow(module, self.children, {}))

    def _call(self, own: nn.Module) -> tuple[Tensor, dict[str, Any]]:
        """A copy's output, and what it passes to the attention function."""
        _Seen.arguments = None
        with torch.no_grad():
            out = own(self.x, position_embeddings=self.tables, attention_mask=None)
        arguments = _Seen.arguments
        if arguments is None:
            raise Refused("does not go through the attention interface")
        if any(isinstance(v, Tensor) for v in arguments.values()):
            raise Refused("passes tensors of its own to the attention function")
        return out[0], arguments

    def holds_for(self, module: nn.Module) -> bool:
        """Whether another layer does the same as the first."""
        out, arguments = self._call(self._copy(module))
        return arguments == self.seen[1] and torch.equal(out, self.seen[0])


# ---- all modules ----------------------------------------------------------------------------------------------------


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Class, plain attributes and children: what makes two modules the same but for their place."""
    simple = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | bool | None)}
    own = vars(module).get("own")
    children = tuple((n, signature(c)) for n, c in module._modules.items() if c is not None)
    shapes = tuple((n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None)
    simple.pop("layer_idx", None)
    inner = signature(own) if isinstance(own, nn.Module) else ()
    return type(module), tuple(sorted(simple.items(), key=lambda kv: kv[0])), children, shapes, inner


def _places(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None:
                yield parent, name, child


class Fuser:
    """Replaces what is proven, and remembers proofs and refusals by signature."""

    def __init__(self) -> None:
        self.report = Report()
        self._proofs: dict[tuple[Any, ...], Any] = {}

    def _proof(self, module: nn.Module, prove: Any) -> Any:
        """The proof's result, or None with the reason noted."""
        key = signature(module)
        if key not in self._proofs:
            try:
                self._proofs[key] = prove(module)
            except (Refused, *FAILS) as error:
                self._proofs[key] = None
                why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
                self.report.kept[type(module).__name__] = why
        return self._proofs[key]

    def _put(self, parent: nn.Module, name: str, fused: Fused, kind: str) -> None:
        parent._modules[name] = fused
        self.report.fused[kind] = self.report.fused.get(kind, 0) + 1

    def norms(self, root: nn.Module) -> None:
        for parent, name, child in _places(root):
            if not isinstance(child, Fused) and _is_norm(child):
                form = self._proof(child, _prove_norm)
                if form is not None:
                    self._put(parent, name, FusedNorm(child, *form), "norm")

    def mlps(self, root: nn.Module) -> None:
        for parent, name, child in _places(root):
            if not isinstance(child, Fused) and mlp_parts(child) is not None:
                form = self._proof(child, _prove_mlp)
                if form is not None:
                    self._put(parent, name, FusedMlp(child, *form), "mlp")

    def attentions(self, root: nn.Module) -> None:
        for parent, name, child in _places(root):
            if not isinstance(child, Fused) and is_attention(child):
                proof = self._proof(child, _AttentionProof)
                if proof is None:
                    continue
                if not proof.holds_for(child):
                    self.report.kept[type(child).__name__] = "layers of this kind differ by their index"
                    continue
                self._put(parent, name, proof.form.fused(child, packed_attention), "attention")


def fuse(model: nn.Module, layers: Sequence[nn.Module]) -> Report:
    """Put fused modules into a weightless model (its layers given apart) where they are proven to do the same."""
    fuser = Fuser()
    for root in (model, *layers):
        fuser.norms(root)
    for layer in layers:
        fuser.mlps(layer)
        fuser.attentions(layer)
    return fuser.report

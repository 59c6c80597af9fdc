"""LoRA parameters: which weights get a pair, of what rank and scale, and their fp32 master values.

LoRA: y = W x + scale B A x, with A [r, in] random and B [out, r] zero at the start (Hu et al. 2021); scale is
alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023). On experts the pair is [E, r, in] and [E, out, r].
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lamella.adapter.pages import PagedParameters, StatePages
from lamella.adapter.targets import PEFT_REFUSES, Candidate, rank_on_experts, select
from lamella.checkpoint.facts import expert_pattern, is_router, num_active_experts, num_routed_experts
from lamella.config import LoraConfig
from lamella.console import notice
from lamella.errors import UserError
from lamella.models.linear import FrozenLinear
from lamella.models.pieces import Cut
from lamella.models.skeleton import Skeleton

PagesIn = Callable[[int], Path | None]


@dataclass(frozen=True)
class SiteSpec:
    """One adapted weight.

    Attributes:
        key: full name: a module (`model.layers.0.self_attn.q_proj`) or an expert parameter
            (`model.layers.0.mlp.experts.gate_up_proj`).
        layer: decoder layer index.
        path: name of the owning module inside the layer (`self_attn.q_proj`, `mlp.experts`).
        parameter: expert parameter's name in that module; None for a linear layer.
        inputs, outputs: features in and out; experts: how many (None for a linear layer).
        rank, alpha, scale: of this pair.
        index: number among all adaptable weights of the model (seeds dropout), whatever is targeted.
        order: position of the parameter in its module (PEFT nests wrappers in that order).
    """

    key: str
    layer: int
    path: str
    parameter: str | None
    inputs: int
    outputs: int
    experts: int | None
    rank: int
    alpha: float
    scale: float
    index: int
    order: int = 0

    @property
    def a_shape(self) -> tuple[int, ...]:
        return (self.rank, self.inputs) if self.experts is None else (self.experts, self.rank, self.inputs)

    @property
    def b_shape(self) -> tuple[int, ...]:
        return (self.outputs, self.rank) if self.experts is None else (self.experts, self.outputs, self.rank)

    @property
    def numel(self) -> int:
        """Parameters of the pair."""
        return math.prod(self.a_shape) + math.prod(self.b_shape)

    @property
    def weight_class(self) -> str:
        """`experts`, `attention` or `mlp`, for reports."""
        if self.experts is not None or ".experts." in f".{self.path}.":
            return "experts"
        return "attention" if "attn" in self.path or "attention" in self.path else "mlp"


def candidates_of(skeleton: Skeleton) -> list[Candidate]:
    """Every weight that can have a pair, in model order: linear layers and fused expert parameters, not routers."""
    found = []
    num_experts = num_routed_experts(skeleton.config.to_dict())
    refused = PEFT_REFUSES.get(skeleton.config.model_type)
    for i, layer in enumerate(skeleton.layers):
        for path, module in layer.named_modules():
            if isinstance(module, FrozenLinear):
                if _left_out(module, path, refused):
                    continue
                if not is_router(path.split("."), (module.out_features, module.in_features), num_experts):
                    found.append(Candidate(i, path, None, module.in_features, module.out_features, None, 0))
            elif hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
                for order, (name, p) in enumerate(module.named_parameters(recurse=False)):
                    if p.dim() == 3:
                        _, rows, columns = p.shape
                        e = int(module.num_experts)  # a rank may hold a part of them
                        inputs, outputs = (rows, columns) if module.is_transposed else (columns, rows)
                        found.append(Candidate(i, path, name, inputs, outputs, e, order))
    return found


def _left_out(module: FrozenLinear, path: str, refused: re.Pattern[str] | None) -> bool:
    return module.bypassed or (refused is not None and refused.search(path) is not None)


def left_out_of(skeleton: Skeleton) -> list[str]:
    """Linear layers that get no pair whatever is targeted, numbers collapsed: the family's code or PEFT would bypass it."""
    refused = PEFT_REFUSES.get(skeleton.config.model_type)
    named = [(path, m) for layer in skeleton.layers for path, m in layer.named_modules() if isinstance(m, FrozenLinear)]
    return sorted({expert_pattern(path) for path, m in named if _left_out(m, path, refused)})


def linear_names_of(skeleton: Skeleton) -> list[str]:
    """Full names of all linear layers in the decoder layers."""
    return [
        f"{skeleton.prefix}.{i}.{path}"
        for i, layer in enumerate(skeleton.layers)
        for path, module in layer.named_modules()
        if isinstance(module, FrozenLinear)
    ]


def active_experts(config: Any) -> int:
    """Experts per token of a transformers config; 1 for dense models."""
    return num_active_experts(config.to_dict())


def scale_of(alpha: float, rank: int, rslora: bool) -> float:
    return alpha / math.sqrt(rank) if rslora else alpha / rank


class Adapter:
    """LoRA pairs of a model: fp32 parameters by stable names, in model order.

    Attributes:
        sites: key -> SiteSpec, in model order.
        dropout: probability; rslora: whether scales are alpha / sqrt(r).
        pages: the file that holds parameters, gradients and moments; None: they are in RAM.
        origin: what `load` read besides the tensors (empty for a new adapter); layout: of the files it was read from.
        linear_names: full names of all linear layers of the model, adapted or not.
        fused_experts: whether the model has experts fused into 3-D parameters, adapted or not.
        seed: that `reset` was last given; None: the values came from elsewhere from the start.
    """

    def __init__(self, sites: list[SiteSpec], dropout: float, rslora: bool, pages_in: PagesIn | None = None) -> None:
        self.sites = {s.key: s for s in sites}
        self.dropout = dropout
        self.rslora = rslora
        self.origin: dict[str, Any] = {}
        self.layout = "peft"
        self.linear_names: list[str] = []
        self.fused_experts = False
        self.seed: int | None = None
        shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        for site in sites:
            shapes.setdefault(site.layer, {}).update(
                {f"{site.key}.lora_A": site.a_shape, f"{site.key}.lora_B": site.b_shape}
            )
        folder = pages_in(sum(site.numel for site in sites)) if pages_in else None
        self.pages = None if folder is None else StatePages(folder, shapes)
        self._parameters: dict[str, nn.Parameter] = {}
        if self.pages is not None:
            self._parameters = PagedParameters(self.pages)
            return
        for site in sites:
            self._parameters[f"{site.key}.lora_A"] = nn.Parameter(torch.empty(site.a_shape, dtype=torch.float32))
            self._parameters[f"{site.key}.lora_B"] = nn.Parameter(torch.zeros(site.b_shape, dtype=torch.float32))

    @classmethod
    def create(cls, skeleton: Skeleton, config: LoraConfig, seed: int, pages_in: PagesIn | None = None) -> Adapter:
        """New pairs for `config.targets`: A uniform in +-1/sqrt(in) (as PEFT's default), B zero.

        The values of a pair depend on the seed and its name only. Expert pairs keep the scale of the others:
        their alpha is reduced with their rank.

        Args:
            pages_in: told the number of parameters, names the folder of the file that is to hold their state (see
                `adapter.pages`), or None for RAM.

        Raises:
            UserError: a target that matches nothing.
        """
        candidates = candidates_of(skeleton)
        chosen = {(c.layer, c.name()) for c in select(candidates, config.targets)}
        if config.targets == "all-linear" and (left_out := left_out_of(skeleton)):
            notice(f"no LoRA pairs on {', '.join(left_out)}: there the model or PEFT would pass them by")
        scale = scale_of(config.alpha, config.rank, config.rslora)
        expert_rank = rank_on_experts(config, active_experts(skeleton.config))
        sites = []
        for index, c in enumerate(candidates):
            if (c.layer, c.name()) in chosen:
                rank = config.rank if c.experts is None else expert_rank
                alpha = scale * (math.sqrt(rank) if config.rslora else rank)
                sites.append(SiteSpec(f"{skeleton.prefix}.{c.layer}.{c.name()}", c.layer, c.path, c.parameter, c.inputs,
                                      c.outputs, c.experts, rank, alpha, scale, index, c.order))  # fmt: skip
        adapter = cls(sites, config.dropout, config.rslora, pages_in)
        adapter.describe(skeleton)
        adapter.reset(seed)
        return adapter

    def describe(self, skeleton: Skeleton) -> None:
        """Note what of the model the adapter's files must know."""
        self.linear_names = linear_names_of(skeleton)
        self.fused_experts = any(c.experts is not None for c in candidates_of(skeleton))

    def reset(self, seed: int) -> None:
        """Set every A to its seeded initial values and every B to zero; in pages, each layer when it is next entered."""
        self.seed = seed
        if self.pages is None:
            with torch.no_grad():
                for site in self.sites.values():
                    a, b = self.pair(site.key)
                    self._draw(site, a)
                    b.zero_()
            return
        pages, by_layer = self.pages, defaultdict[int, list[SiteSpec]](list)
        for site in self.sites.values():
            by_layer[site.layer].append(site)

        def fill(layer: int, fresh: bool) -> None:
            for site in by_layer[layer]:
                self._draw(site, pages.view(f"{site.key}.lora_A", "master"))
                if not fresh:  # else there are zeros; writing them again would make the disk work
                    pages.view(f"{site.key}.lora_B", "master").zero_()

        pages.fill_later(fill)

    def _draw(self, site: SiteSpec, out: Tensor) -> Tensor:
        """Initial values of a site's A, written to `out`: a function of the seed and the site's name."""
        digest = hashlib.sha256(f"{self.seed}/{site.key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = 1 / math.sqrt(site.inputs)
        return out.uniform_(-bound, bound, generator=generator)

    def initial(self, name: str) -> Tensor:
        """What `reset` gave this parameter, made again."""
        assert self.seed is not None, "its values came from elsewhere"
        key, _, which = name.rpartition(".")
        site = self.sites[key]
        return self._draw(site, torch.empty(site.a_shape)) if which == "lora_A" else torch.zeros(site.b_shape)

    def begins_zero(self, name: str) -> bool:
        """Whether `reset` makes this parameter zero."""
        return name.endswith(".lora_B")

    def recipe(self) -> str:
        """What the values that `reset` gives are a function of; and, of this machine's generator, the first A's checksum.

        A checksum of all values would take a pass over them.
        """
        drawn = xxhash.xxh3_128_hexdigest(self.initial(f"{next(iter(self.sites))}.lora_A").numpy().data)
        shapes = (f"{site.key} {site.a_shape} {site.b_shape}" for site in self.sites.values())
        return f"uniform, seed {self.seed}, first {drawn}; {'; '.join(shapes)}"

    def parameters(self) -> dict[str, nn.Parameter]:
        """`<key>.lora_A` and `<key>.lora_B` -> fp32 master, in model order."""
        return self._parameters

    def pair(self, key: str) -> tuple[nn.Parameter, nn.Parameter]:
        return self._parameters[f"{key}.lora_A"], self._parameters[f"{key}.lora_B"]

    def add_gradient(self, name: str, grad: Tensor | None, cut: Cut | None = None) -> None:
        """Add to a master's gradient (fp32; made when there is none yet).

        Args:
            grad: None: nothing, but see that there is a gradient.
            cut: the part of the master that `grad` belongs to; None: all of it.
        """
        master = self._parameters[name]
        if cut is not None or grad is None:
            if master.grad is None:
                master.grad = torch.zeros_like(master) if self.pages is None else self.pages.view(name, "grad").zero_()
            if grad is not None:
                there = master.grad if cut is None else cut.of(master.grad)
                there += grad.to(master.device)
        elif master.grad is not None:
            master.grad += grad.to(master.device)
        elif self.pages is None:
            master.grad = torch.empty_like(master).copy_(grad)  # in the master's layout
        else:
            master.grad = self.pages.view(name, "grad").copy_(grad)

    def layer_sites(self, layer: int) -> list[SiteSpec]:
        return [s for s in self.sites.values() if s.layer == layer]

    @property
    def first_layer(self) -> int:
        """Lowest layer with a pair: the backward walk ends there."""
        return min(s.layer for s in self.sites.values())

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self._parameters.values())

    def state(self) -> dict[str, Tensor]:
        """Copies of all master values by parameter name."""
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Set all masters; names and shapes must match exactly.

        Raises:
            UserError: missing or extra names, or other shapes.
        """
        check_names(set(state), set(self._parameters), "adapter state")
        with torch.no_grad():
            for name, p in self._parameters.items():
                if tuple(state[name].shape) != tuple(p.shape):
                    raise UserError(f"adapter state: {name} has shape {list(state[name].shape)}, needs {list(p.shape)}",
                                    fix="it belongs to another model or other LoRA settings")  # fmt: skip
                p.copy_(state[name])

    def save(self, folder: Path, *, base: str = "", facts: dict[str, Any] | None = None) -> dict[str, str]:
        """Write PEFT's `adapter_model.safetensors` and `adapter_config.json`; see `adapter.peft_format`. Gives the
        weights' file name and checksum."""
        from lamella.adapter.peft_format import save_adapter

        return save_adapter(self, folder, base=base, facts=facts or {})

    @classmethod
    def load(cls, folder: Path, skeleton: Skeleton) -> Adapter:
        """Read an adapter folder of any known layout for this model; every key must be used. See `adapter.read`."""
        from lamella.adapter.peft_format import load_adapter

        return load_adapter(folder, skeleton)


def is_zero(tensor: Tensor) -> bool:
    """Whether all bytes are zero (so -0.0 is not); several times faster than `not tensor.any()`."""
    return not bool(tensor.detach().contiguous().view(-1).view(torch.uint8).any())


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass without a mask."""
    if tensor.numel() == 0:
        return True
    values = tensor.detach().cpu().numpy()  # numpy: a saving thread must not start torch's threads beside the step's
    return math.isfinite(values.min()) and math.isfinite(values.max())  # NaN comes through


def check_names(have: set[str], want: set[str], what: str) -> None:
    """Raise a `UserError` with samples of both sides unless the two sets are equal."""
    missing, extra = sorted(want - have), sorted(have - want)
    if missing or extra:
        raise UserError(
            f"{what}: {len(have & want)} of {len(want)} names match; missing {missing[:3]}, not known {extra[:3]}",
            fix="it belongs to another model, or to other LoRA targets",
        )

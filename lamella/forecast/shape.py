"""A model as forecasts see it: matrices and attention of every layer, and bytes in checkpoint and store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lamella.checkpoint.facts import TensorClass

CoreKind = Literal["full", "sliding", "linear"]


@dataclass(frozen=True)
class Matrix:
    """One weight, or one of each of a layer's experts.

    Attributes:
        name: inside the layer, as transformers names it once loaded: `self_attn.q_proj`, `mlp.experts.gate_up_proj`.
        kind: class of tensors.
        outputs, inputs: features, of one expert.
        experts: copies held; active: of them used by a token.
        quantised: 4-bit in the store.
        adaptable: can have a LoRA pair (routers cannot).
        shared: a shared expert, passed by every token.
    """

    name: str
    kind: TensorClass
    outputs: int
    inputs: int
    experts: int = 1
    active: int = 1
    quantised: bool = True
    adaptable: bool = True
    shared: bool = False

    @property
    def parameters(self) -> int:
        return self.outputs * self.inputs * self.experts

    @property
    def active_parameters(self) -> int:
        return self.outputs * self.inputs * self.active

    @property
    def fused_experts(self) -> bool:
        """Routed experts in one 3-D weight."""
        return self.kind == "experts" and not self.shared


@dataclass(frozen=True)
class Core:
    """Attention without its projections; `head_dim` of queries and keys, `value_dim` of values; MLA's are those that the
    products see. `kv_elements` are cached per token when serving (MLA: the latent and the rotary key)."""

    kind: CoreKind
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    kv_elements: int
    window: int | None = None


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        matrices: in model order.
        core: None: no attention (or one that is not known).
        other_parameters: norms, biases and what is neither matrix nor router.
        checkpoint_bytes, store_bytes: of all its tensors; store_bytes with alignment.
        raw_bytes: of the store's part that is not 4-bit.
    """

    matrices: tuple[Matrix, ...]
    core: Core | None
    other_parameters: int
    checkpoint_bytes: int
    store_bytes: int
    raw_bytes: int

    @property
    def quantised_parameters(self) -> int:
        return sum(m.parameters for m in self.matrices if m.quantised)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model.

    Attributes:
        name: as asked for; model_type: of config.json.
        source: "config.json" (arithmetic) or "headers" (names and shapes of the files' tensors) or "store".
        max_tokens: longest sequence that the model was made for; None: not said.
        tied: the head is the embedding.
        embedding_parameters, head_parameters (0 where tied), outer_parameters (final norm and the like).
        beyond_parameters: prediction heads beyond the last layer, and vision or audio parts, which are not trained.
        parameters, active: by class (experts, attention, mlp, router, norm, bias, embedding, head, other), with the outer
            ones and without `beyond`.
        checkpoint_bytes: of all tensors; outer_store_bytes: of the store's outer file.
        notes: what was assumed.
    """

    name: str
    model_type: str
    source: str
    hidden: int
    vocab: int
    max_tokens: int | None
    tied: bool
    layers: tuple[LayerShape, ...]
    embedding_parameters: int
    head_parameters: int
    outer_parameters: int
    beyond_parameters: int
    parameters: dict[str, int]
    active: dict[str, int]
    checkpoint_bytes: int
    outer_store_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def active_parameters(self) -> int:
        return sum(self.active.values())

    @property
    def store_bytes(self) -> int:
        return self.outer_store_bytes + sum(layer.store_bytes for layer in self.layers)


@dataclass(frozen=True)
class Site:
    """One LoRA pair (of every expert, where the matrix has several)."""

    layer: int
    matrix: Matrix
    rank: int

    @property
    def parameters(self) -> int:
        return self.rank * (self.matrix.inputs + self.matrix.outputs) * self.matrix.experts

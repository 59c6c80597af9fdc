"""How adapter files lay out LoRA pairs, for every engine that reads them, and the exact way there and back.

Ours is A [r, in], B [out, r] for a linear layer and A [E, r, in], B [E, out, r] for experts fused into one parameter.
Column and row orders of a flattened expert axis:

    expert-major    index e * r + k: one expert's ranks side by side
    rank-major      index k * E + e: one rank's experts side by side

| layout | experts' pair is of | lora_A | lora_B | see |
|---|---|---|---|---|
| `peft` | all experts | [E * r, in] expert-major | [out, r * E] rank-major | PEFT 0.19 and later, `ParamWrapper` |
| `peft-0.18` | all experts | [E * r, out] expert-major: B | [in, r * E] rank-major: A | PEFT 0.17 and 0.18 |
| `unsloth` | all experts | [E * r, in] expert-major | [out, E * r] expert-major | unsloth_zoo's `moe_utils` |
| `vllm` | one expert's matrix | [r, in] | [out, r] | vLLM, `FusedMoEWithLoRA` |
| `vllm-3d` | all experts | as `peft` | as `peft` | vLLM, `FusedMoE3DWithLoRA` |
| `sglang` | one expert's matrix | as `vllm` | as `vllm` | SGLang, `LoRAAdapter` |
| `mlx` | all experts' gate, up or down | [E, r, in] | [E, out, r] | mlx-lm, `LoRASwitchLinear` |

PEFT before 0.19 takes the second axis of a parameter for its inputs: right for [E, in, out] (GPT-OSS), else A's and
B's roles are swapped, and the product is the same.

Linear layers are A [r, in], B [out, r] everywhere but in `mlx`: lora_a [in, r], lora_b [r, out]. Where a weight holds
gate and up and the file one pair for each, both have its A, and B's rows are split: halves, or every second row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lamella.adapter.places import Halves, Place
from lamella.errors import UserError

Make = Callable[[Tensor, Tensor], Tensor]
"""A and B of a site, ours -> a tensor as the file has it."""
Entry = tuple[tuple[int, ...], Make]
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Layout:
    """One way to write adapters.

    Attributes:
        experts: one pair of all experts of a parameter, one an expert and matrix, or one of all experts a matrix.
        rank_major: order of the flattened axis of B in a fused pair.
        swapped: fused pairs of [E, out, in] parameters have A's and B's roles swapped.
        names: whose module names: the model's (transformers) or the checkpoint's.
        patterns: rank and alpha may differ by site; else there is one scale for the whole file.
        one_rank: all tensors must have one rank; shorter ones are filled up with zeros.
        rslora: the tool knows scales alpha / sqrt(r).
        axes: for people.
    """

    name: str
    tool: str
    axes: str
    experts: Literal["fused", "single", "switch"]
    rank_major: bool = True
    swapped: bool = False
    names: Literal["model", "checkpoint"] = "checkpoint"
    patterns: bool = False
    one_rank: bool = False
    rslora: bool = False
    weights: str = "adapter_model.safetensors"


_FUSED = "experts: one pair a parameter, lora_A [E * r, in] expert-major, lora_B [out, r * E] rank-major"
_SINGLE = "experts: one pair an expert and matrix, lora_A [r, in] (gate and up share it), lora_B [out, r]"
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("peft", "PEFT 0.19 and later", _FUSED, "fused", names="model", patterns=True, rslora=True),
        Layout("peft-0.18", "PEFT 0.17 and 0.18",
               "experts: one pair a parameter; where it is [E, out, in], lora_A [E * r, out] holds B (expert-major) and "
               "lora_B [in, r * E] holds A (rank-major); else as peft",
               "fused", swapped=True, names="model", patterns=True, rslora=True),
        Layout("unsloth", "Unsloth", "experts: one pair a parameter, lora_A [E * r, in] and lora_B [out, E * r], both expert-major",
               "fused", rank_major=False, names="model", patterns=True, rslora=True),
        Layout("vllm", "vLLM (2-D)", _SINGLE, "single"),
        Layout("vllm-3d", "vLLM (3-D)", _FUSED, "fused"),
        Layout("sglang", "SGLang", _SINGLE, "single", one_rank=True),
        Layout("mlx", "mlx-lm", "linear: lora_a [in, r], lora_b [r, out]; experts: one pair for each of gate, up, down, "
               "lora_a [E, r, in], lora_b [E, out, r]", "switch", one_rank=True, weights="adapters.safetensors"),
    )
}  # fmt: skip
GGUF = "gguf"
"""llama.cpp's adapters: written elsewhere (`lamella.export.writers`), not a safetensors layout."""


def layout_named(name: str) -> Layout:
    """Raises `UserError` for a name that is none."""
    if name not in LAYOUTS:
        raise UserError(f"there is no adapter layout {name!r}", fix=f"one of: {', '.join([*LAYOUTS, GGUF])}")
    return LAYOUTS[name]


# --- the axes


def flatten_experts(a_ErI: Tensor, b_EOr: Tensor) -> tuple[Tensor, Tensor]:
    """[E, r, in], [E, out, r] -> PEFT's [E * r, in] (expert-major) and [out, r * E] (rank-major)."""
    return _rows(a_ErI), _columns(b_EOr, rank_major=True)


def unflatten_experts(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Inverse of `flatten_experts`."""
    return _from_rows(a, experts), _from_columns(b, experts, rank_major=True)


def _rows(a_ErI: Tensor) -> Tensor:
    return a_ErI.reshape(-1, a_ErI.shape[2])


def _columns(b_EOr: Tensor, rank_major: bool) -> Tensor:
    order = (1, 2, 0) if rank_major else (1, 0, 2)
    return b_EOr.permute(order).reshape(b_EOr.shape[1], -1)


def _from_rows(a: Tensor, experts: int) -> Tensor:
    return a.reshape(experts, a.shape[0] // experts, -1).contiguous()


def _from_columns(b: Tensor, experts: int, rank_major: bool) -> Tensor:
    if rank_major:
        return b.reshape(b.shape[0], -1, experts).permute(2, 0, 1).contiguous()
    return b.reshape(b.shape[0], experts, -1).permute(1, 0, 2).contiguous()


def fused_to_file(layout: Layout, place: Place, a_ErI: Tensor, b_EOr: Tensor) -> tuple[Tensor, Tensor]:
    """A fused pair -> (lora_A, lora_B) of the file."""
    if layout.swapped and not place.transposed:  # y = x (B A)^T: the file's A is our B^T, its B our A^T
        a_ErI, b_EOr = b_EOr.transpose(1, 2), a_ErI.transpose(1, 2)
    return _rows(a_ErI), _columns(b_EOr, layout.rank_major)


def fused_from_file(layout: Layout, place: Place, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `fused_to_file`."""
    assert place.experts is not None
    first, second = _from_rows(a, place.experts), _from_columns(b, place.experts, layout.rank_major)
    if layout.swapped and not place.transposed:
        return second.transpose(1, 2).contiguous(), first.transpose(1, 2).contiguous()
    return first, second


def half_of(b: Tensor, halves: Halves, half: int) -> Tensor:
    """Rows of gate (0) or up (1) of B [..., out, r]; all of it where they are not together."""
    if halves == "none":
        return b
    if halves == "interleaved":
        return b[..., half::2, :]
    middle = b.shape[-2] // 2
    return b[..., half * middle : (half + 1) * middle, :]


# --- what a site becomes in a file


def file_entries(layout: Layout, place: Place, rank: int, depth: int) -> dict[str, Entry]:
    """Tensors of a site in the file: name -> (shape, what makes it of the site's pair).

    Args:
        rank: as the file has it. depth: of PEFT's nesting, in fused layouts.
    """
    if place.parameter is None:
        return _linear_entries(layout, place, rank)
    if layout.experts == "fused":
        return _fused_entries(layout, place, rank, depth)
    return _single_entries(layout, place, rank) if layout.experts == "single" else _switch_entries(place, rank)


def _linear_entries(layout: Layout, place: Place, rank: int) -> dict[str, Entry]:
    a_shape, b_shape = (rank, place.inputs), (place.outputs, rank)
    if layout.experts == "switch":
        return {f"{place.source}.lora_a": (a_shape[::-1], lambda a, _: a.T),
                f"{place.source}.lora_b": (b_shape[::-1], lambda _, b: b.T)}  # fmt: skip
    name = PREFIX + (place.module if layout.names == "model" else place.source)
    return {f"{name}.lora_A.weight": (a_shape, lambda a, _: a), f"{name}.lora_B.weight": (b_shape, lambda _, b: b)}


def _fused_entries(layout: Layout, place: Place, rank: int, depth: int) -> dict[str, Entry]:
    assert place.experts is not None
    name = PREFIX + (place.module if layout.names == "model" else place.source) + ".base_layer" * depth
    flat, inputs, outputs = place.experts * rank, place.inputs, place.outputs
    if layout.swapped and not place.transposed:
        inputs, outputs = outputs, inputs
    return {
        f"{name}.lora_A.weight": ((flat, inputs), lambda a, b: fused_to_file(layout, place, a, b)[0]),
        f"{name}.lora_B.weight": ((outputs, flat), lambda a, b: fused_to_file(layout, place, a, b)[1]),
    }


def _single_entries(layout: Layout, place: Place, rank: int) -> dict[str, Entry]:
    assert place.experts is not None
    found: dict[str, Entry] = {}
    outputs = place.outputs // len(place.leaves)
    for half, leaf in enumerate(place.leaves):
        for expert in range(place.experts):
            name = f"{PREFIX}{place.source}.{expert}.{leaf}"
            found[f"{name}.lora_A.weight"] = (rank, place.inputs), lambda a, _, e=expert: a[e]  # type: ignore[misc]
            found[f"{name}.lora_B.weight"] = (
                (outputs, rank), lambda _, b, e=expert, h=half: half_of(b[e], place.halves, h),  # type: ignore[misc]
            )  # fmt: skip
    return found


_MLX_KEEPS_NAME = ("experts",)
MLX_EXPERTS = {"gpt_oss", "afmoe", "Klear", "dots1", "llama4"}
"""Families whose experts mlx-lm calls `experts`; in the others the module is `switch_mlp`."""


def switch_name(place: Place, model_type: str) -> str:
    """What mlx-lm calls the module around the experts."""
    around, _, _ = place.source.rpartition(".")
    return place.source if model_type in MLX_EXPERTS else f"{around}.switch_mlp"


def _switch_entries(place: Place, rank: int) -> dict[str, Entry]:
    assert place.experts is not None
    found: dict[str, Entry] = {}
    outputs = place.outputs // len(place.leaves)
    for half, leaf in enumerate(place.generic):
        name = f"{place.source}.{leaf}"
        found[f"{name}.lora_a"] = (place.experts, rank, place.inputs), lambda a, _: a
        found[f"{name}.lora_b"] = (
            (place.experts, outputs, rank), lambda _, b, h=half: half_of(b, place.halves, h),  # type: ignore[misc]
        )  # fmt: skip
    return found


# --- back: parts of a site into one pair


def join_halves(gate: Tensor, up: Tensor, halves: Halves) -> Tensor:
    """Rows of gate and of up, [..., out / 2, r] each -> [..., out, r]; inverse of `half_of`."""
    if halves == "concatenated":
        return torch.cat([gate, up], dim=-2)
    return torch.stack([gate, up], dim=-2).flatten(-3, -2)


def fuse_halves(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], halves: Halves) -> tuple[Tensor, Tensor, bool]:
    """Pairs of gate and up, A [..., r, in] and B [..., out / 2, r], of one scale -> one pair of the fused weight.

    Exact: with the same A it keeps its rank; else A is both, one after the other, and B has zeros where a row of one
    half meets a rank of the other.

    Returns:
        A, B, whether A was the same.
    """
    (a_gate, b_gate), (a_up, b_up) = gate, up
    if torch.equal(a_gate, a_up):
        return a_gate, join_halves(b_gate, b_up, halves), True
    b_gate_R = torch.cat([b_gate, b_gate.new_zeros(*b_gate.shape[:-1], b_up.shape[-1])], dim=-1)
    b_up_R = torch.cat([b_up.new_zeros(*b_up.shape[:-1], b_gate.shape[-1]), b_up], dim=-1)
    return torch.cat([a_gate, a_up], dim=-2), join_halves(b_gate_R, b_up_R, halves), False


def pad_rank(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The same product at a higher rank: zeros behind A's rows and B's columns."""
    more = rank - a.shape[-2]
    if not more:
        return a, b
    return (torch.cat([a, a.new_zeros(*a.shape[:-2], more, a.shape[-1])], dim=-2),
            torch.cat([b, b.new_zeros(*b.shape[:-1], more)], dim=-1))  # fmt: skip

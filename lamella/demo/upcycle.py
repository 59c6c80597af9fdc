"""A mixture of experts out of a dense Llama, in Mixtral's format, with the same logits.

Mixtral weights each token's top-k experts by a softmax over those k, so the weights sum to one:

- `copies`: every expert is a whole copy of the layer's MLP. Whatever the router picks, the weighted sum is the MLP.
- `slices`: the MLP's neurons are cut into k slices; an expert holds one slice, a group of k experts holds all of
  them, and the experts of a group share one router row. Their k logits are equal, so a token takes one whole group,
  each expert with weight 1/k; `down_proj` is scaled by k, and the sum is the MLP. As much arithmetic per token as
  the dense model, whatever the number of groups.

With two groups the second router row is the negative of the first: logits a and -a never tie, in any precision. With
more groups the rows are random, and in bf16 a rare tie between groups may pick slices from both.

One layer is in memory at a time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamella.checkpoint.source import INDEX_NAME, Checkpoint
from lamella.demo.files import appear
from lamella.errors import UserError
from lamella.files import write_json

if TYPE_CHECKING:
    from torch import Tensor

# Mixtral's names for Llama's three matrices.
EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                   "generation_config.json")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """How the dense MLP becomes experts."""

    kind: Literal["copies", "slices"] = "slices"
    experts: int = 8
    """Experts per layer."""
    top_k: int = 4
    """Active experts per token; for `slices` also the size of a group."""
    seed: int = 0
    """Seeds the router's rows."""

    def check(self, inner: int) -> None:
        """Raise `UserError` unless an MLP of `inner` neurons can be cut this way."""
        if not 1 <= self.top_k <= self.experts:
            raise UserError(f"top_k = {self.top_k} of {self.experts} experts", fix="choose 1 <= top_k <= experts")
        if self.kind == "slices" and (self.experts % self.top_k or inner % self.top_k):
            raise UserError(
                f"{inner} neurons and {self.experts} experts cannot be cut into slices of {self.top_k}",
                fix="choose a top_k that divides both",
            )


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(checkpoint.tensors[name].file, framework="pt") as file:
        return file.get_tensor(name)


def mixtral_config(dense: dict[str, Any], how: Upcycling) -> dict[str, Any]:
    """`config.json` of the upcycled model from the dense Llama's.

    Raises:
        UserError: the dense model is not a Llama without biases, which Mixtral could not express.
    """
    if dense.get("model_type") != "llama":
        raise UserError(f"cannot upcycle a model of type {dense.get('model_type')!r}", fix="give a Llama checkpoint")
    for bias in ("attention_bias", "mlp_bias"):
        if dense.get(bias):
            raise UserError(
                f"cannot upcycle: {bias} is true, and Mixtral has no biases", fix="give a model without biases"
            )
    how.check(dense["intermediate_size"])
    config = {k: v for k, v in dense.items() if k not in ("attention_bias", "mlp_bias", "pretraining_tp")}
    inner = dense["intermediate_size"] // (how.top_k if how.kind == "slices" else 1)
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": inner,
        "num_local_experts": how.experts,
        "num_experts_per_tok": how.top_k,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "sliding_window": None,
    }


def router_rows(how: Upcycling, hidden: int, layer: int) -> Tensor:
    """Router weight, fp32 [experts, hidden]."""
    import torch

    generator = torch.Generator().manual_seed(how.seed * 100_003 + layer)
    groups = how.experts // how.top_k if how.kind == "slices" else how.experts
    rows = torch.randn(groups, hidden, generator=generator) * hidden**-0.5
    if groups == 2:
        rows[1] = -rows[0]
    return rows.repeat_interleave(how.top_k, 0) if how.kind == "slices" else rows


def experts_of(matrices: dict[str, Tensor], how: Upcycling) -> dict[str, Tensor]:
    """Expert matrices by name (`0.w1`, ...) from gate_proj, up_proj [inner, hidden] and down_proj [hidden, inner]."""
    experts = {}
    for e in range(how.experts):
        for name, short in EXPERT_NAMES.items():
            matrix = matrices[name]
            if how.kind == "slices":
                axis = 1 if name == "down_proj" else 0
                matrix = matrix.chunk(how.top_k, axis)[e % how.top_k] * (how.top_k if axis else 1)
            experts[f"{e}.{short}"] = matrix.clone().contiguous()
    return experts


def upcycle(dense: Path, target: Path, how: Upcycling) -> Path:
    """Write the upcycled checkpoint of `dense` into the new folder `target`: one shard per layer, and the rest."""
    if target.exists():
        return target
    from safetensors.torch import save_file

    checkpoint = Checkpoint.open(dense)
    dense_config = checkpoint.config
    config = mixtral_config(dense_config, how)
    layers = checkpoint.facts.num_layers
    weight_map: dict[str, str] = {}
    total_bytes = 0
    with appear(target) as folder:
        shards = layers + 1
        for i in range(shards):
            prefix = f"model.layers.{i}."
            mlp = {f"{prefix}mlp.{name}.weight": name for name in EXPERT_NAMES} if i < layers else {}
            if i < layers:
                plain = [n for n in checkpoint.tensors if n.startswith(prefix) and n not in mlp]
            else:
                plain = [n for n in checkpoint.tensors if not n.startswith("model.layers.")]
            tensors = {n: _read(checkpoint, n) for n in plain}
            if mlp:
                matrices = {short: _read(checkpoint, name) for name, short in mlp.items()}
                moe = prefix + "block_sparse_moe."
                router = router_rows(how, dense_config["hidden_size"], i).to(matrices["up_proj"].dtype)
                tensors[moe + "gate.weight"] = router
                tensors |= {f"{moe}experts.{n}.weight": t for n, t in experts_of(matrices, how).items()}
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX_NAME, index)
        write_json(folder / "config.json", dict(sorted(config.items())))
        for name in TOKENIZER_FILES:
            if (dense / name).is_file():
                shutil.copy2(dense / name, folder / name)
    return target


def largest_logit_gap(dense: Path, moe: Path, token_ids: list[int]) -> tuple[float, float]:
    """(largest difference of the two models' logits, largest dense logit) on one sequence, both loaded in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([token_ids])
    logits = []
    for folder in (dense, moe):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits[0])
        del model
    return float((logits[0] - logits[1]).abs().max()), float(logits[0].abs().max())

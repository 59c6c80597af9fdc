"""Families by their tiny configs, and what is measured of one, for the test and the table: one model, one reference, all comparisons."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lamella.adapter import Adapter
from lamella.adapter.peft_format import WEIGHTS, _tensor_names, flatten_experts
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.models.check import check_checkpoint
from lamella.models.layout import pack_rows
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.conftest import random_rows
from tests.fixtures import write_checkpoint
from tests.oracle import label_loss, load_reference, peft_model, relative_error, write_dequantised

SMALL = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
    max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=4, pad_token_id=2,
)  # fmt: skip
MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)
ROUTED = dict(**MOE, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
MLA = dict(
    kv_lora_rank=24,
    q_lora_rank=40,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_key_value_heads=4,
    head_dim=8,
)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
BOTH = ["sliding_attention", "full_attention"]
MIXED = dict(sliding_window=8, layer_types=BOTH)

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**MOE, **MIXED, "num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1, "n_group": 1, "topk_group": 1},
    "apertus": {}, "arcee": {"mlp_bias": True, "attention_bias": True}, "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "biogpt": {}, "bitnet": {}, "codegen": {"rotary_dim": 8}, "cohere": {}, "cohere-qk": {"use_qk_norm": True}, "cohere2": MIXED,
    "cwm": MIXED, "deepseek_v2": {**ROUTED, **MLA, "topk_method": "greedy"}, "deepseek_v3": {**ROUTED, **MLA}, "dots1": ROUTED,
    "ernie4_5": {"use_bias": True}, "ernie4_5_moe": {"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2},
    "exaone": {}, "exaone4": MIXED, "falcon": {}, "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {}, "gemma2": {**MIXED, "query_pre_attn_scalar": 16}, "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "glm": {}, "glm4": {}, "glm4_moe": {**ROUTED, "use_qk_norm": True}, "glm4_moe_lite": {**ROUTED, **MLA}, "gpt2": {},
    "gpt_bigcode": {}, "gpt_neox": {}, "gpt_oss": {**LOCAL, **MIXED}, "gptj": {"rotary_dim": 8}, "granite": {},
    "granitemoe": LOCAL, "granitemoeshared": {**LOCAL, "shared_intermediate_size": 40}, "helium": {},
    "hunyuan_v1_dense": {}, "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2}, "hyperclovax": {}, "internlm3": {},
    "jetmoe": {**LOCAL, "kv_channels": 16},
    "laguna": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "llama": {}, "llama-tied": {"tie_word_embeddings": True},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "attention_chunk_size": 8},
    "minicpm3": MLA, "minimax_m2": LOCAL, "ministral": MIXED, "ministral3": {"sliding_window": 8}, "mistral": {"sliding_window": 8},
    "mixtral": LOCAL, "nanochat": {}, "nemotron": {}, "olmo": {}, "olmo2": {}, "olmo3": MIXED,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "persimmon": {}, "phi": {},
    "phi3": {}, "phimoe": LOCAL, "qwen2": {}, "qwen2-window": {"use_sliding_window": True, **MIXED},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}, "qwen3": {},
    "qwen3_moe": {**MOE, "num_experts": 4}, "qwen3_moe-dense-first": {**MOE, "num_experts": 4, "mlp_only_layers": [0]},
    "seed_oss": {}, "smollm3": {}, "solar_open": ROUTED, "stablelm": {"qk_layernorm": True}, "starcoder2": {"sliding_window": 8},
    "vaultgemma": {**MIXED, "query_pre_attn_scalar": 16}, "youtu": MLA,
}  # fmt: skip
"""Model type (and, after a dash, a variant) -> its odd settings."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "axk2": ({**ROUTED, **MLA, "layer_types": ["full_attention"] * 2}, "fails when the model is taken apart"),
    "bloom": ({}, "computes attention itself, from a mask"),
    "diffllama": ({}, "goes 2 times through the attention interface, and has 1"),
    "doge": ({}, "asks for a mask of its own"),
    "gemma3_text-bidirectional": ({**FAMILIES["gemma3_text"], "use_bidirectional_attention": True}, "who sees whom is also decided by"),
    "gemma4_text-shared": (
        {**MIXED, "num_hidden_layers": 4, "layer_types": BOTH * 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 128, "num_global_key_value_heads": 2, "global_head_dim": 16},
        "shared keys and values",
    ),
    "gpt_neox_japanese": ({}, "computes attention itself, from a mask"),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2}, "fails when the model is taken apart"),
    "openai-gpt": ({}, "computes attention itself, from a mask"),
    "rwkv": ({"attention_hidden_size": 64}, "fails when the model is taken apart"),
    "sarvam_moe": ({**ROUTED, "use_qk_norm": True}, "weights need Split"),
    "xglm": ({"num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "d_model": 64}, "computes attention itself, from a mask"),
}  # fmt: skip
"""Model type -> its settings, and the reason why it cannot be computed exactly."""

ROWS = random_rows((5, 23, 9, 14), vocab=120)
Rows = list[tuple[list[int], list[bool]]]


def tiny(name: str) -> Any:
    """transformers' config of a family that is handled or refused."""
    settings = FAMILIES[name] if name in FAMILIES else REFUSED[name][0]
    kind = CONFIG_MAPPING[name if name in CONFIG_MAPPING else name.partition("-")[0]]
    given = {**SMALL, **settings}
    if isinstance(getattr(kind, "head_dim", None), property):  # Falcon
        del given["head_dim"]
    return kind(**given)


@dataclass(frozen=True)
class Found:
    """Relative errors against transformers + PEFT in fp32: of logits, of the loss, the worst of any adapter gradient."""

    logits: float
    loss: float
    gradient: float
    worst: str
    pairs: int
    fused: dict[str, Any]


def measure(config: Any, folder: Path, rows: Rows = ROWS) -> Found:
    write_checkpoint(folder / "checkpoint", config, shards=1)
    quantize_checkpoint(folder / "checkpoint", folder / "store", check=check_checkpoint)
    store = Store.open(folder / "store")
    base = write_dequantised(store, folder / "base")
    engine = Engine.open(store, dtype="fp32")
    reference = load_reference(base)
    with torch.no_grad():
        wanted = torch.cat([reference(input_ids=torch.tensor([ids])).logits[0] for ids, _ in rows])
    logits = relative_error(engine.logits(pack_rows(rows)), wanted)
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, alpha=8, targets="all-linear"), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in adapter.parameters().items():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    engine.attach(adapter)
    loss, truth = reference_gradients(adapter, reference, folder / "adapter", rows)
    loss_error, worst = 0.0, (0.0, "")
    labels = sum(sum(mask) for _, mask in rows)
    for cuts in ([rows], [rows[:2], rows[2:]], [[r] for r in rows]):
        for p in adapter.parameters().values():
            p.grad = None
        out = engine.step([pack_rows(c) for c in cuts], step_index=0, label_tokens=labels)
        loss_error = max(loss_error, abs(out.loss_sum / labels - loss) / loss)
        found = as_file(adapter, {name: p.grad for name, p in adapter.parameters().items()})
        worst = max(worst, *((relative_error(g, truth[name]), name) for name, g in found.items()))
    return Found(logits, loss_error, *worst, len(adapter.sites), engine.facts()["fused"])


def reference_gradients(
    adapter: Adapter, reference: Any, folder: Path, rows: Rows
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and gradient of every pair by our name, of transformers + PEFT."""
    adapter.save(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft_model(reference, folder)
    saved = load_file(folder / WEIGHTS)  # PEFT only warns of pairs that it does not place
    values = {n.replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(values[n], saved[n]) for n in saved), "PEFT has not loaded every pair"
    loss = label_loss(model, rows)
    loss.backward()
    parameters = dict(model.named_parameters())
    names = _tensor_names(adapter.sites)
    trainable = {n for n, p in parameters.items() if p.requires_grad}
    assert trainable == {f"{names[k]}.lora_{x}.default.weight" for k in adapter.sites for x in "AB"}
    pairs = ((f"{key}.lora_{x}", f"{names[key]}.lora_{x}.default.weight") for key in adapter.sites for x in "AB")
    return loss.item(), {name: parameters[there].grad for name, there in pairs}


def as_file(adapter: Adapter, gradients: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients in the file's layout."""
    flat = dict(gradients)
    for key, site in adapter.sites.items():
        if site.experts is not None:
            flat[f"{key}.lora_A"], flat[f"{key}.lora_B"] = flatten_experts(flat[f"{key}.lora_A"], flat[f"{key}.lora_B"])
    return flat

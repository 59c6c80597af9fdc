"""Configurations on which forecasts are compared with what happens, by `bench.plan_times`.

None of `HELD_OUT` was used to choose a constant. `FITTED` are the steps that `lamella probe` itself takes to see what a layer
takes beyond its kernels (`lamella/probe/in_place.py`), and those that were looked at while the model of times was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.memory import DENSE, DENSE_WIDE, MOE, MOE_WIDE
from bench.train import DENSE_88M, MOE_115M

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        model: of `MODELS`.
        lengths: of the sequences of each micro-batch, in tokens; the later half of each sequence carries labels.
        recompute: "never" or "always".
        budget_share: memory for the base, as a share of fixed parts and packed layers together; None: no limit.
    """

    name: str
    model: str
    lengths: tuple[tuple[int, ...], ...]
    targets: tuple[str, ...] | str = ATTENTION
    rank: int = 16
    recompute: str = "never"
    budget_share: float | None = None
    dtype: str = "bf16"


def _dense(
    hidden: int, heads: int, kv_heads: int, inner: int, layers: int, vocab: int, head_dim: int = 64
) -> dict[str, Any]:
    return {**DENSE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": inner,
            "num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": False}  # fmt: skip


def _moe(
    hidden: int, heads: int, experts: int, active: int, inner: int, layers: int, vocab: int, head_dim: int = 64
) -> dict[str, Any]:
    return {**MOE, "hidden_size": hidden, "num_attention_heads": heads, "num_experts": experts,
            "num_experts_per_tok": active, "moe_intermediate_size": inner, "num_hidden_layers": layers,
            "vocab_size": vocab, "head_dim": head_dim}  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "dense 576": _dense(576, 9, 3, 1536, 14, 24000),
    "qwen 2048": DENSE_WIDE,
    "qwen 896": _dense(896, 14, 2, 4864, 8, 16000),
    "qwen 4096": _dense(4096, 32, 8, 12288, 2, 4000, head_dim=128),
    "moe 1024": MOE_WIDE,
    "moe 640": _moe(640, 12, 24, 4, 320, 10, 20000),
    "moe 2048": _moe(2048, 32, 128, 8, 768, 2, 4000, head_dim=128),
}

HELD_OUT = (
    Case("tiny MoE, LoRA on attention, kept", "moe 640", ((700, 300),)),
    Case("tiny MoE, LoRA on everything, kept", "moe 640", ((400, 400),), targets="all-linear"),
    Case("tiny MoE, short rows, two micro-batches, recomputed", "moe 640", ((80,) * 6, (104,) * 5), recompute="always"),
    Case("middle MoE, LoRA on everything, recomputed", "moe 1024", ((640,),), targets="all-linear", recompute="always"),
    Case("middle MoE, streamed", "moe 1024", ((768, 256),), recompute="always", budget_share=0.6),
    Case("large MoE layers, LoRA on attention", "moe 2048", ((900, 500),)),
    Case("large MoE layers, LoRA on everything", "moe 2048", ((1300,),), targets="all-linear"),
    Case("small dense, short rows, everything", "dense 576", ((96,) * 7, (80,) * 8), targets="all-linear"),
    Case("small dense, 8,192 tokens in one row, recomputed", "dense 576", ((8192,),), recompute="always"),
    Case("dense 896 with a wide MLP, LoRA on attention", "qwen 896", ((640, 640),)),
    Case("dense 896, rank 64 on everything, recomputed", "qwen 896", ((512,),), targets="all-linear", rank=64,
         recompute="always"),
    Case("dense 2048, streamed", "qwen 2048", ((1024,), (512,)), recompute="always", budget_share=0.87),
    Case("large dense layers, LoRA on attention", "qwen 4096", ((1500,),)),
    Case("large dense layers, LoRA on everything, two micro-batches", "qwen 4096", ((384,), (448,)), targets="all-linear"),
)  # fmt: skip

FITTED: dict[str, dict[str, Any]] = {"dense 88M": DENSE_88M, "moe 115M": MOE_115M}
"""Looked at while the model of times was written, besides the probe's own two small models."""

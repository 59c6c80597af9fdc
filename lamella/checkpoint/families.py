"""Decoder layers of model families, as rules from config.json to names and shapes of tensors.

Written down from the families' public checkpoints and transformers 5.24's models; tests compare every family with
transformers on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lamella.checkpoint import kinds
from lamella.checkpoint.blocks import (
    Tensors,
    attention,
    delta_attention,
    fused_attention,
    fused_mlp,
    gated_mlp,
    latent_attention,
    lightning_attention,
    linear,
    norms,
    plain_mlp,
    routed,
)
from lamella.checkpoint.keys import Keys
from lamella.checkpoint.kinds import LINEAR, KindRule, all_full

_TWO = ("input_layernorm", "post_attention_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_FOUR = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
LayerRule = Callable[[Keys, int], Tensors]


# ---- layers ----------------------------------------------------------------------------------------


def _llama(k: Keys, i: int) -> Tensors:
    mlp = gated_mlp(k, k.size("intermediate_size"), bias=k.flag("mlp_bias"))
    return attention(k, bias=k.flag("attention_bias")) | mlp | norms(_TWO, k.size("hidden_size"))


def _plain(
    bias: str | bool = False, out_bias: bool | None = None, qk_norm: str = "", names: tuple[str, ...] = _TWO
) -> LayerRule:
    """Attention, a gated MLP and norms. `bias`: whether queries, keys and values (and the output, where `out_bias` says
    nothing) have one, or the key that tells; `names`: of the norms."""

    def rule(k: Keys, i: int) -> Tensors:
        biased = k.flag(bias) if isinstance(bias, str) else bias
        found = attention(k, bias=biased, out_bias=out_bias, qk_norm=qk_norm)
        return found | gated_mlp(k, k.size("intermediate_size")) | norms(names, k.size("hidden_size"))

    return rule


def _phi3(k: Keys, i: int) -> Tensors:
    return fused_attention(k) | fused_mlp(k) | norms(_TWO, k.size("hidden_size"))


def _glm(names: tuple[str, ...]) -> LayerRule:
    def rule(k: Keys, i: int) -> Tensors:
        return (
            attention(k, bias=k.flag("attention_bias"), out_bias=False)
            | fused_mlp(k)
            | norms(names, k.size("hidden_size"))
        )

    return rule


def _cohere(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias"), qk_norm="heads" if k.flag("use_qk_norm") else "")
    return found | gated_mlp(k, k.size("intermediate_size")) | norms(["input_layernorm"], k.size("hidden_size"))


def _starcoder2(k: Keys, i: int) -> Tensors:
    bias = k.flag("use_bias")
    found = attention(k, bias=bias) | plain_mlp(k, ("c_fc", "c_proj"), bias)
    return found | norms(_TWO, k.size("hidden_size"), bias=True)


def _stablelm(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("use_qkv_bias"), out_bias=False)
    if k.flag("qk_layernorm"):
        for letter, number in zip("qk", k.heads(), strict=True):
            found |= {f"self_attn.{letter}_layernorm.norms.{h}.weight": (k.head_dim(),) for h in range(number)}
    names = _TWO[:1] if k.flag("use_parallel_residual") else _TWO
    return found | gated_mlp(k, k.size("intermediate_size")) | norms(names, k.size("hidden_size"), bias=True)


def _ernie(k: Keys, i: int) -> Tensors:
    bias = k.flag("use_bias")
    return (
        attention(k, bias=bias)
        | gated_mlp(k, k.size("intermediate_size"), bias=bias)
        | norms(_TWO, k.size("hidden_size"))
    )


def _seed_oss(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias"), out_bias=k.flag("attention_out_bias"))
    return (
        found | gated_mlp(k, k.size("intermediate_size"), bias=k.flag("mlp_bias")) | norms(_TWO, k.size("hidden_size"))
    )


def _nemotron(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias")) | plain_mlp(k, bias=k.flag("mlp_bias"))
    return found | norms(_TWO, k.size("hidden_size"), bias=True)


def _arcee(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias")) | plain_mlp(k, bias=k.flag("mlp_bias"))
    return found | norms(_TWO, k.size("hidden_size"))


def _apertus(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias"), qk_norm="head") | plain_mlp(k)
    found |= {"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,), "mlp.act_fn.beta": (), "mlp.act_fn.eps": ()}
    return found | norms(("attention_layernorm", "feedforward_layernorm"), k.size("hidden_size"))


def _mixtral(k: Keys, i: int) -> Tensors:
    experts = routed(k, k.size("intermediate_size"), "block_sparse_moe", leaves=("w1", "w3", "w2"))
    return attention(k) | experts | norms(_TWO, k.size("hidden_size"))


def _phimoe(k: Keys, i: int) -> Tensors:
    experts = routed(k, k.size("intermediate_size"), "block_sparse_moe", leaves=("w1", "w3", "w2"))
    return attention(k, bias=k.flag("attention_bias")) | experts | norms(_TWO, k.size("hidden_size"), bias=True)


def _minimax(k: Keys, i: int) -> Tensors:
    core = lightning_attention(k) if layer_kinds(k, FAMILIES["minimax"])[i] == LINEAR else attention(k)
    experts = routed(k, k.size("intermediate_size"), "block_sparse_moe", leaves=("w1", "w3", "w2"))
    return core | experts | norms(_TWO, k.size("hidden_size"))


def _minimax_m2(k: Keys, i: int) -> Tensors:
    experts = routed(k, k.size("intermediate_size"), "block_sparse_moe", leaves=("w1", "w3", "w2"))
    experts["block_sparse_moe.e_score_correction_bias"] = experts["block_sparse_moe.gate.weight"][:1]
    return attention(k, qk_norm="full") | experts | norms(_TWO, k.size("hidden_size"))


def _sparse(k: Keys, i: int) -> bool:
    """Qwen: whether layer i has experts."""
    return i not in (k.numbers("mlp_only_layers") or []) and (i + 1) % k.size("decoder_sparse_step") == 0


def _qwen_mlp(k: Keys, i: int, shared: bool) -> Tensors:
    if not _sparse(k, i):
        return gated_mlp(k, k.size("intermediate_size"))
    return _qwen_experts(k, shared)


def _qwen_experts(k: Keys, shared: bool) -> Tensors:
    found = routed(k, k.size("moe_intermediate_size"))
    if shared:
        found |= gated_mlp(k, k.size("shared_expert_intermediate_size"), "mlp.shared_expert")
        found |= linear("mlp.shared_expert_gate", 1, k.size("hidden_size"))
    return found


def _qwen2_moe(k: Keys, i: int) -> Tensors:
    return (
        attention(k, bias=k.flag("qkv_bias"), out_bias=False)
        | _qwen_mlp(k, i, True)
        | norms(_TWO, k.size("hidden_size"))
    )


def _qwen3_moe(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias"), qk_norm="head") | _qwen_mlp(k, i, False)
    return found | norms(_TWO, k.size("hidden_size"))


def _qwen_hybrid(family: str, parted: bool, mlp: Callable[[Keys, int], Tensors]) -> LayerRule:
    def rule(k: Keys, i: int) -> Tensors:
        if layer_kinds(k, FAMILIES[family])[i] == LINEAR:
            core = delta_attention(k, parted)
        else:
            core = attention(k, bias=k.flag("attention_bias"), qk_norm="head", gated=True)
        return core | mlp(k, i) | norms(_TWO, k.size("hidden_size"))

    return rule


def _olmoe(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias"), qk_norm="full") | routed(k, k.size("intermediate_size"))
    return found | norms(_TWO, k.size("hidden_size"))


def _gpt_oss(k: Keys, i: int) -> Tensors:
    hidden, inner, experts = k.size("hidden_size"), k.size("intermediate_size"), k.experts() or 0
    k.active()
    return {
        "self_attn.sinks": (k.heads()[0],),
        **attention(k, bias=k.flag("attention_bias")),
        **linear("mlp.router", experts, hidden, bias=True),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
        "mlp.experts.down_proj": (experts, inner, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
        **norms(_TWO, hidden),
    }


def _dense_first(k: Keys, i: int) -> bool:
    """Whether layer i has a dense MLP in a family whose first layers do (GLM-4 lite: one where nothing is said)."""
    said = k.by_layer("mlp_layer_types")
    if said:
        return said[i] == "dense"
    return i < (1 if k.get("first_k_dense_replace") is None else k.size("first_k_dense_replace", 0))


def _deepseek_mlp(k: Keys, i: int, correction: bool = True) -> Tensors:
    if _dense_first(k, i):
        return gated_mlp(k, k.size("intermediate_size"))
    inner = k.size("moe_intermediate_size")
    found = routed(k, inner)
    if correction:
        found["mlp.gate.e_score_correction_bias"] = found["mlp.gate.weight"][:1]
    shared = k.maybe("n_shared_experts") if k.get("n_shared_experts") else None
    return found | (gated_mlp(k, inner * shared, "mlp.shared_experts") if shared else {})


def _deepseek(correction: bool) -> LayerRule:
    def rule(k: Keys, i: int) -> Tensors:
        return latent_attention(k) | _deepseek_mlp(k, i, correction) | norms(_TWO, k.size("hidden_size"))

    return rule


def _glm4_moe(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias"), out_bias=False, qk_norm="head" if k.flag("use_qk_norm") else "")
    return found | _deepseek_mlp(k, i) | norms(_TWO, k.size("hidden_size"))


def _dots1(k: Keys, i: int) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias"), qk_norm="head") | _deepseek_mlp(k, i)
    return found | norms(_TWO, k.size("hidden_size"))


def _llama4_layer(k: Keys, i: int) -> Tensors:
    hidden, inner, experts = k.size("hidden_size"), k.size("intermediate_size"), k.experts() or 0
    step = k.size("interleave_moe_layer_step")
    sparse = k.numbers("moe_layers")
    found = attention(k, bias=k.flag("attention_bias"))
    if i in (sparse if sparse is not None else range(step - 1, k.layers(), step)):
        k.active()
        found |= {
            "feed_forward.experts.gate_up_proj": (experts, hidden, 2 * inner),
            "feed_forward.experts.down_proj": (experts, inner, hidden),
            **linear("feed_forward.router", experts, hidden),
            **gated_mlp(k, inner, "feed_forward.shared_expert"),
        }
    else:
        found |= gated_mlp(k, k.size("intermediate_size_mlp"), "feed_forward")
    return found | norms(_TWO, hidden)


def _ernie_moe(k: Keys, i: int) -> Tensors:
    bias, inner, interval = k.flag("use_bias"), k.size("moe_intermediate_size"), k.size("moe_layer_interval")
    first, last = k.size("moe_layer_start_index", 0), k.size("moe_layer_end_index", -1)
    found = attention(k, bias=bias)
    if (i + 1) % interval == 0 and first <= i <= (k.layers() - 1 if last == -1 else last):
        found |= routed(k, inner)
        found["mlp.moe_statics.e_score_correction_bias"] = (1, *found["mlp.gate.weight"][:1])
        shared = k.size("moe_num_shared_experts", 0)
        found |= gated_mlp(k, inner * shared, "mlp.shared_experts", bias) if shared else {}
    else:
        found |= gated_mlp(k, k.size("intermediate_size"), bias=bias)
    return found | norms(_TWO, k.size("hidden_size"))


def _hunyuan(k: Keys, i: int) -> Tensors:
    return _hunyuan_attention(k) | gated_mlp(k, k.size("intermediate_size")) | norms(_TWO, k.size("hidden_size"))


def _hunyuan_moe(k: Keys, i: int) -> Tensors:
    inner = k.size("intermediate_size")
    found = _hunyuan_attention(k) | routed(k, inner, router="gate.wg") | gated_mlp(k, inner, "mlp.shared_mlp")
    return found | norms(_TWO, k.size("hidden_size"))


def _hunyuan_attention(k: Keys) -> Tensors:
    found = attention(k, bias=k.flag("attention_bias"), qk_norm="head", names="{}_layernorm")
    return {name.replace(".q_lay", ".query_lay").replace(".k_lay", ".key_lay"): shape for name, shape in found.items()}


# ---- the families ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Rules of one model type.

    Attributes:
        layer: config, index -> the layer's tensors, in the order of transformers' modules.
        kinds: attention of each layer where config.json has no `layer_types`.
        final_norm: of the hidden state before the head: "rms" (a weight), "layer" (weight and bias), "none".
        head_bias: key that says whether the head has a bias; "": never.
        predicts: layers beyond the last one, that predict further tokens, are in its checkpoints as config.json says
            (`num_nextn_predict_layers`).
    """

    layer: LayerRule
    kinds: KindRule = all_full
    final_norm: str = "rms"
    head_bias: str = ""
    predicts: bool = False


FAMILIES: Mapping[str, Family] = {
    "apertus": Family(_apertus),
    "arcee": Family(_arcee),
    "cohere": Family(_cohere),
    "cohere2": Family(_plain(bias="attention_bias", names=("input_layernorm",)), kinds.every(4, "sliding_window_pattern")),

    "cwm": Family(_plain(), kinds.full_first),
    "deepseek_v2": Family(_deepseek(False)),
    "deepseek_v3": Family(_deepseek(True), predicts=True),
    "dots1": Family(_dots1, kinds.dots1),
    "ernie4_5": Family(_ernie),
    "ernie4_5_moe": Family(_ernie_moe, head_bias="use_bias"),
    "exaone4": Family(_plain(qk_norm="head", names=_AFTER), kinds.exaone),
    "gemma": Family(_plain(bias="attention_bias")),
    "gemma2": Family(_plain(bias="attention_bias", names=_FOUR), kinds.every(2)),
    "gemma3_text": Family(
        _plain(bias="attention_bias", qk_norm="head", names=_FOUR), kinds.every(6, "sliding_window_pattern")
    ),
    "glm": Family(_glm(_TWO)),
    "glm4": Family(_glm((*_TWO, "post_self_attn_layernorm", "post_mlp_layernorm"))),
    "glm4_moe": Family(_glm4_moe, predicts=True),
    "glm4_moe_lite": Family(_deepseek(True), predicts=True),
    "gpt_oss": Family(_gpt_oss, kinds.every(2)),
    "granite": Family(_llama),
    "helium": Family(_llama),
    "hunyuan_v1_dense": Family(_hunyuan),
    "hunyuan_v1_moe": Family(_hunyuan_moe),
    "llama": Family(_llama),
    "llama4_text": Family(_llama4_layer, kinds.llama4),
    "minimax": Family(_minimax, kinds.minimax),
    "minimax_m2": Family(_minimax_m2),
    "ministral": Family(_plain(), kinds.window_everywhere),
    "ministral3": Family(_plain(), kinds.window_everywhere),
    "mistral": Family(_plain(), kinds.window_everywhere),
    "mixtral": Family(_mixtral, kinds.window_everywhere),
    "nemotron": Family(_nemotron, final_norm="layer"),
    "olmo": Family(_plain(bias="attention_bias", names=()), final_norm="none"),
    "olmo2": Family(_plain(bias="attention_bias", qk_norm="full", names=_AFTER)),
    "olmo3": Family(_plain(bias="attention_bias", qk_norm="full", names=_AFTER), kinds.every(4)),
    "olmoe": Family(_olmoe),
    "phi3": Family(_phi3, kinds.window_everywhere),
    "phimoe": Family(_phimoe, kinds.window_everywhere, final_norm="layer", head_bias="lm_head_bias"),
    "qwen2": Family(_plain(bias=True, out_bias=False), kinds.window_above),
    "qwen2_moe": Family(_qwen2_moe, kinds.qwen2_moe),
    "qwen3": Family(_plain(bias="attention_bias", qk_norm="head"), kinds.window_above),
    "qwen3_5_moe_text": Family(
        _qwen_hybrid("qwen3_5_moe_text", True, lambda k, i: _qwen_experts(k, True)),
        kinds.every(4, "full_attention_interval", others=LINEAR),
    ),
    "qwen3_5_text": Family(
        _qwen_hybrid("qwen3_5_text", True, lambda k, i: gated_mlp(k, k.size("intermediate_size"))),
        kinds.every(4, "full_attention_interval", others=LINEAR),
    ),
    "qwen3_moe": Family(_qwen3_moe, kinds.window_if_used),
    "qwen3_next": Family(
        _qwen_hybrid("qwen3_next", False, lambda k, i: _qwen_mlp(k, i, True)),
        kinds.every(4, "full_attention_interval", others=LINEAR),
    ),
    "seed_oss": Family(_seed_oss),
    "smollm3": Family(_llama, kinds.smollm3),
    "stablelm": Family(_stablelm, final_norm="layer"),
    "starcoder2": Family(_starcoder2, kinds.window_everywhere, final_norm="layer"),
    "vaultgemma": Family(
        _plain(bias="attention_bias", names=("input_layernorm", "pre_feedforward_layernorm")), kinds.every(2)
    ),
}  # fmt: skip


def layer_kinds(k: Keys, family: Family) -> list[str]:
    """How each layer attends, by config.json's `layer_types` or the family's rule.

    Raises:
        UserError: a list of the wrong length.
    """
    return k.by_layer("layer_types") or family.kinds(k)

"""Names and shapes of the parts that decoder layers are made of, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterable

from lamella.checkpoint.keys import Keys

Shape = tuple[int, ...]
Tensors = dict[str, Shape]


def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Tensors:
    """A linear layer's weight [outputs, inputs], and its bias."""
    found: Tensors = {f"{name}.weight": (outputs, inputs)}
    if bias:
        found[f"{name}.bias"] = (outputs,)
    return found


def norms(names: Iterable[str], size: int, bias: bool = False) -> Tensors:
    found: Tensors = {}
    for name in names:
        found[f"{name}.weight"] = (size,)
        if bias:
            found[f"{name}.bias"] = (size,)
    return found


def attention(
    k: Keys, *, bias: bool = False, out_bias: bool | None = None, qk_norm: str = "", names: str = "{}_norm",
    gated: bool = False,
) -> Tensors:  # fmt: skip
    """Query, key, value and output projections.

    Args:
        bias: of queries, keys and values; out_bias: of the output; None: as `bias`.
        qk_norm: norm of queries and keys: "head" (one vector for all heads), "full" (over all heads), "heads" (one vector
            a head), or "".
        names: of those norms, `{}` being q or k.
        gated: the query projection gives a gate of the output beside each query.
    """
    hidden, size = k.size("hidden_size"), k.head_dim()
    heads, kv_heads = k.heads()
    found = {
        **linear("self_attn.q_proj", heads * size * (2 if gated else 1), hidden, bias),
        **linear("self_attn.k_proj", kv_heads * size, hidden, bias),
        **linear("self_attn.v_proj", kv_heads * size, hidden, bias),
        **linear("self_attn.o_proj", hidden, heads * size, bias if out_bias is None else out_bias),
    }
    for letter, number in (("q", heads), ("k", kv_heads)):
        shapes: dict[str, Shape] = {"head": (size,), "full": (number * size,), "heads": (number, size)}
        if qk_norm:
            found[f"self_attn.{names.format(letter)}.weight"] = shapes[qk_norm]
    return found


def fused_attention(k: Keys) -> Tensors:
    """Queries, keys and values from one projection (Phi-3)."""
    hidden, size = k.size("hidden_size"), k.head_dim()
    heads, kv_heads = k.heads()
    return {
        **linear("self_attn.o_proj", hidden, heads * size),
        **linear("self_attn.qkv_proj", (heads + 2 * kv_heads) * size, hidden),
    }


def latent_attention(k: Keys) -> Tensors:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from a latent of `kv_lora_rank`, and one
    rotary key for all heads."""
    hidden, heads, bias = k.size("hidden_size"), k.heads()[0], k.flag("attention_bias")
    nope, rope, value = k.size("qk_nope_head_dim", 0), k.size("qk_rope_head_dim"), k.size("v_head_dim")
    queries, latent = k.maybe("q_lora_rank"), k.size("kv_lora_rank")
    found: Tensors = {}
    if queries is None:
        found |= linear("self_attn.q_proj", heads * (nope + rope), hidden)
    else:
        found |= linear("self_attn.q_a_proj", queries, hidden, bias)
        found |= norms(["self_attn.q_a_layernorm"], queries)
        found |= linear("self_attn.q_b_proj", heads * (nope + rope), queries)
    found |= linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    found |= norms(["self_attn.kv_a_layernorm"], latent)
    found |= linear("self_attn.kv_b_proj", heads * (nope + value), latent)
    return found | linear("self_attn.o_proj", hidden, heads * value, bias)


def delta_attention(k: Keys, parted: bool) -> Tensors:
    """Gated DeltaNet (Qwen3-Next). `parted`: its input projections apart (Qwen3.5)."""
    hidden = k.size("hidden_size")
    keys, values = k.size("linear_num_key_heads"), k.size("linear_num_value_heads")
    if values % keys:
        raise k.error(f"`linear_num_value_heads` is {values}, no multiple of `linear_num_key_heads`, {keys}")
    key, value = keys * k.size("linear_key_head_dim"), values * k.size("linear_value_head_dim")
    found: Tensors = {
        "linear_attn.dt_bias": (values,),
        "linear_attn.A_log": (values,),
        "linear_attn.conv1d.weight": (2 * key + value, 1, k.size("linear_conv_kernel_dim")),
    }
    if parted:
        found |= linear("linear_attn.in_proj_qkv", 2 * key + value, hidden)
        found |= linear("linear_attn.in_proj_z", value, hidden)
        found |= linear("linear_attn.in_proj_b", values, hidden)
        found |= linear("linear_attn.in_proj_a", values, hidden)
    else:
        found |= linear("linear_attn.in_proj_qkvz", 2 * key + 2 * value, hidden)
        found |= linear("linear_attn.in_proj_ba", 2 * values, hidden)
    return (
        found
        | norms(["linear_attn.norm"], k.size("linear_value_head_dim"))
        | linear("linear_attn.out_proj", hidden, value)
    )


def lightning_attention(k: Keys) -> Tensors:
    """MiniMax's linear attention; its decays are saved with it."""
    hidden, size, heads, block = k.size("hidden_size"), k.head_dim(), k.heads()[0], k.size("block_size")
    inner = heads * size
    return {
        "self_attn.slope_rate": (heads, 1, 1),
        "self_attn.query_decay": (heads, block, 1),
        "self_attn.key_decay": (heads, block, 1),
        "self_attn.diagonal_decay": (1, heads, block, block),
        **norms(["self_attn.norm"], inner),
        **linear("self_attn.qkv_proj", 3 * inner, hidden),
        **linear("self_attn.out_proj", hidden, inner),
        **linear("self_attn.output_gate", inner, hidden),
    }


def gated_mlp(k: Keys, inner: int, path: str = "mlp", bias: bool = False) -> Tensors:
    hidden = k.size("hidden_size")
    return {
        **linear(f"{path}.gate_proj", inner, hidden, bias),
        **linear(f"{path}.up_proj", inner, hidden, bias),
        **linear(f"{path}.down_proj", hidden, inner, bias),
    }


def fused_mlp(k: Keys) -> Tensors:
    """Gate and up in one projection (Phi-3, GLM)."""
    hidden, inner = k.size("hidden_size"), k.size("intermediate_size")
    return {**linear("mlp.gate_up_proj", 2 * inner, hidden), **linear("mlp.down_proj", hidden, inner)}


def plain_mlp(k: Keys, names: tuple[str, str] = ("up_proj", "down_proj"), bias: bool = False) -> Tensors:
    """Two projections without a gate."""
    hidden, inner = k.size("hidden_size"), k.size("intermediate_size")
    return {**linear(f"mlp.{names[0]}", inner, hidden, bias), **linear(f"mlp.{names[1]}", hidden, inner, bias)}


def routed(
    k: Keys, inner: int, path: str = "mlp", router: str = "gate", leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensors:  # fmt: skip
    """A router [experts, hidden], and experts one by one.

    Raises:
        UserError: more experts per token than there are.
    """
    hidden, experts = k.size("hidden_size"), k.experts()
    if experts is None:
        raise k.error("does not say how many experts a layer has")
    k.active()
    found: Tensors = {f"{path}.{router}.weight": (experts, hidden)}
    gate, up, down = leaves
    for e in range(experts):
        found[f"{path}.experts.{e}.{gate}.weight"] = (inner, hidden)
        found[f"{path}.experts.{e}.{up}.weight"] = (inner, hidden)
        found[f"{path}.experts.{e}.{down}.weight"] = (hidden, inner)
    return found

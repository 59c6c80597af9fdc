"""Model shapes written by hand for tests of this room."""

from lamella.forecast.shape import Core, LayerShape, Matrix, ModelShape


def layer(matrices, core, other=0, nf4=0.516):
    quantised = sum(m.parameters for m in matrices if m.quantised)
    raw = 2 * (sum(m.parameters for m in matrices if not m.quantised) + other)
    total = sum(m.parameters for m in matrices) + other
    return LayerShape(tuple(matrices), core, other, 2 * total, round(quantised * nf4) + raw, raw)


def attention(hidden, heads, kv_heads, head_dim):
    return [
        Matrix("self_attn.q_proj", "attention", heads * head_dim, hidden),
        Matrix("self_attn.k_proj", "attention", kv_heads * head_dim, hidden),
        Matrix("self_attn.v_proj", "attention", kv_heads * head_dim, hidden),
        Matrix("self_attn.o_proj", "attention", hidden, heads * head_dim),
    ]


def mlp(hidden, inner):
    return [
        Matrix("mlp.gate_proj", "mlp", inner, hidden),
        Matrix("mlp.up_proj", "mlp", inner, hidden),
        Matrix("mlp.down_proj", "mlp", hidden, inner),
    ]


def moe(hidden, inner, experts, active):
    return [
        Matrix("mlp.gate", "router", experts, hidden, quantised=False, adaptable=False),
        Matrix("mlp.experts.gate_up_proj", "experts", 2 * inner, hidden, experts, active),
        Matrix("mlp.experts.down_proj", "experts", hidden, inner, experts, active),
    ]


def full(heads, kv_heads, head_dim, window=None):
    kind = "full" if window is None else "sliding"
    return Core(kind, heads, kv_heads, head_dim, head_dim, 2 * kv_heads * head_dim, window)


def model(name, hidden, vocab, layers, *, max_tokens=None, tied=False):
    """A shape around these layers; parameters by class are what the layers hold."""
    embedding = hidden * vocab
    head = 0 if tied else embedding
    parameters, active = {"embedding": embedding, "head": head, "norm": hidden}, {"embedding": embedding, "head": head}
    for one in layers:
        for m in one.matrices:
            parameters[m.kind] = parameters.get(m.kind, 0) + m.parameters
            active[m.kind] = active.get(m.kind, 0) + m.active_parameters
        parameters["norm"] += one.other_parameters
    total = sum(parameters.values())
    return ModelShape(
        name, "made", "config.json", hidden, vocab, max_tokens, tied, tuple(layers), embedding, head, hidden, 0,
        parameters, active, 2 * total, 2 * (embedding + head + hidden),
    )  # fmt: skip


def llama_8b():
    """Llama-3.1-8B: 32 layers, hidden 4096, 32 heads, 8 KV heads of 128, inner 14336, vocabulary 128256, 131072 tokens
    (its config.json)."""
    one = layer(attention(4096, 32, 8, 128) + mlp(4096, 14336), full(32, 8, 128), other=2 * 4096)
    return model("Llama-3.1-8B", 4096, 128256, [one] * 32, max_tokens=131072)


def qwen_235b():
    """Qwen3-235B-A22B: 94 layers, hidden 4096, 64 heads, 4 KV heads of 128, 128 experts of 1536, 8 active, vocabulary
    151936 (its config.json); q and k norms of 128 each."""
    one = layer(attention(4096, 64, 4, 128) + moe(4096, 1536, 128, 8), full(64, 4, 128), other=2 * 4096 + 2 * 128)
    return model("Qwen3-235B-A22B", 4096, 151936, [one] * 94, max_tokens=262144)

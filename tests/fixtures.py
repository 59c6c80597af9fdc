"""Small shared inputs, all made on the spot: TOK, CHATML, CHAT12, DENSE, MOE."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = [
    "the", "layer", "walk", "reads", "each", "block", "once", "and", "keeps", "its", "adapter", "small", "while",
    "tokens", "pass", "through", "the", "frozen", "base", "street", "avenue", "invoice", "company", "onion",
    "basil", "court", "appeal", "district", "name", "number", "city", "state",
]  # fmt: skip

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus(n_bytes: int = 50_000) -> list[str]:
    """Deterministic text, about `n_bytes` long, with digits, punctuation and some non-ASCII."""
    lines, size, seed = [], 0, 1
    while size < n_bytes:
        words = []
        for _ in range(12):
            seed = (seed * 1103515245 + 12345) % 2**31
            words.append(WORDS[seed % len(WORDS)])
        line = f"{' '.join(words)}, {seed % 1000}: café {chr(97 + seed % 26)}.\n"
        lines.append(line)
        size += len(line.encode())
    return lines


def make_tokenizer(chat_template: str | None = CHATML, eos: str = "<|im_end|>"):
    """TOK: byte-level BPE of about 500 ids; bos, eos, pad, im_start, im_end special; think tags added, not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(corpus(), trainer)
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<|bos|>", eos_token=eos, pad_token="<|pad|>",
                                   additional_special_tokens=["<|im_start|>", "<|im_end|>"])  # fmt: skip
    fast.chat_template = chat_template
    return fast


def chat12() -> list[dict]:
    """CHAT12: 12 rows of [user, assistant], answers of 1 to about 40 tokens, each with an id."""
    rows = []
    for i in range(12):
        answer = " ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(1 + i * 2))
        question = f"question {i}: " + " ".join(WORDS[(i * 5 + k) % len(WORDS)] for k in range(3 + i))
        rows.append(
            {"id": i, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        )
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def dense_config(layers: int = 2, **over):
    """DENSE: llama-like, hidden 64, 4 heads, 2 kv heads, head_dim 16, inner 128, vocab 512."""
    from transformers import LlamaConfig

    settings = dict(
        vocab_size=512, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0, eos_token_id=4,
        pad_token_id=2,
    )  # fmt: skip
    return LlamaConfig(**{**settings, **over})


def moe_config(experts: int = 4, top_k: int = 2, inner: int = 24, layers: int = 2, **over):
    """MOE: like DENSE with routed experts (Qwen3-MoE)."""
    from transformers import Qwen3MoeConfig

    settings = dict(
        vocab_size=512, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=top_k,
        norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0, eos_token_id=4,
        pad_token_id=2, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    return Qwen3MoeConfig(**{**settings, **over})


def random_model(config, seed: int = 0, std: float = 0.05):
    """A model of this config with random fp32 weights (norms near 1, router and experts included)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator) * std
            p.copy_(1 + noise if "norm" in name.lower() and p.dim() == 1 else noise)
    model.tie_weights()
    return model.eval()


def write_checkpoint(
    path: Path, config, *, seed: int = 0, dtype=torch.float32, shards: int = 3, tokenizer=None, std: float = 0.05
) -> Path:
    """Save a random model as a HF folder of about `shards` safetensors shards + index."""
    model = random_model(config, seed, std).to(dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(path, max_shard_size=max(size // shards + 1, 1) if shards > 1 else "10GB")
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path

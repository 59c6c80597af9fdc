from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lamella.checkpoint.gguf import read_gguf
from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.export.writers import Target
from lamella.export.writers.gguf import GgufWriter
from lamella.store.gguf_files import write_gguf_files
from tests.export.gguf_models import CONFIGS, config_of, random_tensors, write_model
from tests.fixtures import CHATML, chat12, corpus, make_tokenizer, random_model


def read_back(path):
    with Checkpoint.open(path) as checkpoint:
        found = {}
        for name, tensor in checkpoint.tensors.items():
            out = np.empty(tensor.numel, np.float32)
            checkpoint.values(tensor, 0, out)
            found[name] = torch.from_numpy(out).reshape(tensor.shape)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name, tmp_path):
    """What is written as F32 is read as it was, with the config that transformers needs for the same model."""
    config = config_of(name)
    tensors = random_tensors(config)
    writer, promised = write_model(tmp_path / "m.gguf", config, tensors)
    assert (tmp_path / "m.gguf").stat().st_size == writer.nbytes
    found = read_back(tmp_path / "m.gguf")
    assert set(found) == set(tensors)
    for key, values in found.items():
        assert torch.equal(values, promised[key]), key
        shifted = name.startswith("gemma") and key.endswith("norm.weight")  # stored as fp32 w + 1
        assert torch.allclose(values, tensors[key], rtol=0, atol=1.3e-7 if shifted else 0.0), key
    model = read_gguf(tmp_path / "m.gguf")
    again, said = CONFIG_MAPPING[model.config["model_type"]].from_dict(model.config).to_dict(), config.to_dict()
    free = {"architectures", "dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"}
    if name == "mistral":  # in GGUF it is a llama
        free |= {"model_type", "attention_bias", "mlp_bias", "pretraining_tp"}
    if name == "qwen2":
        free |= {"head_dim"}  # said, where the config leaves it to be derived
    assert {k: (said.get(k), v) for k, v in again.items() if said.get(k) != v and k not in free} == {}


@pytest.mark.parametrize("name", ["llama biases", "qwen3_moe", "gemma3_text"])
def test_logits_of_transformers_own_reader(name, tmp_path):
    """transformers reads the file to the same logits. It is given the config: of its own it takes no biases, scaling, head
    sizes or inner sizes of experts from the metadata."""
    config = config_of(name)
    model = random_model(config)
    model.save_pretrained(tmp_path / "hf")
    with Checkpoint.open(tmp_path / "hf") as checkpoint:
        write_model(tmp_path / "m.gguf", checkpoint.config, read_back(tmp_path / "hf"))
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=config, dtype=torch.float32
    ).eval()
    ids = torch.randint(0, 500, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("form", "error"), [("f16", 5e-4), ("bf16", 4e-3), ("q8_0", 4.2e-3), ("q4_0", 0.13), ("q4_1", 0.07)]
)
def test_forms(form, error, tmp_path):
    """A reader gets what the writer said it would; relative to the largest value the rounding is the form's."""
    config = config_of("qwen2_moe")  # experts, a vector as a matrix, rows of 48 that are no whole blocks
    tensors = random_tensors(config)
    writer, promised = write_model(tmp_path / "m.gguf", config, tensors, form)
    found, types = read_back(tmp_path / "m.gguf"), read_gguf(tmp_path / "m.gguf").header.tensors
    for key, values in found.items():
        assert torch.equal(values, promised[key]), key
        exact = values.dim() == 1 or "norm" in key or key.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        off = (values - tensors[key]).abs().max() / tensors[key].abs().max()
        assert off == 0 if exact else 0 < off < error, (key, float(off))
    kinds = {t.type for n, t in types.items() if n.endswith(("ffn_up_exps.weight", "attn_q.weight"))}
    assert kinds == {form.upper()}
    assert types["token_embd.weight"].type == ("Q8_0" if form.startswith("q") else form.upper())
    odd = types["blk.0.ffn_down_shexp.weight"].type
    assert odd == ("F16" if form.startswith("q") else form.upper())
    assert any("rows of 48" in line for line in writer.notices) == form.startswith("q")


def test_pieces(tmp_path, monkeypatch):
    """Tensors larger than a piece are asked for in whole heads and rows, and lie as when written at once."""
    config = config_of("llama")
    tensors = random_tensors(config)
    write_model(tmp_path / "whole.gguf", config, tensors, "q8_0")
    monkeypatch.setattr("lamella.export.writers.gguf.PIECE_VALUES", 1500)
    write_model(tmp_path / "pieces.gguf", config, tensors, "q8_0")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "pieces.gguf").read_bytes()


def test_what_is_refused(tmp_path):
    def refused(name, what, **over):
        config = config_of(name, **over)
        with pytest.raises(UserError, match=what):
            write_model(tmp_path / "m.gguf", config, random_tensors(config))
        assert list(tmp_path.iterdir()) == []

    refused("qwen3_moe", "norm_topk_prob = False", norm_topk_prob=False)
    refused("qwen2_moe", "norm_topk_prob = True", norm_topk_prob=True)
    refused("llama", "hidden_act = 'gelu'", hidden_act="gelu")
    refused("gemma2", "query_pre_attn_scalar = 17", query_pre_attn_scalar=17)
    refused("gemma3_text", "layer_types differ", layer_types=["full_attention"] * 3 + ["sliding_attention"] * 4)
    refused(
        "llama", "scaling of type 'dynamic'", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    config = config_of("llama").to_dict()
    for changed, what in (
        ({"model_type": "helium"}, "model_type 'helium' is not written"),
        ({"num_hidden_layers": 3}, "missing"),
    ):
        with pytest.raises(UserError, match=what):
            write_model(tmp_path / "m.gguf", config | changed, random_tensors(config_of("llama")))
    with pytest.raises(UserError, match="form 'q6_k'"):
        GgufWriter(tmp_path / "m.gguf", [], "q6_k", config, {})
    tensors = random_tensors(config_of("llama"))
    tensors["lm_head.weight"][0, 0] = 1e5
    with pytest.raises(UserError, match=r"lm_head\.weight' has values beyond fp16"):
        write_model(tmp_path / "m.gguf", config, tensors, "f16")


def test_a_window_that_llama_cpp_does_not_have_is_told(tmp_path):
    config = config_of("mistral", sliding_window=64)
    writer, _ = write_model(tmp_path / "m.gguf", config, random_tensors(config))
    assert writer.notices[0] == "llama.cpp's llama has no sliding window: equal up to 64 tokens"


def test_missing_tensor(tmp_path):
    config = config_of("llama")
    tensors = random_tensors(config)
    targets = [Target(name, tuple(t.shape), "float32", "other") for name, t in tensors.items()]
    writer = GgufWriter(tmp_path / "m.gguf", targets, "f32", config.to_dict(), {})
    with pytest.raises(UserError, match="21 tensors were never written"):
        writer.finish(config.to_dict(), {})
    assert not (tmp_path / "m.gguf").exists()


def test_byte_level_tokenizer(tmp_path):
    """Out and in again: the same ids for text and chats, the same special tokens and template."""
    folder = tmp_path / "hf"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 1]}')
    config = config_of("llama", vocab_size=520)
    write_model(tmp_path / "m.gguf", config, random_tensors(config), files={f.name: f for f in folder.iterdir()})
    header = read_gguf(tmp_path / "m.gguf").header.metadata
    assert (header["tokenizer.ggml.model"], header["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert (header["tokenizer.ggml.eos_token_id"], header["tokenizer.ggml.eot_token_id"]) == (4, 1)
    assert (header["tokenizer.ggml.add_bos_token"], header["tokenizer.ggml.add_eos_token"]) == (False, False)
    types = header["tokenizer.ggml.token_type"]
    assert types[:5] == [3] * 5 and types[500:502] == [4, 4] and types[502:] == [5] * 18
    made = tmp_path / "made"
    made.mkdir()
    write_gguf_files(tmp_path / "m.gguf", read_gguf(tmp_path / "m.gguf").config, made)
    again = PreTrainedTokenizerFast.from_pretrained(made)
    for text in (*corpus(4000), "a<|im_end|> <think>b</think>", "  two\n\n  "):
        assert again(text).input_ids == tokenizer(text).input_ids, text
    for row in chat12()[:3]:
        assert (
            again.apply_chat_template(row["messages"])["input_ids"]
            == tokenizer.apply_chat_template(row["messages"])["input_ids"]
        )
    assert again.chat_template == CHATML and again.eos_token_id == 4
    assert '"eos_token_id": [\n    4,\n    1\n  ]' in (made / "generation_config.json").read_text()


def test_sentencepiece_tokenizer(tmp_path):
    """A BPE over bytes as fallback, with metaspaces, becomes llama.cpp's "llama" vocabulary and comes back."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    base = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    base.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    base.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_256 = [f"<0x{i:02X}>" for i in range(256)]
    base.train_from_iterator([line.split(",")[0] for line in corpus(5000)],
                             trainers.BpeTrainer(vocab_size=460, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))  # fmt: skip
    tree = json.loads(base.to_str())
    vocab = tree["model"]["vocab"]
    order = [
        "<unk>",
        "<s>",
        "</s>",
        *bytes_256,
        *[t for t in sorted(vocab, key=vocab.get) if t not in ("<unk>", "<s>", "</s>")],
    ]
    tree["model"]["vocab"] = {token: i for i, token in enumerate(order)}
    for i, added in enumerate(tree["added_tokens"]):
        added["id"] = i
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(tree)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    folder = tmp_path / "hf"
    tokenizer.save_pretrained(folder)
    config = config_of("llama", vocab_size=len(order), bos_token_id=1, eos_token_id=2)
    write_model(tmp_path / "m.gguf", config, random_tensors(config), files={f.name: f for f in folder.iterdir()})
    header = read_gguf(tmp_path / "m.gguf").header.metadata
    assert header["tokenizer.ggml.model"] == "llama" and header["tokenizer.ggml.add_space_prefix"] is True
    assert header["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    made = tmp_path / "made"
    made.mkdir()
    write_gguf_files(tmp_path / "m.gguf", read_gguf(tmp_path / "m.gguf").config, made)
    again = PreTrainedTokenizerFast.from_pretrained(made)
    for text in ("the layer walk reads each block once", "café 12", "a b"):
        assert again(text, add_special_tokens=False).input_ids == tokenizer(text, add_special_tokens=False).input_ids, (
            text
        )

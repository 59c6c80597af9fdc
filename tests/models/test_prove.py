"""Which modules are replaced, and that a module which only looks like a known kind is not."""

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.llama import modeling_llama as llama

from lamella.kernels import rows
from lamella.models.fused import FusedAttention, FusedMlp, FusedNorm
from lamella.models.prove import fuse
from lamella.models.skeleton import Skeleton
from tests.engine.test_families import FAMILIES, SMALL
from tests.fixtures import dense_config

pytestmark = pytest.mark.skipif(not rows.supported(), reason="needs AVX-512 with bf16")

PROVEN = {
    "llama": {"norm": 5, "mlp": 2, "attention": 2},
    "llama-tied": {"norm": 5, "mlp": 2, "attention": 2},
    "qwen2": {"norm": 5, "mlp": 2, "attention": 2},
    "qwen3": {"norm": 9, "mlp": 2, "attention": 2},
    "qwen3_moe": {"norm": 9, "attention": 2},
    "qwen3_moe-dense-first": {"norm": 9, "mlp": 1, "attention": 2},
    "mixtral": {"norm": 5, "attention": 2},
    "olmoe": {"norm": 9},
    "gemma3": {"norm": 19, "mlp": 3, "attention": 3},
    "gemma2-softcap": {"norm": 9, "mlp": 2, "attention": 2},
    "gpt_oss": {"norm": 5},
    "mistral-window": {"norm": 5, "mlp": 2, "attention": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_proven(family):
    skeleton = Skeleton(FAMILIES[family](), torch.bfloat16)
    names = [name for layer in skeleton.layers for name in layer.state_dict()]
    skeleton.fuse()
    assert skeleton.fused.fused == PROVEN[family]
    assert [name for layer in skeleton.layers for name in layer.state_dict()] == names


def test_why_attention_is_left_alone():
    assert fused_kept("olmoe") == {"OlmoeAttention": "its q_norm is not over one head"}
    assert fused_kept("gpt_oss") == {"GptOssAttention": "has a parameter of its own, sinks"}


def fused_kept(family):
    skeleton = Skeleton(FAMILIES[family](), torch.bfloat16)
    skeleton.fuse()
    return skeleton.fused_facts()["kept"]


def test_rotary_in_pairs_is_not_rotary_in_halves():
    skeleton = Skeleton(tf.CohereConfig(**SMALL), torch.bfloat16)
    skeleton.fuse()
    assert "attention" not in skeleton.fused.fused
    assert "differ" in skeleton.fused.kept["CohereAttention"]


# ---- look-alikes ----------------------------------------------------------------------------------------------------


class HiddenEpsilonNorm(llama.LlamaRMSNorm):
    """Says 1e-6, takes 1e-5."""

    def forward(self, hidden_states):
        x = hidden_states.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).to(hidden_states.dtype)


class CentredNorm(llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class SwappedMlp(llama.LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class ClampedMlp(llama.LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x))


class ClippedAttention(llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        return super().forward(hidden_states.clamp(-8, 8), position_embeddings, attention_mask, **kwargs)


class PairsAttention(llama.LlamaAttention):
    """As one that rotates nothing in every second layer."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        if self.layer_idx == 1:
            cos, sin = position_embeddings
            position_embeddings = torch.ones_like(cos), torch.zeros_like(sin)
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


class ScaledByIndexAttention(llama.LlamaAttention):
    """As one whose arguments to the attention function depend on the layer's place."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        kwargs["softcap"] = 30.0 if self.layer_idx else None
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


def skeleton_with(cls):
    """A llama whose modules of cls's base class became cls."""
    skeleton = Skeleton(dense_config(), torch.bfloat16)
    base = cls.__mro__[1]
    for layer in skeleton.layers:
        for module in layer.modules():
            if type(module) is base:
                module.__class__ = cls
    return skeleton


@pytest.mark.parametrize("cls", [HiddenEpsilonNorm, CentredNorm, SwappedMlp, ClampedMlp, ClippedAttention])
def test_look_alikes_are_refused(cls):
    skeleton = skeleton_with(cls)
    report = fuse(skeleton.model, skeleton.layers)
    assert "differ by" in report.kept[cls.__name__]
    assert not [m for layer in skeleton.layers for m in layer.modules() if isinstance(getattr(m, "own", None), cls)]


@pytest.mark.parametrize("cls", [PairsAttention, ScaledByIndexAttention])
def test_layers_that_differ_by_their_index(cls):
    skeleton = skeleton_with(cls)
    report = fuse(skeleton.model, skeleton.layers)
    assert report.fused["attention"] == 1, "the first is what it was proven to be"
    assert report.kept[cls.__name__] == "layers of this kind differ by their index"
    assert type(skeleton.layers[1].self_attn) is cls


def test_an_honest_subclass_is_proven():
    class Honest(llama.LlamaMLP):
        pass

    skeleton = skeleton_with(Honest)
    assert fuse(skeleton.model, skeleton.layers).fused["mlp"] == 2


# ---- at work --------------------------------------------------------------------------------------------------------


def give_weights(module, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                values = torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2)
                m._parameters[name] = nn.Parameter((values + (p.dim() == 1)).to(dtype), requires_grad=False)


@pytest.mark.parametrize("family", [f for f in FAMILIES if "mlp" in PROVEN[f]])
@pytest.mark.parametrize("kind", [FusedNorm, FusedMlp])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_fused_against_own(family, kind, dtype, near):
    skeleton = Skeleton(FAMILIES[family](), dtype)
    skeleton.fuse()
    fused = next(m for m in skeleton.layers[0].modules() if isinstance(m, kind))
    give_weights(fused, dtype)
    x = torch.randn(1, 33, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    if x.shape[-1] != (fused.weight.shape[0] if kind is FusedNorm else 64):
        x = x[..., : fused.weight.shape[0]]
    found = []
    for module in (fused, fused.own):
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        (grad,) = torch.autograd.grad(
            out, leaf, torch.ones_like(out) + x if out.shape == x.shape else torch.ones_like(out)
        )
        found.append((out.detach().double(), grad.double()))
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < near
    assert fused.own_calls == 0


def test_calls_it_was_not_proven_on_go_to_the_family():
    skeleton = Skeleton(dense_config(), torch.float32)
    skeleton.fuse()
    norm = skeleton.layers[0].input_layernorm
    give_weights(norm, torch.float32)
    x = torch.randn(2, 64, dtype=torch.float64)
    assert torch.equal(norm(x), norm.own(x))
    assert skeleton.fused_facts()["own_calls"] == 1
    attention = skeleton.layers[0].self_attn
    assert isinstance(attention, FusedAttention)
    give_weights(attention, torch.float32)
    half = torch.zeros(1, 3, 8)
    with pytest.raises(RuntimeError):  # the family's own cannot rotate heads of 16 by tables of 8
        attention(torch.randn(1, 3, 64), position_embeddings=(half, half))
    assert skeleton.fused_facts()["own_calls"] == 2

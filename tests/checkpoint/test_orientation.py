"""B30: which way round fused experts lie is told by the family, never by sizes."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig

from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.models.binding import plan_binding
from lamella.models.skeleton import Skeleton, load_config
from tests.checkpoint.helpers import write_fused, write_tensors
from tests.checkpoint.packed_writers import read_folder, write_packed
from tests.fixtures import moe_config, random_model, write_checkpoint

IDS = torch.arange(3, 40)[None]
INNER = {"narrow": 24, "wide": 48, "square": 32}
"""2 x inner below, above and at the hidden size of 64."""


def gpt_oss(inner: int) -> GptOssConfig:
    """Inputs first, gate and up interleaved."""
    return GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def llama4(inner: int) -> Llama4TextConfig:
    """Inputs first, gate and up in halves."""
    return Llama4TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=inner, intermediate_size_mlp=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def loaded(folder):
    """The model with values as `Checkpoint` reads them, at the places that the binding gives them."""
    skeleton = Skeleton(load_config(folder), torch.float32)
    model = AutoModelForCausalLM.from_config(load_config(folder), dtype=torch.float32).eval()
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    with Checkpoint.open(folder) as checkpoint, torch.no_grad():
        shapes = {name: t.shape for name, t in checkpoint.tensors.items()}
        for plan in plan_binding(skeleton, shapes).values():
            for piece in plan.pieces:
                tensor = checkpoint.tensors[piece.source]
                out = np.empty(tensor.numel, np.float32)
                checkpoint.values(tensor, 0, out)
                piece.view(parameters[plan.name]).copy_(torch.from_numpy(out).view(tensor.shape))
    return model


@pytest.mark.parametrize("inner", INNER)
def test_b30_outputs_first_like_the_unfused(tmp_path, inner):
    """Qwen3-MoE: experts one by one and fused as [E, 2I, H]."""
    config = moe_config(inner=INNER[inner])
    wanted = logits(random_model(config))
    unfused = write_checkpoint(tmp_path / "unfused", config, shards=1)
    assert any(".experts.3." in name for name in read_folder(unfused))
    fused = write_fused(tmp_path / "fused", config, dtype=torch.float32)
    for folder in (unfused, fused):
        torch.testing.assert_close(logits(loaded(folder)), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("family", [gpt_oss, llama4])
def test_b30_inputs_first(tmp_path, family, inner):
    """GPT-OSS and Llama 4 keep [E, H, 2I], whatever is wider."""
    config = family(INNER[inner])
    folder = write_fused(tmp_path / "c", config, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded(folder)), logits(random_model(config)), rtol=0, atol=1e-5)


def test_b30_mxfp4_lies_the_other_way_round(tmp_path):
    """Square experts in MXFP4: blocks lie [E, O, I], the weight is the family's [E, I, O]."""
    config = gpt_oss(32)
    source = write_fused(tmp_path / "plain", config, dtype=torch.float32)
    written = write_packed("mxfp4", source, tmp_path / "packed")
    model = random_model(config)
    model.load_state_dict(written.values)
    torch.testing.assert_close(logits(loaded(written.path)), logits(model), rtol=0, atol=1e-5)
    assert (logits(model) - logits(random_model(config))).abs().max() > 1e-3


@pytest.mark.parametrize("inner", ["narrow", "wide"])
@pytest.mark.parametrize("family", [moe_config, gpt_oss])
def test_b30_a_shape_that_contradicts_its_family(tmp_path, family, inner):
    config = family(inner=INNER[inner])
    folder = write_fused(tmp_path / "c", config, dtype=torch.float32)
    tensors = {n: t.mT if n.endswith("gate_up_proj") else t for n, t in read_folder(folder).items()}
    write_tensors(folder, json.loads((folder / "config.json").read_text()), tensors)
    with pytest.raises(UserError, match=r"gate_up_proj.*has fused experts as \[experts, "):
        Checkpoint.open(folder)

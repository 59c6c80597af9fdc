"""The experts' CUDA path, its kernels in Triton's interpreter, against the CPU path: output and every gradient."""

import pytest
import torch
import transformers as tf

from lamella.models import experts
from lamella.models.linear import DropoutClock, LoraSite
from tests.engine.test_families import FAMILIES
from tests.fixtures import moe_config
from tests.kernels.triton import need_interpreter
from tests.oracle import relative_error

need_interpreter()
from lamella.models import experts_cuda  # noqa: E402


def module_of(config):
    config._experts_implementation = "eager"
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = next(m for m in model.modules() if hasattr(m, "has_gate") and hasattr(m, "num_experts"))
    generator = torch.Generator().manual_seed(0)
    for p in found.parameters():
        p.requires_grad_(False).copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return found


def hang(module, rank, dropout):
    generator = torch.Generator().manual_seed(1)
    sites, count = {}, int(module.num_experts)
    for number, name in enumerate(("gate_up_proj", "down_proj")):
        rows, columns = getattr(module, name).shape[1:]
        inputs, outputs = (rows, columns) if module.is_transposed else (columns, rows)
        a, b = (torch.randn(s, generator=generator) * 0.1 for s in ((count, rank, inputs), (count, outputs, rank)))
        sites[name] = LoraSite(a.requires_grad_(), b.requires_grad_(), 2.0, dropout, number)
    module.__dict__["lamella_lora"] = sites
    module.__dict__["lamella_hits"] = torch.zeros(count, dtype=torch.int64)
    return [leaf for site in sites.values() for leaf in (site.a, site.b)]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dropout", [None, 0.0, 0.3])
def test_same_output_and_gradients_as_on_the_cpu(family, dropout, monkeypatch):
    module = module_of(FAMILIES[family]() if family == "gpt_oss" else moe_config(experts=6, top_k=3))
    hidden_size = module.hidden_size if hasattr(module, "hidden_size") else module.hidden_dim
    leaves = [] if dropout is None else hang(module, 2, dropout)
    generator = torch.Generator().manual_seed(2)
    tokens, per_token, count = 21, 2, int(module.num_experts)
    x = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
    index = torch.stack(
        [torch.randperm(count - 1, generator=generator)[:per_token] for _ in range(tokens)]
    )  # the last: none
    weights = torch.rand(tokens, per_token, generator=generator).requires_grad_()
    dout = torch.randn(tokens, hidden_size, generator=generator)
    monkeypatch.setattr(DropoutClock, "row_keys_T", torch.arange(tokens) * 7919 if dropout else None)
    found = []
    for path in (experts.packed_experts, experts_cuda.packed_experts):
        out = path(module, x, index, weights)
        found.append([out.detach(), *torch.autograd.grad(out, [x, weights, *leaves], dout)])
    for one, other in zip(*found, strict=True):
        assert other.isfinite().all()
        assert relative_error(other, one) < 2e-6
    if leaves:
        assert module.lamella_hits.tolist() == [2 * int((index == e).sum()) for e in range(count)]
        assert not found[1][3][count - 1].any()


def test_the_usual_gate_is_recognised():
    assert experts_cuda._is_swiglu(module_of(moe_config()))
    assert not experts_cuda._is_swiglu(module_of(FAMILIES["gpt_oss"]()))
    assert not experts_cuda._is_swiglu(module_of(moe_config(hidden_act="gelu")))

"""In bf16 a small adapter keeps its whole effect: nothing is added to an output that was rounded before.

Measured as the projection of (with adapter - without) on what the adapter adds in exact arithmetic, over many outputs:
1 when rounding only scatters. Outputs are about 1, the adapter's part about a tenth of half a unit in the last place.
"""

import pytest
import torch
from torch import nn

from lamella.models.groups import LinearGroup
from lamella.models.linear import FrozenLinear, LoraSite

ROWS, INPUTS, OUTPUTS, RANK = 512, 256, (128, 64), 8


def draw(*shape, seed, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def linear(outputs, seed, *, bias=False, small=True):
    made = FrozenLinear(INPUTS, outputs, bias, device="meta")
    made.weight = nn.Parameter(draw(outputs, INPUTS, seed=seed, scale=INPUTS**-0.5), requires_grad=False)
    if bias:
        made.bias = nn.Parameter(draw(outputs, seed=seed + 1, scale=0.05), requires_grad=False)
    made.lora = LoraSite(
        draw(RANK, INPUTS, seed=seed + 2, scale=INPUTS**-0.5).requires_grad_(),
        draw(outputs, RANK, seed=seed + 3, scale=5e-5 if small else 0.0).requires_grad_(),
        2.0,
    )
    return made


def kept(found, without, added):
    added = added.detach()
    return float(((found.detach().double() - without.double()) * added).sum() / (added * added).sum())


def added_by(module, x):
    site = module.lora
    return site.scale * (x.double() @ site.a.double().T @ site.b.double().T)


@pytest.mark.parametrize("bias", [False, True])
def test_forward(bias):
    x, module = draw(ROWS, INPUTS, seed=0), linear(OUTPUTS[0], 1, bias=bias)
    with torch.no_grad():
        found, without = module(x), nn.functional.linear(x, module.weight, module.bias)
    assert kept(found, without, added_by(module, x)) == pytest.approx(1, abs=0.1)


def test_forward_of_a_group():
    x, modules = draw(ROWS, INPUTS, seed=0), [linear(o, 10 * i) for i, o in enumerate(OUTPUTS, start=1)]
    group = LinearGroup(modules)
    with torch.no_grad():
        found, _ = group.forward(x, group.leaves(), None)
        without = torch.cat([nn.functional.linear(x, m.weight) for m in modules], dim=1)
    added = torch.cat([added_by(m, x) for m in modules], dim=1)
    assert kept(found, without, added) == pytest.approx(1, abs=0.1)


def test_input_gradient():
    x, module = draw(ROWS, INPUTS, seed=0).requires_grad_(), linear(OUTPUTS[0], 1)
    dy = draw(ROWS, OUTPUTS[0], seed=9)
    (found,) = torch.autograd.grad(module(x), x, dy)
    site = module.lora
    added = site.scale * (dy.double() @ site.b.double() @ site.a.double())
    assert kept(found, dy @ module.weight, added) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_of_zeros_changes_no_bit(bias):
    x, module = draw(ROWS, INPUTS, seed=0), linear(OUTPUTS[0], 1, bias=bias, small=False)
    with torch.no_grad():
        with_zeros = module(x)
        assert torch.equal(with_zeros, nn.functional.linear(x, module.weight, module.bias))

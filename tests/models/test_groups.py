"""Linear layers computed as a group against each of them alone."""

import pytest
import torch
from torch import nn

from lamella.models.groups import BLOCK_RANK, LinearGroup
from lamella.models.linear import DropoutClock, FrozenLinear, LoraSite
from tests.oracle import relative_error

ROWS, INPUTS, OUTPUTS = 11, 24, (40, 8, 16)


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linears(*, adjacent=True, bias=(False, False, False), dtype=torch.float32):
    buffer = draw(sum(OUTPUTS) * INPUTS, seed=0).to(dtype)
    made, at = [], 0
    for i, (outputs, has_bias) in enumerate(zip(OUTPUTS, bias, strict=True)):
        linear = FrozenLinear(INPUTS, outputs, has_bias, device="meta")
        weight = buffer[at : at + outputs * INPUTS].view(outputs, INPUTS)
        at += outputs * INPUTS
        linear.weight = nn.Parameter(weight if adjacent else weight.clone(), requires_grad=False)
        if has_bias:
            linear.bias = nn.Parameter(draw(outputs, seed=10 + i).to(dtype), requires_grad=False)
        made.append(linear)
    return made


def adapt(made, which, *, rank=4, scales=(2.0, 2.0, 2.0), dropout=0.0):
    for i in which:
        a = draw(rank, INPUTS, seed=20 + i).to(made[i].weight.dtype).requires_grad_()
        b = draw(OUTPUTS[i], rank, seed=30 + i).to(made[i].weight.dtype).requires_grad_()
        made[i].lora = LoraSite(a, b, scales[i], dropout, site=3 * i)


def alone(made, x, dys):
    leaves = [t for m in made if m.lora is not None for t in (m.lora.a, m.lora.b)]
    ys = [m(x) for m in made]
    return ys, torch.autograd.grad(ys, [x, *leaves], dys)


def grouped(made, x, dys):
    group = LinearGroup(made)
    leaves, keys = group.leaves(), group.dropout_keys()
    with torch.no_grad():
        y, xa = group.forward(x, leaves, keys)
        dy = torch.cat(dys, dim=1)
        dx, dxa = group.input_gradient(dy, leaves, keys)
        grads = group.leaf_gradients(dy, x, xa, dxa, leaves, keys)
    return [y[:, s] for s in group.slices], [dx, *grads]


def check(made, near=2e-6):
    dtype = made[0].weight.dtype
    x = draw(ROWS, INPUTS, seed=1).to(dtype).requires_grad_()
    dys = [draw(ROWS, o, seed=40 + o).to(dtype) for o in OUTPUTS]
    ys, grads = alone(made, x, dys)
    ours, our_grads = grouped(made, x, dys)
    assert len(grads) == len(our_grads)
    for a, b in zip((*ours, *our_grads), (*ys, *grads), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b.detach()) < near


@pytest.fixture
def keys():
    DropoutClock.row_keys_T = torch.arange(ROWS) * 77777777777
    yield
    DropoutClock.row_keys_T = None


SOME = [(), (0,), (2,), (0, 2), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize("which", SOME)
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (True, False, True)])
def test_as_each_alone(which, adjacent, bias):
    made = linears(adjacent=adjacent, bias=bias)
    adapt(made, which)
    check(made)


@pytest.mark.parametrize("which", SOME)
def test_with_unlike_scales(which):
    made = linears()
    adapt(made, which, scales=(2.0, 0.3, 1.7))
    check(made)


def test_with_ranks_beyond_one_block():
    made = linears()
    adapt(made, (0, 1, 2), rank=BLOCK_RANK // 2)
    check(made)


@pytest.mark.parametrize("which", SOME)
@pytest.mark.parametrize("rank", [4, BLOCK_RANK])
def test_with_dropout(which, rank, keys):
    made = linears()
    adapt(made, which, rank=rank, dropout=0.3)
    check(made)


def test_in_bf16():
    made = linears(dtype=torch.bfloat16)
    adapt(made, (0, 1, 2))
    check(made, near=1e-2)


def test_dropout_changes_the_output(keys):
    made = linears()
    adapt(made, (0,), dropout=0.5)
    x = draw(ROWS, INPUTS, seed=1)
    group = LinearGroup(made)
    dropped, _ = group.forward(x, group.leaves(), group.dropout_keys())
    whole, _ = group.forward(x, group.leaves(), None)
    assert not torch.equal(dropped, whole)


def test_no_input_gradient_when_not_wanted():
    made = linears()
    adapt(made, (0,))
    group = LinearGroup(made)
    dx, dxa = group.input_gradient(draw(ROWS, sum(OUTPUTS), seed=2), group.leaves(), None, wanted=False)
    assert dx is None
    assert dxa.shape == (ROWS, 4)

"""Schedule, clipping, and that saved moments bring back the same bits."""

import math

import pytest
import torch

from lamella.config import TrainConfig
from lamella.errors import RunFailed, UserError
from lamella.train.optimizer import Optimizer, learning_rate


def params(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.nn.Parameter(torch.randn(s, generator=g)) for n, s in (("a", (3, 5)), ("b", (7,)), ("c", (2, 33)))}


def gradient(ps, step):
    g = torch.Generator().manual_seed(100 + step)
    for p in ps.values():
        p.grad = torch.randn(p.shape, generator=g)


def test_schedule_shapes():
    cosine = TrainConfig(learning_rate=1.0, warmup_steps=4, schedule="cosine")
    assert [learning_rate(cosine, k, 14) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(cosine, 9, 14) == pytest.approx(0.5)
    assert learning_rate(cosine, 14, 14) == pytest.approx(0.0, abs=1e-12)
    linear = cosine.model_copy(update={"schedule": "linear"})
    assert learning_rate(linear, 6, 14) == pytest.approx(0.8)
    constant = cosine.model_copy(update={"schedule": "constant"})
    assert learning_rate(constant, 13, 14) == 1.0
    assert learning_rate(TrainConfig(learning_rate=1.0, warmup_steps=0), 0, 1) == 1.0
    assert learning_rate(TrainConfig(learning_rate=1.0, warmup_steps=10), 2, 3) == pytest.approx(0.3)


def test_adamw_update_equals_the_formula():
    config = TrainConfig(learning_rate=0.1, warmup_steps=0, schedule="constant", weight_decay=0.01, clip_norm=0)
    ps = {"w": torch.nn.Parameter(torch.tensor([1.0, -2.0]))}
    optimizer = Optimizer(ps, config, 3)
    ps["w"].grad = torch.tensor([0.5, -4.0])
    optimizer.step(0, optimizer.grad_norm())
    expected = [w * (1 - 0.1 * 0.01) - 0.1 * math.copysign(1, g) for w, g in ((1.0, 0.5), (-2.0, -4.0))]
    torch.testing.assert_close(ps["w"].detach(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_clipping_scales_to_the_norm():
    ps = params()
    optimizer = Optimizer(ps, TrainConfig(clip_norm=0.5), 3)
    gradient(ps, 0)
    ps["b"].grad = None
    norm = optimizer.grad_norm()
    expected = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in ps.values() if p.grad is not None))
    assert norm == pytest.approx(expected, rel=1e-6)
    optimizer.step(0, norm)
    assert optimizer.grad_norm() == pytest.approx(0.5, rel=1e-4)


def test_state_round_trip_gives_the_same_bits():
    config = TrainConfig(warmup_steps=2, weight_decay=0.1)
    whole, first = params(), params()
    a, b = Optimizer(whole, config, 8), Optimizer(first, config, 8)
    for step in range(8):
        gradient(whole, step)
        a.step(step, a.grad_norm())
    for step in range(4):
        gradient(first, step)
        b.step(step, b.grad_norm())
    resumed = {n: torch.nn.Parameter(p.detach().clone()) for n, p in first.items()}
    c = Optimizer(resumed, config, 8)
    c.load_state_tensors({k: v.clone() for k, v in b.state_tensors().items()})
    for step in range(4, 8):
        gradient(resumed, step)
        c.step(step, c.grad_norm())
    assert all(torch.equal(whole[n], resumed[n]) for n in whole)


def test_wrong_state_is_refused():
    ps = params()
    optimizer = Optimizer(ps, TrainConfig(), 3)
    gradient(ps, 0)
    optimizer.step(0, 1.0)
    state = optimizer.state_tensors()
    with pytest.raises(UserError, match="unknown tensors, e"):
        optimizer.load_state_tensors({**state, "x/step": torch.tensor(1.0)})
    with pytest.raises(UserError, match=r"a/exp_avg is of shape \(1,\), not \(3, 5\)"):
        optimizer.load_state_tensors({**state, "a/exp_avg": torch.zeros(1)})


def test_b42_half_precision_masters_are_refused():
    with pytest.raises(RunFailed, match=r"w is torch\.float16"):
        Optimizer({"w": torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))}, TrainConfig(), 1)


def test_no_parameters_is_refused():
    with pytest.raises(UserError, match="no parameters"):
        Optimizer({}, TrainConfig(), 1)

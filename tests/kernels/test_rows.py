"""Row kernels against plain torch in fp64; same bits for any number of threads."""

import math

import pytest
import torch

from lamella.kernels import rows, rows_reference
from tests.oracle import relative_error

pytestmark = pytest.mark.skipif(not rows.supported(), reason="needs AVX-512 with bf16")

DTYPES = {"fp32": (torch.float32, 2e-6), "bf16": (torch.bfloat16, 4e-3)}
SIZES = [(1, 1), (3, 17), (130, 768), (5, 1000)]


def draw(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.fixture(params=DTYPES)
def kind(request):
    return DTYPES[request.param]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same_for_any_threads(make):
    """What `make` gives with 1 and 2 threads, and again, is equal; returns it."""
    found = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        found.append(make())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(kind, shape, offset, weight_dtype):
    dtype, near = kind
    x, dy = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    w = draw(shape[1], dtype=weight_dtype, seed=2)
    y, rstd = same_for_any_threads(lambda: rows.rms_norm(x, w, 1e-6, offset))
    (dx,) = same_for_any_threads(lambda: (rows.rms_norm_backward(dy, x, w, rstd, offset),))
    wanted, wanted_rstd = rows_reference.rms_norm(x.double(), w.double(), 1e-6, offset)
    assert relative_error(y, wanted) < near
    assert relative_error(rstd, wanted_rstd) < 2e-6
    wanted_dx = rows_reference.rms_norm_backward(dy.double(), x.double(), w.double(), wanted_rstd, offset)
    if shape[1] > 1:  # of a single value the gradient is all but zero
        assert relative_error(dx, wanted_dx) < near


def test_rms_norm_twin_is_the_gradient():
    x = draw(4, 20, dtype=torch.float64).requires_grad_()
    w, dy = draw(20, dtype=torch.float64, seed=1), draw(4, 20, dtype=torch.float64, seed=2)
    y, rstd = rows_reference.rms_norm(x, w, 1e-6, 1.0)
    (wanted,) = torch.autograd.grad(y, x, dy)
    got = rows_reference.rms_norm_backward(dy, x.detach(), w, rstd.detach(), 1.0)
    assert relative_error(got, wanted) < 1e-12


@pytest.mark.parametrize(("size", "rotary"), [(16, 16), (64, 64), (128, 128), (40, 24), (96, 32), (80, 80), (256, 128)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_rotate(kind, size, rotary, norm, transposed):
    dtype, near = kind
    tokens, heads = 37, 3
    packed = draw(tokens, heads * size + 8, dtype=dtype)
    x = packed[:, : heads * size].view(tokens, heads, size)
    dy = draw(heads, tokens, size, dtype=dtype, seed=1).transpose(0, 1)
    angle = draw(tokens, rotary, dtype=torch.float32, seed=2)  # not halves alike: the tables' own values count
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    w = (1 + draw(size, dtype=torch.float32, seed=3, scale=0.1)).to(dtype) if norm else None
    raw = None if w is None else x

    def empty():
        return torch.empty(heads, tokens, size, dtype=dtype).transpose(0, 1) if transposed else torch.empty_like(x)

    (y,) = same_for_any_threads(lambda: (rows.rotate(x, cos, sin, empty(), w, 1e-6, 0.0),))
    (dx,) = same_for_any_threads(lambda: (rows.rotate_backward(dy, cos, sin, empty(), raw, w, 1e-6, 0.0),))
    leaf = x.double().requires_grad_()
    wd = None if w is None else w.double()
    normed = leaf if wd is None else leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + 1e-6) * wd
    a, b = normed[..., : rotary // 2], normed[..., rotary // 2 : rotary]
    c, s = cos.double()[:, None], sin.double()[:, None]
    half = torch.cat((-b, a), -1)
    wanted = torch.cat((normed[..., :rotary] * c + half * s, normed[..., rotary:]), -1)
    (wanted_dx,) = torch.autograd.grad(wanted, leaf, dy.double())
    assert relative_error(y, wanted) < near
    assert relative_error(dx, wanted_dx) < near
    twin = rows_reference.rotate(x.double(), cos.double(), sin.double(), torch.empty_like(leaf), wd, 1e-6)
    assert relative_error(twin, wanted) < 1e-12
    raw_d = None if wd is None else x.double()
    twin = rows_reference.rotate_backward(
        dy.double(), cos.double(), sin.double(), torch.empty_like(leaf), raw_d, wd, 1e-6
    )
    assert relative_error(twin, wanted_dx) < 1e-12
    assert torch.equal(rows.rotate(x, cos, sin, x, w, 1e-6, 0.0), y), "in place"


@pytest.mark.parametrize("activation", rows.ACTIVATIONS)
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("packed", [False, True])
def test_gated(kind, activation, shape, packed):
    dtype, near = kind
    n, inner = shape
    both = draw(n, 2 * inner, dtype=dtype, scale=2.0)
    gate, up = both[:, :inner], both[:, inner:]
    if not packed:
        gate, up = gate.clone(), up.clone()
    dh = draw(n, inner, dtype=dtype, seed=1)
    (h,) = same_for_any_threads(lambda: (rows.gated(gate, up, activation),))

    def backward():
        g, u = gate.clone(), up.clone()
        product = rows.gated_backward_(dh, g, u, activation, product=True)
        return g, u, product

    dgate, dup, product = same_for_any_threads(backward)
    assert torch.equal(product, h)
    wanted_h = rows_reference.gated(gate.double(), up.double(), activation)
    wanted_dgate, wanted_dup = gate.double(), up.double()
    rows_reference.gated_backward_(dh.double(), wanted_dgate, wanted_dup, activation)
    for got, wanted in ((h, wanted_h), (dgate, wanted_dgate), (dup, wanted_dup)):
        assert relative_error(got, wanted) < near


def test_gated_at_the_edges():
    gate = torch.tensor([[0.0, -0.0, 200.0, -200.0, 1e30, -1e30, 88.0, -88.0, 10.0, -10.0]])
    for activation in rows.ACTIVATIONS:
        h = rows.gated(gate, torch.ones_like(gate), activation)
        wanted = rows_reference.gated(gate.double(), torch.ones_like(gate).double(), activation)
        assert torch.allclose(h.double(), wanted, rtol=1e-6, atol=1e-6), (activation, h, wanted)


@pytest.mark.parametrize(("rows_", "vocabulary"), [(1, 1), (3, 17), (9, 4097), (40, 32000)])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_cross_entropy(kind, rows_, vocabulary, scale):
    dtype, near = kind
    logits = draw(rows_, vocabulary, dtype=dtype, scale=scale)
    targets = torch.randint(0, vocabulary, (rows_,), generator=torch.Generator().manual_seed(5))

    def make():
        grad = logits.clone()
        return rows.cross_entropy_(grad, targets, 0.25), grad

    loss, grad = same_for_any_threads(make)
    wanted_grad = logits.double()
    wanted = rows_reference.cross_entropy_(wanted_grad, targets, 0.25)
    assert torch.allclose(loss, wanted, rtol=1e-6, atol=1e-6)
    if vocabulary > 1:
        assert relative_error(grad, wanted_grad) < near


def test_cross_entropy_with_a_sure_row_and_a_rising_one():
    logits = torch.zeros(2, 10000)
    logits[0, 7] = 90.0
    logits[1] = torch.arange(10000) * 0.01
    targets = torch.tensor([7, 9999])
    grad, wanted_grad = logits.clone(), logits.double()
    loss = rows.cross_entropy_(grad, targets, 1.0)
    wanted = rows_reference.cross_entropy_(wanted_grad, targets, 1.0)
    assert torch.allclose(loss, wanted, rtol=1e-6, atol=1e-12)
    assert relative_error(grad[1], wanted_grad[1]) < 2e-6


def test_cross_entropy_keeps_nan():
    logits = torch.zeros(2, 40)
    logits[1, 3] = math.nan
    loss = rows.cross_entropy_(logits, torch.tensor([0, 0]), 1.0)
    assert loss[0].item() == pytest.approx(math.log(40))
    assert math.isnan(loss[1].item())


def test_target_beyond_the_vocabulary():
    with pytest.raises(AssertionError, match="beyond the vocabulary"):
        rows.cross_entropy_(torch.zeros(1, 4), torch.tensor([4]), 1.0)


@pytest.mark.parametrize("n", [0, 1, 15, 100, 200001])
def test_peak(kind, n):
    x = draw(n, dtype=kind[0])
    assert rows.peak(x) == rows_reference.peak(x)
    if n:
        x[n // 2] = -1e30
        assert rows.peak(x) == abs(float(x[n // 2]))
        x[n - 1] = math.nan
        assert math.isnan(rows.peak(x))

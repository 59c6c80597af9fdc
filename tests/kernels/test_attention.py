"""The C attention kernels against attention written out in fp64: values, gradients, and what must not change a bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lamella.errors import UserError
from lamella.kernels import attention, build, library
from lamella.models.layout import Tree, pack_rows, pack_trees

REPO = Path(__file__).parents[2]
SUPPORTED = attention.supported()
pytestmark = pytest.mark.skipif(not SUPPORTED, reason="no AVX-512 here")


@pytest.fixture(params=SUPPORTED)
def name(request):
    return request.param


def rows_of(*lengths):
    return pack_rows([([1] * n, [False] * n) for n in lengths])


def segments_of(batch):
    return attention.Segments.of(batch.visible_until, batch.position_ids, batch.starts)


def made(batch, heads, kv_heads, size, value_size=None, seed=0):
    """q, k, v, gradient of out: [heads, T, size] views of [T, heads, size], as transformers hands them over."""
    g = torch.Generator().manual_seed(seed)
    value_size = value_size or size
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size))
    q, k, v, grad = (torch.randn(batch.tokens, h, d, generator=g).bfloat16() for h, d in shapes)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), grad


def oracle(q, k, v, grad, batch, scale, window=None):
    """fp64: out, lse, gradients of q, k, v."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    repeat = q.shape[0] // k.shape[0]
    index = torch.arange(batch.tokens)
    seen = (index[:, None] >= index) & (index[:, None] < batch.visible_until)
    if window is not None:
        seen &= batch.position_ids[:, None] - batch.position_ids < window
    scores = torch.matmul(q, k.repeat_interleave(repeat, 0).transpose(1, 2)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.matmul(scores.softmax(-1), v.repeat_interleave(repeat, 0)).transpose(0, 1)
    return out.detach(), scores.logsumexp(-1).detach(), torch.autograd.grad(out, (q, k, v), grad.double())


def both(q, k, v, grad, batch, scale, window=None, **over):
    segments = segments_of(batch)
    out, lse = attention.forward(q, k, v, segments, scale, window, **over)
    return out, lse, attention.backward(grad, q, k, v, out, lse, segments, scale, window, **over)


def error(x, expected):
    return float((x.double() - expected).norm() / expected.norm())


def check(batch, heads, kv_heads, size, value_size=None, window=None, **over):
    tensors = made(batch, heads, kv_heads, size, value_size)
    scale = size**-0.5
    out, lse, grads = both(*tensors, batch, scale, window, **over)
    true_out, true_lse, true_grads = oracle(*tensors, batch, scale, window)
    assert error(out, true_out) < 2.5e-3  # rounding to bf16 alone gives 1.7e-3
    torch.testing.assert_close(lse.double(), true_lse, atol=2e-5, rtol=1e-5)
    for grad, expected, x in zip(grads, true_grads, tensors, strict=False):
        if expected.norm() > 1e-9:  # a token that sees itself alone gives q and k no gradient
            assert error(grad, expected) < 5e-3
        assert (grad.double() - expected).abs().max() < 2e-2 * max(1.0, float(expected.abs().max()))
        assert grad.stride() == x.stride()


@pytest.mark.parametrize("length", [1, 7, 31, 33, 64, 100, 513])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 1)])
def test_lengths_and_groups(name, length, heads, kv_heads):
    check(rows_of(length), heads, kv_heads, 64, name=name, threads=2)


@pytest.mark.parametrize(
    ("size", "value_size"), [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (32, 64)]
)
def test_head_sizes(name, size, value_size):
    check(rows_of(100, 33), 4, 2, size, value_size, name=name)


@pytest.mark.parametrize("window", [1, 5, 32, 100, 10_000])
def test_windows(name, window):
    check(rows_of(300, 7, 64), 2, 1, 32, window=window, name=name)


def test_uneven_and_empty_rows(name):
    check(rows_of(0, 100, 1, 0, 31, 600, 0), 6, 3, 64, name=name, threads=2)


def test_no_tokens(name):
    out, lse, grads = both(*made(rows_of(0, 0), 2, 1, 32), rows_of(0, 0), 1.0, name=name)
    assert out.shape == (0, 2, 32) and lse.shape == (2, 0)
    assert [g.shape for g in grads] == [(2, 0, 32), (1, 0, 32), (1, 0, 32)]


def tree(generator, depth=0):
    length = int(torch.randint(0 if depth else 1, 70, (), generator=generator))
    branches = int(torch.randint(0, 4, (), generator=generator)) if depth < 3 else 0
    return Tree([1] * length, [], [tree(generator, depth + 1) for _ in range(branches)])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("seed", range(4))
def test_trees(name, seed, window):
    g = torch.Generator().manual_seed(seed)
    check(pack_trees([tree(g), tree(g), tree(g)]), 4, 2, 32, window=window, name=name, threads=2)


def test_strides_of_any_kind(name):
    batch = rows_of(70, 40)
    q, k, v, grad = made(batch, 4, 2, 64)
    plain = both(q, k, v, grad, batch, 0.125, name=name)
    wide = torch.randn(4, batch.tokens, 200).bfloat16()
    wide[:, :, 8:72] = q
    wide_grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    for x, y, z in ((wide[:, :, 8:72], k.contiguous(), v), (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)):
        other = both(x, y, z, wide_grad, batch, 0.125, name=name)
        assert torch.equal(plain[0], other[0])
        assert all(torch.equal(a, b) for a, b in zip(plain[2], other[2], strict=True))


def test_large_scores_do_not_overflow(name):
    batch = rows_of(200)
    q, k, v, grad = made(batch, 2, 2, 64)
    out, _, grads = both(q * 30, k * 30, v, grad, batch, 1.0, name=name)
    assert error(out, oracle(q * 30, k * 30, v, grad, batch, 1.0)[0]) < 2.5e-3
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
@pytest.mark.parametrize("length", [90, 700])
def test_only_some_gradients(name, wanted, length):
    batch = rows_of(length)
    q, k, v, grad = made(batch, 4, 2, 64)
    out, lse, full = both(q, k, v, grad, batch, 0.125, name=name)
    part = attention.backward(grad, q, k, v, out, lse, segments_of(batch), 0.125, wanted=wanted, name=name)
    for want, x, expected in zip(wanted, part, full, strict=True):
        assert torch.equal(x, expected) if want else x is None


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (6, 3), (4, 1)])
def test_neither_threads_nor_neighbours_nor_runs_change_a_bit(name, heads, kv_heads):
    """600 tokens: long enough to be cut into parts where kv heads are few."""
    batch = rows_of(33, 600, 0, 90)
    tensors = made(batch, heads, kv_heads, 64)
    first = both(*tensors, batch, 0.125, name=name, threads=1)
    for threads in (1, 2, 5):
        again = both(*tensors, batch, 0.125, name=name, threads=threads)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        assert all(torch.equal(a, b) for a, b in zip(first[2], again[2], strict=True))
    a = 0
    for length in (33, 600, 90):
        q, k, v = (x[:, a : a + length] for x in tensors[:3])
        alone = both(q, k, v, tensors[3][a : a + length], rows_of(length), 0.125, name=name, threads=2)
        assert torch.equal(alone[0], first[0][a : a + length])
        assert all(torch.equal(x, y[:, a : a + length]) for x, y in zip(alone[2], first[2], strict=True))
        a += length


def test_a_branch_gets_the_bits_of_no_sibling(name):
    """What a sibling holds does not reach a branch."""
    batch = pack_trees([Tree([1] * 50, [], [Tree([1] * 40), Tree([1] * 45)])])
    q, k, v, _ = made(batch, 2, 1, 32)
    clean, _ = attention.forward(q, k, v, segments_of(batch), 0.2, name=name)
    k, v = k.clone(), v.clone()
    k[:, 50:90] = 1e30
    v[:, 50:90] = 1e30
    dirty, _ = attention.forward(q, k, v, segments_of(batch), 0.2, name=name)
    assert torch.equal(clean[90:], dirty[90:])
    assert torch.equal(clean[:50], dirty[:50])
    assert not torch.equal(clean[50:90], dirty[50:90])


def test_a_nan_stays_in_its_sequence(name):
    batch = rows_of(40, 40)
    q, k, v, grad = made(batch, 2, 1, 32)
    q = q.clone()
    q[:, 45] = torch.nan
    out, _, grads = both(q, k, v, grad, batch, 0.2, name=name)
    assert out[45].isnan().all() and out[:45].isfinite().all() and out[46:].isfinite().all()
    assert all(g[:, :40].isfinite().all() for g in grads)
    assert grads[0][:, 45].isnan().all()


LONG = """
import resource, torch
from lamella.kernels import attention, build, library
torch.set_num_threads(2)
T, H, K, D = 16_384, 4, 2, 64
q, k, v, grad = (torch.randn(T, h, D).bfloat16() for h in (H, K, K, H))
until, at, starts = torch.full((T,), T), torch.arange(T), torch.tensor([0, T])
segments = attention.Segments.of(until, at, starts)
x = [t.transpose(0, 1) for t in (q, k, v)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out, lse = attention.forward(*x, segments, 0.125)
grads = attention.backward(grad, *x, out, lse, segments, 0.125)
assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_16k_tokens_in_linear_memory():
    """Results are 25 MB, packed keys 4, the parts' fp32 sums 67: far below the 268 MB of one head's bf16 weights at 8k."""
    done = subprocess.run([sys.executable, "-c", LONG], cwd=REPO, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 130_000


def test_the_environment_chooses():
    code = "from lamella.kernels import attention; print(attention.implementation())"
    for asked in (*SUPPORTED, "torch"):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True,
            env={**os.environ, "LAMELLA_ATTENTION": asked},
        )  # fmt: skip
        assert done.stdout.strip() == asked


def test_an_unknown_name_is_refused(monkeypatch):
    monkeypatch.setenv("LAMELLA_ATTENTION", "amxx")
    with pytest.raises(UserError, match="amxx"):
        attention.implementation.__wrapped__()


def test_a_build_without_the_instructions_offers_none(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "X86_FLAGS", {})
    lib = library.load(build.build(tmp_path))
    assert not any(lib.lamella_attention_supported(isa) for isa in attention.IMPLEMENTATIONS.values())

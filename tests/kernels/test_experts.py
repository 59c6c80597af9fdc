"""The fused expert kernels against the same arithmetic in fp64."""

import os
import subprocess
import sys

import pytest
import torch

from lamella.errors import UserError
from lamella.kernels import dequantize_nf4, experts, quantize_absmax, quantize_nf4

pytestmark = pytest.mark.skipif(experts.route() is None, reason="no AVX-512 BF16 here")


class Bytes:
    """Tensors one after the other in one uint8 buffer."""

    def __init__(self):
        self.parts, self.size = [], 0

    def put(self, tensor):
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        at, padding = self.size, -raw.numel() % 64
        self.parts += [raw, torch.zeros(padding, dtype=torch.uint8)]
        self.size += raw.numel() + padding
        return at


def random_experts(count, hidden, inner, double=True, fused=False):
    """PackedExperts, and [gate, up, down] of each as bf16. `fused`: all gate and up matrices are one tensor."""
    packed, table, dense = Bytes(), torch.zeros(count, 3, experts.PARTS, dtype=torch.int64), []

    def store(weight):
        codes, absmax = quantize_nf4(weight)
        out = torch.empty(weight.shape, dtype=torch.bfloat16)
        if double:
            state = quantize_absmax(absmax)
            dequantize_nf4(codes, state, out)
            parts = [-1, packed.put(state.q), packed.put(state.code), packed.put(state.absmax2)]
            return out, [packed.put(codes), *parts, packed.put(state.offset.reshape(1))]
        dequantize_nf4(codes, absmax, out)
        return out, [packed.put(codes), packed.put(absmax), -1, -1, -1, -1]

    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    if fused:
        gate_up, at = store(torch.randn(count, 2, inner, hidden) / hidden**0.5)
        numel = inner * hidden
    for e in range(count):
        row = []
        for which, shape in enumerate(shapes):
            if fused and which < 2:
                first = (2 * e + which) * numel
                table[e, which] = torch.tensor([at[0] + first // 2, *at[1:], first // 64])
                row.append(gate_up[e, which])
            else:
                out, parts = store(torch.randn(shape) / shape[1] ** 0.5)
                table[e, which] = torch.tensor([*parts, 0])
                row.append(out)
        dense.append(row)
    return experts.PackedExperts(torch.cat(packed.parts), table, hidden, inner), dense


def reference(dense, x, routing, lora1, lora2, weight):
    """out [T, H] in fp64; x, weight [S] and the pairs are fp64."""
    rows, offsets = [], routing.offsets_E.tolist()
    for e, (gate, up, down) in enumerate(dense):
        token = routing.token_S[offsets[e] : offsets[e + 1]].long()
        gates, ups = x[token] @ gate.double().T, x[token] @ up.double().T
        if lora1:
            more = x[token] @ lora1[0][e].T @ lora1[1][e].T * lora1[2]
            gates, ups = gates + more[:, : gate.shape[0]], ups + more[:, gate.shape[0] :]
        inner = torch.nn.functional.silu(gates) * ups
        y = inner @ down.double().T
        if lora2:
            y = y + inner @ lora2[0][e].T @ lora2[1][e].T * lora2[2]
        rows.append(y * weight[offsets[e] : offsets[e + 1], None])
    return torch.zeros_like(x).index_add(0, routing.token_S.long(), torch.cat(rows))


def close(found, wanted, tolerance=0.012):
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm() + 1e-12


def setting(count, hidden, inner, tokens, per_token, ranks, *, skewed=False, **how):
    torch.manual_seed(0)
    weights, dense = random_experts(count, hidden, inner, **how)
    index = torch.stack([torch.randperm(count)[:per_token] for _ in range(tokens)])
    if skewed:  # one expert gets every token, another none
        index[:, 0], index[:, 1:] = 0, index[:, 1:].clamp(2)
    weight_TK = torch.rand(tokens, per_token)
    routing = experts.sort_by_expert(index, weight_TK, count)
    pairs = [
        experts.Lora(
            (torch.randn(count, r, i) / i**0.5).bfloat16(), (torch.randn(count, o, r) / r**0.5).bfloat16(), 1.5
        )
        if r
        else None
        for r, i, o in ((ranks[0], hidden, 2 * inner), (ranks[1], inner, hidden))
    ]
    return weights, dense, torch.randn(tokens, hidden).bfloat16(), routing, weight_TK, pairs


CASES = [
    pytest.param((4, 64, 64, 40, 2, (0, 0)), {}, id="plain"),
    pytest.param((4, 128, 64, 100, 2, (4, 4)), {}, id="small-rank"),
    pytest.param((8, 192, 128, 333, 3, (16, 16)), {}, id="rank-16"),
    pytest.param((3, 256, 192, 70, 2, (0, 33)), {}, id="lora-on-down-only"),
    pytest.param((3, 256, 192, 70, 2, (40, 0)), {}, id="lora-on-gate-up-only"),
    pytest.param((6, 64, 192, 1300, 2, (17, 5)), {"skewed": True}, id="more-rows-than-a-chunk"),
    pytest.param((3, 832, 320, 300, 2, (20, 3)), {}, id="strips-in-parts"),
    pytest.param((3, 1088, 448, 270, 2, (4, 36)), {"skewed": True}, id="strips-in-parts-and-more-rows-than-a-chunk"),
    pytest.param((6, 64, 64, 1, 2, (1, 1)), {}, id="one-token"),
    pytest.param((4, 128, 128, 200, 2, (8, 8)), {"double": False}, id="plain-scales"),
    pytest.param((5, 192, 64, 90, 2, (8, 8)), {"fused": True}, id="one-tensor-for-all-experts"),
]


@pytest.mark.parametrize(("sizes", "how"), CASES)
def test_forward_and_every_gradient(sizes, how):
    weights, dense, x, routing, weight_TK, (lora1, lora2) = setting(*sizes, **how)
    y = torch.empty(routing.token_S.numel(), weights.hidden, dtype=torch.bfloat16)
    saved = experts.forward(weights, x, routing, y, lora1, lora2, keep=True)
    out = experts.combine(y, routing.slot_TK, weight_TK)
    dout = torch.randn_like(x)
    dx_rows = torch.empty_like(y)
    dweight, gradients = experts.backward(weights, x, routing, saved, dout, lora1, lora2, dx_rows)

    x64, weight64 = x.double().requires_grad_(), routing.weight_S.double().requires_grad_()
    pairs64 = [
        (p.a.double().requires_grad_(), p.b.double().requires_grad_(), p.scale) if p else None for p in (lora1, lora2)
    ]
    wanted = reference(dense, x64, routing, *pairs64, weight64)
    wanted.backward(dout.double())
    close(out, wanted.detach())
    close(experts.combine(dx_rows, routing.slot_TK, None), x64.grad)
    close(dweight, weight64.grad)
    for found, leaf in zip(gradients, [t for pair in pairs64 if pair for t in pair[:2]], strict=True):
        close(found, leaf.grad)


def test_same_bits_with_any_number_of_threads_and_from_run_to_run():
    weights, _, x, routing, _, (lora1, lora2) = setting(8, 192, 128, 333, 3, (16, 4))
    dout, results = torch.randn_like(x), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            y = torch.empty(routing.token_S.numel(), weights.hidden, dtype=torch.bfloat16)
            dx_rows = torch.empty_like(y)
            saved = experts.forward(weights, x, routing, y, lora1, lora2, keep=True)
            dweight, gradients = experts.backward(weights, x, routing, saved, dout, lora1, lora2, dx_rows)
            results.append([y, dx_rows, dweight, *gradients])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_forward_alone_gives_the_same_bits():
    weights, _, x, routing, _, (lora1, lora2) = setting(4, 128, 64, 100, 2, (4, 4))
    y, again = (torch.empty(routing.token_S.numel(), weights.hidden, dtype=torch.bfloat16) for _ in range(2))
    experts.forward(weights, x, routing, y, lora1, lora2, keep=True)
    assert experts.forward(weights, x, routing, again, lora1, lora2, keep=False) is None
    assert torch.equal(y, again)


def test_experts_without_tokens_get_zero_gradients():
    weights, _, x, routing, _, (lora1, lora2) = setting(6, 64, 64, 50, 2, (3, 3), skewed=True)
    y = torch.empty(routing.token_S.numel(), 64, dtype=torch.bfloat16)
    saved = experts.forward(weights, x, routing, y, lora1, lora2, keep=True)
    _, gradients = experts.backward(weights, x, routing, saved, torch.randn_like(x), lora1, lora2, None)
    assert all(g[0].any() for g in gradients)
    assert not any(g[1].any() for g in gradients)


def test_sorting_is_stable_and_complete():
    index = torch.tensor([[2, 0], [2, 1], [0, 2]])
    weight = torch.arange(6.0).view(3, 2)
    routing = experts.sort_by_expert(index, weight, 4)
    assert routing.offsets_E.tolist() == [0, 2, 3, 6, 6]
    assert routing.token_S.tolist() == [0, 2, 1, 0, 1, 2]
    assert routing.slot_TK.tolist() == [[3, 0], [4, 2], [1, 5]]
    assert routing.weight_S.tolist() == [1.0, 4.0, 3.0, 0.0, 2.0, 5.0]


def test_experts_of_another_rank_have_no_rows():
    index = torch.tensor([[2, 0], [2, 1], [0, 3]])
    weight = torch.arange(6.0).view(3, 2)
    routing = experts.sort_by_expert(index, weight, 2, first=1, total=4)
    assert routing.offsets_E.tolist() == [0, 1, 3]
    assert routing.token_S.tolist() == [1, 0, 1]
    assert routing.slot_TK.tolist() == [[1, -1], [2, 0], [-1, -1]]
    assert routing.weight_S.tolist() == [3.0, 0.0, 2.0]
    y = torch.arange(1.0, 4.0).to(torch.bfloat16)[:, None].repeat(1, 64)
    assert experts.combine(y, routing.slot_TK, weight)[:, 0].tolist() == [0.0, 2.0 * 3 + 3.0 * 1, 0.0]
    assert experts.combine(y, routing.slot_TK, None)[:, 5].tolist() == [2.0, 4.0, 0.0]
    assert experts.sort_by_expert(index, weight, 0, first=4, total=4).token_S.numel() == 0


def test_an_index_that_names_no_expert_is_refused():
    with pytest.raises(IndexError, match="outside 0"):
        experts.sort_by_expert(torch.tensor([[4]]), torch.ones(1, 1), 4)
    with pytest.raises(IndexError, match=r"outside 0 \.\. 7"):
        experts.sort_by_expert(torch.tensor([[8]]), torch.ones(1, 1), 2, first=2, total=8)


@pytest.mark.parametrize("name", experts.ROUTES)
def test_every_route_is_right(name):
    """In a process of its own: the route is chosen once."""
    here = f"{__name__.rpartition('.')[0]}.test_experts".lstrip(".")
    code = (
        "from lamella.kernels import experts\n"
        f"from {here} import test_forward_and_every_gradient as check, CASES\n"
        f"assert experts.route() == {name!r}\n"
        "for case in CASES: check(*case.values)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "LAMELLA_EXPERTS": name}, capture_output=True, text=True, check=False,
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    )  # fmt: skip
    if "cannot run expert kernels" in done.stderr:
        pytest.skip(f"no {name} here")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [(0, 0), (1, 0), (0, 17), (16, 40)])
@pytest.mark.parametrize(
    ("hidden", "inner"), [(64, 64), (512, 192), (832, 320), (2048, 768), (4096, 1536), (7168, 2048)]
)
def test_plans_know_the_scratch(hidden, inner, ranks):
    from lamella.forecast.routed import expert_scratch_bytes

    assert expert_scratch_bytes(hidden, inner, *ranks) == pytest.approx(
        experts.scratch_bytes(hidden, inner, *ranks), rel=1e-3
    )


def test_unknown_route(monkeypatch):
    monkeypatch.setenv("LAMELLA_EXPERTS", "fast")
    experts.route.cache_clear()
    try:
        with pytest.raises(UserError, match="unknown expert kernels 'fast'"):
            experts.route()
    finally:
        experts.route.cache_clear()

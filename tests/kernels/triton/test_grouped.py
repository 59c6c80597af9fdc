"""Grouped matmuls and row passes in Triton against their plain-torch twins."""

import pytest
import torch

from lamella.kernels.triton import twins
from tests.kernels.triton import need_interpreter
from tests.oracle import relative_error

need_interpreter()
from lamella.kernels.triton import grouped, rows  # noqa: E402
from lamella.kernels.triton.grouped import Groups, Tiling  # noqa: E402

BOUND = {torch.float32: 1e-6, torch.float16: 2e-3}
CASES = {
    "even": [20, 20, 20],
    "empty experts": [0, 37, 0, 5, 0],
    "one row": [0, 1, 0],
    "border of a tile": [16, 32, 15, 17],
    "nothing": [0, 0],
}


def make(counts, inputs, outputs, rank, dtype, transposed=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / 4).to(dtype)

    experts, total = len(counts), sum(counts)
    expert_S = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    weight = random(experts, *((inputs, outputs) if transposed else (outputs, inputs)))
    return Groups.of_sorted(expert_S, experts), dict(
        x=random(total, inputs), w=weight, a=random(experts, rank, inputs), b=random(experts, outputs, rank),
        dy=random(total, outputs), bias=random(experts, outputs),
        keep=((torch.rand(total, inputs, generator=generator) > 0.3) / 0.7).to(dtype),
    )  # fmt: skip


def close(found, wanted, dtype):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    assert relative_error(found, wanted) < BOUND[dtype]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [16, 32])
def test_every_row_is_in_one_tile_of_its_expert(case, size):
    counts = CASES[case]
    groups, _ = make(counts, 4, 4, 1, torch.float32)
    expert, first = (t.tolist() for t in groups.tiles(size))
    seen = []
    for e, row in zip(expert, first, strict=True):
        if e < len(counts):
            end = int(groups.offsets[e + 1])
            assert int(groups.offsets[e]) <= row < end
            seen += [(r, e) for r in range(row, min(row + size, end))]
    owner = [e for e, count in enumerate(counts) for _ in range(count)]
    assert sorted(seen) == list(enumerate(owner))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("transposed", [False, True])
def test_forward_and_backward(case, dtype, transposed):
    groups, t = make(CASES[case], 48, 40, 3, dtype, transposed)
    for lora in (False, True):
        pair = (t["a"], t["b"], 0.7) if lora else ()
        found = grouped.grouped_linear(t["x"], t["w"], groups, *pair, transposed=transposed)
        wanted = twins.grouped_linear(t["x"], t["w"], groups, *pair, transposed=transposed)
        close(found[0], wanted[0], dtype)
        assert (found[1] is None) == (not lora)
        if lora:
            close(found[1], wanted[1], dtype)
    low = twins.grouped_low(t["dy"], t["b"], groups)
    close(grouped.grouped_low(t["dy"], t["b"], groups), low, dtype)
    for pair in ((), (t["a"], low)):
        found = grouped.grouped_input(t["dy"], t["w"], groups, *pair, transposed=transposed)
        close(found, twins.grouped_input(t["dy"], t["w"], groups, *pair, transposed=transposed), dtype)


@pytest.mark.parametrize("dtype", BOUND)
def test_dropout_and_bias(dtype):
    groups, t = make([7, 0, 30, 11], 40, 33, 2, dtype)
    args = dict(dropped_SI=t["x"] * t["keep"], bias_EO=t["bias"])
    found = grouped.grouped_linear(t["x"], t["w"], groups, t["a"], t["b"], 2.0, **args)
    wanted = twins.grouped_linear(t["x"], t["w"], groups, t["a"], t["b"], 2.0, **args)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)
    low = twins.grouped_low(t["dy"], t["b"], groups)
    found = grouped.grouped_input(t["dy"], t["w"], groups, t["a"], low, keep_SI=t["keep"])
    close(found, twins.grouped_input(t["dy"], t["w"], groups, t["a"], low, keep_SI=t["keep"]), dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_a_and_b(case, dtype, keep):
    groups, t = make(CASES[case], 40, 24, 3, dtype)
    small = t["dy"][:, :3].contiguous()
    kept = t["keep"] if keep else None
    for swapped, shape in ((False, (groups.experts, 40, 3)), (True, (groups.experts, 3, 40))):
        out = torch.full(shape, 9.0, dtype=dtype)
        found = grouped.grouped_outer(t["x"], small, groups, out, 0.5, keep_SM=kept, swapped=swapped)
        wanted = twins.grouped_outer(
            t["x"], small, groups, torch.empty(shape, dtype=dtype), 0.5, keep_SM=kept, swapped=swapped
        )
        close(found, wanted, dtype)
        for e, count in enumerate(CASES[case]):
            assert count or not found[e].any()


@pytest.mark.parametrize("tiling", [Tiling(32, 64, 16, 1, 1), Tiling(64, 16, 64, 1, 1)])
def test_tiles_of_any_size_give_the_same(tiling):
    groups, t = make([13, 50, 3, 0, 64], 80, 72, 5, torch.float32)
    found, _ = grouped.grouped_linear(t["x"], t["w"], groups, t["a"], t["b"], 1.5, tiling=tiling)
    close(found, twins.grouped_linear(t["x"], t["w"], groups, t["a"], t["b"], 1.5)[0], torch.float32)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_librarys_matmul_and_a_pass_for_lora(transposed):
    """`grouped_mm` on a CPU takes bf16 alone, which the interpreter cannot add: the pass is tested on its own in fp32."""
    groups, t = make([16, 0, 24, 8], 32, 24, 3, torch.float32, transposed)
    x, w = t["x"].bfloat16(), t["w"].bfloat16()
    found, _ = grouped.grouped_linear(x, w, groups, how="library", transposed=transposed)
    assert relative_error(found.float(), twins.grouped_linear(x, w, groups, transposed=transposed)[0].float()) < 5e-3
    base, _ = twins.grouped_linear(t["x"], t["w"], groups, transposed=transposed)
    wanted, xa = twins.grouped_linear(
        t["x"], t["w"], groups, t["a"], t["b"], 0.3, transposed=transposed, bias_EO=t["bias"]
    )
    w_EKN = t["w"] if transposed else t["w"].transpose(1, 2)
    found = grouped._launch(t["x"], w_EKN, groups, base, grouped.SMALL, base=False, low_Sr=xa, scale=0.3,
                            factor_ErN=t["b"].transpose(1, 2), bias_EN=t["bias"])  # fmt: skip
    close(found, wanted, torch.float32)


def test_the_choice_depends_on_the_shape_alone():
    cpu = torch.device("cpu")
    assert grouped.choose(100_000, 8, 64, 64, torch.bfloat16, cpu) == "triton"
    assert grouped.choose(8, 8, 64, 64, torch.float32, cpu) == "triton"


@pytest.mark.parametrize("dtype", BOUND)
def test_combine_and_its_backward(dtype):
    tokens, per_token, hidden = 9, 3, 50
    generator = torch.Generator().manual_seed(3)
    slot = torch.randperm(tokens * per_token, generator=generator).view(tokens, per_token)
    y = torch.randn(tokens * per_token, hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, per_token, generator=generator).to(dtype)
    dout = torch.randn(tokens, hidden, generator=generator).to(dtype)
    close(rows.combine(y, slot), twins.combine(y, slot), dtype)
    close(rows.combine(y, slot, weights), twins.combine(y, slot, weights), dtype)
    found, wanted = rows.combine_backward(dout, y, slot, weights), twins.combine_backward(dout, y, slot, weights)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("inner", [16, 24, 1030])
def test_swiglu_and_its_backward(dtype, inner):
    generator = torch.Generator().manual_seed(4)
    gate_up = (torch.randn(5, 2 * inner, generator=generator) * 3).to(dtype)
    dout = torch.randn(5, inner, generator=generator).to(dtype)
    close(rows.swiglu(gate_up), twins.swiglu(gate_up), dtype)
    close(rows.swiglu_backward(gate_up, dout), twins.swiglu_backward(gate_up, dout), dtype)

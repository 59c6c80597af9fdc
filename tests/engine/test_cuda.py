"""The CUDA path against the CPU path: run where there is a GPU (`pytest -m gpu`)."""

import pytest
import torch

from lamella import kernels
from lamella.engine import Engine
from lamella.kernels import reference
from lamella.kernels.triton import twins
from lamella.models.layout import pack_rows
from tests.conftest import random_rows
from tests.engine.test_families import FAMILIES, LABELS, ROWS, trained_adapter
from tests.fixtures import moe_config
from tests.oracle import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def config_of(family, layers=4):
    config = FAMILIES[family]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2] * (layers // 2)
    return config


def one_step(engine, batches=None, labels=LABELS):
    adapter = engine.adapter
    for p in adapter.parameters().values():
        p.grad = None
    out = engine.step(batches or [pack_rows(ROWS[:2]), pack_rows(ROWS[2:])], step_index=0, label_tokens=labels)
    return out, torch.cat([p.grad.flatten() for p in adapter.parameters().values()])


# ---- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "gemma2-softcap", "mixtral"])
@pytest.mark.parametrize("resident", [4, 1, 0])
def test_same_loss_and_gradients_as_on_the_cpu(family, resident, made):
    store, _ = made(config_of(family))
    found = []
    for device in ("cpu", "cuda"):
        engine = Engine.open(store, dtype="fp32", device=device)
        if device == "cuda" and resident < 4:
            sizes = [store.group_bytes(i) for i in range(4)]
            budget = engine.walk.weights.residency.fixed_bytes + (2 + resident) * max(sizes)
            engine = Engine.open(store, dtype="fp32", device=device, budget_bytes=budget, recompute="always")
            assert len(engine.walk.weights.residency.resident) >= resident
            assert engine.walk.weights.residency.streamed
        trained_adapter(engine, dropout=0.1)
        out, gradient = one_step(engine)
        found.append((out.loss_sum, gradient))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert relative_error(found[1][1], found[0][1]) < 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_do_not_depend_on_residency_recompute_or_the_run(dtype, made):
    store, _ = made(config_of("qwen3_moe"))
    whole = Engine.open(store, dtype=dtype, device="cuda", recompute="never")
    fixed, size = whole.walk.weights.residency.fixed_bytes, max(store.group_bytes(i) for i in range(4))
    found = []
    small = [{"recompute": "always", "budget_bytes": fixed + count * size} for count in (2, 3)]
    for settings in ({"recompute": "never"}, {"recompute": "never"}, {"recompute": "always"}, *small):
        engine = Engine.open(store, dtype=dtype, device="cuda", **settings)
        trained_adapter(engine, dropout=0.1)
        for _ in range(2):
            out, gradient = one_step(engine)
            found.append((out.loss_sum, gradient))
        if "budget_bytes" in settings:
            assert engine.walk.boundaries.spilled_bytes > 0
    assert all(loss == found[0][0] and torch.equal(gradient, found[0][1]) for loss, gradient in found)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mistral-window", "gpt_oss"])
def test_bf16_is_close_to_fp32_on_the_cpu(family, made):
    """Varlen attention, the grouped kernels and the loss by vocabulary, in the dtype they are made for."""
    rows = random_rows((70, 5, 129, 33), seed=3)
    labels = sum(sum(mask) for _, mask in rows)
    store, _ = made(config_of(family, 2))
    found = []
    for device, dtype in (("cpu", "fp32"), ("cuda", "bf16")):
        engine = Engine.open(store, dtype=dtype, device=device)
        trained_adapter(engine)
        out, gradient = one_step(engine, [pack_rows(rows)], labels)
        found.append((out.loss_sum, gradient))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.01)
    assert relative_error(found[1][1], found[0][1]) < 0.06
    if family != "gpt_oss":
        assert engine.facts()["loss"] == "vocabulary"


def test_a_library_loop_of_many_experts(made):
    """Experts without rows, and double-quantised scales read as one run."""
    store, _ = made(moe_config(experts=32, top_k=2, inner=256))
    found = []
    for device in ("cpu", "cuda"):
        engine = Engine.open(store, dtype="fp32", device=device)
        trained_adapter(engine)
        found.append(one_step(engine)[1])
    assert relative_error(found[1], found[0]) < 1e-3
    hits = engine.walk.expert_hits()
    assert all(sum(h) > 0 for h in hits.values())


def test_generation_gives_the_same_tokens(made):
    store, _ = made(config_of("qwen3_moe", 2))
    prompts = [r for r, _ in ROWS]
    one, other = (Engine.open(store, dtype="fp32", device=d).generate(prompts, 5, set()) for d in ("cpu", "cuda"))
    assert [g.ids for g in one] == [g.ids for g in other]


# ---- kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [32, 64, 4096])
def test_nf4_gives_the_reference_bits(dtype, block_size):
    for n in (1, 111, 64 * 256 * 2 + 64, 64 * 700 + 17, 1 << 22):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.05
        x[64:128] = 0
        x[128:192] *= 1e-30
        x = x.to(dtype)
        codes, absmax = reference.quantize_nf4(x, block_size)
        found = kernels.quantize_nf4(x.cuda(), block_size)
        assert torch.equal(found[0].cpu(), codes)
        assert torch.equal(found[1].cpu(), absmax)
        state = reference.quantize_absmax(absmax)
        moved = kernels.AbsmaxState(*(t.cuda() for t in (state.q, state.code, state.absmax2, state.offset)))
        for scales, there in ((absmax, absmax.cuda()), (state, moved)):
            for out in DTYPES:
                wanted = reference.dequantize_nf4(codes, scales, torch.empty(n, dtype=out), block_size)
                made = kernels.dequantize_nf4(codes.cuda(), there, torch.empty(n, dtype=out, device="cuda"), block_size)
                assert torch.equal(made.cpu(), wanted)


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_dropout_masks_give_the_reference_bits(p):
    keys = torch.randint(-(2**63), 2**63 - 1, (130,), generator=torch.Generator().manual_seed(5))
    assert torch.equal(kernels.keep_mask(keys.cuda(), 1000, p).cpu(), reference.keep_mask(keys, 1000, p))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("how", ["triton", "library"])
def test_grouped_matmuls(dtype, transposed, how):
    from lamella.kernels.triton import grouped

    if how == "library" and (dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm")):
        pytest.skip("the library's grouped matmul takes bf16")
    generator = torch.Generator().manual_seed(0)
    counts, inputs, outputs, rank = [300, 0, 129, 1, 600], 256, 384, 3

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / 4).to("cuda", dtype)

    expert_S = torch.repeat_interleave(torch.arange(5), torch.tensor(counts)).cuda()
    groups, rows = grouped.Groups.of_sorted(expert_S, 5), sum(counts)
    weight = random(5, *((inputs, outputs) if transposed else (outputs, inputs)))
    x, a, b, dy = random(rows, inputs), random(5, rank, inputs), random(5, outputs, rank), random(rows, outputs)
    keep = ((torch.rand(rows, inputs, generator=generator) > 0.3) / 0.7).to("cuda", dtype)
    bias = random(5, outputs)
    args = dict(transposed=transposed, dropped_SI=x * keep, bias_EO=bias)
    found = grouped.grouped_linear(x, weight, groups, a, b, 0.7, how=how, **args)
    wanted = twins.grouped_linear(x, weight, groups, a, b, 0.7, **args)
    low = twins.grouped_low(dy, b, groups)
    pairs = [
        *zip(found, wanted, strict=True),
        (grouped.grouped_low(dy, b, groups), low),
        (grouped.grouped_input(dy, weight, groups, a, low, keep_SI=keep, transposed=transposed, how=how),
         twins.grouped_input(dy, weight, groups, a, low, keep_SI=keep, transposed=transposed)),
        (grouped.grouped_outer(dy, wanted[1], groups, torch.empty_like(b), 0.7),
         twins.grouped_outer(dy, wanted[1], groups, torch.empty_like(b), 0.7)),
        (grouped.grouped_outer(x, low, groups, torch.empty_like(a), keep_SM=keep, swapped=True),
         twins.grouped_outer(x, low, groups, torch.empty_like(a), keep_SM=keep, swapped=True)),
    ]  # fmt: skip
    for one, other in pairs:
        assert one.isfinite().all()
        assert relative_error(one, other) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_passes_loss_and_lora(dtype):
    from lamella.kernels.triton import lora, loss, rows

    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    slot = torch.randperm(64 * 8, generator=generator).view(64, 8).cuda()
    y, weights, dout, gate_up = random(512, 300), random(64, 8).abs(), random(64, 300), random(70, 600)
    dgate = random(70, 300)
    pairs = [
        (rows.combine(y, slot, weights), twins.combine(y, slot, weights)),
        (rows.combine(y, slot), twins.combine(y, slot)),
        *zip(
            rows.combine_backward(dout, y, slot, weights), twins.combine_backward(dout, y, slot, weights), strict=True
        ),
        (rows.swiglu(gate_up), twins.swiglu(gate_up)),
        (rows.swiglu_backward(gate_up, dgate), twins.swiglu_backward(gate_up, dgate)),
    ]
    states, weight = random(200, 256), random(1000, 256)
    target = torch.randint(1000, (200,), generator=generator).cuda()
    pairs += zip(loss.linear_cross_entropy(states, weight, target, 1 / 9, slice_bytes=1 << 17),
                 twins.linear_cross_entropy(states, weight, target, 1 / 9), strict=True)  # fmt: skip
    xa, b, bias = random(200, 16), random(1000, 16), random(1000)
    pairs.append(
        (lora.lora_linear(states, weight, xa, b, 0.5, bias), twins.lora_linear(states, weight, xa, b, 0.5, bias))
    )
    for one, other in pairs:
        assert one.isfinite().all()
        assert relative_error(one, other) < BOUND[dtype]


def test_host_memory_is_page_locked():
    from lamella.engine.device import HostArena

    arena = HostArena(3_000_000, pin=True)
    assert arena.bytes.is_pinned()
    moved = arena.bytes.fill_(5).to("cuda", non_blocking=True)
    assert int(moved.sum()) == 15_000_000

"""Times of a step's pieces from rates."""

import json
from collections import Counter

import pytest

from lamella.errors import UserError
from lamella.forecast.layers import pieces_of
from lamella.forecast.measured import KernelTimes
from lamella.forecast.shape import Site
from lamella.forecast.times import CAUSES, times_of
from lamella.hardware.machine import (
    AttentionPoint,
    DeviceFacts,
    ExpertPoint,
    FixedCost,
    KernelRates,
    MatmulPoint,
    RowPoint,
)
from tests.forecast.shapes import attention, full, layer, mlp, model, moe

RATE = 1e12
ROW_KINDS = ("norm", "norm_back", "rotate", "rotate_back", "gated", "gated_back", "add", "copy", "cast", "accumulate", "peak",
             "loss", "router", "router_back", "balance", "spread", "dequantise")  # fmt: skip


def kernels(call_s=2e-6, fixed=()):
    """Products at `RATE` after a fixed 10 us and at 20 GB/s of the second matrix; the rest at plain rates."""

    def point(form, rows, inner, columns):
        flops = 2.0 * rows * inner * columns
        return MatmulPoint(form=form, rows=rows, inner=inner, columns=columns,
                           flops_per_s=flops / (1e-5 + 2 * inner * columns / 2e10 + flops / RATE))  # fmt: skip

    sizes, ranks = (256, 4096), (8, 64)
    matmul = [point(f, t, a, b) for f in ("forward", "backward") for t in (32, 2048) for a in sizes for b in sizes]
    matmul += [point(f, t, a, r) for f in ("narrow", "narrow_back") for t in (32, 2048) for a in sizes for r in ranks]
    matmul += [point(f, t, r, a) for f in ("widen", "widen_back") for t in (32, 2048) for a in sizes for r in ranks]
    matmul += [point("gradient", r, t, a) for t in (32, 2048) for a in sizes for r in ranks]
    experts = [
        ExpertPoint(rows=n * 8, experts=8, hidden=h, inner=i, rank=r, forward_flops_per_s=8e11 / (1 + 20 / n) / (1 + r / 64),
                    backward_flops_per_s=6e11 / (1 + 20 / n) / (1 + r / 64))
        for n in (1, 64, 512) for h in (256, 4096) for i in (128, 1024) for r in (0, 1, 16)
    ]  # fmt: skip
    attention_points = [
        AttentionPoint(length=n, heads=8, head_dim=d, forward_flops_per_s=4e11 / (1 + 100 / n),
                       backward_flops_per_s=3e11 / (1 + 100 / n))
        for n in (32, 512, 8192) for d in (64, 128)
    ]  # fmt: skip
    return KernelRates(
        threads=2, matmul=tuple(matmul), experts=tuple(experts), attention=tuple(attention_points),
        rows=tuple(RowPoint(kind=k, values=n, values_per_s=2e9) for k in ROW_KINDS for n in (1 << 15, 1 << 22)),
        row_bytes_per_s=1e10, call_s=call_s, fixed=fixed, update_parameters_per_s=3e8,
    )  # fmt: skip


def cpu(rates=None):
    return DeviceFacts(name="a CPU", kind="cpu", memory_bytes=1 << 34, matmul_flops_per_s=RATE, dequantise_bytes_per_s=2e10,
                       memory_bytes_per_s=2e10, threads=2, kernels=rates)  # fmt: skip


DENSE = model("dense", 512, 8000, [layer(attention(512, 8, 4, 64) + mlp(512, 1536), full(8, 4, 64))] * 4)
MOE = model("moe", 512, 8000, [layer(attention(512, 8, 4, 64) + moe(512, 192, 16, 4), full(8, 4, 64))] * 4)


def sites(shape, rank=16, first=0, attention_only=False):
    return [
        Site(i, m, rank)
        for i, one in enumerate(shape.layers[first:], first)
        for m in one.matrices
        if m.adaptable and (m.kind == "attention" or not attention_only)
    ]


def whole(times, layers, lengths, recompute):
    """Seconds of all passes of a step on one micro-batch."""
    passes = [times.forward(i, lengths) for i in range(layers)] + [
        times.backward(i, lengths, recompute) for i in range(layers)
    ]
    return sum(sum(p.values()) for p in passes)


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("device", [cpu(kernels()), cpu()], ids=["measured", "rates"])
def test_more_tokens_never_take_less(shape, device):
    times = times_of(shape, sites(shape), device)
    seconds = [whole(times, 4, (n,), True) for n in (1, 8, 31, 32, 33, 64, 100, 500, 2000, 9000)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    heads = [times.head(n) for n in (0, 1, 31, 33, 200, 256, 300, 5000)]
    assert heads == sorted(heads)


@pytest.mark.parametrize("device", [cpu(kernels()), cpu()], ids=["measured", "rates"])
def test_causes_are_those_promised_and_recompute_adds_a_forward_pass(device):
    times = times_of(MOE, sites(MOE), device)
    forward, kept, again = times.forward(2, (300, 200)), *(times.backward(2, (300, 200), r) for r in (False, True))
    assert set(forward) == set(kept) == set(again) == set(CAUSES)
    for cause in ("linear", "attention"):
        assert again[cause] == pytest.approx(kept[cause] + forward[cause])
    assert again["rows"] > kept["rows"]
    assert again["lora"] > kept["lora"] > 0


def test_large_products_are_flops_over_rate():
    wide = model("wide", 4096, 8000, [layer(attention(4096, 32, 32, 128) + mlp(4096, 16384), full(32, 32, 128))])
    tokens = 65536
    macs = 4 * 4096 * 4096 + 3 * 4096 * 16384
    for device in (cpu(kernels()), cpu()):
        times = times_of(wide, sites(wide, attention_only=True), device)
        assert times.forward(0, (64,) * (tokens // 64))["linear"] == pytest.approx(2.0 * macs * tokens / RATE, rel=0.06)


def test_rates_alone_give_the_flops_that_plans_count():
    from lamella.forecast.costs import cost_of

    for shape in (DENSE, MOE):
        own = sites(shape)
        cost = cost_of(shape, own, 2, True).layers[2]
        times = times_of(
            shape, own, cpu().model_copy(update={"memory_bytes_per_s": 1e30})
        )  # experts' rows take no time
        passes = [times.forward(2, (700,)), times.backward(2, (700,), True)]
        linear = sum(p[c] for p in passes for c in ("linear", "experts", "lora")) * RATE
        assert linear == pytest.approx(700 * cost.flops_per_token, rel=1e-6)
        assert sum(p["attention"] for p in passes) * RATE == pytest.approx(700 * 701 / 2 * cost.flops_per_pair)


def test_layers_below_the_first_adapted_one_have_no_backward_pass():
    times = times_of(DENSE, sites(DENSE, first=2), cpu(kernels()))
    assert sum(times.backward(1, (256,), True).values()) == 0.0
    first, above = times.backward(2, (256,), True), times.backward(3, (256,), True)
    assert 0 < first["linear"] < above["linear"]  # nothing goes on to the layer below


def test_windows_and_short_sequences_see_fewer_pairs():
    def core_s(window, lengths):
        one = layer(attention(512, 8, 4, 64) + mlp(512, 1536), full(8, 4, 64, window))
        shape = model("windowed", 512, 8000, [one] * 2)
        return times_of(shape, sites(shape), cpu(kernels())).forward(1, lengths)["attention"]

    assert core_s(256, (4096,)) < 0.4 * core_s(None, (4096,))
    assert core_s(256, (128,)) == core_s(None, (128,))
    assert core_s(None, (512,) * 8) < 0.4 * core_s(None, (4096,))


def test_few_tokens_reach_few_experts():
    many = model("many", 512, 8000, [layer(attention(512, 8, 4, 64) + moe(512, 192, 128, 4), full(8, 4, 64))] * 2)
    times = times_of(many, sites(many, attention_only=True), cpu(kernels()))
    one, two = (times.forward(1, (n,))["experts"] for n in (1, 2))
    assert 1.9 < two / one < 2.0  # nearly twice as many experts, one row each
    assert times.forward(1, (4000,))["experts"] < 400 * one  # every expert is read once, whatever its rows


def test_fixed_costs_go_to_layers_of_their_kind():
    fixed = (FixedCost(work="forward", seconds=1.0), FixedCost(work="forward", experts=True, seconds=2.0),
             FixedCost(work="forward", everywhere=True, seconds=3.0), FixedCost(work="backward", seconds=5.0),
             FixedCost(work="backward_again", seconds=7.0), FixedCost(work="head", seconds=11.0),
             FixedCost(work="update", seconds=0.5))  # fmt: skip
    device = cpu(kernels(call_s=0.0, fixed=fixed))
    calls = {}
    for shape in (DENSE, MOE):
        for narrow in (True, False):
            times = times_of(shape, sites(shape, attention_only=narrow), device)
            calls[shape.name, narrow] = times.forward(1, (64,))["calls"]
            assert times.backward(1, (64,), False)["calls"] == 5.0
            assert times.backward(1, (64,), True)["calls"] == 7.0
            assert times.head(40) - times.head(20) < 0.1
            assert times.head(1) > 11.0
    assert calls == {("dense", True): 1.0, ("dense", False): 3.0, ("moe", True): 2.0, ("moe", False): 2.0}
    own = sites(DENSE, attention_only=True)
    times = times_of(DENSE, own, device)
    parameters = sum(s.parameters for s in own)
    assert times.update(parameters) == pytest.approx(parameters / 3e8 + 0.5 * 2 * len(own))


def test_a_slowed_device_has_slower_kernels_and_costs():
    from lamella.forecast.places import slower

    rates = kernels(fixed=(FixedCost(work="forward", seconds=1.0), FixedCost(work="backward", seconds=2.0)))
    half = slower(rates, 0.25, 2.0)  # half of the threads, and half as fast
    before, after = (times_of(DENSE, sites(DENSE), cpu(r)).forward(1, (512,)) for r in (rates, half))
    assert after["calls"] == 2 * before["calls"] == 2.0
    for cause in ("linear", "attention", "lora", "rows"):
        assert after[cause] == pytest.approx(4 * before[cause])


def test_packed_experts_are_not_dequantised_where_kernels_read_them():
    with_kernels, without = (times_of(MOE, sites(MOE), cpu(k)) for k in (kernels(call_s=0.0), None))
    plain = 512 * (512 + 512 + 256 + 256)
    assert with_kernels.dequantise(0) == pytest.approx(plain / 2e9, rel=0.01)
    assert without.dequantise(0) == pytest.approx(2 * (plain + 3 * 512 * 192 * 16) / 2e10)


def test_rates_of_another_dtype_are_refused():
    with pytest.raises(UserError, match="bf16, not in fp32"):
        times_of(DENSE, sites(DENSE), cpu(kernels()), "fp32")


# ---- beside the engine ----------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 320,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
CONFIG_MOE = {
    **CONFIG, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


def products_taken(step):
    """Sizes of all products that torch does in a step: the first matrix's rows, inner size, columns; smallest first where
    they are a gradient of LoRA (either way round)."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name in ("mm", "addmm", "addmm_"):
                a, b = args[-2:] if name == "mm" else args[1:3]
                self.products[tuple(sorted((a.shape[0], a.shape[1], b.shape[1])))] += 1
            return func(*args, **(kwargs or {}))

    with Seen() as seen, torch.no_grad():
        step()
    return seen.products


@pytest.mark.parametrize(
    ("config", "targets"),
    [(CONFIG, "all-linear"), (CONFIG, ("q_proj", "down_proj")), (CONFIG_MOE, ("q_proj", "k_proj", "v_proj", "o_proj"))],
)
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_products_are_those_of_the_engine(tmp_path, config, targets, recompute):
    import json

    import torch

    from lamella.adapter import Adapter
    from lamella.config import LoraConfig
    from lamella.engine import Engine
    from lamella.forecast.describe import shape_of
    from lamella.forecast.trainable import sites_of
    from lamella.kernels import experts, rows
    from lamella.models.layout import pack_rows
    from lamella.models.names import checkpoint_shapes
    from lamella.models.skeleton import Skeleton, read_config
    from lamella.store.quantize import QuantizeSettings
    from lamella.store.reader import Store
    from lamella.store.synth import synthesize_store

    if not rows.supported() or experts.route() is None:
        pytest.skip("the fused kernels need AVX-512 with bf16")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    synthesize_store(file, tmp_path / "store", lambda f: checkpoint_shapes(Skeleton(read_config(f), torch.bfloat16)),
                     QuantizeSettings())  # fmt: skip
    lora = LoraConfig(rank=4, targets=targets)
    engine = Engine.open(Store.open(tmp_path / "store"), dtype="bf16", recompute=recompute)
    adapter = Adapter.create(engine.skeleton, lora, 0)
    engine.attach(adapter)
    batch = pack_rows([([5 + i % 400 for i in range(96)], [i >= 40 for i in range(96)])])
    engine.step([batch], step_index=0, label_tokens=56)  # the first step looks how much a layer keeps
    taken = products_taken(lambda: engine.step([batch], step_index=1, label_tokens=56))

    shape = shape_of(tmp_path / "store")
    own = sites_of(shape, lora)
    forms = pieces_of(shape, own), pieces_of(shape, own, kept=True)
    times = KernelTimes(*forms, shape.hidden, shape.vocab, kernels(), 1e10)
    counted = Counter()
    times.rates.product = lambda form, *sizes: (
        counted.update([tuple(sorted(sizes))]) or 0.0
    )  # counts in the place of times
    for i in range(3):
        times.forward(i, (96,))
        times._forward.cache_clear()
        times.backward(i, (96,), recompute == "always")
        times._forward.cache_clear()
        times._backward.cache_clear()
    times.head(56)
    assert counted == taken


def test_files_of_before_are_read():
    old = {**json.loads(kernels().model_dump_json()), "uneven_rows": 1.2}
    read = KernelRates.model_validate_json(json.dumps(old))
    assert read.matmul == kernels().matmul and "uneven_rows" not in json.loads(read.model_dump_json())

"""What a layer's work takes on paper, against a ledger around the real layer."""

import pytest
import torch
from transformers import Gemma3TextConfig, MixtralConfig, Qwen2Config, Qwen3Config

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.engine.memory import _use, probe_head
from lamella.forecast import tape
from lamella.forecast.describe import shape_of
from lamella.forecast.tape import Ways
from lamella.forecast.trainable import sites_of
from lamella.forecast.use import head_use, is_estimate, layer_use, use_of
from lamella.kernels import attention, experts, rows
from lamella.models import attention as model_attention
from lamella.models import experts_cpu, groups, padded
from lamella.models.layout import pack_rows
from tests.fixtures import dense_config, moe_config

WIDE = dict(hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=320)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MOE = dict(experts=8, inner=64, **WIDE)
COMMON = dict(
    vocab_size=512, num_hidden_layers=2, max_position_embeddings=512, eos_token_id=4, bos_token_id=0, pad_token_id=2
)
CONFIGS = {
    "llama": lambda: dense_config(**WIDE),
    "llama, tied": lambda: dense_config(tie_word_embeddings=True, **WIDE),
    "qwen2": lambda: Qwen2Config(**COMMON, **WIDE),
    "qwen3": lambda: Qwen3Config(**COMMON, **WIDE),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, **WIDE, query_pre_attn_scalar=32),
    "qwen3_moe": lambda: moe_config(**MOE),
    "mixtral": lambda: MixtralConfig(**COMMON, **WIDE, num_local_experts=8, num_experts_per_tok=2),
}
fast = pytest.mark.skipif(
    not rows.supported() or attention.implementation() == "torch" or experts.route() is None,
    reason="needs AVX-512 with bf16",
)


@pytest.fixture(scope="module")
def opened(made):
    cache = {}

    def make(name, dtype, targets="all-linear", rank=8, dropout=0.0, fused=True):
        key = name, dtype, targets, rank, dropout, fused
        if key not in cache:
            store, _ = made(CONFIGS[name]())
            lora = LoraConfig(rank=rank, targets=targets, dropout=dropout)
            engine = Engine.open(store, dtype=dtype, fused=fused)
            engine.attach(Adapter.create(engine.skeleton, lora, 0))
            shape = shape_of(store.path)
            cache[key] = engine, shape, sites_of(shape, lora)
        return cache[key]

    return make


def measured(engine, lengths):
    run = engine.walk.probe(pack_rows([([1] * n, []) for n in lengths]), 1)
    _use(run)  # buffers that outlive the work are there now
    return _use(run)


def check(found, real, close=0.003):
    for name in ("forward", "graph", "graph_peak", "backward"):
        assert getattr(found, name) == pytest.approx(getattr(real, name), rel=close), name


@fast
@pytest.mark.parametrize("lengths", [(64, 64), (576,), (40, 24, 64)], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2", "qwen3", "gemma3", "qwen3_moe", "mixtral"])
def test_layers_in_bf16(name, lengths, opened):
    engine, shape, sites = opened(name, "bf16")
    found = layer_use(shape, 1, sites, lengths, 2, "cpu", threads=torch.get_num_threads())
    real = measured(engine, lengths)
    check(found, real)
    assert found.shapes == real.shapes


@fast
@pytest.mark.parametrize("lengths", [(64, 64), (330, 400), (40, 24, 60)], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_layers_in_fp32(name, lengths, opened):
    engine, shape, sites = opened(name, "fp32")
    found = layer_use(shape, 1, sites, lengths, 4, "cpu", threads=torch.get_num_threads())
    check(found, measured(engine, lengths))
    assert found.shapes == 0


@fast
@pytest.mark.parametrize(
    "targets", [ATTENTION, ("q_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj", "o_proj")], ids=str
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_any_targets(name, targets, opened):
    engine, shape, sites = opened(name, "bf16", targets, rank=4)
    check(layer_use(shape, 1, sites, (96, 96), 2, "cpu", threads=torch.get_num_threads()), measured(engine, (96, 96)))


@fast
@pytest.mark.parametrize("rank", [1, 24, 64])
def test_any_rank(rank, opened):
    for name in ("llama", "qwen3_moe"):
        engine, shape, sites = opened(name, "bf16", rank=rank)
        check(
            layer_use(shape, 1, sites, (96, 96), 2, "cpu", threads=torch.get_num_threads()), measured(engine, (96, 96))
        )


@fast
@pytest.mark.parametrize(
    ("name", "targets", "dtype"),
    [("llama", "all-linear", "bf16"), ("qwen3_moe", ATTENTION, "bf16"), ("qwen3_moe", "all-linear", "fp32"),
     ("qwen3_moe", "all-linear", "bf16")],
)  # fmt: skip
def test_dropout_takes_other_ways(name, targets, dtype, opened):
    engine, shape, sites = opened(name, dtype, targets, dropout=0.1)
    element = 2 if dtype == "bf16" else 4
    found = layer_use(shape, 1, sites, (128, 128), element, "cpu", dropout=True, threads=torch.get_num_threads())
    check(found, measured(engine, (128, 128)), close=0.03)


@fast
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_a_familys_own_modules(name, dtype, opened):
    """As on a GPU, and on CPUs without the fused kernels; attention and experts are the C kernels' here."""
    engine, shape, sites = opened(name, dtype, fused=False)
    ways = Ways(False, True, False, 2 if dtype == "bf16" else 4, False, torch.get_num_threads())
    check(use_of(shape, 1, sites, (64, 64), ways), measured(engine, (64, 64)))


def test_a_gpu_keeps_what_the_familys_own_modules_keep(opened):
    _, shape, sites = opened("llama", "bf16")
    on_gpu = layer_use(shape, 1, sites, (64, 64), 2, "cuda")
    own = use_of(shape, 1, sites, (64, 64), Ways(False, True, False, 2, False, 1))
    assert on_gpu.graph == own.graph
    assert on_gpu.graph > 1.5 * layer_use(shape, 1, sites, (64, 64), 2, "cpu").graph
    assert on_gpu.shapes == 0


def test_costs_of_plans_take_activations_from_here(opened):
    from lamella.forecast.costs import cost_of
    from lamella.forecast.use import TYPICAL_TOKENS, activation_bytes_per_token

    _, shape, sites = opened("llama", "bf16")
    for kind in ("cpu", "cuda"):
        found = activation_bytes_per_token(shape, 1, sites, 2, kind)
        assert found == layer_use(shape, 1, sites, (TYPICAL_TOKENS,), 2, kind).backward / TYPICAL_TOKENS
        assert cost_of(shape, sites, 2, True, kind).layers[1].activation_bytes_per_token == found


def test_use_grows_with_tokens_and_rank(opened):
    _, shape, sites = opened("qwen3_moe", "bf16")
    small, large = (layer_use(shape, 1, sites, (n,), 2, "cpu") for n in (256, 512))
    assert large.graph == pytest.approx(2 * small.graph, rel=0.02)
    assert large.backward < 2 * small.backward, "gradients of pairs do not grow"
    assert layer_use(shape, 1, [], (256,), 2, "cpu").graph < small.graph


@fast
@pytest.mark.parametrize("positions", [20, 300])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_head(dtype, positions, opened):
    engine, shape, _ = opened("llama, tied", dtype)
    real_rows, real = probe_head(engine.walk, positions)
    found_rows, found = head_use(shape, positions, 2 if dtype == "bf16" else 4, "cpu")
    assert found_rows == real_rows
    assert found == pytest.approx(real, rel=0.03)


@fast
def test_layers_of_no_known_form_are_bounded_from_above(opened):
    """Here a known one, taken as unknown."""
    from lamella.forecast.blocks import UnknownLayer
    from lamella.forecast.tape import Tape

    engine, shape, sites = opened("qwen3", "bf16", fused=False)
    assert not is_estimate(shape.layers[1])
    real = measured(engine, (128, 128))
    for keeps, name in ((False, "forward"), (True, "graph")):
        t = Tape(2, keeps)
        UnknownLayer.of(shape, 1, sites).forward(t, 256, (128, 128))
        assert t.peak >= getattr(real, name)
        if keeps:
            assert 1 <= t.live / real.graph < 2


def test_constants_are_the_kernels_own():
    assert tape.BLOCK_RANK == groups.BLOCK_RANK
    assert (tape.SHORT_CPU, tape.MAX_PADDING) == (model_attention.SHORT_CPU, padded._MAX_PADDING)
    assert (tape.CHUNK, tape.WANTED_GRAINS, tape.UNDIVIDED) == (
        attention.CHUNK,
        attention.WANTED_GRAINS,
        attention.UNDIVIDED,
    )
    lengths = [700, 690, 100, 90, 40]
    by_length = padded.by_length(lengths)
    assert tape.groups_by_length(lengths) == [[lengths[s] for s in group] for group in by_length]


@fast
def test_scratch_of_attention_is_what_the_library_says():
    job = attention._Job(size=32, value_size=64, undivided=5)
    assert attention._library().lamella_attention_scratch(job, 0) == tape.FORWARD_SCRATCH
    assert attention._library().lamella_attention_scratch(job, 1) == tape.BACKWARD_SCRATCH + 5 * 96 * 32 * 4


@fast
def test_buffers_of_the_expert_kernels(opened):
    from lamella.engine.memory import _expert_bytes
    from lamella.forecast.blocks import expert_bytes

    engine, shape, sites = opened("qwen3_moe", "bf16")
    ways = Ways.of("cpu", 2, True, False, torch.get_num_threads())
    assert expert_bytes(shape, sites, range(2), 200, ways) == _expert_bytes(engine.walk, 200)
    engine.step([pack_rows([([1] * 200, [False] + [True] * 199)])], step_index=0, label_tokens=200)
    assert experts_cpu._rows[0].nbytes >= 200 * 2 * 128 * 2
    dense, shape, sites = opened("llama", "bf16")
    assert expert_bytes(shape, sites, range(2), 200, ways) == _expert_bytes(dense.walk, 200) == 0

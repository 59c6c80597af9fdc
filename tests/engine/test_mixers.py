"""Families whose layers mix tokens by other means than attention: each sequence and each branch of a tree is on its own."""

import gc
import weakref

import pytest
import torch
import transformers as tf

from lamella.adapter.lora import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.models.attention import AttentionRefused
from lamella.models.divided import divide
from lamella.models.layout import Tree, pack_rows, pack_trees
from lamella.models.mixers import Mixing, weights_by_name
from lamella.models.skeleton import Skeleton
from tests.conftest import random_rows
from tests.engine import families as every
from tests.engine.test_families import SMALL, trained_adapter
from tests.oracle import load_reference, relative_error

NO_HEAD_DIM = {k: v for k, v in SMALL.items() if k != "head_dim"}
NO_INNER = {k: v for k, v in SMALL.items() if k != "intermediate_size"}
LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=16, mamba_chunk_size=16, mamba_expand=2)
BOTH = dict(layer_types=["linear_attention", "full_attention"])

MIXERS = {
    "qwen3_next": lambda: tf.Qwen3NextConfig(**SMALL, **DELTA, **EXPERTS, **BOTH, shared_expert_intermediate_size=32),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**SMALL, **DELTA, **BOTH),
    "qwen3_5_moe": lambda: tf.Qwen3_5MoeTextConfig(
        **NO_INNER, **DELTA, **EXPERTS, **BOTH, shared_expert_intermediate_size=32
    ),
    "olmo_hybrid": lambda: tf.OlmoHybridConfig(**NO_HEAD_DIM, **DELTA, **BOTH),
    "kimi_linear": lambda: tf.KimiLinearConfig(
        **{**NO_HEAD_DIM, **LATENT}, **LOCAL, **BOTH, moe_intermediate_size=32, linear_head_dim=16, linear_num_heads=4,
        mlp_layer_types=["sparse", "dense"],
    ),
    "bailing_hybrid": lambda: tf.BailingHybridConfig(
        **{**SMALL, **LATENT}, **LOCAL, **BOTH, moe_intermediate_size=32, n_group=2, topk_group=1,
        mlp_layer_types=["sparse", "dense"],
    ),
    "minimax": lambda: tf.MiniMaxConfig(**SMALL, **LOCAL, **BOTH, block_size=16, linear_attn_alpha_factor=1.5),
    "lfm2": lambda: tf.Lfm2Config(
        **NO_HEAD_DIM, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    ),
    "lfm2_moe": lambda: tf.Lfm2MoeConfig(
        **NO_HEAD_DIM, **EXPERTS, num_dense_layers=1, layer_types=["full_attention", "conv"]
    ),
    "jamba": lambda: tf.JambaConfig(
        **NO_HEAD_DIM, num_experts=4, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=0,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
    ),
    "bamba": lambda: tf.BambaConfig(**NO_HEAD_DIM, **MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **NO_HEAD_DIM, **MAMBA, **LOCAL, **BOTH, shared_intermediate_size=32, residual_multiplier=0.5
    ),
    "granitemoehybrid-dense": lambda: tf.GraniteMoeHybridConfig(
        **NO_HEAD_DIM, **MAMBA, **BOTH, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=32,
        position_embedding_type="rope",
    ),
    "falcon_h1": lambda: tf.FalconH1Config(
        **NO_HEAD_DIM, **MAMBA, mamba_d_ssm=128, ssm_multipliers=[1.1, 0.9, 1.2, 0.8, 1.3], mamba_rms_norm=True
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **{**SMALL, "num_hidden_layers": 4}, ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=32, n_groups=2, chunk_size=16,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "moe", "full_attention", "mlp"],
    ),
    "recurrent_gemma": lambda: tf.RecurrentGemmaConfig(
        **{**NO_HEAD_DIM, "num_key_value_heads": 1, "tie_word_embeddings": True}, attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
}  # fmt: skip
"""Family -> a small config with a layer of each kind."""

ALIKE = {"qwen3_5_moe", "bailing_hybrid", "bamba", "granitemoehybrid", "olmo_hybrid", "lfm2_moe"}
"""Their mixers are as another family's here."""

ROWS = random_rows((5, 71, 9, 12))  # one longer than a delta net's chunk of 64
LABELS = sum(sum(mask) for _, mask in ROWS)


def gradients(engine, batches, labels=LABELS, **over):
    for p in engine.adapter.parameters().values():
        p.grad = None
    out = engine.step(batches, step_index=0, label_tokens=labels, **over)
    return out, {name: p.grad.clone() for name, p in engine.adapter.parameters().items()}


def worst_error(found, wanted):
    return max((relative_error(found[n], wanted[n]), n) for n in wanted)


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f in ALIKE else f for f in MIXERS])
def test_loss_and_every_gradient(family, tmp_path):
    found = every.measure(MIXERS[family](), tmp_path, ROWS)
    assert found.logits < 1e-5 and found.loss < 1e-5 and found.gradient < 1e-5, found


def deeper(family):
    config = MIXERS[family]()
    config.num_hidden_layers = 4
    config.layer_types = config.layer_types * 2
    return config


@pytest.mark.parametrize("family", ["qwen3_5", "jamba"])
def test_recompute_and_residency_do_not_change_a_bit(family, made):
    store, _ = made(deeper(family) if family == "qwen3_5" else MIXERS[family]())
    layers, cuts = len(store.manifest.layers), [pack_rows(ROWS[:2]), pack_rows(ROWS[2:])]
    whole = Engine.open(store, dtype="fp32", recompute="never")
    trained_adapter(whole)
    _, kept = gradients(whole, cuts)
    fixed = whole.walk.weights.residency.fixed_bytes
    budget = fixed + 2 * max(store.group_bytes(i) for i in range(layers)) + 1
    for settings in ({"recompute": "always"}, {"recompute": "always", "budget_bytes": budget}):
        engine = Engine.open(store, dtype="fp32", **settings)
        trained_adapter(engine)
        _, again = gradients(engine, cuts)
        assert all(torch.equal(kept[n], again[n]) for n in kept)
    if layers > 2:
        assert len(engine.walk.weights.residency.streamed) == layers


def family_tree():
    """A prefix with two branches, one of which branches again; and the same as rows, one for each leaf."""
    (a, _), (b, _), (c, _), (d, _), (e, _) = random_rows((70, 6, 3, 4, 5), seed=3)

    def scored(ids):
        return [True] * len(ids)

    tree = Tree(a, [], [Tree(b, scored(b)), Tree(c, [], [Tree(d, scored(d)), Tree(e, scored(e))])])
    rows = [
        (a + b, [False] * len(a) + scored(b)), (a + c + d, [False] * len(a + c) + scored(d)),
        (a + c + e, [False] * len(a + c) + scored(e)),
    ]  # fmt: skip
    return tree, rows


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "falcon_h1"])
def test_a_tree_is_its_paths(family, made):
    store, _ = made(MIXERS[family]())
    engine = Engine.open(store, dtype="fp32")
    trained_adapter(engine)
    tree, rows = family_tree()
    short = Tree(*ROWS[0])
    tree_batch, rows_batch = pack_trees([tree, short]), pack_rows([*rows, ROWS[0]])
    (found,), (wanted,) = engine.score([tree_batch]), engine.score([rows_batch])
    assert torch.allclose(found, wanted, atol=1e-5)
    labels = len(wanted)
    out, by_tree = gradients(engine, [tree_batch], labels)
    other, by_rows = gradients(engine, [rows_batch], labels)
    assert out.loss_sum == pytest.approx(other.loss_sum, rel=1e-5)
    assert worst_error(by_tree, by_rows)[0] < 1e-5


@pytest.mark.parametrize("family", ["qwen3_5", "minimax", "jamba", "falcon_h1", "recurrent_gemma"])
def test_generation_is_the_reference_model_s(family, made):
    store, base = made(MIXERS[family]())
    engine, reference = Engine.open(store, dtype="fp32"), load_reference(base)
    prompts = [ROWS[2][0], ROWS[0][0]]
    wanted = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        wanted.append(ids[len(prompt) :])
    assert [g.ids for g in engine.generate(prompts, 6, set())] == wanted
    stop = wanted[0][2]
    stopped = engine.generate(prompts, 6, {stop})[0]
    assert (stopped.ids, stopped.finish) == (wanted[0][: wanted[0].index(stop)], "stop")


def test_dropout_and_padding_do_not_depend_on_the_micro_batch(made):
    store, _ = made(MIXERS["qwen3_5"]())
    engine = Engine.open(store, dtype="fp32")
    trained_adapter(engine, dropout=0.3)
    _, whole = gradients(engine, [pack_rows(ROWS, range(4))])
    _, cut = gradients(engine, [pack_rows([ROWS[i] for i in ids], ids) for ids in ((2, 0), (3,), (1,))])
    assert worst_error(cut, whole)[0] < 1e-5
    engine.adapter.dropout = 0.0
    assert worst_error(gradients(engine, [pack_rows(ROWS)])[1], whole)[0] > 0.01


@pytest.mark.parametrize(("family", "near"), [("qwen3_5", 0.09), ("granitemoehybrid-dense", 0.02), ("lfm2", 0.02)])
def test_bf16_is_close_to_fp32(family, near, made):
    """transformers' own gradients in bf16 are 0.063, 0.012 and 0.015 off."""
    store, _ = made(MIXERS[family]())
    found = {}
    for dtype in ("fp32", "bf16"):
        engine = Engine.open(store, dtype=dtype)
        trained_adapter(engine)
        out, grads = gradients(engine, [pack_rows(ROWS)])
        found[dtype] = out.loss_sum, torch.cat([g.flatten() for g in grads.values()])
    assert found["bf16"][0] == pytest.approx(found["fp32"][0], rel=0.01)
    assert relative_error(found["bf16"][1], found["fp32"][1]) < near


def test_a_mixer_that_runs_across_sequences_is_refused(made):
    store, _ = made(MIXERS["falcon_h1"]())
    engine = Engine.open(store, dtype="fp32")
    engine.logits(pack_rows(ROWS[:1]))
    for layer in engine.skeleton.layers:
        layer._modules["mamba"] = layer._modules["mamba"].own
    engine.skeleton.mixing = [Mixing((), tested=True)] * 2
    engine.walk.mixing._passed.clear()
    engine.walk.mixing._kinds.clear()
    with pytest.raises(AttentionRefused, match=r"layer 0 .*a sequence sees the one packed before it"):
        engine.logits(pack_rows(ROWS[:1]))


def test_memory_is_probed_and_a_step_fits(made):
    store, _ = made(MIXERS["qwen3_5"]())
    engine = Engine.open(store, dtype="fp32", budget_bytes=1 << 30)
    trained_adapter(engine)
    plan = engine.fit([[71, 12]], [20])
    assert plan is not None
    assert plan.beyond_program_bytes < 1 << 30
    assert gradients(engine, [pack_rows(ROWS)])[0].label_tokens == LABELS


def test_what_autograd_keeps_in_a_mixer_counts(made):
    store, _ = made(MIXERS["jamba"]())
    engine = Engine.open(store, dtype="fp32", recompute="never")
    trained_adapter(engine)
    walk = engine.walk
    item = walk.enter(pack_rows(ROWS), None)
    walk.weights.bind(0)
    walk.hang(0, grad=True)
    walk.measure_saved(item, 0)
    states = 2 * 128 * 8 * 4  # the scan's decay and input for each of 128 channels' 8 states, fp32
    assert walk.saved_bytes_per_token > states


def test_a_graph_inside_a_mixer_does_not_hold_itself():
    gc.disable()
    try:
        with weights_by_name(torch.nn.Linear(2, 2)):
            out = torch.ones(4, requires_grad=True).exp()
        held = weakref.ref(out)
        del out
        assert held() is None
    finally:
        gc.enable()


class Alone:
    members, index = (0, 1), 0


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "kimi_linear", "minimax"])
def test_ranks_divide_no_mixer(family):
    skeleton = Skeleton(MIXERS[family](), torch.float32)
    division = divide(skeleton.layers, skeleton.prefix, Alone(), (1, 1))
    (mixer,) = skeleton.mixing[0].mixers
    name = next(path for path, m in skeleton.layers[0].named_modules() if m is mixer)
    assert not [n for n in division.cuts if n.startswith(f"{skeleton.prefix}.0.{name}.")]
    assert type(mixer.own).__name__ in division.whole
    division.undo()


def test_layers_that_are_never_called_get_no_adapter(capfd):
    names = [
        {name.rpartition(".")[2] for name in Adapter.create(Skeleton(MIXERS[family](), torch.float32), LoraConfig(), 0).sites}
        for family in ("jamba", "bamba", "nemotron_h")
    ]  # fmt: skip
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("no LoRA pairs on ")]
    assert [line.partition(":")[0].removeprefix("no LoRA pairs on ") for line in told] == [
        "mamba.dt_proj",
        "mixer.out_proj",
    ]
    assert "dt_proj" not in names[0]  # Jamba multiplies with its weight
    assert {"x_proj", "in_proj", "out_proj"} <= names[0]
    assert "out_proj" in names[1]
    assert "out_proj" not in names[2]  # PEFT refuses it there

"""What the walk promises whatever the layout: packing, trees, dropout, generation, balancing loss."""

import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.models.layout import PackedBatch, Tree, pack_rows, pack_trees
from tests.conftest import random_rows
from tests.engine.test_families import FAMILIES, LABELS, ROWS, step_gradients, trained_adapter
from tests.fixtures import dense_config, moe_config
from tests.oracle import load_reference, relative_error


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3"])
def test_b49_a_sequence_never_sees_its_neighbours(family, made):
    store, base = made(FAMILIES[family]())
    engine, reference = Engine.open(store, dtype="fp32"), load_reference(base)
    (a, _), (b, _) = random_rows((5, 12))
    packed = pack_rows([(a, [False] * 4 + [True]), (b, [False] + [True] * 11)])
    logits = engine.logits(packed)
    alone = reference(input_ids=torch.tensor([b])).logits[0]
    assert (logits[5:] - alone).abs().max() < 1e-5
    other = pack_rows([([7] * 5, []), (b, [])])
    assert torch.equal(engine.logits(other)[5:], logits[5:])
    assert packed.position_ids.tolist() == [*range(5), *range(12)]
    assert 4 not in packed.score_positions.tolist(), "the last token of A must not predict the first of B"
    sums = engine.loss_sums([packed])[0]
    apart = torch.cat(
        [engine.loss_sums([pack_rows([r])])[0] for r in ((a, [False] * 4 + [True]), (b, [False] + [True] * 11))]
    )
    assert torch.allclose(sums, apart, rtol=1e-6)


def test_b49_an_attention_that_wants_its_own_mask_is_refused(made):
    store, _ = made(dense_config())
    engine = Engine.open(store, dtype="fp32")
    engine.skeleton.layers[0].self_attn.is_causal = False
    with pytest.raises(UserError, match="non-causal"):
        engine.logits(pack_rows(ROWS))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3", "qwen3_moe"])
def test_tree_scores_equal_separate_sequences(family, made):
    store, base = made(FAMILIES[family]())
    engine, reference = Engine.open(store, dtype="fp32"), load_reference(base)
    trunk, prompt, *labels = (ids for ids, _ in random_rows((14, 9, 3, 1, 4), seed=3))
    branches = [Tree(x, [True] * len(x)) for x in labels]
    tree = Tree(trunk, [], [Tree(prompt, [], branches), Tree(labels[0], [True] * 3)])
    (scores,) = engine.score([pack_trees([Tree([1, 2, 3]), tree])])
    wanted = []
    for before, answer in [(trunk + prompt, x) for x in labels] + [(trunk, labels[0])]:
        ids = [*before, *answer]
        logp = torch.log_softmax(reference(input_ids=torch.tensor([ids])).logits[0], -1)
        wanted += [logp[len(before) + k - 1, t] for k, t in enumerate(answer)]
    assert torch.allclose(scores, torch.stack(wanted), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
def test_b83_generation_equals_transformers_at_any_batch_size(family, made):
    store, base = made(FAMILIES[family]())
    engine, reference = Engine.open(store, dtype="fp32"), load_reference(base)
    prompts = [ids for ids, _ in random_rows((3, 21, 8, 13), seed=5)]
    wanted = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(reference(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        wanted.append(ids[len(prompt) :])
    together = engine.generate(prompts, 8, stop_ids=set())
    assert [g.ids for g in together] == wanted
    assert {g.finish for g in together} == {"length"}
    one_by_one = [engine.generate([p], 8, stop_ids=set())[0].ids for p in prompts]
    assert one_by_one == wanted
    stop = wanted[1][3]
    stopped = engine.generate(prompts, 8, stop_ids={stop})
    assert stopped[1].ids == wanted[1][: wanted[1].index(stop)]
    assert stopped[1].finish == "stop"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_dropout_is_a_function_of_step_row_and_site(family, made):
    store, _ = made(FAMILIES[family]())
    found = []
    for recompute, cuts in (("always", [ROWS]), ("never", [[r] for r in ROWS])):
        engine = Engine.open(store, dtype="fp32", recompute=recompute)
        trained_adapter(engine, dropout=0.3)
        ids, batches = iter(range(100, 200)), []
        for cut in cuts:
            batches.append(pack_rows(cut, [next(ids) for _ in cut]))
        for p in engine.adapter.parameters().values():
            p.grad = None
        engine.step(batches, step_index=3, label_tokens=LABELS)
        found.append(torch.cat([p.grad.flatten() for p in engine.adapter.parameters().values()]))
    assert relative_error(found[1], found[0]) < 1e-5
    plain = Engine.open(store, dtype="fp32")
    trained_adapter(plain)
    _, without = step_gradients(plain, [ROWS])
    flat = torch.cat([g.flatten() for g in without.values()])
    assert relative_error(found[0], flat) > 0.05, "dropout had no effect"
    engine.step(batches, step_index=4, label_tokens=LABELS)
    both = torch.cat([p.grad.flatten() for p in engine.adapter.parameters().values()])
    assert relative_error(both - found[1], found[1]) > 0.05, "another step must drop other inputs"


def test_b51_balancing_loss_is_transformers_own_over_the_whole_step(made):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    config = moe_config(experts=8, top_k=2)
    store, base = made(config)
    reference = load_reference(base)
    reference.config.output_router_logits = True
    router = [reference(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits for ids, _ in ROWS]
    logits = tuple(torch.cat([r[i] for r in router]) for i in range(2))
    wanted = float(load_balancing_loss_func(logits, 8, 2))
    engine = Engine.open(store, dtype="fp32")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, targets=("q_proj", "v_proj")), 0)
    engine.attach(adapter)
    before = [p.clone() for layer in engine.skeleton.layers for n, p in layer.named_parameters() if ".gate." in n]
    for cuts in ([ROWS], [[r] for r in ROWS[:3]] + [ROWS[3:]]):
        out, _ = step_gradients(engine, cuts, aux_coef=0.01)
        assert out.aux == pytest.approx(wanted, rel=1e-5)
    after = [p for layer in engine.skeleton.layers for n, p in layer.named_parameters() if ".gate." in n]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_b51_balancing_gradient_equals_autograd(recompute, made, tmp_path):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    from lamella.adapter.peft_format import _tensor_names
    from tests.oracle import label_loss, peft_model

    store, base = made(moe_config(experts=8, top_k=2))
    engine = Engine.open(store, dtype="fp32", recompute=recompute)
    adapter = trained_adapter(engine, targets=("q_proj", "v_proj"))
    adapter.save(tmp_path)
    _, with_aux = step_gradients(engine, [ROWS[:2], ROWS[2:]], aux_coef=10.0)
    model = peft_model(load_reference(base), tmp_path)
    router = [model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits for ids, _ in ROWS]
    logits = tuple(torch.cat([r[i] for r in router]) for i in range(2))
    (label_loss(model, ROWS) + 10.0 * load_balancing_loss_func(logits, 8, 2)).backward()
    parameters, names = dict(model.named_parameters()), _tensor_names(adapter.sites)
    for key in adapter.sites:
        for x in "AB":
            truth = parameters[f"{names[key]}.lora_{x}.default.weight"].grad
            assert relative_error(with_aux[f"{key}.lora_{x}"], truth) < 2e-5, key


def test_b60_an_expert_without_tokens_has_zero_gradient(made):
    store, _ = made(moe_config(experts=32, top_k=2))
    engine = Engine.open(store, dtype="fp32")
    adapter = trained_adapter(engine)
    one = pack_rows([([5, 6], [False, True])])
    engine.step([one], step_index=0, label_tokens=1)
    gate = adapter.pair("model.layers.0.mlp.experts.gate_up_proj")[0].grad
    per_expert = gate.flatten(1).norm(dim=1)
    hits = engine.walk.expert_hits()["model.layers.0.mlp.experts"]
    assert gate.isfinite().all()
    touched = torch.tensor(hits) > 0
    assert (per_expert[~touched] == 0).all()
    assert (per_expert[touched] > 0).any()
    assert 0 < touched.sum() < 32


def test_b57_new_adapter_equals_base_and_has_the_stated_init(made):
    store, _ = made(dense_config())
    engine = Engine.open(store, dtype="fp32")
    base = engine.logits(pack_rows(ROWS))
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=16), seed=3)
    engine.attach(adapter)
    assert torch.equal(engine.logits(pack_rows(ROWS)), base)
    for key, site in adapter.sites.items():
        a, b = adapter.pair(key)
        assert (b == 0).all()
        assert a.abs().max() <= 1 / site.inputs**0.5
        assert a.std().item() == pytest.approx(1 / (3 * site.inputs) ** 0.5, rel=0.15)
    engine.attach(None)
    assert torch.equal(engine.logits(pack_rows(ROWS)), base)


def test_b42_fp16_on_a_cpu_is_refused(made):
    store, _ = made(dense_config())
    with pytest.raises(UserError, match="fp16 on a CPU"):
        Engine.open(store, dtype="fp16")


def test_b42_a_layer_that_overflows_is_named(made):
    store, _ = made(dense_config())
    engine = Engine.open(store, dtype="fp32")
    trained_adapter(engine)
    engine.skeleton.layers[1].input_layernorm.weight.data[0] = float("nan")
    out = engine.step([pack_rows(ROWS)], step_index=0, label_tokens=LABELS)
    assert out.first_bad_layer() == 1


def test_b52_every_pair_gets_a_gradient_with_and_without_recompute(made):
    store, _ = made(dense_config(layers=4))
    grads = []
    for recompute in ("always", "never"):
        engine = Engine.open(store, dtype="fp32", recompute=recompute)
        adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj")), 0)
        engine.attach(adapter)
        _, g = step_gradients(engine, [ROWS])
        grads.append(g)
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])
    assert len(adapter.sites) == 12
    assert all(grads[0][f"{k}.lora_B"].norm() > 0 for k in adapter.sites)


def test_score_does_not_depend_on_batches(made):
    store, _ = made(FAMILIES["qwen3_moe"]())
    engine = Engine.open(store, dtype="fp32")
    (together,) = engine.score([pack_rows(ROWS)])
    apart = torch.cat(engine.score([pack_rows([r]) for r in ROWS]))
    assert torch.allclose(together, apart, atol=1e-5)


def test_packed_batch_moves_and_knows_trees():
    plain = pack_rows(ROWS)
    assert not plain.is_tree
    assert pack_trees([Tree([1], [], [Tree([2], [True]), Tree([3], [True])])]).is_tree
    assert isinstance(plain.to(torch.device("cpu")), PackedBatch)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2-softcap"])
def test_the_head_in_chunks_gives_the_same(family, made):
    store, _ = made(FAMILIES[family]())
    whole, cut = Engine.open(store, dtype="fp32"), Engine.open(store, dtype="fp32")
    cut.walk.logits_bytes = 1
    widest = 0

    def watch(module, args, out):
        nonlocal widest
        widest = max(widest, out.shape[-2])

    cut.skeleton.model.lm_head.register_forward_hook(watch)
    assert len(cut.walk.head_chunks(LABELS)) > 1
    found = []
    for engine in (whole, cut):
        trained_adapter(engine)
        out, gradients = step_gradients(engine, [ROWS])
        flat = torch.cat([g.flatten() for g in gradients.values()])
        found.append((out.loss_sum, flat, engine.score([pack_rows(ROWS)])[0], engine.logits(pack_rows(ROWS))))
        found[-1] += ([g.ids for g in engine.generate([r for r, _ in ROWS] * 5, 3, set())],)
    assert widest == 16
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(found[0][1:4], found[1][1:4], strict=True))
    assert found[0][4] == found[1][4]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "mixtral", "gpt_oss", "olmoe"])
def test_b49_filler_tokens_change_nothing(family, made):
    store, _ = made(FAMILIES[family]())
    plain, filled = Engine.open(store, dtype="fp32"), Engine.open(store, dtype="fp32")
    filled.walk._multiple = 32
    found = []
    for engine in (plain, filled):
        trained_adapter(engine, dropout=0.2)
        for p in engine.adapter.parameters().values():
            p.grad = None
        out = engine.step([pack_rows(ROWS[:2]), pack_rows(ROWS[2:])], step_index=1, label_tokens=LABELS, aux_coef=0.1)
        flat = torch.cat([p.grad.flatten() for p in engine.adapter.parameters().values()])
        load = engine.expert_load()
        found.append((flat, engine.score([pack_rows(ROWS)])[0], engine.logits(pack_rows(ROWS)), out, load))
    assert sum(len(r) for r, _ in ROWS[:2]) % 32 != 0
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(found[0][:3], found[1][:3], strict=True))
    assert found[0][3].loss_sum == pytest.approx(found[1][3].loss_sum, rel=1e-7)
    assert found[0][3].label_tokens == found[1][3].label_tokens
    assert found[0][3].aux == pytest.approx(found[1][3].aux, rel=1e-6)
    assert found[0][4] == found[1][4]


@pytest.mark.parametrize("way", ["fused", "expert by expert"])
def test_b49_filler_goes_through_no_expert(way, made, monkeypatch):
    from lamella.models import experts_cpu

    if way == "expert by expert":
        monkeypatch.setattr(experts_cpu, "can_fuse", lambda *_: False)
    store, _ = made(moe_config(hidden_size=64, moe_intermediate_size=64))
    found = []
    for multiple in (1, 32):
        engine = Engine.open(store, dtype="bf16")
        engine.walk._multiple = multiple
        trained_adapter(engine)
        out, gradients = step_gradients(engine, [ROWS], aux_coef=0.1)
        found.append((out, torch.cat([g.flatten() for g in gradients.values()]), engine.expert_load()))
    assert sum(len(r) for r, _ in ROWS) % 32 != 0
    assert found[0][0].loss_sum == pytest.approx(found[1][0].loss_sum, rel=2e-3)
    assert found[0][0].aux == pytest.approx(found[1][0].aux, rel=2e-3)
    assert relative_error(found[0][1], found[1][1]) < 0.03
    tokens = sum(len(r) for r, _ in ROWS)
    (some, *_), (other, *_) = (list(load.values()) for _, _, load in found)
    assert sum(some) == sum(other) and sum(some) % (2 * tokens) == 0  # two experts a token, forward and again


def test_expert_rows_filled_up_change_nothing(made, monkeypatch):
    import lamella.models.experts as experts

    store, _ = made(FAMILIES["qwen3_moe"]())
    found = []
    for rows in (1, 16):
        monkeypatch.setattr(experts, "PAD_ROWS", rows)
        engine = Engine.open(store, dtype="bf16")
        trained_adapter(engine)
        out, gradients = step_gradients(engine, [ROWS])
        found.append((out.loss_sum, torch.cat([g.flatten() for g in gradients.values()])))
    assert found[0][0] == pytest.approx(found[1][0], rel=2e-3)
    assert relative_error(found[0][1], found[1][1]) < 0.03


def test_b42_fp16_never_trains(made):
    store, _ = made(dense_config())
    engine = Engine.open(store, dtype="fp32")
    trained_adapter(engine)
    engine.skeleton.dtype = torch.float16
    with pytest.raises(UserError, match="fp16 cannot train"):
        engine.step([pack_rows(ROWS)], step_index=0, label_tokens=LABELS)


def test_b42_activations_beyond_fp16_are_fine_in_fp32_and_bf16(tmp_path):
    """Layer 0's down_proj scaled so that the residual stream passes 70,000 while every weight stays below 65,504."""
    from lamella.store.quantize import quantize_checkpoint
    from lamella.store.reader import Store
    from tests.fixtures import random_model

    model = random_model(dense_config(), std=0.3)
    weight = model.model.layers[0].mlp.down_proj.weight
    ids = torch.tensor([ROWS[3][0]])
    while model(ids, output_hidden_states=True).hidden_states[1].abs().max() <= 70_000:
        weight.data *= 2
        assert weight.abs().max() < 65_504
    model.save_pretrained(tmp_path / "hf")
    quantize_checkpoint(tmp_path / "hf", tmp_path / "store")
    for dtype in ("fp32", "bf16"):
        engine = Engine.open(Store.open(tmp_path / "store"), dtype=dtype)
        trained_adapter(engine)
        out, gradients = step_gradients(engine, [ROWS])
        assert out.first_bad_layer() is None
        assert out.peaks[0] > 65_504
        assert out.loss_sum > 0
        assert all(g.isfinite().all() for g in gradients.values())


def test_a_token_beyond_the_vocabulary_is_a_user_error(made):
    store, _ = made(dense_config())
    engine = Engine.open(store, dtype="fp32")
    with pytest.raises(UserError, match="token id 512 is beyond the model's vocabulary of 512"):
        engine.logits(pack_rows([([1, 512], [])]))

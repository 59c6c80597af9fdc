"""Layers divided among ranks (gloo, processes of their own) give what one process gives."""

from dataclasses import replace

import pytest
import torch
import transformers as tf

from lamella.engine import Engine
from lamella.errors import UserError
from lamella.models.divided import apportion, columns_at_once
from lamella.store.quantize import quantize_checkpoint
from tests.conftest import random_rows
from tests.distributed import run_as_ranks
from tests.engine.divided_ranks import Job, do, do_all
from tests.engine.test_families import FAMILIES, SMALL
from tests.fixtures import dense_config, moe_config, random_model
from tests.oracle import relative_error

ROWS = [(tuple(ids), tuple(mask)) for ids, mask in random_rows((5, 23, 9, 30, 12))]
CUTS = (tuple(ROWS[:2]), tuple(ROWS[2:]))
WIDE = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=512)

MODELS = {
    "llama": FAMILIES["llama"],
    "biases": lambda: dense_config(attention_bias=True, mlp_bias=True),
    "qwen3": FAMILIES["qwen3"],
    "qwen3_moe": lambda: moe_config(experts=5),
    "dense-first": FAMILIES["qwen3_moe-dense-first"],
    "mixtral": FAMILIES["mixtral"],
    "shared": lambda: tf.Qwen2MoeConfig(
        **SMALL, moe_intermediate_size=24, shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "gpt_oss": FAMILIES["gpt_oss"],
    "olmoe": FAMILIES["olmoe"],
    "gemma3": FAMILIES["gemma3"],
    "wide": lambda: moe_config(experts=8, inner=64, **WIDE),
    "wide-dense": lambda: dense_config(**WIDE),
}  # fmt: skip
DIVIDED = {  # kinds of modules, and classes that stay whole
    "llama": ({"attention": 2, "mlp": 2}, set()),
    "biases": ({"attention": 2, "mlp": 2}, set()),
    "qwen3": ({"attention": 2, "mlp": 2}, set()),
    "qwen3_moe": ({"attention": 2, "experts": 2}, set()),
    "dense-first": ({"attention": 2, "mlp": 1, "experts": 1}, set()),
    "mixtral": ({"attention": 2, "experts": 2}, set()),
    "shared": ({"attention": 2, "mlp": 2, "experts": 2}, {"Qwen2MoeSparseMoeBlock"}),
    "gpt_oss": ({"experts": 2}, {"GptOssAttention"}),
    "olmoe": ({"experts": 2}, {"OlmoeAttention"}),
    "gemma3": ({"attention": 3, "mlp": 3}, set()),
    "wide": ({"attention": 2, "experts": 2}, set()),
    "wide-dense": ({"attention": 2, "mlp": 2}, set()),
}
SHARES = {"even": (0.5, 0.5), "uneven": (0.7, 0.3), "all on one": (1.0, 0.0)}
THREE = (0.5, 0.3, 0.2)


def biased(config, choose, folder, kinds=4):
    """A store whose routers choose what `choose` says of each token's kind, by a wide margin; the first channels, where
    no layer writes, carry the kind."""
    model = random_model(config)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.mul_(20)  # layers add little to it, as in trained models
        embedding[:, :kinds] = 6 * torch.eye(kinds)[torch.arange(len(embedding)) % kinds]
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:kinds] = 0
            layer.mlp.experts.down_proj[:, :kinds] = 0
            layer.mlp.gate.weight.mul_(0.01)
            for kind in range(kinds):
                for order, expert in enumerate(choose(kind)):
                    layer.mlp.gate.weight[expert, kind] = 1.0 - 0.3 * order
    model.save_pretrained(folder / "checkpoint")
    quantize_checkpoint(folder / "checkpoint", folder / "store")
    return str(folder / "store")


@pytest.fixture(scope="module")
def stores(made, tmp_path_factory):
    found = {name: str(made(config())[0].path) for name, config in MODELS.items()}
    four = moe_config(experts=4)
    apart = moe_config(experts=8, inner=64, **WIDE)
    found["sure"] = biased(apart, lambda k: (k, (k + 3) % 8), tmp_path_factory.mktemp("sure"), kinds=8)
    found["deep"] = str(made(moe_config(experts=5, layers=4))[0].path)
    found["b60 two each"] = biased(four, lambda k: (0, 1) if k < 2 else (2, 3), tmp_path_factory.mktemp("two"))
    found["b60 one rank"] = biased(four, lambda k: (2, 3), tmp_path_factory.mktemp("rank"))
    one = moe_config(experts=4, top_k=1)
    found["b60 one expert"] = biased(one, lambda k: (2,), tmp_path_factory.mktemp("expert"))
    return found


def two(stores):
    jobs = [
        Job(f"{model} {how}", stores[model], shares, cuts=CUTS, aux_coef=0.01 if model == "mixtral" else 0.0)
        for model in MODELS
        for how, shares in SHARES.items()
        if how == "uneven" or model in ("llama", "qwen3_moe", "mixtral")
    ]
    for model in ("qwen3_moe", "llama"):
        jobs += [
            Job(f"{model} kept", stores[model], (0.7, 0.3), cuts=CUTS, recompute="never"),
            Job(f"{model} dropout", stores[model], (0.7, 0.3), cuts=CUTS, dropout=0.3),
            Job(f"{model} unfused", stores[model], (0.7, 0.3), cuts=CUTS, dropout=0.3, fused=False),
        ]
    jobs += [Job(f"bf16 {how}", stores["sure"], shares, "bf16", cuts=CUTS) for how, shares in SHARES.items()]
    jobs += [Job(name, stores[name], (0.5, 0.5), cuts=CUTS) for name in stores if name.startswith("b60")]
    one_token = ((ROWS[0][0][:1], (False,)),), ((ROWS[0][0][:2], (False, True)),)
    return [
        *jobs,
        Job("bf16 dense", stores["wide-dense"], (0.7, 0.3), "bf16", cuts=CUTS),
        Job("bf16 kept", stores["sure"], (0.7, 0.3), "bf16", cuts=CUTS, recompute="never"),
        Job("bf16 single", stores["sure"], (0.9, 0.1), "bf16", cuts=one_token),
        Job("b60 single", stores["b60 one expert"], (0.5, 0.5), cuts=one_token),
        Job("again", stores["qwen3_moe"], (0.5, 0.5), cuts=CUTS, then=(0.7, 0.3)),
        Job("undone", stores["qwen3_moe"], (0.5, 0.5), cuts=CUTS, then=()),
        Job("streamed", stores["deep"], (0.7, 0.3), cuts=CUTS, streamed=True),
        *(
            Job(f"{model} as on a device", stores[model], (0.7, 0.3), cuts=CUTS, as_on_device=True)
            for model in ("mixtral", "gpt_oss", "wide-dense")
        ),
        Job("twenty", stores["qwen3_moe"], (0.7, 0.3), cuts=CUTS, updates=20),
        Job("scored", stores["qwen3_moe"], (0.7, 0.3), cuts=CUTS, score=True),
        Job("first layer later", stores["dense-first"], (0.7, 0.3), cuts=CUTS, targets=("experts.gate_up_proj",)),
    ]


def three(stores):
    return [
        *(Job(f"{model} three", stores[model], THREE, cuts=CUTS) for model in ("qwen3_moe", "llama", "mixtral")),
        Job("bf16 three", stores["sure"], THREE, "bf16", cuts=CUTS),
        Job("twenty three", stores["llama"], THREE, cuts=CUTS, updates=20),
    ]


@pytest.fixture(scope="module")
def found(stores):
    """Job -> what each rank found."""
    results = {}
    for world, jobs in ((2, two(stores)), (3, three(stores))):
        ranks = run_as_ranks(world, do_all, jobs, preload="tests.engine.divided_ranks")
        results |= {job.name: (job, [rank[job.name] for rank in ranks]) for job in jobs}
    return results


@pytest.fixture(scope="module")
def alone(found):
    """Job -> what one process finds; jobs that differ only in their shares are done once."""
    known = {}

    def get(name):
        key = replace(found[name][0], name="", shares=(), then=None, streamed=False, as_on_device=False)
        if key not in known:
            known[key] = do(key, None)
        return known[key]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks
    yield get
    torch.set_num_threads(threads)


def names(dtype):
    every = dict.fromkeys([*MODELS, "sure", "deep", "b60 two each", "b60 one rank", "b60 one expert"], "")
    return [job.name for job in (*two(every), *three(every)) if job.dtype == dtype]


FP32, BF16 = names("fp32"), names("bf16")


@pytest.mark.parametrize("name", FP32)
def test_loss_and_every_gradient_equal_one_process(name, found, alone):
    _, ranks = found[name]
    one = alone(name)
    assert sum(r["loss"] for r in ranks) == pytest.approx(one["loss"], rel=1e-5)
    assert sum(r["aux"] for r in ranks) == pytest.approx(one["aux"], rel=1e-5)
    assert sum(r["labels"] for r in ranks) == one["labels"]
    assert sum(r["flops"] for r in ranks) == pytest.approx(one["flops"], rel=1e-9)
    assert ranks[0]["start"] == pytest.approx(one["start"], rel=1e-5)
    for rank in ranks:
        worst = {n: relative_error(g, one["gradients"][n]) for n, g in rank["gradients"].items()}
        assert worst.keys() == one["gradients"].keys()
        assert max(worst.values()) < 1e-5, max(worst, key=worst.get)
        assert rank["same_base"]


@pytest.mark.parametrize("name", BF16)
def test_bf16_stays_close(name, found, alone):
    _, ranks = found[name]
    one = alone(name)
    assert sum(r["loss"] for r in ranks) == pytest.approx(one["loss"], rel=1e-2)
    flat = [torch.cat([g.flatten() for g in r["gradients"].values()]) for r in (*ranks, one)]
    assert relative_error(flat[0], flat[-1]) < 1e-2
    assert all(torch.equal(f, flat[0]) for f in flat[:-1])


@pytest.mark.parametrize("name", [name for name in BF16 if name != "bf16 dense"])
def test_bf16_experts_go_to_the_fused_kernels(name, found):
    assert all(r["fused_experts"] for r in found[name][1]), "nothing was shown: these ranks took the general way"


def test_sums_are_recorded(found):
    tokens, hidden, layers = sum(len(ids) for ids, _ in ROWS), 64, 2
    for rank in found["llama even"][1]:
        at_once = tokens * hidden * 4
        walks = 2 * 3 * layers - 1  # attention and MLP; forward, again, back (no gradient below the first attention)
        bare = 2 * layers * len(ROWS[0][0] + ROWS[1][0]) * hidden * 4
        heads = at_once + len(ROWS[0][0] + ROWS[1][0]) * hidden * 4 + 3 * 8 + 12  # and whether to keep
        assert rank["reduced_bytes"] == walks * at_once + bare + heads


@pytest.mark.parametrize("name", FP32 + BF16)
def test_all_ranks_hold_the_same_bits(name, found):
    _, (first, *others) = found[name]
    assert len(first["seen"]) > 0
    assert all(rank["seen"] == first["seen"] for rank in others)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_divided_is_said(model, found):
    _, ranks = found[f"{model} uneven"]
    for rank in ranks:
        facts = rank["facts"]["split"]
        assert facts["way"] == "experts"
        assert (facts["divided"], set(facts["whole"])) == DIVIDED[model]
        assert all(facts["whole"].values())
        assert facts["layer_bytes_read"] < facts["layer_bytes"]
    assert ranks[0]["facts"]["split"]["layer_bytes_read"] > ranks[1]["facts"]["split"]["layer_bytes_read"]


def test_a_rank_without_a_part_reads_nothing_of_it(found):
    facts = found["mixtral all on one"][1][1]["facts"]["split"]
    assert facts["parts"] == {"experts of 4": "none of 4", "key/value heads of 2": "none of 2"}
    assert facts["layer_bytes_read"] < 0.05 * facts["layer_bytes"]


@pytest.mark.parametrize("model", ["qwen3_moe", "llama", "bf16"])
def test_kept_and_recomputed_give_the_same_bits(model, found):
    kept, again = (found[f"{model} {how}"][1][0]["gradients"] for how in ("kept", "uneven"))
    assert all(torch.equal(g, again[n]) for n, g in kept.items())


@pytest.mark.parametrize("model", ["qwen3_moe", "llama"])
def test_dropout_has_an_effect(model, found):
    with_it, without = (found[f"{model} {how}"][1][0]["gradients"] for how in ("dropout", "uneven"))
    apart = [relative_error(g, without[n]) for n, g in with_it.items()]
    assert min(apart) > 0.05


@pytest.mark.parametrize("name", ["b60 one rank", "b60 one expert"])
def test_b60_a_rank_whose_experts_get_no_token_has_zero_gradients(name, found):
    """The tokens go to experts 2 and 3, or 2 alone; all are rank 1's."""
    first, second = found[name][1]
    stacks = [n for n in first["mine"] if ".experts." in n]
    assert len(stacks) == 8
    assert not any(first["mine"][n] for n in stacks)
    assert all(second["mine"][n] for n in stacks)
    (hits, *_), (mine, *_) = (list(r["hits"].values()) for r in (second, first))
    assert sum(mine) == 0
    assert hits[:2] == [0, 0]
    assert hits[2] > 0


def test_b60_each_rank_has_its_own_tokens(found):
    hits = [next(iter(r["hits"].values())) for r in found["b60 two each"][1]]
    assert [[n > 0 for n in h] for h in hits] == [[True, True, False, False], [False, False, True, True]]


def test_another_division_gives_the_same(found, alone):
    for rank in found["again"][1]:
        assert rank["facts_again"]["split"]["parts"] != rank["facts"]["split"]["parts"]
        one = alone("again")["gradients"]
        assert max(relative_error(g, one[n]) for n, g in rank["again"].items()) < 1e-5


def test_undone_the_bits_of_one_process_come_back(found, alone):
    one = alone("undone")["gradients"]
    for rank in found["undone"][1]:
        assert rank["facts_again"]["split"] is None
        assert all(torch.equal(g, one[n]) for n, g in rank["again"].items())


@pytest.mark.parametrize("name", ["twenty", "twenty three"])
def test_after_twenty_updates_the_adapter_is_the_same(name, found, alone):
    one = alone(name)
    assert one["last_loss"] < 0.98 * one["loss"], "nothing was learnt"
    for rank in found[name][1]:
        worst = {n: relative_error(p, one["adapter"][n]) for n, p in rank["adapter"].items()}
        assert max(worst.values()) < 1e-5, max(worst, key=worst.get)


def test_scores_and_answers_are_the_same(found, alone):
    one = alone("scored")
    for rank in found["scored"][1]:
        assert rank["answers"] == one["answers"]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(rank["scores"], one["scores"], strict=True))


@pytest.mark.parametrize(
    ("units", "shares", "wanted"),
    [
        (8, (0.5, 0.5), [(0, 4), (4, 8)]),
        (5, (0.7, 0.3), [(0, 4), (4, 5)]),
        (128, (1.0, 0.6, 0.3), [(0, 67), (67, 108), (108, 128)]),
        (3, (0.5, 0.5), [(0, 2), (2, 3)]),
        (4, (1.0, 0.0), [(0, 4), (4, 4)]),
        (1, (0.2, 0.3, 0.5), [(0, 0), (0, 0), (0, 1)]),
    ],
)
def test_apportion_is_by_largest_remainder(units, shares, wanted):
    assert apportion(units, shares) == wanted


@pytest.mark.parametrize(
    ("columns", "ranks", "wanted"), [(12288, 2, 64), (512, 2, 64), (128, 2, 16), (24, 2, 2), (7, 2, 1)]
)
def test_columns_stay_together(columns, ranks, wanted):
    assert columns_at_once(columns, ranks) == wanted


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.6, 0.1), (-0.5, 1.5), (0.0, 0.0)])
def test_shares_that_do_not_fit_are_refused(shares, made):
    class Two:
        members, index = (0, 1), 0

    engine = Engine.open(made(moe_config(experts=5))[0], dtype="fp32")
    with pytest.raises(UserError, match=r"split\.shares"):
        engine.divide(Two(), shares)

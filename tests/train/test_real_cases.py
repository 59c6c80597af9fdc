"""Fault cases on the real engine: cuts of a step, the balancing loss, uninitialised memory, rows without labels."""

import json
import math
import random
import shutil

import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.models.layout import pack_rows
from lamella.ranks.group import Ranks
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from lamella.train.assemble import assemble_parts, open_rows
from lamella.train.loop import train_run
from tests import fixtures
from tests.conftest import random_rows
from tests.oracle import load_reference, write_dequantised
from tests.train import fake
from tests.train.conftest import start_losses


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# --- B46: cuts


def gradient(engine, adapter, batches, label_tokens):
    """All gradients as one flat vector, and the logged loss."""
    for p in adapter.parameters().values():
        p.grad = None
    out = engine.step(batches, step_index=0, label_tokens=label_tokens, aux_coef=0.0)
    return torch.cat([p.grad.flatten() for p in adapter.parameters().values()]).double(), out.loss_sum / label_tokens


@pytest.fixture(scope="module")
def started(stores):
    """Engine and adapter whose B is not zero, so that every A has a gradient."""
    engine = Engine.open(Store.open(stores / "dense"), dtype="fp32", threads=1)
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4), 0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in adapter.parameters().items():
            if name.endswith("lora_B"):
                p.normal_(0, 0.05, generator=g)
    engine.attach(adapter)
    yield engine, adapter
    engine.close()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_b46_gradients_of_eight_rows_do_not_depend_on_the_cut(started, size):
    engine, adapter = started
    rnd = random.Random(2)
    rows = [
        ([rnd.randrange(500) for _ in range(6 + n)], [False] * 6 + [True] * n) for n in (1, 3, 7, 12, 19, 26, 33, 40)
    ]
    labels = sum(sum(mask) for _, mask in rows)

    def cut(n):
        return [pack_rows(rows[i : i + n], list(range(i, i + n))) for i in range(0, 8, n)]

    whole, whole_loss = gradient(engine, adapter, cut(8), labels)
    parts, parts_loss = gradient(engine, adapter, cut(size), labels)
    assert float((parts - whole).norm() / whole.norm()) < 1e-6
    assert float(parts.norm()) == pytest.approx(float(whole.norm()), rel=1e-6)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-6)


def test_b46_gradients_of_two_rows_with_fixed_losses(tmp_path):
    config = fake.make_config(tmp_path)
    options = fake.Options(label_counts=[2, 18], row_losses=[4.0, 1.0])
    data = fake.FakeData(config, options)
    found = {}
    for rows in (((0, 1),), ((0,), (1,))):
        engine = fake.FakeEngine(config, options, Ranks(0, 1))
        engine.adapter = fake.FakeAdapter(config)
        engine.adapter.p["attn.lora_B"].data.fill_(0.1)
        engine.adapter.p["experts.lora_B"].data.fill_(0.1)
        batches = [pack_rows([data.encoded[row] for row in batch], list(batch)) for batch in rows]
        out = engine.step(batches, step_index=0, label_tokens=20, aux_coef=0.0)
        assert out.loss_sum / 20 == pytest.approx(1.3)
        found[len(rows)] = torch.cat([p.grad.flatten() for p in engine.adapter.parameters().values()])
    assert float((found[1] - found[2]).norm() / found[1].norm()) < 1e-6


# --- B51: the balancing loss


def transformers_balancing_loss(store, folder, rows):
    """By transformers' own function, on the router logits of its own model, row after row without padding."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = load_reference(write_dequantised(store, folder))
    by_layer = [[], []]
    with torch.no_grad():
        for row in rows:
            out = model(input_ids=torch.tensor([list(row.input_ids)]), output_router_logits=True)
            for found, logits in zip(by_layer, out.router_logits, strict=True):
                found.append(logits)
    config = model.config
    logits = tuple(torch.cat(found) for found in by_layer)
    return float(load_balancing_loss_func(logits, config.num_experts, config.num_experts_per_tok))


@pytest.mark.parametrize("tokens", [4000, 60])
def test_b51_balancing_loss_is_the_one_of_transformers(real_config, tmp_path, tokens, capsys):
    config = real_config("moe", train={"steps": 1, "router_aux_coef": 0.01, "micro_batch_tokens": tokens})
    line = lines(train_run(config).run_dir)[0]
    said = capsys.readouterr().err
    assert "router balancing loss x 0.01: routers are frozen, so it can only change what adapters" in said
    parts = assemble_parts(config, Ranks(0, 1), False)
    parts.engine.close()
    rows = [parts.data.dataset.rows[row] for row in parts.data.rows_of(0).rows]
    wanted = transformers_balancing_loss(Store.open(config.store), tmp_path / "base", rows)
    assert line["aux"] == pytest.approx(wanted, rel=1e-5)
    assert line["total_loss"] == pytest.approx(line["loss"] + 0.01 * wanted, abs=1e-6)


@pytest.mark.parametrize(("asks", "coefficient"), [(True, 0.25), (False, 0.0)])
def test_b51_the_models_config_decides_when_the_run_does_not(real_config, stores, tmp_path, asks, coefficient, capsys):
    shutil.copytree(stores / "moe-hf", tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    model = json.loads(file.read_text()) | {"output_router_logits": asks, "router_aux_loss_coef": 0.25}
    file.write_text(json.dumps(model))
    quantize_checkpoint(tmp_path / "hf", tmp_path / "store", threads=1)
    config = real_config("moe", train={"steps": 2}).model_copy(update={"store": tmp_path / "store"})
    run_dir = train_run(config).run_dir
    line = lines(run_dir)[0]
    assert line["total_loss"] - line["loss"] == pytest.approx(coefficient * line["aux"], abs=1e-6)
    assert line["aux"] > 0.9
    assert ("router balancing loss x 0.25" in capsys.readouterr().err) == asks
    rows = {row["setting"]: row for row in json.loads((run_dir / "receipt.json").read_text())["comparison"]}
    assert rows["router_aux_coef"]["in_effect"] == coefficient


# --- B57: memory that nobody filled


@pytest.fixture
def nan_memory():
    """Every tensor that torch makes without filling it holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("store", ["dense", "moe"])
def test_b57_no_value_comes_from_fresh_memory(nan_memory, real_config, store):
    parts = assemble_parts(real_config(store), Ranks(0, 1), True)
    start = start_losses(parts)
    assert start["base"] == start["adapter"]
    assert math.isfinite(start["base"])
    assert all(torch.isfinite(p).all() for p in parts.adapter.parameters().values())
    batch = pack_rows(random_rows([9, 30]), [0, 1])
    adapted = parts.engine.logits(batch)
    parts.engine.attach(None)
    assert torch.isfinite(adapted).all()
    assert torch.equal(adapted, parts.engine.logits(batch))
    parts.engine.close()
    run_dir = train_run(real_config(store, train={"steps": 3})).run_dir
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines(run_dir))


@pytest.mark.parametrize("store", ["dense", "moe"])
def test_b57_two_reloads_give_the_outputs_from_before_saving(real_config, store, tmp_path):
    batch = pack_rows(random_rows([9, 30]), [0, 1])
    before = []

    def assemble(config, ranks, fresh):
        parts = assemble_parts(config, ranks, fresh)
        save = parts.adapter.adapter.save

        def looked_at(folder, **kwargs):
            before.append(parts.engine.logits(batch))
            save(folder, **kwargs)

        parts.adapter.adapter.save = looked_at
        return parts

    config = real_config(store, train={"steps": 4})
    run_dir = train_run(config, "auto", assemble).run_dir
    for _ in range(2):
        engine = Engine.open(Store.open(config.store), dtype="fp32", threads=1)
        bare = engine.logits(batch)
        engine.attach(Adapter.load(run_dir, engine.skeleton))
        after = engine.logits(batch)
        engine.close()
        assert torch.equal(after, before[-1])
        assert (after - bare).abs().max() > 0.01


# --- B11: rows that lose their labels


def rows_of_length(prompt_tokens, answer_tokens, count):
    """prompt/completion rows of so many tokens: letters that the tokenizer never merges."""
    letters = "jqxz"
    rnd = random.Random(3)
    return [
        {"prompt": "".join(rnd.choice(letters) for _ in range(prompt_tokens)),
         "completion": "".join(rnd.choice(letters) for _ in range(answer_tokens))}
        for _ in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain_store(tmp_path_factory):
    """A base without chat template."""
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = fixtures.make_tokenizer(chat_template=None)
    fixtures.write_checkpoint(folder / "hf", fixtures.dense_config(), tokenizer=tokenizer)
    quantize_checkpoint(folder / "hf", folder / "store", threads=1)
    return folder / "store"


def test_b11_start_loss_is_that_of_guessing(plain_store, real_config, tmp_path):
    data = fixtures.write_jsonl(tmp_path / "r.jsonl", rows_of_length(60, 5, 8))
    config = real_config("dense", data={"train": [str(data)], "max_tokens": 128}, train={"steps": 2})
    config = config.model_copy(update={"store": plain_store})
    run_dir = train_run(config).run_dir
    start = json.loads((run_dir / "receipt.json").read_text())["start"]
    assert start["base"] == pytest.approx(math.log(512), rel=0.1)
    assert lines(run_dir)[0]["loss"] == pytest.approx(math.log(512), rel=0.1)


def test_b11_one_row_without_labels_among_seven(plain_store, real_config, tmp_path):
    rows = rows_of_length(20, 5, 7)
    rows.insert(3, rows_of_length(60, 5, 1)[0])
    data = fixtures.write_jsonl(tmp_path / "r.jsonl", rows)
    settings = {"train": [str(data)], "max_tokens": 60}
    train = {"rows_per_step": 1, "epochs": 2}
    config = real_config("dense", data=settings, train=train).model_copy(update={"store": plain_store})
    with pytest.raises(UserError, match=r"1 of 8 rows are over data\.max_tokens = 60"):
        train_run(config)
    settings |= {"too_long": "drop", "max_drop_share": 0.2}
    config = real_config("dense", data=settings, train=train).model_copy(update={"store": plain_store})
    run_dir = train_run(config, "fresh").run_dir
    tree, steps = json.loads((run_dir / "receipt.json").read_text()), lines(run_dir)
    assert (tree["status"], tree["data"]["rows_kept"], tree["data"]["dropped"]) == ("ok", 7, {"too long": 1})
    assert len(steps) == 14
    assert all(step["loss"] > 1 and step["label_tokens"] > 0 and step["skipped"] is None for step in steps)


def test_plain_rows_have_the_length_asked(plain_store, real_config, tmp_path):
    from lamella.data.encode import load_tokenizer

    data = fixtures.write_jsonl(tmp_path / "r.jsonl", rows_of_length(60, 5, 8))
    config = real_config("dense", data={"train": [str(data)]}).model_copy(update={"store": plain_store})
    rows = open_rows(config, load_tokenizer(plain_store)).dataset.rows
    assert {(row.tokens, row.label_tokens) for row in rows} == {(66, 6)}  # with eos

"""From training to generation: an overfitted model says its answers and stops."""

import pytest

from lamella.adapter import Adapter
from lamella.data.dataset import encode_dataset
from lamella.data.encode import Encoder, load_tokenizer
from lamella.engine import Engine
from lamella.eval.encoder import StoreEncoder
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from lamella.train.loop import train_run
from tests import fixtures


@pytest.fixture(scope="session")
def odd_stores(tmp_path_factory):
    """Stores whose tokenizer's pad is its eos, and one without any pad token."""
    folder = tmp_path_factory.mktemp("odd")
    for name in ("pad-is-eos", "no-pad"):
        tokenizer = fixtures.make_tokenizer()
        tokenizer.pad_token = tokenizer.eos_token if name == "pad-is-eos" else None
        # std: logits of the frozen random head must be able to reach a sure answer
        fixtures.write_checkpoint(folder / f"{name}-hf", fixtures.dense_config(), tokenizer=tokenizer, std=0.3)
        quantize_checkpoint(folder / f"{name}-hf", folder / name, threads=1)
    return folder


@pytest.mark.parametrize("name", ["pad-is-eos", pytest.param("no-pad", marks=pytest.mark.slow)])
def test_b13_overfitted_model_stops_after_every_answer(name, odd_stores, real_config):
    config = real_config(
        "dense", lora={"rank": 16}, train={"steps": 200, "rows_per_step": 12, "learning_rate": 0.02}
    ).model_copy(update={"store": odd_stores / name})
    result = train_run(config)
    store = Store.open(config.store)
    engine = Engine.open(store, dtype="fp32", threads=1)
    engine.attach(Adapter.load(result.run_dir, engine.skeleton))
    tokenizer = load_tokenizer(config.store)
    encoder = Encoder(tokenizer)
    rows = fixtures.chat12()
    answers = [tokenizer.encode(r["messages"][1]["content"], add_special_tokens=False) for r in rows]
    prompts = [encoder.encode_prompt(r["messages"][:1]) for r in rows]
    made = engine.generate(prompts, max(map(len, answers)) + 20, set(encoder.stop_ids))
    for row, answer, generation in zip(rows, answers, made, strict=True):
        assert generation.finish == "stop", row["id"]
        assert len(generation.ids) + 1 <= len(answer) + 1
        assert tokenizer.decode(generation.ids) == row["messages"][1]["content"]


def test_b12_training_evaluation_and_generation_share_their_prompt_ids(real_config):
    config = real_config("dense")
    tokenizer = load_tokenizer(config.store)
    dataset = encode_dataset(config.data, tokenizer)
    encoder = StoreEncoder.open(config.store)
    for row, encoded in zip(fixtures.chat12(), dataset.rows, strict=True):
        prompt = dataset.encoder.encode_prompt(row["messages"][:1])
        first_label = list(encoded.label_mask).index(1)
        assert list(encoded.input_ids)[:first_label] == list(prompt)
        assert list(encoder.prompt_ids(row["messages"][:1])) == list(prompt)

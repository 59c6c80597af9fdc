"""Tiny real stores and rows, made once per session."""

import pytest

from lamella.config import build_run_config
from lamella.store.quantize import quantize_checkpoint
from tests import fixtures


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    tokenizer = fixtures.make_tokenizer()
    for name, config in (("dense", fixtures.dense_config(layers=4)), ("moe", fixtures.moe_config())):
        fixtures.write_checkpoint(folder / f"{name}-hf", config, tokenizer=tokenizer)
        quantize_checkpoint(folder / f"{name}-hf", folder / name, threads=1)
    fixtures.write_jsonl(folder / "rows.jsonl", fixtures.chat12())
    return folder


@pytest.fixture
def real_config(stores, tmp_path):
    """`make(store, **sections)` -> RunConfig in fp32 on one thread."""

    def make(store, **sections):
        tree = {"store": str(stores / store), "runs_dir": str(tmp_path), **sections}
        tree["data"] = {"train": [str(stores / "rows.jsonl")], **sections.get("data", {})}
        tree["train"] = {"rows_per_step": 4, "learning_rate": 0.01, "warmup_steps": 0, **sections.get("train", {})}
        tree["compute"] = {"dtype": "fp32", "threads": 1, **sections.get("compute", {})}
        tree["lora"] = {"rank": 4, **sections.get("lora", {})}
        return build_run_config(tree)

    return make


def start_losses(parts):
    """What the first step measures of the base and of the adapter before training."""
    batches = parts.data.pack(parts.data.rows_of(0).rows)
    labels = sum(int(batch.score_tokens.numel()) for batch in batches)
    return parts.engine.step(batches, step_index=0, label_tokens=labels, beside_base=True).start

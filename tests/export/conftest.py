"""Adapters of tiny models in every layout, made once; a run with its own chat template."""

import pytest

from lamella.adapter.layouts import LAYOUTS
from lamella.adapter.places import Names, places_of
from lamella.adapter.read import AdapterFile
from lamella.config import build_run_config
from lamella.engine import Engine
from lamella.export.adapter_base import open_base
from lamella.export.adapters import write_layout
from lamella.store.quantize import quantize_checkpoint
from lamella.train.loop import train_run
from tests import fixtures
from tests.engine.test_families import FAMILIES, trained_adapter
from tests.export.tuned import tune


def write(layout, file, places, folder, base, names):
    """An adapter in another layout, read back."""
    folder.mkdir()
    write_layout(layout, file, places, folder, base)
    return AdapterFile(folder, base.skeleton, names=names)


@pytest.fixture(scope="session")
def exported(made, tmp_path_factory):
    """exported(model, rslora) -> (base, places, names, {layout: AdapterFile of the adapter in it}, ours)."""
    cache = {}

    def make(model, rslora=False):
        if (model, rslora) not in cache:
            store, _ = made(FAMILIES[model]())
            folder = tmp_path_factory.mktemp(model)
            engine = Engine.open(store, dtype="fp32", threads=1)
            ours = trained_adapter(engine, rslora=rslora)
            ours.save(folder / "ours", facts={"base_fingerprint": store.manifest.source_fingerprint})
            base = open_base(store.path)
            places = places_of(base.skeleton, base.shapes)
            names = Names(base.skeleton, places_of(base.skeleton))
            first = AdapterFile(folder / "ours", base.skeleton, names=names)
            files = {name: write(x, first, places, folder / name, base, names) for name, x in LAYOUTS.items()}
            cache[model, rslora] = base, places, names, files, ours
        return cache[model, rslora]

    return make


T1 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
"""Of training; the base's tokenizer holds CHATML."""


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """(run folder, store) of a tiny dense model, trained two steps with T1."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = fixtures.make_tokenizer(eos="<|eos|>")
    fixtures.write_checkpoint(folder / "checkpoint", fixtures.dense_config(eos_token_id=1), tokenizer=tokenizer)
    quantize_checkpoint(folder / "checkpoint", folder / "store", threads=1)
    fixtures.write_jsonl(folder / "rows.jsonl", fixtures.chat12())
    (folder / "t1.jinja").write_text(T1)
    config = build_run_config({
        "store": str(folder / "store"), "runs_dir": str(folder / "runs"), "compute": {"dtype": "fp32", "threads": 1},
        "data": {"train": [str(folder / "rows.jsonl")], "chat_template": str(folder / "t1.jinja"), "system": "Be short."},
        "train": {"rows_per_step": 4, "steps": 2, "warmup_steps": 0, "learning_rate": 0.01}, "lora": {"rank": 4},
    })  # fmt: skip
    return train_run(config).run_dir, folder / "store"


@pytest.fixture(scope="session")
def tuned(made, tmp_path_factory):
    """tuned(config, **of the adapter) -> Tuned, cached."""
    cache = {}

    def make(config, **over):
        key = config.to_json_string(), tuple(sorted(over.items()))
        if key not in cache:
            cache[key] = tune(*made(config), tmp_path_factory.mktemp("adapter"), **over)
        return cache[key]

    return make

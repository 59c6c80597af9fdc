"""Every fast path equals its reference, through the engine.

Truth: transformers + PEFT in float32, on the base rounded to bf16 and an adapter of bf16 values, so that both sides
start from the same numbers. The plain path: the engine on torch alone, in a process of its own. In bf16 the fast path
may be as far from the truth as the plain one is, with a margin, and within 1e-2 over all tensors; in fp32 both are equal.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella import kernels
from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.conftest import random_rows
from tests.engine.plain_gradients import gradients
from tests.engine.test_families import as_file, reference_gradients
from tests.fixtures import dense_config, moe_config, random_model
from tests.oracle import relative_error, write_dequantised

REPO = Path(__file__).parents[2]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
WIDE = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=256)
ROWS = random_rows((40, 7, 64, 23, 31), seed=4)
CUTS = {"two": [ROWS[:2], ROWS[2:]], "single rows": [[row] for row in ROWS]}
DTYPES = ("bf16", "fp32")


@dataclass(frozen=True)
class Case:
    """A model and its adapter; `wide` sizes are multiples that vector and tile kernels like, the others are not."""

    experts: int
    wide: bool
    targets: tuple[str, ...] | str
    rank: int

    def config(self):
        sizes = WIDE if self.wide else {}
        if not self.experts:
            return dense_config(layers=3, **sizes)
        inner = 64 if self.wide else 24
        return moe_config(experts=self.experts, top_k=2, inner=inner, layers=3, **sizes)


CASES = {
    "dense-attention": Case(0, True, ATTENTION, 16),
    "dense-all": Case(0, True, "all-linear", 16),
    "dense-odd": Case(0, False, "all-linear", 4),
    "moe-attention": Case(8, True, ATTENTION, 16),
    "moe-experts": Case(8, True, "all-linear", 16),
    "moe-odd": Case(4, False, "all-linear", 4),
}


def sure_router(model, experts):
    """Each token's two experts follow from its id by a wide margin: rounding must not choose others.

    The first `experts` channels carry the kind of token; no layer writes there, and the router reads little else.
    """
    kinds = torch.eye(experts) + 0.6 * torch.eye(experts).roll(1, dims=1)
    embedding = model.get_input_embeddings().weight
    embedding[:, :experts] = 6 * kinds[torch.arange(len(embedding)) % experts]
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:experts] = 0
        layer.mlp.experts.down_proj[:, :experts] = 0
        layer.mlp.gate.weight.mul_(0.05)
        layer.mlp.gate.weight[:, :experts] += 0.3 * torch.eye(experts)


def start_adapter(engine, case, dropout=0.0):
    """B away from zero, so that every gradient is exercised; values that bf16 holds."""
    settings = LoraConfig(rank=case.rank, alpha=2 * case.rank, targets=case.targets, dropout=dropout)
    adapter = Adapter.create(engine.skeleton, settings, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in adapter.parameters().items():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
                if case.experts and ("o_proj" in name or "down_proj" in name):
                    p[..., : case.experts, :] = 0  # the router's channels
            p.copy_(p.bfloat16())
    engine.attach(adapter)
    return adapter


@dataclass(frozen=True)
class Made:
    """A case's store, adapter folder and true gradients (fp32, by parameter, experts as in PEFT's file)."""

    store: Store
    adapter: Path
    truth: dict[str, torch.Tensor]

    def open(self, dtype, **settings) -> Engine:
        engine = Engine.open(self.store, dtype=dtype, **settings)
        engine.attach(Adapter.load(self.adapter, engine.skeleton))
        return engine


def make(case: Case, folder: Path) -> Made:
    model = random_model(case.config())
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)  # layers add little to it, as in trained models
        if case.experts:
            sure_router(model, case.experts)
    model.to(torch.bfloat16).save_pretrained(folder / "checkpoint")
    quantize_checkpoint(folder / "checkpoint", folder / "store")
    store = Store.open(folder / "store")
    base = write_dequantised(store, folder / "base")
    rounded = {name: t.bfloat16().float() for name, t in load_file(base / "model.safetensors").items()}
    save_file(rounded, base / "model.safetensors", metadata={"format": "pt"})
    engine = Engine.open(store, dtype="bf16")
    adapter = start_adapter(engine, case)
    _, truth = reference_gradients(adapter, base, folder / "adapter", ROWS)
    return Made(store, folder / "adapter", truth)


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fast")
    return {name: make(case, folder / name) for name, case in CASES.items()}


@pytest.fixture(scope="session")
def plain(cases, tmp_path_factory):
    """(case, dtype) -> gradients of the engine on plain torch, all from one process."""
    folder = tmp_path_factory.mktemp("plain")
    jobs = [
        {"store": str(made.store.path), "adapter": str(made.adapter), "dtype": dtype, "rows": ROWS,
         "out": str(folder / f"{name}-{dtype}.safetensors")}
        for name, made in cases.items() for dtype in DTYPES
    ]  # fmt: skip
    env = {**os.environ, "LAMELLA_KERNELS": "torch", "LAMELLA_ATTENTION": "torch", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "tests.engine.plain_gradients"]
    done = subprocess.run(
        command, input=json.dumps(jobs), text=True, capture_output=True, env=env, cwd=REPO, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {(n, d): load_file(folder / f"{n}-{d}.safetensors") for n in cases for d in DTYPES}


def errors(engine, found, truth):
    return {name: relative_error(g, truth[name]) for name, g in as_file(engine.adapter, found).items()}


def flat(found):
    return torch.cat([found[name].flatten() for name in sorted(found)])


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_as_near_to_the_truth_as_plain_torch(name, cases, plain):
    assert kernels.backend() != "torch", "nothing to compare: the C kernels are not in use"
    made = cases[name]
    engine = made.open("bf16")
    fast = errors(engine, gradients(engine, [ROWS]), made.truth)
    slow = errors(engine, plain[name, "bf16"], made.truth)
    assert fast.keys() == slow.keys() == made.truth.keys()
    for key, error in fast.items():
        assert error <= 1.5 * slow[key] + 1e-3, (key, error, slow[key])
        assert error <= 2e-2, (key, error, slow[key])
    found = as_file(engine.adapter, gradients(engine, [ROWS]))
    assert relative_error(flat(found), flat(made.truth)) <= 1e-2


@pytest.mark.parametrize("name", CASES)
def test_fp32_equals_plain_torch(name, cases, plain):
    """`test_families.py` compares fp32 with the truth; the base is not rounded to bf16 there."""
    engine = cases[name].open("fp32")
    fast = errors(engine, gradients(engine, [ROWS]), as_file(engine.adapter, plain[name, "fp32"]))
    assert max(fast.values()) < 1e-5, max(fast, key=fast.get)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_twice_and_in_another_engine(name, dtype, cases):
    engine = cases[name].open(dtype)
    first = gradients(engine, CUTS["two"])
    assert all(g.norm() > 0 for g in first.values())
    assert same_bits(first, gradients(engine, CUTS["two"]))
    assert same_bits(first, gradients(cases[name].open(dtype), CUTS["two"]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kept_recomputed_resident_and_streamed_give_the_same_bits(name, dtype, cases):
    made = cases[name]
    kept = made.open(dtype, recompute="never")
    wanted = gradients(kept, CUTS["two"])
    assert (kept.walk.steps_kept, kept.walk.steps_recomputed) == (1, 0)
    layers = len(kept.skeleton.layers)
    smallest = kept.walk.weights.residency.fixed_bytes + 2 * max(made.store.group_bytes(i) for i in range(layers))
    for settings in ({"recompute": "always"}, {"recompute": "auto", "budget_bytes": smallest}):
        engine = made.open(dtype, **settings)
        assert same_bits(wanted, gradients(engine, CUTS["two"])), settings
        assert (engine.walk.steps_kept, engine.walk.steps_recomputed) == (0, 1)
        assert len(engine.walk.weights.residency.streamed) == (layers if "budget_bytes" in settings else 0)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_micro_batches_give_the_same_within_rounding(name, dtype, cut, cases):
    engine = cases[name].open(dtype)
    whole, parts = gradients(engine, [ROWS]), gradients(engine, CUTS[cut])
    assert relative_error(flat(parts), flat(whole)) < {"bf16": 1e-2, "fp32": 1e-5}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dense-all", "moe-experts"])
def test_dropout_is_replayed(name, dtype, cases):
    found = []
    for recompute in ("never", "always"):
        engine = Engine.open(cases[name].store, dtype=dtype, recompute=recompute)
        start_adapter(engine, CASES[name], dropout=0.2)
        found.append(gradients(engine, CUTS["two"]))
    assert same_bits(*found)
    without = gradients(cases[name].open(dtype), CUTS["two"])
    assert relative_error(flat(found[0]), flat(without)) > 0.05, "dropout had no effect"

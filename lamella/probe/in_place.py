"""What a layer takes beyond its kernels, seen in steps of small models.

Between kernels that stream megabytes the interpreter and torch find their own code and data gone from the caches, so a call
costs several times what it costs in a loop of calls. It is therefore measured where it happens: steps of two small models
(dense, and with experts) are taken by the engine, and from each of their spans the time that `KernelTimes` gives for its
kernels is taken off. What is left depends little on sizes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.forecast.describe import shape_of
from lamella.forecast.layers import pieces_of
from lamella.forecast.measured import KernelTimes
from lamella.forecast.shape import ModelShape
from lamella.forecast.trainable import sites_of
from lamella.hardware.machine import FixedCost, FixedWork, KernelRates
from lamella.models.layout import PackedBatch, pack_rows
from lamella.models.names import checkpoint_shapes
from lamella.models.skeleton import Skeleton, read_config
from lamella.probe.own import updating
from lamella.probe.timing import Clock
from lamella.store.quantize import QuantizeSettings
from lamella.store.reader import Store
from lamella.store.synth import synthesize_store
from lamella.trace.recorder import RECORDER

TOKENS, LABELS, LAYERS = 64, 32, 4
RESERVE_S, RESERVE_QUICK_S = 10.0, 1.0
"""Left for the disk and for sums among ranks."""
WARM_UP = 2
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 2048, "hidden_size": 512,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1536, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **DENSE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 192, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """Steps of one small model: with experts or dense, LoRA on all linear layers or on attention, recomputed or kept."""

    experts: bool
    everywhere: bool
    recompute: bool


QUICK = (Trial(False, False, False), Trial(True, False, False))
FULL = tuple(Trial(e, *rest) for e in (False, True) for rest in ((False, False), (True, False), (False, True)))


def measure_in_place(
    rates: KernelRates, dtype: torch.dtype, quick: bool, on_progress: Callable[[str], None], clock: Clock | None = None
) -> tuple[FixedCost, ...]:
    """Fixed costs of this CPU, given the rates of its kernels. When `clock` runs short, of fewer settings: a plan then takes
    as many calls as such work is made of."""
    clock = clock or Clock()
    reserve_s = RESERVE_QUICK_S if quick else RESERVE_S
    found: dict[tuple[FixedWork, bool, bool], list[float]] = defaultdict(list)
    kept_steps = RECORDER.steps.maxlen or 0
    try:
        RECORDER.keep(1)
        with tempfile.TemporaryDirectory(prefix="lamella-probe-") as scratch:
            for config in (DENSE, EXPERTS):
                experts = config is EXPERTS
                on_progress(f"steps of a small model{' with experts' if experts else ''}")
                if clock.over(reserve_s):
                    continue
                store = _make_store(Path(scratch) / str(experts), config)
                for trial in QUICK if quick else FULL:
                    if trial.experts == experts and not clock.over(reserve_s):
                        for (work, layer), seconds in _try(trial, store, rates, dtype, 2 if quick else 5).items():
                            found[work, experts and layer, trial.everywhere and layer].append(seconds)
    finally:
        RECORDER.keep(kept_steps)
        RECORDER.take_totals()
    return tuple(FixedCost(work=work, experts=experts, everywhere=everywhere, seconds=max(statistics.mean(seconds), 0.0))
                 for (work, experts, everywhere), seconds in found.items())  # fmt: skip


def _make_store(folder: Path, config: dict[str, Any]) -> Store:
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(config))
    synthesize_store(
        file, folder, lambda f: checkpoint_shapes(Skeleton(read_config(f), torch.bfloat16)), QuantizeSettings()
    )
    return Store.open(folder)


def _batch(generator: torch.Generator) -> PackedBatch:
    ids = torch.randint(5, int(DENSE["vocab_size"]), (TOKENS,), generator=generator).tolist()
    return pack_rows([(ids, [i >= TOKENS - LABELS for i in range(TOKENS)])])


def _try(
    trial: Trial, store: Store, rates: KernelRates, dtype: torch.dtype, steps: int
) -> dict[tuple[FixedWork, bool], float]:
    """What each work took beyond its kernels, medians over steps and layers; and whether it is a layer's."""
    targets: Any = "all-linear" if trial.everywhere else ATTENTION
    lora = LoraConfig(rank=16, targets=targets)
    engine = Engine.open(
        store, dtype="bf16" if dtype == torch.bfloat16 else "fp32", recompute="always" if trial.recompute else "never"
    )
    adapter = Adapter.create(engine.skeleton, lora, 0)
    engine.attach(adapter)
    parameters = list(adapter.parameters().values())
    update = updating(parameters)
    shape = shape_of(store.path)
    sites = sites_of(shape, lora)
    kernels = rates.model_copy(update={"call_s": 0.0, "fixed": ()})  # nothing but kernels
    forms = pieces_of(shape, sites), pieces_of(shape, sites, kept=True)
    times = KernelTimes(*forms, shape.hidden, shape.vocab, kernels, 1e12)
    generator = torch.Generator().manual_seed(0)
    seen: dict[tuple[FixedWork, bool], list[float]] = defaultdict(list)
    for step in range(steps + WARM_UP):
        batch = _batch(generator)
        RECORDER.begin_step(step)
        start_s = time.perf_counter()
        engine.step([batch], step_index=step, label_tokens=LABELS)
        step_s = time.perf_counter() - start_s
        update()
        update_s = time.perf_counter() - start_s - step_s
        for p in parameters:
            p.grad = None
        if step >= WARM_UP:
            seen["update", False].append((update_s - times.update(sum(s.parameters for s in sites))) / times.tensors)
            _add_step(seen, times, shape, step_s, trial.recompute)
    return {key: statistics.median(values) for key, values in seen.items()}


def _add_step(
    seen: dict[tuple[FixedWork, bool], list[float]],
    times: KernelTimes,
    shape: ModelShape,
    step_s: float,
    recompute: bool,
) -> None:
    """The last step's spans, without their kernels' time; what is in none of them belongs to the prologue."""
    lengths: Sequence[int] = (TOKENS,)
    binds: list[float] = []
    spent_s = 0.0
    for span in RECORDER.steps[-1].spans:
        if span.lane != "main":
            continue
        taken_s = span.end_s - span.start_s
        if span.cause == "dequantise":
            binds.append(taken_s)
        if span.cause != "compute":
            continue
        what, _, number = span.name.partition(" ")
        if what == "embed":
            continue
        layer = int(number) if number else 0
        spent_s += taken_s
        if what == "head":
            seen["head", False].append(taken_s - times.head(LABELS))
        elif what == "forward":
            kernels_s = sum(times.forward(layer, lengths).values()) + times.hang(layer)
            seen["forward", True].append(taken_s - kernels_s)
        else:
            kernels_s = sum(times.backward(layer, lengths, recompute).values()) + times.hang(layer)
            seen["backward_again" if recompute else "backward", True].append(taken_s - kernels_s)
    layers = len(shape.layers)
    kernels_s = statistics.mean(times.dequantise(i) for i in range(layers))
    seen["bind", True] += [taken_s - kernels_s for taken_s in binds]
    seen["prologue", False].append(step_s - spent_s - sum(binds) - times.prologue(TOKENS))

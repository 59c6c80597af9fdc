"""What the ranks of a divided group do in `test_divided.py`: a list of jobs, in processes forked from one server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from lamella.adapter import Adapter
from lamella.engine import Engine
from lamella.engine.boundary import Boundaries, GradientSums
from lamella.engine.walk import Walk
from lamella.engine.weights import LayerWeights
from lamella.models.divisible import is_experts
from lamella.models.experts_cpu import can_fuse
from lamella.models.layout import pack_rows
from lamella.models.skeleton import Skeleton, load_config
from lamella.ranks.group import Group, Ranks
from lamella.store.reader import Store
from lamella.trace.recorder import RECORDER
from tests.engine.test_families import trained_adapter
from tests.engine.test_weights import Recording


@dataclass(frozen=True)
class Job:
    """One engine, divided by `shares` (none: whole), on these micro-batches of rows; `then`: other shares for a second
    step, or `()` for none; `updates`: optimizer steps; `as_on_device`: layers, boundaries and gradients are copied as on
    a GPU."""

    name: str
    store: str
    shares: tuple[float, ...] = ()
    dtype: str = "fp32"
    cuts: tuple = ()  # of rows: hashable, as a key
    targets: tuple[str, ...] | str = "all-linear"
    dropout: float = 0.0
    recompute: str = "always"
    fused: bool = True
    aux_coef: float = 0.0
    then: tuple[float, ...] | None = None
    updates: int = 0
    score: bool = False
    streamed: bool = False
    as_on_device: bool = False


def prepared_adapter(engine, job: Job) -> Adapter:
    """B away from zero, so that every gradient is exercised."""
    return trained_adapter(engine, job.targets, dropout=job.dropout)


def _bits(tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def _listen(walk) -> list[str]:
    """Digests of every layer's output and input gradient, as they come."""
    seen: list[str] = []
    run, back = walk._run, walk.backward_one

    def heard_run(*args):
        out = run(*args)
        seen.append(_bits(out[0]))
        return out

    def heard_back(*args):
        grad = back(*args)
        seen.append(_bits(grad))
        return grad

    walk._run, walk.backward_one = heard_run, heard_back
    return seen


def _sum(adapter, group) -> None:
    for p in adapter.parameters().values():
        if group is not None:
            group.all_reduce_(p.grad)


def _step(engine, job: Job, group, index: int = 0):
    adapter = engine.adapter
    for p in adapter.parameters().values():
        p.grad = None
    labels = sum(sum(mask) for cut in job.cuts for _, mask in cut)
    batches = [pack_rows(cut) for cut in job.cuts]
    out = engine.step(batches, step_index=index, label_tokens=labels, aux_coef=job.aux_coef, beside_base=index == 0)
    mine = {n: p.grad is not None and bool(p.grad.any()) for n, p in adapter.parameters().items()}
    assert all(p.grad is not None for p in adapter.parameters().values()), "a gradient is missing, not zero"
    reduced_bytes = RECORDER.totals.nbytes.get("reduce", 0)
    _sum(adapter, group)
    return out, mine, {n: p.grad.clone() for n, p in adapter.parameters().items()}, reduced_bytes


def opened(job: Job) -> Engine:
    return Engine.open(Store.open(job.store), dtype=job.dtype, recompute=job.recompute, fused=job.fused)


def on_slots(job: Job) -> Engine:
    """Copies arrive late, as on a device."""
    store = Store.open(job.store)
    skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
    weights = LayerWeights(store, skeleton, torch.device("cpu"), copier=Recording(), host_bytes=0)
    walk = Walk(skeleton, weights)
    walk.boundaries, walk.gradients = Boundaries(Recording, 0), GradientSums(Recording())
    return Engine(store, skeleton, walk, keep_bytes=0, recompute="always")


def _fused_experts(engine) -> bool:
    """Whether the experts of the layer at work go to the fused kernels in bf16."""
    modules = [m for m in engine.skeleton.layers[engine.walk.weights.bound].modules() if is_experts(m)]
    x = torch.zeros(1, 1, dtype=torch.bfloat16)
    return bool(modules) and all(can_fuse(m, x, {}) for m in modules)


def do(job: Job, group: Group | None) -> dict:
    engine = on_slots(job) if job.as_on_device else opened(job)
    if group is not None:
        engine.divide(group, job.shares)
    adapter = prepared_adapter(engine, job)
    if job.streamed:
        weights = engine.walk.weights
        weights.limit(weights.residency.fixed_bytes + 2 * max(weights.layer_bytes()))
        assert len(weights.residency.streamed) == len(engine.skeleton.layers)
        if group is not None and group.index == 0:  # one rank alone measures what steps take
            engine.budget_bytes = 1 << 40
            engine.recompute = "never"
            assert engine.fit([[30]], [10]) is not None
    RECORDER.begin_step(0)
    before = engine.walk.weights.resident_checksum()
    seen = _listen(engine.walk)
    out, mine, gradients, reduced_bytes = _step(engine, job, group)
    found = {
        "loss": out.loss_sum, "aux": out.aux, "labels": out.label_tokens, "flops": out.flops, "start": out.start,
        "gradients": gradients, "mine": mine, "seen": list(seen), "facts": engine.facts(), "hits": engine.walk.expert_hits(),
        "reduced_bytes": reduced_bytes, "fused_experts": _fused_experts(engine),
        "same_base": engine.walk.weights.resident_checksum() == before,
    }  # fmt: skip
    if job.then is not None:
        engine.divide(group if job.then else None, job.then)
        adapter_sum = group if job.then else None
        found["again"] = _step(engine, job, adapter_sum)[2]
        found["facts_again"] = engine.facts()
    if job.score:
        found["scores"] = engine.score([pack_rows(cut) for cut in job.cuts])
        found["answers"] = [g.ids for g in engine.generate([cut[0][0][:3] for cut in job.cuts], 4, set())]
    if job.updates:
        optimizer = torch.optim.AdamW(adapter.parameters().values(), lr=1e-3)
        for k in range(job.updates):
            found["last_loss"] = _step(engine, job, group, k + 1)[0].loss_sum
            optimizer.step()
        found["adapter"] = adapter.state()
    engine.close()
    return found


def do_all(ranks: Ranks, jobs: list[Job]) -> dict[str, dict]:
    """What this rank found in every job."""
    group = ranks.subgroup(range(ranks.world))
    return {job.name: do(job, group) for job in jobs}

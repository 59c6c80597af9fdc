"""Whether another engine makes of an export what Lamella makes of the adapter on its base.

Both compute log p of tokens at the last positions of real prompts. The export passes when they are near enough, when the
engine's answer differs from the base's, and when it is nearer to the tuned model than to the base: an adapter that a
server accepts and ignores fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lamella.adapter import Adapter
from lamella.data.steps import pack_lengths
from lamella.engine import Engine
from lamella.errors import RunFailed, UserError
from lamella.export.engines.child import LLAMA_CPP, MLX, TRANSFORMERS
from lamella.export.engines.seen import Answer, Asked, Seen, seen_whole
from lamella.export.engines.server import TransformersServe, Vllm
from lamella.models.layout import pack_rows
from lamella.store.reader import Store

POSITIONS = 16
BATCH_TOKENS = 4096
EXACT = 1e-3
"""Largest difference of log p that an export in fp32 may show in an engine that computes in fp32."""


class Target(Protocol):
    """An engine that tells log-probabilities."""

    @property
    def name(self) -> str: ...

    def interpreter(self, python: Path | None) -> Path: ...

    def answer(self, asked: Asked, base_too: bool, python: Path | None) -> Answer: ...


SERVE = TransformersServe()
TARGETS: dict[str, Target] = {engine.name: engine for engine in (TRANSFORMERS, Vllm(), LLAMA_CPP, MLX)}


@dataclass(frozen=True)
class Distance:
    """Between two models over the same positions.

    Attributes:
        largest: largest |difference of log p| over the tokens that both tell of, in nats.
        kl: mean KL(first || second) in nats per position; where only some tokens are told, of those and all others as one.
        top1: share of positions where both find the same token likeliest.
    """

    largest: float
    kl: float
    top1: float


@dataclass(frozen=True)
class Verified:
    """What came out.

    Attributes:
        engine: with its version; prompts, positions: how much was compared.
        tuned: ours, adapter on base, against the engine's.
        base: ours without the adapter against the engine's without it; None for merged models, which have no base there.
        from_base: the engine's answer against the base's (its own, or ours for merged models).
        effect: ours with the adapter against ours without it.
        limit: that `tuned.largest` had to keep; None: only nearer to the tuned model than to the base.
        failures: why it does not pass; empty when it does.
    """

    engine: str
    dtype: str
    prompts: int
    positions: int
    tuned: Distance
    base: Distance | None
    from_base: Distance
    effect: Distance
    limit: float | None
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def distance(ours: Seen, theirs: Seen) -> Distance:
    """`ours` tells of the whole vocabulary; `theirs` of all of it, or of some tokens at each position."""
    assert ours.whole
    rows = np.arange(len(ours.logprobs))[:, None]
    if theirs.whole and theirs.logprobs.shape[1] != ours.logprobs.shape[1]:
        least = min(theirs.logprobs.shape[1], ours.logprobs.shape[1])  # one of them pads its vocabulary
        theirs = Seen(theirs.ids[:, :least], theirs.logprobs[:, :least], False, theirs.top)
    told = theirs.ids >= 0
    p = np.where(told, ours.logprobs[rows, np.maximum(theirs.ids, 0)], -np.inf).astype(np.float64)
    q = np.where(told, theirs.logprobs, -np.inf).astype(np.float64)
    with np.errstate(invalid="ignore"):  # -inf less -inf, where a token is not told of
        apart = np.where(told, p - q, 0.0)
    largest, kl = float(np.abs(apart).max()), (np.exp(p) * apart).sum(-1)
    if not theirs.whole:
        kl += _rest(np.exp(p).sum(-1), np.exp(q).sum(-1))
    return Distance(largest, float(max(kl.mean(), 0.0)), float((ours.top == theirs.top).mean()))


def ours(engine: Engine, asked: Asked) -> Seen:
    """What Lamella makes of the prompts, with the adapter that is attached."""
    found: dict[int, np.ndarray] = {}
    for group in pack_lengths([len(ids) for ids in asked.prompts], BATCH_TOKENS):
        batch = pack_rows([(list(asked.prompts[i]), [False] * len(asked.prompts[i])) for i in group])
        starts = batch.starts.tolist()
        positions = [starts[k] + t for k, i in enumerate(group) for t in asked.wanted()[i]]
        ends = np.cumsum([len(asked.wanted()[i]) for i in group])[:-1]
        found.update(zip(group, np.split(engine.logits(batch, positions).numpy(), ends), strict=True))
    return seen_whole([found[i] for i in range(len(asked.prompts))])


def verify(
    target: Target, model: Path, served: Path | None, *, store: Path, adapter: Path, prompts: Sequence[tuple[int, ...]],
    limit: float | None, python: Path | None = None, dtype: str = "float32", positions: int = POSITIONS, threads: int = 2,
) -> Verified:  # fmt: skip
    """Compare an export with the adapter it was made of.

    Args:
        model: what the engine is to load: the merged model, or the base under an exported adapter.
        served: the exported adapter, or None for a merged model.
        store, adapter: what was trained, as Lamella has it.
        limit: of the largest difference of log p; None: see `Verified`.

    Raises:
        UserError: the engine is not installed, or the adapter does not fit the store.
        RunFailed: the engine stopped.
    """
    asked = Asked(model, served, tuple(prompts), positions, dtype, threads)
    engine = Engine.open(Store.open(store), dtype="fp32" if dtype == "float32" else "auto")
    base = ours(engine, asked)
    engine.attach(Adapter.load(adapter, engine.skeleton))
    tuned = ours(engine, asked)
    engine.close()
    answer = target.answer(asked, served is not None, python)
    if len(answer.tuned.logprobs) != len(tuned.logprobs):
        raise RunFailed(
            f"{target.name} told of {len(answer.tuned.logprobs)} positions, {len(tuned.logprobs)} were asked for"
        )
    return judge(answer, tuned, base, limit, dtype, len(prompts))


def judge(answer: Answer, tuned: Seen, base: Seen, limit: float | None, dtype: str, prompts: int) -> Verified:
    """From what was seen: `tuned` and `base` are ours."""
    near, away, effect = distance(tuned, answer.tuned), distance(base, answer.tuned), distance(tuned, base)
    failures = []
    if effect.largest == 0:
        failures.append("the adapter changes nothing in Lamella either: it is untrained")
    theirs = None if answer.base is None else distance(base, answer.base)
    own = away if answer.base is None else _between(answer.tuned, answer.base)
    if own.largest == 0:
        failures.append("the engine's answers are those of the base: the adapter has no effect there")
    elif near.kl >= away.kl and effect.largest > 0:
        failures.append(
            f"the engine's answers are nearer to the base (KL {away.kl:.3g}) than to the tuned model (KL {near.kl:.3g})"
        )
    if limit is not None and near.largest > limit:
        failures.append(f"log p differs by up to {near.largest:.3g} nats from Lamella's, more than {limit:g}")
    return Verified(
        answer.version, dtype, prompts, len(tuned.logprobs), near, theirs, own, effect, limit, tuple(failures)
    )  # fmt: skip


def _between(first: Seen, second: Seen) -> Distance:
    """Two answers of one engine, over the tokens that both tell of and all others as one."""
    if first.whole and second.whole:
        return distance(first, second)
    largest, kls = 0.0, []
    for a_ids, a, b_ids, b in zip(first.ids, first.logprobs, second.ids, second.logprobs, strict=True):
        told = dict(zip(b_ids.tolist(), b.tolist(), strict=True))
        both = [(value, told[i]) for i, value in zip(a_ids.tolist(), a.tolist(), strict=True) if i >= 0 and i in told]
        p, q = np.array(both, dtype=np.float64).reshape(-1, 2).T
        largest = max([largest, *np.abs(p - q).tolist()])
        kls.append(float((np.exp(p) * (p - q)).sum() + _rest(np.exp(p).sum(), np.exp(q).sum())))
    return Distance(largest, max(float(np.mean(kls)), 0.0), float((first.top == second.top).mean()))


def _rest(told_p: np.ndarray, told_q: np.ndarray) -> np.ndarray:
    """KL's part of all tokens that are not told of, taken as one."""
    rest_p, rest_q = np.clip(1.0 - told_p, 0.0, None), np.clip(1.0 - told_q, 1e-12, None)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rest_p > 0, rest_p * (np.log(rest_p) - np.log(rest_q)), 0.0)


def target_of(text: str) -> tuple[Target | TransformersServe, Path | None]:
    """`NAME`, or `NAME=PYTHON` for an engine in an environment of its own.

    Raises:
        UserError: no engine of that name.
    """
    name, _, python = text.partition("=")
    known: dict[str, Target | TransformersServe] = {**TARGETS, SERVE.name: SERVE}
    if name not in known:
        raise UserError(f"no engine {name!r}", fix=f"one of {', '.join(known)}")
    return known[name], Path(python) if python else None

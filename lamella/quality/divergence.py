"""How far the next-token distributions of one model are from another's, on given texts.

Over every position t of every text but its last, p(. | tokens up to t) of both models is compared. The models go side by
side through the layers (`engine/passes.py`); logits are made for some positions at a time.

KL(a || b) = sum over the vocabulary of p_a (log p_a - log p_b), in nats per token (Kullback and Leibler 1951). Perplexity is
exp of the mean of -log p(next token).

Shape suffixes: N positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lamella.checkpoint.source import locate
from lamella.data.steps import pack_lengths
from lamella.engine.passes import HOLD_BYTES, LayerSource, SideBySide
from lamella.engine.values import CheckpointValues, MixedValues, StoreValues, Values
from lamella.errors import UserError
from lamella.models.layout import PackedBatch, pack_rows

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMALL_PARAMETERS = 2_000_000_000
"""Up to this size `auto` computes in fp32: then nothing but the weights differs."""
MICRO_BATCH_TOKENS = 4096
LOGITS_BYTES = 32 << 20
"""Of one model's fp32 logits at once."""


@dataclass(frozen=True)
class Base:
    """A checkpoint folder (or hub id), with an adapter on it or without."""

    path: str | Path
    adapter: Path | None = None


@dataclass(frozen=True)
class Stored:
    """A layer store, with an adapter on it or without.

    Attributes:
        only: names of the tensors that are the store's; the others are those of `base`, the checkpoint that it was made from.
            None: all.
    """

    path: str | Path
    adapter: Path | None = None
    only: frozenset[str] | None = None
    base: str | Path | None = None


Model = Base | Stored


@dataclass(frozen=True)
class Divergence:
    """Of model b from model a.

    Attributes:
        texts: how many; tokens: positions compared, one less than the tokens of each text.
        kl_mean: KL(a || b), nats per token; kl_error: its standard error over positions, None of a single one; kl_p99: 99th percentile.
        top1_agreement: share of positions where both find the same token the likeliest.
        perplexity_a, perplexity_b: of the texts.
        largest_logit_difference: over all positions and the vocabulary.
    """

    texts: int
    tokens: int
    kl_mean: float
    kl_error: float | None
    kl_p99: float
    top1_agreement: float
    perplexity_a: float
    perplexity_b: float
    largest_logit_difference: float

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity_b / self.perplexity_a


class _Rows:
    """One model's logits at some positions, and their normaliser: fp32, sums in fp64.

    log sum exp z = m + log sum exp(z - m), m the largest: every term is at most 1, so fp32 exponentials and an fp64 sum give it
    to 1e-7, where an fp32 logarithm of the whole would round to 2e-6.
    """

    def __init__(self, source: LayerSource, hidden_NH: Tensor) -> None:
        self.logits_NV = source.logits(hidden_NH).float()
        top_N1, top1_N1 = self.logits_NV.max(-1, keepdim=True)
        self.top1_N = top1_N1[:, 0]
        self.exp_NV = (self.logits_NV - top_N1).exp_()
        self.sum_N = self.exp_NV.sum(-1, dtype=torch.float64)
        self.normaliser_N = top_N1[:, 0].double() + self.sum_N.log()
        if not bool(self.normaliser_N.isfinite().all()):
            raise UserError(f"{source.name}: the head gives logits that are not numbers",
                            fix="look for broken weights outside the layers (`lamella store verify`)", path=source.values.path)  # fmt: skip

    def nll(self, target_N: Tensor) -> float:
        """Summed -log p of these tokens."""
        return float((self.normaliser_N - self.logits_NV.gather(1, target_N[:, None])[:, 0].double()).sum())


@dataclass
class _Tally:
    """What is summed over positions."""

    kl: list[Tensor] = field(default_factory=list)
    same: int = 0
    nll_a: float = 0.0
    nll_b: float = 0.0
    largest: float = 0.0

    def add(self, a: _Rows, b: _Rows, target_N: Tensor) -> None:
        """KL = sum p_a (z_a - z_b) - lse_a + lse_b"""
        self.same += int((a.top1_N == b.top1_N).sum())
        self.nll_a += a.nll(target_N)
        self.nll_b += b.nll(target_N)
        difference_NV = torch.sub(a.logits_NV, b.logits_NV, out=b.exp_NV)
        difference_NV.nan_to_num_(nan=0.0)  # tokens that a family forbids have -inf in both
        low, high = difference_NV.aminmax()
        self.largest = max(self.largest, -float(low), float(high))
        mean_N = difference_NV.mul_(a.exp_NV).sum(-1, dtype=torch.float64) / a.sum_N
        self.kl.append(mean_N - a.normaliser_N + b.normaliser_N)

    def result(self, texts: int) -> Divergence:
        kl_N = torch.cat(self.kl)
        tokens = kl_N.numel()
        return Divergence(
            texts=texts, tokens=tokens, kl_mean=float(kl_N.mean()),
            kl_error=float(kl_N.std() / math.sqrt(tokens)) if tokens > 1 else None,
            kl_p99=float(kl_N.quantile(0.99)) if tokens <= 1 << 24 else float(kl_N.kthvalue(math.ceil(0.99 * tokens))[0]),
            top1_agreement=self.same / tokens,
            perplexity_a=_perplexity(self.nll_a / tokens), perplexity_b=_perplexity(self.nll_b / tokens),
            largest_logit_difference=self.largest,
        )  # fmt: skip


def _perplexity(nll: float) -> float:
    """Of a mean in nats; a broken model's stays a finite number, which JSON can hold."""
    return math.exp(min(nll, 700.0))


def divergence(
    a: Model, b: Model, texts: Sequence[Sequence[int]], *, dtype: str = "auto",
    advance: Callable[[float], None] = lambda _: None,
) -> Divergence:  # fmt: skip
    """How far `b` is from `a` on these texts (token ids). See `divergences`."""
    return divergences(a, {"b": b}, texts, dtype=dtype, advance=advance)["b"]


def divergences(
    a: Model,
    others: Mapping[str, Model],
    texts: Sequence[Sequence[int]],
    *,
    dtype: str = "auto",
    micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    hold_bytes: int = HOLD_BYTES,
    advance: Callable[[float], None] = lambda _: None,
) -> dict[str, Divergence]:
    """How far several models are from `a`, in one pass through the layers.

    Memory: one layer in the compute dtype (`hold_bytes` of it at most where it has experts), hidden states of all models,
    embeddings and head, `LOGITS_BYTES` a few times.

    Args:
        texts: token ids; a text of one token says nothing and is left out.
        dtype: that layers compute in: "fp32", "bf16", or "auto": fp32 up to `SMALL_PARAMETERS`, else bf16.
        micro_batch_tokens: texts that go through a layer together.
        advance: called as work goes on with the tokens done, whose sum is the tokens of all texts.

    Raises:
        UserError: no text with two tokens, models that do not belong together, a broken layer.
    """
    rows = [(list(ids), [False] + [True] * (len(ids) - 1)) for ids in texts if len(ids) > 1]
    if not rows:
        raise UserError("no text of two tokens or more to compare the models on", fix="give longer texts")
    models = {"a": a, **others}
    with ExitStack() as at_end:
        opened: dict[str, Values] = {}
        for name, model in models.items():
            opened[name] = open_values(model)
            at_end.callback(opened[name].close)
        side = SideBySide(resolve_dtype(dtype, opened["a"]), hold_bytes)
        at_end.callback(side.close)
        sources = [side.add(_title(models[name]), values, models[name].adapter) for name, values in opened.items()]
        packed = [[rows[i] for i in group] for group in pack_lengths([len(ids) for ids, _ in rows], micro_batch_tokens)]
        batches = [pack_rows(group) for group in packed]
        head = _head_layers(sources[0])
        passes = len(sources) * (len(sources[0].skeleton.layers) + head)
        hidden = side.hidden(batches, lambda tokens: advance(tokens / passes))
        tallies = _compare(sources, hidden, batches, lambda tokens: advance(tokens * len(sources) * head / passes))
        return {name: tally.result(len(rows)) for name, tally in zip(others, tallies, strict=True)}


def _head_layers(source: LayerSource) -> float:
    """Layers that the head is worth, for the time left."""
    config = source.skeleton.config
    return int(config.vocab_size) * int(config.hidden_size) * source.room.dtype.itemsize / source.layer_bytes(0)


def _title(model: Model) -> str:
    return f"{model.path}" + (f" + {model.adapter}" if model.adapter is not None else "")


def open_values(model: Model) -> Values:
    """Where a model's values come from."""
    if isinstance(model, Base):
        return CheckpointValues.open(model.path)
    stored = StoreValues.open(model.path)
    if model.only is None:
        return stored
    assert model.base is not None, "tensors that are not the store's need a checkpoint"
    return MixedValues(stored, same_source(stored, model.base), model.only)


def same_source(stored: StoreValues, checkpoint: str | Path) -> CheckpointValues:
    """The checkpoint that a store was made from.

    Raises:
        UserError: it is another one.
    """
    plain = CheckpointValues.open(checkpoint)
    if plain.fingerprint != stored.fingerprint:
        plain.close()
        raise UserError(
            f"was made from a checkpoint with fingerprint {stored.fingerprint} ({stored.store.manifest.source}); "
            f"{locate(checkpoint)} has {plain.fingerprint}",
            fix="give the checkpoint it was made from, or another -o STORE", path=stored.path,
        )  # fmt: skip
    return plain


def resolve_dtype(name: str, values: Values) -> torch.dtype:
    """Compute dtype: see `divergences`."""
    if name == "auto":
        numel = sum(math.prod(shape) for shape in values.shapes.values())
        return torch.float32 if numel <= SMALL_PARAMETERS else torch.bfloat16
    return DTYPES[name]


@torch.no_grad()
def _compare(
    sources: Sequence[LayerSource], hidden: Sequence[Sequence[Tensor]], batches: Sequence[PackedBatch],
    done: Callable[[float], None],
) -> list[_Tally]:  # fmt: skip
    """The first source's distributions beside each other one's, some positions at a time."""
    tallies = [_Tally() for _ in sources[1:]]
    rows = max(16, LOGITS_BYTES // (4 * int(sources[0].skeleton.config.vocab_size)))
    for k, batch in enumerate(batches):
        for start in range(0, batch.score_positions.numel(), rows):
            position_N = batch.score_positions[start : start + rows]
            target_N = batch.score_tokens[start : start + rows]
            base = _Rows(sources[0], hidden[0][k][position_N])
            for number, tally in enumerate(tallies, 1):
                tally.add(base, _Rows(sources[number], hidden[number][k][position_N]), target_N)
            done(batch.tokens * position_N.numel() / batch.score_positions.numel())
    return tallies


def stored_names(store: StoreValues, classes: Collection[str]) -> frozenset[str]:
    """Quantised tensors of these classes."""
    groups = store.store.manifest.groups()
    records = (record for _, group in groups for record in group.tensors)
    return frozenset(r.name for r in records if r.format != "raw" and r.tensor_class in classes)

"""One pass of the model for many requests: new prompts, running rows and label scores walk the layers together.

Mechanism alone: who takes part in a pass is the scheduler's to say.

Shape suffixes: B rows, V vocabulary, N scored pairs, E edges of a label trie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamella.engine.serving import Resident, Serving, Share
from lamella.eval.scoring import ScoredBatch, plan_batches, shared_tokens
from lamella.eval.trie import LabelTrie
from lamella.models.paged import CacheRow, PagedCache
from lamella.serve.backend import Finished, GenerateRequest, Ids, ScoreRequest, Token
from lamella.serve.sampling import Chooser

Likeliest = list[tuple[tuple[int, float], ...]]
"""At each edge of a trie: tokens and their log-probabilities, likeliest first."""


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        tenant: the adapter's name; None: the base.
        adapter: held until the job is done, whatever is loaded or dropped meanwhile.
        tell: gives a result to whoever asked: tokens and `Finished`, an array, or an exception. From any thread.
        gone: nobody waits for it any more.
    """

    tenant: str | None
    adapter: Resident | None
    tell: Callable[[Any], None]
    gone: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Answer(Job):
    """Attributes: row: its blocks of the cache, once it runs; tokens: written so far."""

    request: GenerateRequest
    chooser: Chooser
    row: CacheRow | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def cache_tokens(self) -> int:
        """Tokens that ever stand in the cache: the last one written is not read again."""
        return len(self.request.prompt) + self.request.max_new_tokens - 1

    def take(self, token: Token) -> Finished | None:
        """Give out a token; whether the answer ends with it."""
        if token.id in self.request.stop_ids:
            return Finished("stop")
        self.tokens.append(token.id)
        self.tell(token)
        if self.chooser.ended:
            return Finished("stop")
        return Finished("length") if len(self.tokens) >= self.request.max_new_tokens else None


@dataclass(eq=False)
class Scoring(Job):
    """Attributes: taken: prompts that a pass has been asked for; left: prompts without a result; top: so many likeliest
    tokens are wanted at each edge; likeliest: [N][E] of them, when it is done."""

    request: ScoreRequest
    edges_NE: np.ndarray
    left: int
    taken: int = 0
    top: int = 0
    likeliest: list[Likeliest] = field(default_factory=list)


@dataclass
class Prompt:
    """One prompt of a scoring request."""

    job: Scoring
    index: int

    @property
    def ids(self) -> Ids:
        return self.job.request.prompts[self.index]


def by_adapter(jobs: Iterable[Answer]) -> list[Answer]:
    """Jobs of one adapter side by side, else in their order."""
    groups: dict[int, list[Answer]] = {}
    for job in jobs:
        groups.setdefault(id(job.adapter), []).append(job)
    return [job for group in groups.values() for job in group]


class ScoreGroups:
    """Prompts of a pass to be scored, those of one adapter and one label trie together: they share their beginnings."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._groups: dict[tuple[int, int], list[Prompt]] = {}

    def cost(self, prompt: Prompt) -> int:
        """Tokens that this prompt would add to the pass, about."""
        group = self._groups.get(self._key(prompt))
        shared = shared_tokens(group[-1].ids, prompt.ids) if group else 0
        return len(prompt.ids) - shared + prompt.job.request.trie.num_edges

    @staticmethod
    def _key(prompt: Prompt) -> tuple[int, int]:
        return id(prompt.job.adapter), id(prompt.job.request.trie)

    def add(self, prompt: Prompt) -> None:
        self._groups.setdefault(self._key(prompt), []).append(prompt)

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def jobs(self) -> list[Scoring]:
        return list(dict.fromkeys(p.job for group in self._groups.values() for p in group))

    def planned(self) -> list[_Planned]:
        found = []
        for group in self._groups.values():
            places: dict[Ids, list[Prompt]] = {}
            for prompt in group:
                places.setdefault(prompt.ids, []).append(prompt)
            prompts, job = list(places), group[0].job
            for batch in plan_batches(prompts, job.request.trie, self._batch_tokens):
                asked = [places[prompts[n]] for n in batch.prompts]
                share = Share(batch.batch, (job.adapter,) * len(batch.batch.row_ids))
                found.append(_Planned(share, batch, asked, job.request.trie))
        return found


@dataclass
class _Planned:
    """A packed batch of label trees, and who asked for each of its prompts."""

    share: Share
    batch: ScoredBatch
    asked: list[list[Prompt]]
    trie: LabelTrie

    def fill(self, logp_N: Tensor) -> None:
        values = logp_N.double().numpy().reshape(len(self.asked), self.trie.num_edges)
        for row, prompts in zip(values, self.asked, strict=True):
            for prompt in prompts:
                prompt.job.edges_NE[prompt.index] = row
                prompt.job.left -= 1

    @property
    def top(self) -> int:
        """Likeliest tokens wanted at each edge."""
        return max(prompt.job.top for prompts in self.asked for prompt in prompts)

    def fill_likeliest(self, found: Likeliest) -> None:
        edges = self.trie.num_edges
        for n, prompts in enumerate(self.asked):
            for prompt in prompts:
                if prompt.job.top:
                    here = found[n * edges : (n + 1) * edges]
                    prompt.job.likeliest[prompt.index] = [tokens[: prompt.job.top] for tokens in here]


@dataclass
class Pass:
    """What walks together.

    Attributes:
        running: rows that get their next token; joining: rows whose prompts enter; scores: prompts to be scored.
    """

    running: list[Answer]
    joining: list[Answer]
    scores: ScoreGroups

    def __bool__(self) -> bool:
        return bool(self.running or self.joining or self.scores)

    @property
    def jobs(self) -> list[Job]:
        return [*self.running, *self.joining, *self.scores.jobs]


@dataclass(frozen=True)
class Chosen:
    """A row's next token; None: the model gave numbers that are not finite."""

    job: Answer
    token: Token | None


def run_pass(serving: Serving, cache: PagedCache, work: Pass) -> list[Chosen]:
    """Walk once; scores are filled in, and every row's next token is chosen."""
    running, groups = by_adapter(work.running), _together(work.joining, serving.apart_tokens)
    shares: list[Share] = []
    if running:
        shares.append(serving.next_tokens(
            cache, [_row(job) for job in running], [job.tokens[-1] for job in running],
            [len(job.request.prompt) + len(job.tokens) - 1 for job in running], [job.adapter for job in running],
        ))  # fmt: skip
    for group in groups:
        shares.append(serving.prompts(
            cache, [_row(job) for job in group], [job.request.prompt for job in group], [job.adapter for job in group],
        ))  # fmt: skip
    planned = work.scores.planned()
    hidden = serving.walk([*shares, *(p.share for p in planned)])
    for p, hidden_TH in zip(planned, hidden[len(shares) :], strict=True):
        if p.top:
            p.fill_likeliest(serving.likeliest(hidden_TH, p.share.batch, p.top))
        p.fill(serving.scores(hidden_TH, p.share.batch))
    last = hidden[:1] if running else []
    for group, hidden_TH in zip(groups, hidden[len(last) : len(shares)], strict=True):
        ends = torch.tensor([len(job.request.prompt) for job in group]).cumsum(0) - 1
        last.append(hidden_TH[ends.to(hidden_TH.device)])
    if not last:
        return []
    return _choose([*running, *(job for group in groups for job in group)], serving.logits(torch.cat(last)))


def _together(joining: Sequence[Answer], apart_tokens: int | None) -> list[list[Answer]]:
    """Whose prompts make one packed batch: all, but adapters with at least `apart_tokens` go alone."""
    alone: list[list[Answer]] = []
    rest: list[Answer] = []
    for _, group in groupby(by_adapter(joining), key=lambda job: id(job.adapter)):
        jobs = list(group)
        if apart_tokens is not None and sum(len(job.request.prompt) for job in jobs) >= apart_tokens:
            alone.append(jobs)
        else:
            rest += jobs
    return [*alone, rest] if rest else alone


def _row(job: Answer) -> CacheRow:
    assert job.row is not None
    return job.row


def _choose(jobs: Sequence[Answer], logits_BV: Tensor) -> list[Chosen]:
    most_B, best_B = logits_BV.max(-1)
    finite = torch.isfinite(most_B).tolist()
    return [
        Chosen(job, job.chooser.choose(logits_BV[n], best) if finite[n] else None)
        for n, (job, best) in enumerate(zip(jobs, best_B.tolist(), strict=True))
    ]

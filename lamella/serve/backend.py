"""The seam between the HTTP side and the engine side of the server.

The HTTP side knows requests, keys and text; the engine side knows token ids, adapters and memory. Everything between
them goes through `Backend`, on token ids.

Shape suffixes: N prompts, E edges of a label trie.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the HTTP side imports no torch
    from lamella.eval.trie import LabelTrie

Ids = tuple[int, ...]


class Busy(Exception):
    """The queue is full, or the server is draining: ask again after `retry_after_s` (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLong(Exception):
    """The request can never fit: the model's context, or the whole KV cache, is shorter (HTTP 400)."""


class UnknownAdapter(Exception):
    """No adapter of this name is loaded (HTTP 404)."""


class EngineFailed(Exception):
    """The pass this request was part of failed, or the engine has ended (HTTP 503)."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0: the likeliest token (greedy).
        top_p: only the likeliest tokens whose probabilities first sum to this much; 1: all.
        top_k: only the k likeliest; 0: all.
        seed: the same seed gives the same tokens, whatever else runs in the batch; None: a fresh one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """One answer to write.

    Attributes:
        id: of the request, for logs and errors.
        adapter: name of a loaded adapter; None: the bare base.
        prompt: token ids, not empty.
        max_new_tokens: at least 1.
        stop_ids: ids that end the answer; the one met is not part of it.
        top_logprobs: None: no log-probabilities; n: each token's, and those of the n likeliest (0: only its own).
        choices: only these token strings may be written, terminator included; the answer ends with "stop" when one is
            complete (a last token in `stop_ids` is not given out). None: anything.
    """

    id: str
    adapter: str | None
    prompt: Ids
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling = Sampling()
    top_logprobs: int | None = None
    choices: tuple[Ids, ...] | None = None


@dataclass(frozen=True)
class Token:
    """One written token. `logprob` and `top` (id, log-probability; likeliest first) are of the model's own distribution,
    before temperature, top_p, top_k and choices."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last thing an answer gives."""

    reason: Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class ScoreRequest:
    """Log-probabilities of every edge of a label trie after every prompt.

    Attributes:
        prompts: token ids of each question, none empty.
        trie: the labels of all of them.
    """

    id: str
    adapter: str | None
    prompts: tuple[Ids, ...]
    trie: LabelTrie


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in memory.

    Attributes:
        modules: LoRA pairs it has, all of them in the model.
        rank: largest of its pairs.
        bytes: of its pairs in the compute dtype.
        effect: largest |logits(adapter) - logits(base)| on the smoke test's prompt, never 0.
        layout: how its folder is laid out.
        facts: of its `lamella_adapter.json`.
    """

    name: str
    path: Path
    modules: int
    rank: int
    bytes: int
    effect: float
    layout: str
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """What can be asked for.

    Attributes:
        context: tokens of a prompt and its answer together; None: the model's config does not say.
        vocabulary: ids are below it.
        max_rows: answers written at the same time.
        kv_tokens, kv_tokens_used: what the KV cache holds, and what is reserved now.
        queue: requests that may wait.
    """

    context: int | None
    vocabulary: int
    max_rows: int
    kv_tokens: int
    kv_tokens_used: int
    queue: int


@dataclass(frozen=True)
class Stats:
    """Counts since the start; `running`, `waiting` and `kv_*` are of now.

    Attributes:
        running, waiting: requests (answers and score requests).
        tokens_in, tokens_out: by adapter name; the base's stand under None. `tokens_in`: prompt tokens taken up.
        batches_by_rows: rows decoded together -> how many steps had so many.
        finished: answers by the reason they ended for, "failed" included; scored: score requests answered.
        walks: passes through the layers, and the seconds they took.
    """

    running: int
    waiting: int
    kv_tokens: int
    kv_tokens_used: int
    tokens_in: Mapping[str | None, int]
    tokens_out: Mapping[str | None, int]
    batches_by_rows: Mapping[int, int]
    finished: Mapping[str, int]
    scored: int
    walks: int
    walk_s: float


class Backend(Protocol):
    """What writes and scores. All methods may be called from the event loop; `load_adapter`, `unload_adapter` and `close`
    block, so call them in a thread while requests run."""

    def limits(self) -> Limits: ...

    def load_adapter(self, name: str, folder: Path) -> LoadedAdapter:
        """Load a folder of any known layout, or replace the adapter of this name; requests in flight keep theirs.

        Raises:
            UserError: it cannot be read, was trained on another base, matches nothing or only in part, or has no effect.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for it from now on. Requests in flight keep it; its memory is given back after the last.

        Raises:
            UnknownAdapter: none of this name.
        """
        ...

    def adapters(self) -> dict[str, LoadedAdapter]: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Token | Finished]:
        """Tokens as they are written, then `Finished`. Closing the iterator (`aclose`) cancels the request.

        Raises:
            Busy, TooLong, UnknownAdapter: at the first step, before anything is computed.
            EngineFailed: at any step.
            ValueError: arguments without meaning (an empty prompt, an id beyond the vocabulary, choices that begin with
                one another).
        """
        ...

    async def score(self, request: ScoreRequest) -> NDArray[np.float64]:
        """Log-probability of every trie edge after every prompt: float64 [N, E], as `eval.scoring.score_prompts` gives.

        Cancelling the awaiting task cancels the request.

        Raises:
            Busy, TooLong, UnknownAdapter, EngineFailed, ValueError: as `generate`.
        """
        ...

    async def score_likeliest(
        self, request: ScoreRequest, top: int
    ) -> tuple[NDArray[np.float64], list[list[tuple[tuple[int, float], ...]]]]:
        """As `score`; and [N][E] the `top` likeliest tokens in each edge's place with their log-probabilities, likeliest
        first."""
        ...

    def stats(self) -> Stats: ...

    @property
    def ended(self) -> bool:
        """Everything fails with `EngineFailed` from now on."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests with `Busy` and wait for those taken; after `timeout_s` cancel what still runs."""
        ...

    def close(self) -> None:
        """End the engine; requests still there fail with `EngineFailed`."""
        ...

"""What the HTTP side asks of the engine side. Imports no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from lamella.eval.trie import LabelTrie

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0: the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """One row to go on with.

    Attributes:
        adapter: name of a loaded adapter; None: the base.
        stop_ids: tokens that end the answer.
        top_logprobs: None: no log-probabilities; n: the token's own, and those of the n likeliest.
        choices: only these token strings (terminator included) may be written.
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
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    reason: Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class ScoreRequest:
    """Prompts of one tenant, and its labels as one tree of tokens."""

    id: str
    adapter: str | None
    prompts: tuple[Ids, ...]
    trie: LabelTrie


@dataclass(frozen=True)
class LoadedAdapter:
    name: str
    folder: Path
    pairs: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Limits:
    context: int | None
    vocabulary: int
    max_rows: int
    kv_tokens_total: int
    kv_tokens_used: int
    queue: int


@dataclass(frozen=True)
class Stats:
    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    tokens_in: Mapping[str, int] = field(default_factory=dict)
    tokens_out: Mapping[str, int] = field(default_factory=dict)
    batches: Mapping[int, int] = field(default_factory=dict)


class Busy(Exception):
    """The queue is full."""


class TooLong(Exception):
    """It never fits the context or the cache."""


class UnknownAdapter(Exception):
    """No adapter of this name is loaded."""


class EngineFailed(Exception):
    """The engine's thread has ended."""


class Backend(Protocol):
    def limits(self) -> Limits: ...

    def load_adapter(self, name: str, folder: Path) -> LoadedAdapter:
        """Blocking, safe while running. Raises `UserError`: it matches nothing or in part, or has no effect."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Requests in flight keep theirs; memory is given back after the last."""
        ...

    def adapters(self) -> dict[str, LoadedAdapter]: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Token | Finished]:
        """Closing the iterator cancels."""
        ...

    async def score(self, request: ScoreRequest) -> np.ndarray:
        """float64 [N, E]: log p of every edge of the trie after every prompt."""
        ...

    def stats(self) -> Stats: ...

    async def drain(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...

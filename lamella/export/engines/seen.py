"""What an engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Asked:
    """A model, with or without an adapter, and prompts as token ids.

    Attributes:
        model: a Hugging Face folder, or a GGUF file.
        adapter: a folder or file in the engine's own layout, or None.
        positions: how many of each prompt's last positions are wanted.
        dtype: the engine is to compute in, torch's name.
        threads: of the CPU.
    """

    model: Path
    adapter: Path | None
    prompts: tuple[tuple[int, ...], ...]
    positions: int
    dtype: str = "float32"
    threads: int = 2

    def wanted(self) -> list[range]:
        """Positions of each prompt that are looked at: the last ones."""
        return [range(max(0, len(p) - self.positions), len(p)) for p in self.prompts]


@dataclass(frozen=True)
class Seen:
    """log p of tokens at P positions in all, prompt after prompt.

    Attributes:
        ids: int64 [P, K], the tokens told of at each position; -1: none there.
        logprobs: fp32 [P, K] in nats.
        whole: whether K is the whole vocabulary, in order.
        top: int64 [P], the likeliest token.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    whole: bool
    top: np.ndarray


@dataclass(frozen=True)
class Answer:
    """Of an engine: with the adapter (or merged), and the base without it where the engine was asked for that too."""

    engine: str
    version: str
    tuned: Seen
    base: Seen | None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """fp64 inside, fp32 out; over the last axis."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)), dtype=np.float32)


def seen_whole(logits: Sequence[np.ndarray]) -> Seen:
    """From logits [P, V], prompt by prompt."""
    stacked = np.concatenate([np.asarray(part, dtype=np.float32) for part in logits])
    ids = np.broadcast_to(np.arange(stacked.shape[1]), stacked.shape)
    return Seen(ids, log_softmax(stacked), True, stacked.argmax(-1))

"""Label log-probabilities with every shared prefix computed once.

The prompts of one tenant begin alike (system text, instructions, few-shot examples; rows of one document go on
alike). Sorted, they form a radix tree; the tenant's label trie hangs below the end of each prompt. One packed tree
holds as many prompts as the token budget allows.

Shape suffixes: N prompts, L labels, E edges of the label trie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lamella.errors import RunFailed
from lamella.eval.trie import Floats, LabelTrie
from lamella.models.layout import PackedBatch, Tree, pack_trees

Ids = tuple[int, ...]

MIN_SHARED_TOKENS = 16
"""Prompts that share fewer tokens than this are laid out apart."""
MIN_TREE_TOKENS = 512
"""A tree may always grow to this size; beyond, to four times its trunk: attention costs the square of it."""


class ScoringEngine(Protocol):
    def score(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Per batch, fp32 [N]: log-probability of each scored pair."""
        ...


@dataclass(frozen=True)
class ScoredBatch:
    """A packed batch and the prompts (indices into the caller's list) in the order of its scored pairs."""

    batch: PackedBatch
    prompts: tuple[int, ...]


def shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def prompt_tree(prompts: Sequence[Ids], branches: list[Tree], start: int = 0) -> Tree:
    """Radix tree of different prompts, sorted, that share their first `start` tokens; `branches` below each.

    Depth-first order meets the prompts in their sorted order.
    """
    shared = shared_tokens(prompts[0], prompts[-1])  # sorted: what first and last share, all share
    node = Tree(prompts[0][start:shared])
    at = 0
    if len(prompts[0]) == shared:
        node.branches += branches
        at = 1
    while at < len(prompts):
        end = at + 1
        while end < len(prompts) and prompts[end][shared] == prompts[at][shared]:
            end += 1
        node.branches.append(prompt_tree(prompts[at:end], branches, shared))
        at = end
    return node


def drop_unread(batch: PackedBatch) -> PackedBatch:
    """Leave out tokens whose output nobody uses: not scored from, and seen by no later token (label terminators)."""
    at = torch.arange(batch.tokens)
    keep = batch.visible_until > at + 1
    keep[batch.score_positions] = True
    new_index = torch.cat([torch.zeros(1, dtype=torch.int64), keep.cumsum(0)])  # kept tokens before each index
    return PackedBatch(
        batch.input_ids[keep], batch.position_ids[keep], new_index[batch.visible_until[keep]], new_index[batch.starts],
        new_index[batch.score_positions], batch.score_tokens, batch.row_ids,
    )  # fmt: skip


def _grow_trees(prompts: Sequence[Ids], trie: LabelTrie, batch_tokens: int) -> Iterator[tuple[list[Ids], int]]:
    """Cut sorted, different prompts into runs that make one tree each; yields (run, upper bound of its tokens)."""
    run: list[Ids] = []
    size = trunk = 0
    for ids in prompts:
        shared = shared_tokens(run[-1], ids) if run else 0
        trunk_with = min(trunk, shared)
        more = len(ids) - shared + trie.num_edges
        room = min(batch_tokens, max(MIN_TREE_TOKENS, 4 * trunk_with))
        if run and shared >= MIN_SHARED_TOKENS and size + more <= room:
            run.append(ids)
            size, trunk = size + more, trunk_with
            continue
        if run:
            yield run, size
        run, size, trunk = [ids], len(ids) + trie.num_edges, len(ids)
    if run:
        yield run, size


def plan_batches(prompts: Sequence[Ids], trie: LabelTrie, batch_tokens: int) -> list[ScoredBatch]:
    """Pack prompts of one tenant into batches of at most `batch_tokens` tokens (a longer single prompt goes alone)."""
    index = {ids: n for n, ids in reversed(list(enumerate(prompts)))}  # equal prompts are scored once
    batches: list[ScoredBatch] = []
    trees: list[Tree] = []
    members: list[int] = []
    filled = 0

    def close() -> None:
        if trees:
            batches.append(ScoredBatch(drop_unread(pack_trees(trees)), tuple(members)))
            trees.clear()
            members.clear()

    for run, size in _grow_trees(sorted(index), trie, batch_tokens):
        if filled + size > batch_tokens:
            close()
            filled = 0
        trees.append(prompt_tree(run, trie.branches))
        members += [index[ids] for ids in run]
        filled += size
    close()
    return batches


def score_prompts(
    engine: ScoringEngine,
    prompts: Sequence[Ids],
    trie: LabelTrie,
    *,
    batch_tokens: int,
    walk_tokens: int,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> Floats:
    """Log-probability of every trie edge after every prompt: float64 [N, E].

    Args:
        prompts: token ids of each question.
        trie: the labels of all of them.
        batch_tokens: token budget of a micro-batch.
        walk_tokens: token budget of one `engine.score` call: all its batches walk the layers together.
        on_rows: told how many prompts were just done.

    Raises:
        RunFailed: the model gives NaN.
    """
    edge_logps_NE = np.full((len(prompts), trie.num_edges), np.nan)
    waiting: list[ScoredBatch] = []

    def flush() -> None:
        for done, logps in zip(waiting, engine.score([w.batch for w in waiting]), strict=True):
            values = logps.detach().to("cpu", torch.float64).numpy()
            edge_logps_NE[list(done.prompts)] = values.reshape(len(done.prompts), trie.num_edges)
        on_rows(sum(len(w.prompts) for w in waiting))
        waiting.clear()

    for batch in plan_batches(prompts, trie, batch_tokens):
        if waiting and sum(w.batch.tokens for w in waiting) + batch.batch.tokens > walk_tokens:
            flush()
        waiting.append(batch)
    if waiting:
        flush()
    first = {ids: n for n, ids in reversed(list(enumerate(prompts)))}
    if any(np.isnan(edge_logps_NE[n]).any() for n in first.values()):
        raise RunFailed(
            "the model gives NaN log-probabilities", fix="check the store and the adapter, or compute in fp32"
        )
    return edge_logps_NE[[first[ids] for ids in prompts]]

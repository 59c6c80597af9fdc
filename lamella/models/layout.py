"""Packed token layouts: how sequences, and trees of sequences, lie in one row of tokens.

Tokens of all sequences of a micro-batch stand one after the other, without padding. Who sees
whom is said by one number per token: token i attends to token j when

    j <= i < visible_until[j]          (and, in sliding-window layers, pos[i] - pos[j] < window)

A plain sequence occupying [a, b) has visible_until = b for all its tokens: causal attention that
never crosses a border. A tree (a shared prefix followed by branches, in depth-first order) has, for
each token, the end of the subtree that hangs below it: a branch sees its ancestors and itself, never
its siblings. One pass thus scores a prompt once with all its label strings.

Shape suffixes: T tokens in the batch, S sequences, N scored (position, token) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T]; restart at 0 in every sequence, continue along branches.
        visible_until: int64 [T]; first index of the batch that no longer sees this token.
        starts: int64 [S + 1]; sequence s is tokens starts[s] .. starts[s + 1] - 1.
        score_positions: int64 [N]; position whose output predicts score_tokens. For training these
            are the label tokens: position t - 1 predicts the label token at t of the same sequence.
        score_tokens: int64 [N].
        row_ids: identity of each sequence (dropout is seeded by it, errors name it); length S.
    """

    input_ids: Tensor
    position_ids: Tensor
    visible_until: Tensor
    starts: Tensor
    score_positions: Tensor
    score_tokens: Tensor
    row_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return int(self.input_ids.numel())

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        if self.input_ids.device == device:
            return self
        return PackedBatch(
            self.input_ids.to(device), self.position_ids.to(device), self.visible_until.to(device), self.starts.to(device),
            self.score_positions.to(device), self.score_tokens.to(device), self.row_ids,
        )  # fmt: skip

    def padded(self, multiple: int) -> PackedBatch:
        """The same batch with one more sequence of filler tokens, so that its tokens are a multiple of `multiple`.

        The filler (row id -1) is seen by nobody and scores nothing.
        """
        extra = -self.tokens % multiple
        if not extra:
            return self
        filler = torch.arange(extra, device=self.input_ids.device)
        end = self.tokens + extra
        return PackedBatch(
            torch.cat([self.input_ids, torch.zeros_like(filler)]), torch.cat([self.position_ids, filler]),
            torch.cat([self.visible_until, torch.full_like(filler, end)]), torch.cat([self.starts, self.starts.new_tensor([end])]),
            self.score_positions, self.score_tokens, (*self.row_ids, -1),
        )  # fmt: skip

    @property
    def real_tokens(self) -> int:
        """Tokens without those of the filler, which come last."""
        return int(self.starts[-2]) if self.row_ids and self.row_ids[-1] == -1 else self.tokens

    @property
    def lengths(self) -> list[int]:
        return (self.starts[1:] - self.starts[:-1]).tolist()

    @property
    def is_tree(self) -> bool:
        """True when some sequence has branches, so that plain causal attention would be wrong."""
        ends_T = torch.repeat_interleave(self.starts[1:], self.starts[1:] - self.starts[:-1])
        return not bool(torch.equal(ends_T, self.visible_until))


@dataclass
class Tree:
    """A run of tokens and the branches that continue it.

    Attributes:
        tokens: token ids of this node.
        scored: for each token of the node, whether its own log-probability (given its ancestors) is wanted.
        branches: continuations; siblings do not see each other.
    """

    tokens: Sequence[int]
    scored: Sequence[bool] = ()
    branches: list[Tree] = field(default_factory=list)


def pack_rows(
    rows: Sequence[tuple[Sequence[int], Sequence[bool]]], row_ids: Sequence[int] | None = None
) -> PackedBatch:
    """Pack plain sequences.

    Args:
        rows: (token ids, label mask) pairs; mask[t] says that token t is a label. A first token
            cannot be a label (nothing predicts it).
        row_ids: identity of each row; default 0..S-1.
    """
    return pack_trees([Tree(ids, mask) for ids, mask in rows], row_ids)


def pack_trees(trees: Sequence[Tree], row_ids: Sequence[int] | None = None) -> PackedBatch:
    """Pack trees, depth first. Scored pairs come in depth-first order of their tokens."""
    ids: list[int] = []
    positions: list[int] = []
    until: list[int] = []
    starts = [0]
    score_positions: list[int] = []
    score_tokens: list[int] = []

    def lay(node: Tree, depth: int, parent: int) -> None:
        first = len(ids)
        ids.extend(node.tokens)
        positions.extend(range(depth, depth + len(node.tokens)))
        until.extend([0] * len(node.tokens))
        for offset, wanted in enumerate(node.scored):
            if wanted:
                before = first + offset - 1 if offset else parent
                assert before >= 0, "the first token of a sequence cannot be scored"
                score_positions.append(before)
                score_tokens.append(node.tokens[offset])
        last = len(ids) - 1 if node.tokens else parent
        for branch in node.branches:
            lay(branch, depth + len(node.tokens), last)
        until[first : first + len(node.tokens)] = [len(ids)] * len(node.tokens)

    for tree in trees:
        lay(tree, 0, -1)
        starts.append(len(ids))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return PackedBatch(
        tensor(ids), tensor(positions), tensor(until), tensor(starts), tensor(score_positions),
        tensor(score_tokens), tuple(row_ids if row_ids is not None else range(len(trees))),
    )  # fmt: skip

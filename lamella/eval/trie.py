"""All label strings of a tenant as one tree of tokens.

Every edge is a token with the log-probability it has after the prompt and the edges above it. One tree pass gives
them all, and from them follow both a label's likelihood (the sum along its path) and what greedy decoding
constrained to the labels writes (the walk along the likeliest edge).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamella.errors import UserError
from lamella.models.layout import Tree

Floats = NDArray[np.float64]


class LabelTrie:
    """Merged prefixes of label token strings. Edges are numbered depth first, children in label order.

    Args:
        labels: the fixed label set, in the order that breaks ties.
        label_ids: token ids of each label, terminator included (so no label ends inside another).

    Raises:
        UserError: two labels have the same tokens, or one lacks tokens of its own.
    """

    def __init__(self, labels: Sequence[str], label_ids: Sequence[Sequence[int]]) -> None:
        self.labels = tuple(labels)
        root: dict[int, dict] = {}
        seen: dict[tuple[int, ...], str] = {}
        for label, ids in zip(labels, label_ids, strict=True):
            other = seen.setdefault(tuple(ids), label)
            if other is not label or not ids:
                what = (
                    f"labels {other!r} and {label!r} have the same tokens" if ids else f"label {label!r} has no tokens"
                )
                raise UserError(what, fix="rename the label in the data and in the task")
            node = root
            for token in ids:
                node = node.setdefault(token, {})
        self._children: list[list[tuple[int, int]]] = [[]]  # node -> (edge, node below); the root is node 0
        edge_of: dict[tuple[int, ...], int] = {}
        self.branches = self._lay(root, (), 0, edge_of)
        self.num_edges = len(edge_of)
        self.paths = tuple(tuple(edge_of[tuple(ids[: n + 1])] for n in range(len(ids))) for ids in label_ids)
        self._label_at = {path[-1]: i for i, path in enumerate(self.paths)}
        inside = {e for path in self.paths for e in path[:-1]} & set(self._label_at)
        if inside:
            raise UserError(
                f"label {labels[self._label_at[min(inside)]]!r} is the beginning of another label",
                fix="labels need a terminator token: check the tokenizer's end-of-turn token",
            )

    def _lay(self, node: dict[int, dict], path: tuple[int, ...], at: int, edge_of: dict) -> list[Tree]:
        trees = []
        for token, below in node.items():
            edge_of[(*path, token)] = len(edge_of)
            self._children.append([])
            child = len(self._children) - 1
            self._children[at].append((len(edge_of) - 1, child))
            trees.append(Tree([token], [True], self._lay(below, (*path, token), child, edge_of)))
        return trees

    def likelihoods(self, edge_logps_NE: Floats, *, length_normalise: bool = False) -> Floats:
        """Log-probability of each label [N, L] (terminator included); per token when `length_normalise`."""
        sums_NL = np.stack([edge_logps_NE[:, list(path)].sum(1) for path in self.paths], axis=1)
        return sums_NL / [len(path) for path in self.paths] if length_normalise else sums_NL

    def greedy(self, edge_logps_E: Floats) -> int:
        """Index of the label that greedy decoding constrained to the labels writes. Ties go to the earlier label."""
        at, edge = 0, -1
        while self._children[at]:
            edge, at = max(
                self._children[at], key=lambda child: edge_logps_E[child[0]]
            )  # max keeps the first of equals
        return self._label_at[edge]

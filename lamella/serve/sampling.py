"""The next token of one answer, from its logits and its own random numbers alone.

Shape suffixes: V vocabulary, k candidates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lamella.serve.backend import GenerateRequest, Ids, Sampling, Token

COLDEST = 1e-5
"""Below this temperature the likeliest token is taken."""


def choices_tree(choices: Sequence[Ids]) -> dict:
    """Nested dict of token -> what may follow; empty at the end of a choice.

    Raises:
        ValueError: an empty choice, none at all, or one that is the beginning of another.
    """
    root: dict[int, dict] = {}
    for ids in dict.fromkeys(choices):
        node, new = root, False
        for n, token in enumerate(ids):
            if n and not new and not node:
                raise ValueError(f"choice {choices.index(ids[:n])} is the beginning of choice {choices.index(ids)}")
            new = new or token not in node
            node = node.setdefault(token, {})
        if not ids:
            raise ValueError("a choice has no tokens")
        if node:
            raise ValueError(f"choice {choices.index(ids)} is the beginning of another")
    if not root:
        raise ValueError("there are no choices")
    return root


def pick(values_k: Tensor, sampling: Sampling, uniform: float) -> int:
    """Index of a value drawn with a number uniform in [0, 1): temperature, then top_k, then top_p."""
    scaled_k = values_k.double() / sampling.temperature
    order_k = None
    if 0 < sampling.top_k < scaled_k.numel():
        scaled_k, order_k = scaled_k.topk(sampling.top_k)
    elif sampling.top_p < 1:
        scaled_k, order_k = scaled_k.sort(descending=True, stable=True)
    upto_k = torch.softmax(scaled_k, 0).cumsum(0)
    if sampling.top_p < 1:
        kept = int((upto_k < sampling.top_p).sum()) + 1
        upto_k = upto_k[:kept]
    at = int(torch.searchsorted(upto_k, uniform * float(upto_k[-1]), right=True).clamp(max=upto_k.numel() - 1))
    return at if order_k is None else int(order_k[at])


class Chooser:
    """Chooses the tokens of one answer, one after the other.

    Raises:
        ValueError: choices that cannot be told apart.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._sampling, self._top = request.sampling, request.top_logprobs
        self._greedy = request.sampling.temperature < COLDEST
        seed = request.sampling.seed
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._node = None if request.choices is None else choices_tree(request.choices)

    @property
    def ended(self) -> bool:
        """Whether a choice is complete."""
        return self._node is not None and not self._node

    def choose(self, logits_V: Tensor, best: int) -> Token:
        """The next token.

        Args:
            logits_V: fp32, finite.
            best: where they are largest.
        """
        if self._node is None:
            token = best if self._greedy else pick(logits_V, self._sampling, self._random.random())
        else:
            allowed = list(self._node)
            values_k = logits_V[allowed]
            if self._greedy:
                listed = values_k.tolist()
                token = allowed[listed.index(max(listed))]  # the first of equals
            else:
                token = allowed[pick(values_k, self._sampling, self._random.random())]
            self._node = self._node[token]
        if self._top is None:
            return Token(token)
        logp_V = torch.log_softmax(logits_V, 0)
        top = torch.topk(logp_V, min(self._top, logp_V.numel()))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return Token(token, float(logp_V[token]), pairs)

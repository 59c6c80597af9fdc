"""One request to a server, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lamella.endpoint.client import Endpoint, Refused, usage_of
from lamella.eval.labels import parse_generation
from lamella.loadtest.measure import Answer
from lamella.loadtest.prompts import Models, Prompt, body_of

Label = Literal["completed", "truncated", "invalid"]
PATHS = {"chat": "/chat/completions", "completions": "/completions"}


class Asker:
    """Asks prompt number n; one attempt, since what a retry hides is what a load test looks for.

    Args:
        timeout_s: for one request, whole; later it is an error.
        now: the clock that `Piece.at_s` is read from.
    """

    def __init__(
        self, endpoint: Endpoint, prompts: Sequence[Prompt], models: Models, mode: str, *, max_tokens: int,
        timeout_s: float, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._endpoint, self._prompts, self._models = endpoint, prompts, models
        self._mode, self._max_tokens, self._timeout_s, self._now = mode, max_tokens, timeout_s, now
        self._tenants = len({p.tenant for p in prompts})

    async def __call__(self, number: int) -> Answer:
        prompt = self._prompts[number % len(self._prompts)]
        model = self._models.of(prompt, number // self._tenants)
        body = body_of(prompt, self._mode, model, self._max_tokens)
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._mode == "classify":
                    return await self._classify(prompt, body)
                return await self._stream(prompt, body)
        except TimeoutError:
            return Answer(self._now(), "error", said="no answer in time")
        except Refused as refused:
            return Answer(self._now(), "rejected" if refused.status == 429 else "error", said=str(refused))

    async def _classify(self, prompt: Prompt, body: dict[str, Any]) -> Answer:
        tree, _, _ = await self._endpoint.post("/classify", body)
        end_s = self._now()
        results = tree.get("results")
        if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], dict):
            return Answer(end_s, "error", said="the answer holds no result for the document")
        told = results[0].get("label")
        known = prompt.labels or tree.get("labels") or ()
        label: Label = "completed" if isinstance(told, str) and told in known else "invalid"
        return Answer(end_s, "ok", input=usage_of(tree).input, label=label)

    async def _stream(self, prompt: Prompt, body: dict[str, Any]) -> Answer:
        first_s: float | None = None
        last_s: float | None = None
        texts: list[str] = []
        finish, usage = None, usage_of({})
        async for piece in self._endpoint.stream(PATHS[self._mode], body):
            if piece.text or piece.reasoning:
                first_s, last_s = (piece.at_s if first_s is None else first_s), piece.at_s
                texts.append(piece.text)
            finish, usage = piece.finish or finish, piece.usage or usage
        end_s = self._now()
        if finish is None:
            return Answer(end_s, "error", said="the stream broke off")
        label = None if prompt.parser is None else label_of("".join(texts), finish, prompt)
        return Answer(end_s, "ok", first_s, last_s, usage.input, usage.output, usage.reasoning, label)


def label_of(text: str, finish: str, prompt: Prompt) -> Label:
    """An answer that the token limit ended, in its thinking or after it, is "truncated"; one that is no label, "invalid"."""
    assert prompt.parser is not None
    status = parse_generation(text, stopped=finish != "length", parser=prompt.parser).status
    return "completed" if status == "answered" else "truncated" if status == "truncated" else "invalid"

"""One request's answers: tokens of the engine as text, log-probabilities and counts. Imports no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from starlette.types import Receive

from lamella.serve.backend import (
    Backend,
    Busy,
    EngineFailed,
    Finished,
    GenerateRequest,
    Token,
    TooLong,
    UnknownAdapter,
)
from lamella.serve.errors import ApiError, no_such_model
from lamella.serve.text import Piece

T = TypeVar("T")

_LEAST = -9999.0
"""What is told for a probability of 0, which JSON has no logarithm for."""


class Reader(Protocol):
    """Makes text of one answer's tokens: `text.AnswerText`, or `ChosenText`."""

    @property
    def stopped(self) -> bool: ...
    @property
    def thinks(self) -> bool: ...
    def add(self, token: int) -> Piece: ...
    def end(self) -> Piece: ...


class ChosenText:
    """Of an answer that is one of some labels: the label as it was asked for, when it is complete.

    Args:
        labels: token ids with terminator -> what to write.
        decode: for an answer that was cut off.
    """

    stopped = thinks = False

    def __init__(self, labels: Mapping[tuple[int, ...], str], decode: Callable[[Sequence[int]], str]) -> None:
        self._labels = dict(labels) | {ids[:-1]: text for ids, text in labels.items()}
        self._decode = decode
        self._ids: list[int] = []

    def add(self, token: int) -> Piece:
        self._ids.append(token)
        return Piece()

    def end(self) -> Piece:
        found = self._labels.get(tuple(self._ids))
        return Piece(content=self._decode(self._ids) if found is None else found)


@dataclass(frozen=True)
class Step:
    """What one token added to one answer. The last step of an answer has `finish`, and no token."""

    index: int
    piece: Piece
    token: Token | None = None
    thinks: bool = False
    finish: Literal["stop", "length"] | None = None


@dataclass
class Answer:
    """One answer when it is complete."""

    reasoning: str = ""
    content: str = ""
    tokens: list[Token] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish: str = "stop"

    def add(self, step: Step) -> None:
        self.reasoning += step.piece.reasoning
        self.content += step.piece.content
        if step.token is not None:
            self.tokens.append(step.token)
            self.reasoning_tokens += step.thinks
        if step.finish is not None:
            self.finish = step.finish


def refusal(error: Exception, model: str) -> ApiError:
    """What a caller is told when the engine does not answer."""
    if isinstance(error, Busy):
        return ApiError(429, f"the server is busy: {error}", code="busy", retry_s=error.retry_after_s)
    if isinstance(error, TooLong):
        return ApiError(400, f"{error}: send a shorter prompt, or ask for fewer tokens", code="context_length_exceeded")
    if isinstance(error, UnknownAdapter):
        return no_such_model(model)
    if isinstance(error, EngineFailed):
        return ApiError(503, "the engine failed; see the server's log", code="engine_failed", retry_s=5)
    assert isinstance(error, TimeoutError), error
    return ApiError(504, "the request took longer than this server allows: ask for less", code="timeout")


ENGINE_ERRORS = (Busy, TooLong, UnknownAdapter, EngineFailed, TimeoutError)


async def _one(backend: Backend, request: GenerateRequest, index: int, text: Reader) -> AsyncGenerator[Step, None]:
    """One answer step by step; ends early when a stop string is found."""
    async with aclosing(_closable(backend.generate(request))) as tokens:
        async for item in tokens:
            if isinstance(item, Finished):
                if item.reason == "cancelled":
                    raise EngineFailed("the engine ended this request")
                yield Step(index, text.end(), finish=item.reason)
                return
            thinks = text.thinks
            yield Step(index, text.add(item.id), item, thinks)
            if text.stopped:
                yield Step(index, Piece(), finish="stop")
                return
    raise EngineFailed("an answer without an end")


async def _closable(items: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    try:
        async for item in items:
            yield item
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


async def steps(
    backend: Backend, requests: Sequence[GenerateRequest], text: Callable[[int], Reader], deadline_s: float
) -> AsyncGenerator[Step, None]:
    """Steps of all answers as they come. Closing it cancels those that still run.

    Args:
        text: makes the reader of the answer of an index.
        deadline_s: `time.monotonic()` at which it ends with a `TimeoutError`.
    """
    queue: asyncio.Queue[Step | int] = asyncio.Queue()

    async def pump(index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(_one(backend, request, index, text(index))) as answer:
                async for step in answer:
                    queue.put_nowait(step)
        finally:
            queue.put_nowait(index)

    tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            item = await asyncio.wait_for(queue.get(), max(deadline_s - time.monotonic(), 0))
            if isinstance(item, Step):
                yield item
                continue
            await tasks[item]  # raises what it ended with
            left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(receive: Receive, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """The result of `work`, or None when the client hung up before; then the work is cancelled.

    Args:
        receive: ASGI's, of a request whose body was read.
    """
    doing = asyncio.ensure_future(work())
    watching = asyncio.create_task(until_gone(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    """Returns when the client hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def logp(value: float | None) -> float | None:
    """As JSON can say it."""
    return None if value is None else max(value, _LEAST)


def chat_logprobs(tokens: Sequence[Token], decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`. `bytes` is null where a token is no whole text."""

    def one(token: int, value: float | None) -> dict[str, Any]:
        text = decode([token])
        return {"token": text, "logprob": logp(value), "bytes": None if "�" in text else list(text.encode())}

    return [
        {**one(t.id, t.logprob), "top_logprobs": [one(i, value) for i, value in t.top]} for t in tokens
    ]  # fmt: skip


def plain_logprobs(tokens: Sequence[Token], decode: Callable[[Sequence[int]], str], start: int = 0) -> dict[str, Any]:
    """The `logprobs` of /v1/completions; `start`: characters before the first token."""
    texts = [decode([t.id]) for t in tokens]
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [logp(t.logprob) for t in tokens],
        "top_logprobs": [_by_text(t, text, decode) for t, text in zip(tokens, texts, strict=True)],
        "text_offset": offsets,
    }


def _by_text(token: Token, text: str, decode: Callable[[Sequence[int]], str]) -> dict[str, float | None] | None:
    """The likeliest tokens and the token itself. Of tokens that read alike the one that stands there keeps its text (then the
    likelier one), the others are `token_id:N`. Nothing before the first token."""
    if token.logprob is None:
        return None
    if not token.top:
        return {}
    owner, found = {text: token.id}, {text: logp(token.logprob)}
    for i, value in token.top:
        reads = decode([i])
        found[reads if owner.setdefault(reads, i) == i else f"token_id:{i}"] = logp(value)
    return found

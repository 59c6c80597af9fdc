"""Chat and plain completions: from a checked request to answers, whole or streamed. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lamella.serve.answering import (
    ENGINE_ERRORS,
    Answer,
    ChosenText,
    Reader,
    Step,
    chat_logprobs,
    plain_logprobs,
    refusal,
    steps,
)
from lamella.serve.backend import GenerateRequest, Sampling, ScoreRequest, Token
from lamella.serve.errors import ApiError
from lamella.serve.schema import ChatRequest, CompletionRequest, Sampled, choices_of, written
from lamella.serve.service import Ids, Model, Service, Visit, new_id
from lamella.serve.text import AnswerText

T = TypeVar("T")
_DEFAULT_TOKENS = 16
"""Of a plain completion, as OpenAI has it."""


@dataclass
class Job:
    """A request ready for the engine.

    Attributes:
        reader: makes the text reader of the answer of an index.
        prompts: of each answer; equal ones follow one another, `n` of each.
        echo: texts of the prompts, shown before each answer; empty: not asked for.
        top: likeliest tokens wanted in the place of each token.
        scored: of each prompt its tokens with their log-probabilities; `collect` asks for them.
    """

    id: str
    model: Model
    requests: list[GenerateRequest]
    reader: Callable[[int], Reader]
    n: int
    logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    echo: list[str] = field(default_factory=list)
    top: int = 0
    scored: list[list[Token]] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests[:: self.n])

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        made = sum(len(answer.tokens) for answer in answers)
        thought = sum(answer.reasoning_tokens for answer in answers)
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": made, "total_tokens": self.prompt_tokens + made,
            "completion_tokens_details": {"reasoning_tokens": thought},
        }  # fmt: skip


def _sampling(asked: Sampled, k: int) -> Sampling:
    """Of answer `k`; answers of one request have seeds of their own."""
    seed = None if asked.seed is None else (asked.seed + k) % 2**63
    top_k = max(asked.top_k or 0, 0)
    temperature = 1.0 if asked.temperature is None else float(asked.temperature)
    return Sampling(temperature, 1.0 if asked.top_p is None else float(asked.top_p), top_k, seed)


def _check_counts(service: Service, asked: Sampled, tops: int | None, param: str) -> int:
    limits = service.config.limits
    n = asked.n or 1
    if n > limits.max_choices:
        raise ApiError(400, f"`n` is {n}, this server gives {limits.max_choices} at most", param="n")
    if tops is not None and tops > limits.max_logprobs:
        raise ApiError(400, f"`{param}` is {tops}, this server gives {limits.max_logprobs} at most", param=param)
    if len(asked.stops) > 16:
        raise ApiError(400, f"{len(asked.stops)} stop strings: give 16 at most", param="stop")
    return n


async def chat_job(service: Service, visit: Visit, asked: ChatRequest) -> Job:
    """Raises `ApiError`: whatever cannot be done as asked."""
    model = service.find(visit, asked.model)
    tops = (asked.top_logprobs or 0) if asked.logprobs else None
    n = _check_counts(service, asked, tops, "top_logprobs")
    choices = choices_of(asked, service.config.limits.max_documents)
    prompt, opened = await service.encode(lambda: model.chat_ids(asked.messages), "messages")
    limit = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
    labels: dict[Ids, str] = {}
    if choices is not None:
        ids = await service.encode(lambda: [model.answer_ids(label) for label in choices[0]], "guided_choice")
        labels = {i: written(choices, label) for i, label in zip(ids, choices[0], strict=True)}
        if opened:
            raise ApiError(400, "the chat template opens <think> where the label would begin: ask without choices",
                           param="guided_choice")  # fmt: skip
        if max(map(max, ids)) >= service.backend.limits().vocabulary:
            raise ApiError(400, "a choice needs a token that the model does not have: rename it", param="guided_choice")
        if len(labels) < len(ids):
            raise ApiError(400, "two choices have the same tokens: give different ones", param="guided_choice")
        if asked.stops:
            raise ApiError(400, "`stop` with choices: leave it out", param="stop")
    longest = max(map(len, labels), default=service.config.limits.max_new_tokens)
    new = service.room(prompt, limit, longest, "messages")
    request_id = new_id("chatcmpl")
    requests = [
        GenerateRequest(f"{request_id}-{k}", model.adapter, prompt, new, model.stop_ids, _sampling(asked, k), tops,
                        tuple(labels) or None)
        for k in range(n)
    ]  # fmt: skip

    def reader(index: int) -> Reader:
        if labels:
            return ChosenText(labels, model.decode)
        return AnswerText(model.decode, asked.stops, thinking=True, opened=opened)

    return Job(request_id, model, requests, reader, n, bool(asked.logprobs))


async def completion_job(service: Service, visit: Visit, asked: CompletionRequest) -> Job:
    """Raises `ApiError`: whatever cannot be done as asked."""
    model = service.find(visit, asked.model)
    n = _check_counts(service, asked, asked.logprobs, "logprobs")
    given: list[Any] = [asked.prompt] if isinstance(asked.prompt, str) or _is_ids(asked.prompt) else list(asked.prompt)
    most = service.config.limits.max_documents
    if not 1 <= len(given) <= most:
        raise ApiError(400, f"{len(given)} prompts: give 1 to {most}", param="prompt")
    prompts = await service.encode(
        lambda: [model.text_ids(p) if isinstance(p, str) else tuple(p) for p in given], "prompt"
    )
    request_id = new_id("cmpl")
    requests = []
    for i, prompt in enumerate(prompts):
        new = service.room(prompt, asked.max_tokens, _DEFAULT_TOKENS, "prompt")
        requests += [
            GenerateRequest(f"{request_id}-{i}-{k}", model.adapter, prompt, new, model.stop_ids, _sampling(asked, k), asked.logprobs)
            for k in range(n)
        ]  # fmt: skip
    job = Job(request_id, model, requests, lambda _: AnswerText(model.decode, asked.stops, thinking=False), n,
              asked.logprobs is not None)  # fmt: skip
    if asked.echo:
        job.echo = [p if isinstance(p, str) else model.decode(p) for p in given]
        job.top = asked.logprobs or 0
    return job


def _is_ids(prompt: Any) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


async def _prompt_logprobs(service: Service, visit: Visit, job: Job, prompt: Ids) -> list[Token]:
    """Each token of a prompt with its log-probability after those before it; the first has none."""
    if len(prompt) == 1:
        return [Token(prompt[0])]
    asked = ScoreRequest(f"{job.id}-p", job.model.adapter, (prompt[:1],), job.model.token_path(prompt[1:]))
    try:
        if job.top:
            values_NE, likeliest = await within(visit, service.backend.score_likeliest(asked, job.top))
            tops = likeliest[0]
        else:
            values_NE = await within(visit, service.backend.score(asked))
            tops = [()] * (len(prompt) - 1)
    except ENGINE_ERRORS as error:
        raise refusal(error, job.model.name) from error
    scored = zip(prompt[1:], values_NE[0], tops, strict=True)
    return [Token(prompt[0]), *(Token(token, float(value), most) for token, value, most in scored)]


async def within(visit: Visit, work: Awaitable[T]) -> T:
    """The result of engine work, within the request's time. Raises `TimeoutError`."""
    return await asyncio.wait_for(work, max(visit.deadline_s - time.monotonic(), 0))


async def run(service: Service, visit: Visit, job: Job) -> AsyncGenerator[Step, None]:
    """Steps of all answers, counted.

    Raises:
        ApiError: 429, 400, 404, 503, 504, at any step.
    """
    first = True
    service.count(visit, "prompt", job.prompt_tokens)
    try:
        async with aclosing(steps(service.backend, job.requests, job.reader, visit.deadline_s)) as found:
            async for step in found:
                if step.token is not None:
                    if first:
                        service.metrics.first_token.labels(visit.model).observe(time.monotonic() - visit.start_s)
                        first = False
                    service.count(visit, "completion", 1)
                yield step
    except ENGINE_ERRORS as error:
        raise refusal(error, job.model.name) from error


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(service: Service, visit: Visit, job: Job) -> list[Answer]:
    """All answers, complete. Raises as `run`."""
    answers = [Answer() for _ in job.requests]
    if job.echo and job.logprobs:
        job.scored = await _all([_prompt_logprobs(service, visit, job, r.prompt) for r in job.requests[:: job.n]])
    if job.requests[0].max_new_tokens == 0:  # `echo` alone
        service.count(visit, "prompt", job.prompt_tokens)
        return [Answer(finish="length") for _ in job.requests]
    async with aclosing(run(service, visit, job)) as found:
        async for step in found:
            answers[step.index].add(step)
    return answers


def chat_answer(job: Job, answers: Sequence[Answer]) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(answers):
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        logprobs = (
            {"content": chat_logprobs(answer.tokens, job.model.decode), "refusal": None} if job.logprobs else None
        )
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish})
    return {**_head(job, "chat.completion"), "choices": choices, "usage": job.usage(answers)}


def completion_answer(job: Job, answers: Sequence[Answer]) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(answers):
        text = job.echo[index // job.n] if job.echo else ""
        tokens = job.scored[index // job.n] if job.scored else []
        logprobs = plain_logprobs([*tokens, *answer.tokens], job.model.decode) if job.logprobs else None
        choices.append(
            {"index": index, "text": text + answer.content, "logprobs": logprobs, "finish_reason": answer.finish}
        )
    return {**_head(job, "text_completion"), "choices": choices, "usage": job.usage(answers)}


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model.name}


async def events(
    job: Job, found: AsyncGenerator[Step, None], first: Step, *, chat: bool, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a stream whose first step is there already. An error ends it with an `error` event."""
    answers = [Answer() for _ in job.requests]
    extra = {"usage": None} if include_usage else {}
    head = {**_head(job, "chat.completion.chunk" if chat else "text_completion"), **extra}
    lengths = [0] * len(answers)
    async with aclosing(found):
        try:
            if chat:
                for index in range(len(answers)):
                    delta = {"role": "assistant", "content": ""}
                    yield _event({**head, "choices": [_choice(index, {"delta": delta})]})
            step: Step | None = first
            while step is not None:
                answers[step.index].add(step)
                change = _chat_change(job, step) if chat else _plain_change(job, step, lengths)
                if change is not None:
                    yield _event({**head, "choices": [change]})
                step = await anext(found, None)
        except ApiError as error:
            yield _event(error.body)
            return
    if include_usage:
        yield _event({**head, "choices": [], "usage": job.usage(answers)})
    yield b"data: [DONE]\n\n"


def _choice(index: int, what: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, **what, "logprobs": logprobs, "finish_reason": finish}


def _chat_change(job: Job, step: Step) -> dict[str, Any] | None:
    delta = {
        key: value for key, value in (("reasoning_content", step.piece.reasoning), ("content", step.piece.content)) if value
    }  # fmt: skip
    logprobs = None
    if job.logprobs and step.token is not None:
        logprobs = {"content": chat_logprobs([step.token], job.model.decode), "refusal": None}
    if not delta and logprobs is None and step.finish is None:
        return None
    return _choice(step.index, {"delta": delta}, step.finish, logprobs)


def _plain_change(job: Job, step: Step, lengths: list[int]) -> dict[str, Any] | None:
    logprobs = None
    if job.logprobs and step.token is not None:
        logprobs = plain_logprobs([step.token], job.model.decode, lengths[step.index])
        lengths[step.index] += len(logprobs["tokens"][0])
    if not step.piece.content and logprobs is None and step.finish is None:
        return None
    return _choice(step.index, {"text": step.piece.content}, step.finish, logprobs)


def _event(tree: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(tree, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"

"""Rows put to an endpoint: many at once, each once, within rates and money."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella.compare.answers import Answers, Spent, in_order
from lamella.compare.settings import Candidate
from lamella.console import Meter
from lamella.endpoint.cache import AnswerCache, key_of
from lamella.endpoint.client import Endpoint, Refused, Reply, Usage, read_key, usage_of
from lamella.endpoint.limits import CeilingReached, Ledger, RateLimiter
from lamella.endpoint.prices import Price, price_of
from lamella.errors import RunFailed, UserError
from lamella.eval.encoder import StoreEncoder
from lamella.eval.labels import LabelParser, parse_generation
from lamella.eval.metrics import Prediction
from lamella.eval.task import TaskRow
from lamella.eval.trie import LabelTrie

WAYS = ("choice", "json_schema", "enum_schema", "guided_choice")
"""In which order `auto` tries them."""
PROBE_LABELS = ("lamella-alpha", "lamella-beta")
_MARKS = 24  # tokens of a message's marks, at most
LABEL_TOKENS = 64
KEPT = ("text", "reasoning", "finish", "latency_s", "retries", "logprobs", "usage", "cost")
"""Keys of an answer in the cache."""


@dataclass(frozen=True)
class Question:
    """One row, as it is asked: path and body; `at_most`: tokens of input and output together, at most."""

    row: TaskRow
    path: str
    body: dict[str, Any]
    input_at_most: int
    output_at_most: int


def constraint(way: str, labels: Sequence[str]) -> dict[str, Any]:
    """What makes a server write one of these labels and nothing else."""
    enum = {"type": "string", "enum": list(labels)}
    if way == "choice":
        return {"structured_outputs": {"choice": list(labels)}}
    if way == "guided_choice":
        return {"guided_choice": list(labels)}
    if way == "enum_schema":
        return {
            "response_format": {"type": "json_schema", "json_schema": {"name": "label", "strict": True, "schema": enum}}
        }
    shape = {"type": "object", "properties": {"label": enum}, "required": ["label"], "additionalProperties": False}
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "label", "strict": True, "schema": shape}}
    }


def written(way: str, text: str) -> str:
    """The label in an answer of a way."""
    if way in ("json_schema", "enum_schema"):
        try:
            tree = json.loads(text)
        except ValueError:
            return text
        if isinstance(tree, dict):
            tree = tree.get("label", text)
        return tree if isinstance(tree, str) else text
    return text


class Asker:
    """One endpoint candidate.

    Args:
        ledger: of the whole comparison.
        transport: for tests.
    """

    def __init__(
        self, candidate: Candidate, task: Any, seed: int, cache: AnswerCache, ledger: Ledger, *, transport: Any = None,
        sleep: Any = asyncio.sleep,
    ) -> None:  # fmt: skip
        self.candidate, self.task, self.seed, self.cache, self.ledger = candidate, task, seed, cache, ledger
        self.price: Price | None = None if candidate.price is None else price_of(candidate.price)
        self._limiter = RateLimiter(candidate.requests_per_min, candidate.tokens_per_min)
        self._transport, self._sleep = transport, sleep
        self.way = candidate.way
        self.notes: list[str] = []
        self._encoder = StoreEncoder.open(candidate.tokenizer) if candidate.tokenizer is not None else None
        self._tries: dict[str, LabelTrie] = {}
        self.spent = Spent(money=None if self.price is None else 0.0)

    def check(self) -> None:
        """All that can be refused before anything is asked. Raises `UserError`."""
        if self.ledger.ceiling is not None and self.price is None:
            raise UserError(f"candidate {self.candidate.name!r} has no price, and there is a ceiling",
                            fix="give `price`, or leave `ceiling` out")  # fmt: skip
        read_key(self.candidate.key_env)
        for tenant in self.task.tenants:
            self.task.choose_shots(tenant, self.candidate.few_shot, self.seed)

    async def ask_all(self, meter: Meter) -> Answers:
        """Every test row.

        Raises:
            UserError: the server refuses (wrong key, model or request), or cannot answer in this way.
            RunFailed: the ceiling is reached, or rows stayed without an answer; what was answered is kept.
        """
        assert self.candidate.endpoint is not None
        start_s = time.monotonic()
        async with Endpoint(
            self.candidate.endpoint, key_env=self.candidate.key_env, timeout_s=self.candidate.timeout_s,
            attempts=self.candidate.attempts, transport=self._transport, connections=self.candidate.concurrency, sleep=self._sleep,
        ) as server:  # fmt: skip
            await self._settle_way(server)
            rows = [row for tenant in self.task.tenants for row in self.task.rows_of(tenant)]
            questions = [self._question(row) for row in rows]
            found: list[Prediction] = []
            failed: list[tuple[TaskRow, Refused]] = []
            waiting = iter(questions)
            stop: list[BaseException] = []

            async def work() -> None:
                for question in waiting:
                    if stop:
                        return
                    try:
                        found.append(await self._answer(server, question))
                        meter.advance(1, self._said())
                    except CeilingReached as reached:
                        stop.append(reached)
                    except Refused as refused:
                        if refused.status in (400, 401, 403, 404, 405, 413, 422):
                            stop.append(refused)
                        failed.append((question.row, refused))

            await asyncio.gather(*(work() for _ in range(self.candidate.concurrency)))
        self._raise(stop, failed, len(found), len(rows))
        self.spent.wall_s = time.monotonic() - start_s
        if self.spent.uncounted:
            self.notes.append(f"the server does not say how many tokens {self.spent.uncounted} answers took: they count as none, and "
                              "as the most where they cost money")  # fmt: skip
        return Answers(in_order(found, [(r.tenant, r.id) for r in self.task.test]), self.spent, self.notes, self.price,
                       {"way": self.way if self.candidate.answering == "constrained" else None})  # fmt: skip

    def _said(self) -> str:
        if self.price is None:
            return f"{self.spent.from_cache} from the cache"
        return f"{self.ledger.spent:.4g} {self.price.currency} so far, {self.spent.from_cache} from the cache"

    def _raise(
        self, stop: list[BaseException], failed: list[tuple[TaskRow, Refused]], answered: int, rows: int
    ) -> None:
        name = self.candidate.name
        for reason in stop:
            if isinstance(reason, Refused):
                raise UserError(
                    f"{name!r} at {self.candidate.endpoint}: {reason}", fix="correct the candidate in compare.toml"
                )
        if stop:
            raise RunFailed(
                f"the ceiling of {self.ledger.ceiling:g} is reached: {self.ledger.spent:.6g} spent, {answered} of {rows} rows of "
                f"{name!r} answered", fix="raise `ceiling` and run again: nothing is asked twice",
            )  # fmt: skip
        if failed:
            row, refused = failed[0]
            raise RunFailed(
                f"{len(failed)} of {rows} rows of {name!r} got no answer after {self.candidate.attempts} attempts, first row "
                f"{row.id!r} of {row.tenant!r}: {refused}", fix="run again: what was answered is kept",
            )  # fmt: skip

    # ---- one row

    def _question(self, row: TaskRow) -> Question:
        c, labels = self.candidate, self.task.labels[row.tenant]
        messages = self.task.messages(row, self.task.choose_shots(row.tenant, c.few_shot, self.seed))
        size = sum(len(m["content"].encode()) + _MARKS for m in messages)
        if c.answering == "likelihood":
            assert self._encoder is not None
            prompt = list(self._encoder.prompt_ids(messages))
            trie = self._tries.setdefault(row.tenant, LabelTrie(labels, [self._encoder.answer_ids(x) for x in labels]))
            asked = [[*prompt, *self._encoder.answer_ids(label)] for label in trie.labels]
            body: dict[str, Any] = {
                "model": c.model,
                "prompt": asked,
                "max_tokens": 0,
                "echo": True,
                "logprobs": 1,
                "temperature": 0,
            }
            return Question(row, "/completions", body, sum(map(len, asked)), 0)
        answer = c.max_new_tokens or self.task.config.max_new_tokens
        limit = {"constrained": LABEL_TOKENS, "think": c.thinking_budget + answer, "generate": answer}[c.answering]
        body = {"model": c.model, "messages": messages, "max_tokens": limit, "temperature": c.temperature}
        if c.answering == "constrained":
            body |= constraint(self.way, labels)
        return Question(row, "/chat/completions", body, size, limit)

    async def _answer(self, server: Endpoint, question: Question) -> Prediction:
        kept = await self._fetch(server, question)
        usage = Usage(**kept["usage"])
        self._count(usage, kept)
        row, parser = question.row, self.task.parser_of(question.row.tenant)
        assert row.id is not None
        if self.candidate.answering == "likelihood":
            return self._likelihood(row, kept["logprobs"])
        read = self._read(kept, usage, parser)
        return Prediction(row.tenant, row.id, row.document, row.label, read.label, read.status, output=read.answer,
                          reasoning=read.reasoning or None)  # fmt: skip

    def _read(self, kept: Mapping[str, Any], usage: Usage, parser: LabelParser) -> Any:
        """B85: reasoning never reaches the parser, and what thought too long is truncated, whatever it then said."""
        text, thought = kept["text"], kept["reasoning"]
        if self.candidate.answering == "constrained":
            text = written(self.way, text)
        stopped = kept["finish"] not in ("length", "max_tokens")
        over = self.candidate.answering == "think" and (usage.reasoning or 0) > self.candidate.thinking_budget
        read = parse_generation(text, stopped=stopped and not over, parser=parser)
        return read if not thought else type(read)(read.status, read.label, read.answer, thought + read.reasoning)

    def _likelihood(self, row: TaskRow, logprobs: list[list[float]]) -> Prediction:
        labels = self._tries[row.tenant].labels
        sums = [float(sum(part)) for part in logprobs]
        weights = np.exp(np.array(sums) - max(sums))
        ranked = sorted(sums)
        best = int(np.argmax(sums))
        assert row.id is not None
        return Prediction(
            row.tenant, row.id, row.document, row.label, labels[best], scores=dict(zip(labels, sums, strict=True)),
            probabilities=dict(zip(labels, map(float, weights / weights.sum()), strict=True)), margin=ranked[-1] - ranked[-2],
        )  # fmt: skip

    async def _fetch(self, server: Endpoint, question: Question) -> dict[str, Any]:
        """The answer, from the cache or the server."""
        key = key_of({"url": server.base_url, "path": question.path, "body": question.body})
        kept = self.cache.get(key, KEPT)
        if kept is not None:
            self.spent.from_cache += 1
            return kept
        at_most = 0.0 if self.price is None else self.price.cost(question.input_at_most, question.output_at_most)
        await self.ledger.reserve(at_most)
        cost = at_most  # what was under way when it broke may have been billed
        try:
            await self._limiter.wait(question.input_at_most + question.output_at_most)
            kept, cost = await self._post(server, question)
        except Refused as refused:
            cost = at_most if refused.status == 0 else 0.0
            raise
        finally:
            await self.ledger.settle(at_most, cost)
        self.cache.put(key, {**kept, "cost": cost})
        return {**kept, "cost": cost}

    async def _post(self, server: Endpoint, question: Question) -> tuple[dict[str, Any], float]:
        if question.path == "/completions":
            tree, latency_s, retries = await server.post(question.path, question.body)
            reply = Reply("", "", "", Usage(), latency_s, retries, tree)
            usage = usage_of(tree)
            logprobs = self._echoed(tree, question)
        else:
            reply = await server.chat(question.body)
            usage, logprobs = reply.usage, None
        cost = 0.0
        if self.price is not None:
            given = question.input_at_most if usage.input is None else usage.input
            wrote = question.output_at_most if usage.output is None else usage.output
            cost = self.price.cost(given, wrote, usage.cached_input or 0)
        kept = {"text": reply.text, "reasoning": reply.reasoning, "finish": reply.finish, "latency_s": reply.latency_s,
                "retries": reply.retries, "logprobs": logprobs,
                "usage": {"input": usage.input, "output": usage.output, "reasoning": usage.reasoning,
                          "cached_input": usage.cached_input}}  # fmt: skip
        return kept, cost

    def _echoed(self, tree: Mapping[str, Any], question: Question) -> list[list[float]]:
        """Log-probabilities of each label's tokens. Raises `Refused` where the server does not give those of the prompt."""
        assert self._encoder is not None
        asked = question.body["prompt"]
        labels = self._tries[question.row.tenant].labels
        try:
            choices = sorted(tree["choices"], key=lambda c: c["index"])
            told = [c["logprobs"]["token_logprobs"][: len(ids)] for c, ids in zip(choices, asked, strict=True)]
            parts = [part[-len(self._encoder.answer_ids(label)) :] for part, label in zip(told, labels, strict=True)]
            if any(len(part) != len(ids) for part, ids in zip(told, asked, strict=True)):
                raise ValueError("not one per token")
            return [[float(x) for x in part] for part in parts]
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(400, "it gives no log-probabilities of prompts (echo with logprobs), so labels cannot be scored there; "
                          'use answering = "constrained"') from error  # fmt: skip

    def _count(self, usage: Usage, kept: Mapping[str, Any]) -> None:
        spent = self.spent
        spent.uncounted += usage.input is None or usage.output is None
        spent.input += usage.input or 0
        spent.output += usage.output or 0
        spent.reasoning += usage.reasoning or 0
        spent.cached_input += usage.cached_input or 0
        spent.latencies_s.append(kept["latency_s"])
        spent.retries += kept["retries"]
        if spent.money is not None:
            spent.money += kept["cost"]

    # ---- which way holds

    async def _settle_way(self, server: Endpoint) -> None:
        """Find a way by which the server writes labels only: asked for something else, it must still write one of them."""
        if self.candidate.answering != "constrained" or self.candidate.way != "auto":
            return
        said = []
        for way in WAYS:
            body = {
                "model": self.candidate.model, "max_tokens": LABEL_TOKENS, "temperature": 0,
                "messages": [{"role": "user", "content": "Write the word banana."}], **constraint(way, PROBE_LABELS),
            }  # fmt: skip
            key = key_of({"url": server.base_url, "probe": body})
            told = self.cache.get(key, ("text",))
            if told is None:
                try:
                    told = await self._probe(server, body)
                except Refused as refused:
                    if refused.status in (401, 403, 404):
                        raise UserError(f"{self.candidate.name!r} at {self.candidate.endpoint}: {refused}",
                                        fix="correct `model`, `key_env` or `endpoint`") from refused  # fmt: skip
                    told = {"refused": str(refused)}
                if "refused" not in told:
                    self.cache.put(key, told)
            if "refused" not in told and written(way, told["text"]).strip() in PROBE_LABELS:
                self.way = way  # type: ignore[assignment]
                self.notes.append(f"labels are enforced by {way}, found by trying")
                return
            said.append(f"{way}: {told.get('refused') or 'other words were written'}")
        raise UserError(f"{self.candidate.name!r} cannot be held to labels ({'; '.join(said)})",
                        fix='use answering = "generate" or "think"')  # fmt: skip

    async def _probe(self, server: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
        at_most = 0.0 if self.price is None else self.price.cost(200, LABEL_TOKENS)
        try:
            await self.ledger.reserve(at_most)
        except CeilingReached as error:
            raise RunFailed("the ceiling leaves no room for a first request", fix="raise `ceiling`") from error
        try:
            reply = await server.chat(body)
        finally:
            await self.ledger.settle(at_most, at_most)
        return {"text": reply.text, "cost": at_most}

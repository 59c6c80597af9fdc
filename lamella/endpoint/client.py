"""An OpenAI-compatible server, asked over httpx.

A key comes from the environment variable that the settings name, goes into one header, and nowhere else: not into errors, the
cache, or notices. Requests are sent again after 408, 409, 429, 5xx and broken connections, with exponential back-off and the
server's `Retry-After`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from lamella.errors import UserError

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which a request is sent again."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0


class Refused(Exception):
    """The server's answer was no, and asking again would not change it.

    Attributes:
        status: HTTP status; 0: no answer at all.
        said: the server's message.
    """

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{said} (HTTP {status})" if status else said)
        self.status, self.said = status, said


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer as the server counts them; None where it does not say."""

    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cached_input: int | None = None


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        text, reasoning: what was written, and what was thought (in fields of its own; `<think>` in the text is left there).
        finish: why it ended, in the server's words ("stop", "length", ...).
        latency_s: of the attempt that was answered, from sending to the last byte.
        retries: attempts before it.
        raw: the whole body.
    """

    text: str
    reasoning: str
    finish: str
    usage: Usage
    latency_s: float
    retries: int
    raw: dict[str, Any] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer; `at_s` is `time.monotonic()` when it came."""

    at_s: float
    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: Usage | None = None


def read_key(variable: str | None) -> str | None:
    """The key in an environment variable; None where none is named.

    Raises:
        UserError: the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"the environment variable {variable} holds no key", fix=f"export {variable}=...")
    if not key.isascii() or not key.isprintable():  # a header cannot hold it, and an error of the library would show it
        raise UserError(
            f"the environment variable {variable} holds no key: a key is one line of ASCII",
            fix=f"export {variable}=...",
        )
    return key


class Endpoint:
    """A server. Use as an async context manager.

    Args:
        base_url: up to and with `/v1`.
        key_env: environment variable that holds the key; None: no key is sent.
        timeout_s: for one attempt, whole.
        attempts: at most, the first included.
        sleep: waits between attempts (for tests).
    """

    def __init__(
        self, base_url: str, *, key_env: str | None = None, timeout_s: float = 120.0, attempts: int = 6,
        headers: Mapping[str, str] | None = None, transport: httpx.AsyncBaseTransport | None = None, connections: int = 64,
        sleep: Any = asyncio.sleep,
    ) -> None:  # fmt: skip
        key = read_key(key_env)
        sent = {"Accept": "application/json", **(headers or {})}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        self.base_url = base_url.rstrip("/")
        self._hidden = key
        self._attempts, self._sleep = attempts, sleep
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(
            base_url=self.base_url, headers=sent, timeout=timeout_s, transport=transport, limits=limits
        )

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def chat(self, body: Mapping[str, Any]) -> Reply:
        """`/chat/completions`, whole. Raises `Refused`."""
        tree, latency_s, retries = await self.post("/chat/completions", body)
        try:
            choice = tree["choices"][0]
            message = choice["message"]
            text, thought = (
                message.get("content") or "",
                message.get("reasoning_content") or message.get("reasoning") or "",
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Refused(200, f"the answer is no chat completion: {json.dumps(tree)[:200]}") from error
        return Reply(
            str(text), str(thought), str(choice.get("finish_reason") or ""), usage_of(tree), latency_s, retries, tree
        )

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float, int]:
        """(JSON object, seconds of the attempt that was answered, attempts before it). Raises `Refused`."""
        for attempt in range(self._attempts):
            start_s = time.monotonic()
            said, status, wait_s = "", 0, None
            try:
                answer = await self._http.post(path, json=dict(body))
                status = answer.status_code
                if status == 200:
                    tree = answer.json()
                    if isinstance(tree, dict):
                        return tree, time.monotonic() - start_s, attempt
                    said = "the answer is no JSON object"
                else:
                    said, wait_s = _message(answer), _retry_after(answer)
            except httpx.TimeoutException:
                said = "no answer in time"
            except (httpx.HTTPError, ValueError, RecursionError) as error:
                said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if (status not in AGAIN and status not in (0, 200)) or attempt + 1 == self._attempts:
                raise Refused(status, self._clean(said))
            await self._sleep(wait_s if wait_s is not None else back_off_s(attempt))
        raise AssertionError("attempts is 1 or more")

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """Server-sent events of `/chat/completions` or `/completions`, one attempt. Raises `Refused`."""
        try:
            async with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise Refused(answer.status_code, self._clean(_message(answer)))
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    yield _piece(json.loads(data))
        except httpx.TimeoutException as error:
            raise Refused(0, "no answer in time") from error
        except (httpx.HTTPError, ValueError) as error:
            raise Refused(0, self._clean(f"{type(error).__name__}: {error}")) from error

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON object. Raises `Refused`."""
        try:
            answer = await self._http.get(path)
            tree = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError) as error:
            raise Refused(0, self._clean(f"{type(error).__name__}: {error}")) from error
        if answer.status_code != 200:
            raise Refused(answer.status_code, self._clean(_message(answer)))
        return tree if isinstance(tree, dict) else {}

    def _clean(self, said: str) -> str:
        """Without the key, should a server repeat it."""
        return said.replace(self._hidden, "***") if self._hidden else said


def back_off_s(attempt: int) -> float:
    """Twice as long each time, with jitter, so that many do not come back at once."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1.0)


def _retry_after(answer: httpx.Response) -> float | None:
    try:
        seconds = float(answer.headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S)


def _message(answer: httpx.Response) -> str:
    try:
        tree = answer.json()
        error = tree.get("error", tree) if isinstance(tree, dict) else tree
        said = error.get("message") if isinstance(error, dict) else error
    except ValueError:
        said = answer.text
    return str(said or answer.reason_phrase)[:500]


def usage_of(tree: Mapping[str, Any]) -> Usage:
    """The `usage` of an answer."""
    used = tree.get("usage")
    if not isinstance(used, dict):
        return Usage()
    out, given = (
        d if isinstance(d := used.get(name), dict) else {}
        for name in ("completion_tokens_details", "prompt_tokens_details")
    )
    return Usage(_count(used.get("prompt_tokens")), _count(used.get("completion_tokens")), _count(out.get("reasoning_tokens")),
                 _count(given.get("cached_tokens")))  # fmt: skip


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _piece(tree: Any) -> Piece:
    now_s = time.monotonic()
    if not isinstance(tree, dict):
        return Piece(now_s)
    if isinstance(tree.get("error"), dict):
        raise Refused(int(tree["error"].get("status") or 0), str(tree["error"].get("message")))
    usage = usage_of(tree) if isinstance(tree.get("usage"), dict) else None
    choices = tree.get("choices") or []
    if not choices:
        return Piece(now_s, usage=usage)
    choice = choices[0]
    delta = choice.get("delta") or {}
    text = delta.get("content") or choice.get("text") or ""
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return Piece(now_s, str(text), str(thought), choice.get("finish_reason"), usage)

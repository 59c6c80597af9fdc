"""What every route needs: models, engine, keys, limits; and what is known of one request. Imports no torch."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import Request

from lamella.errors import UserError
from lamella.serve.backend import Backend, LoadedAdapter
from lamella.serve.errors import ApiError, no_such_model
from lamella.serve.keys import ANYONE, Caller, KeyStore
from lamella.serve.limits import Limiter
from lamella.serve.metrics import ServeMetrics
from lamella.serve.schema import ChatMessage, Document
from lamella.serve.settings import ServeConfig

if TYPE_CHECKING:
    from lamella.eval.trie import LabelTrie

Ids = tuple[int, ...]
T = TypeVar("T")
VISIT = "lamella.visit"


class Labels(Protocol):
    """A tenant's labels and prompt: `classify.Classifier`."""

    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def tenant(self) -> str: ...
    @property
    def task(self) -> Any: ...
    @property
    def trie(self) -> LabelTrie: ...
    @property
    def answer_tokens(self) -> int: ...
    def rows(self, documents: Sequence[Document]) -> list[Any]: ...
    def prompt(self, row: Any) -> Ids: ...
    def read(self, rows: Sequence[Any], edges_NE: Any, mode: Any) -> list[Any]: ...


class Model(Protocol):
    """A name that is served: `registry.ServedModel`."""

    @property
    def name(self) -> str: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def folder(self) -> Path | None: ...
    @property
    def created(self) -> int: ...
    @property
    def classifier(self) -> Labels | None: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def loaded(self) -> LoadedAdapter | None: ...
    @property
    def leases(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    def chat_ids(self, messages: Sequence[ChatMessage]) -> tuple[Ids, bool]: ...
    def text_ids(self, text: str) -> Ids: ...
    def answer_ids(self, text: str) -> Ids: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def token_path(self, ids: Sequence[int]) -> LabelTrie: ...


class Models(Protocol):
    """All names that are served: `registry.Registry`."""

    @property
    def models(self) -> Mapping[str, Any]: ...
    def add(
        self, name: str, path: Path, task: Path | None = None, tenant: str | None = None, *, replace: bool = False
    ) -> Any: ...
    def remove(self, name: str) -> int: ...
    def lease(self, model: Any) -> AbstractContextManager[None]: ...


@dataclass
class Visit:
    """One request, from its first byte to the last of its answer.

    Attributes:
        stack: what is given back at its end.
        model: for the metrics; only names that the caller reaches.
        deadline_s: of `time.monotonic()`.
    """

    caller: Caller
    deadline_s: float
    stack: ExitStack = field(default_factory=ExitStack)
    model: str = ""
    start_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, request: Request) -> Visit:
        visit = request.scope[VISIT]
        assert isinstance(visit, Visit)
        return visit


@dataclass
class Service:
    """A server's parts.

    Attributes:
        keys: None: no keys are used.
        stopping: says that the server takes no more requests.
    """

    config: ServeConfig
    models: Models
    backend: Backend
    keys: KeyStore | None = None
    stopping: Callable[[], bool] = lambda: False
    limiter: Limiter = field(init=False)
    metrics: ServeMetrics = field(init=False)
    _encoding: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "encode"))

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.config.limits.per_key)
        self.metrics = ServeMetrics(self.backend.stats, lambda: len(self.models.models) - 1)

    def works(self) -> bool:
        """The engine still answers."""
        return not self.backend.ended

    def caller(self, authorization: str) -> Caller:
        """Who sends this header.

        Raises:
            ApiError: 401.
        """
        if self.keys is None:
            return ANYONE
        kind, _, key = authorization.partition(" ")
        caller = self.keys.caller(key.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            raise ApiError(401, "no such API key: send the header `Authorization: Bearer KEY`", code="invalid_api_key")
        return caller

    def find(self, visit: Visit, name: str) -> Model:
        """The model of a request, held until the request ends.

        Raises:
            ApiError: 404, also for what the key does not reach.
        """
        model: Any = self.models.models.get(name)
        if model is None or not visit.caller.reaches(None if model.adapter is None else name):
            raise no_such_model(name)
        try:
            visit.stack.enter_context(self.models.lease(model))
        except KeyError as error:
            raise no_such_model(name) from error
        visit.model = name
        found: Model = model
        return found

    async def encode(self, work: Callable[[], T], param: str) -> T:
        """Run tokenizer work beside the event loop, one at a time.

        Raises:
            ApiError: 400, with what the tokenizer or the template refuses.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoding, work)
        except UserError as error:
            raise ApiError(400, error.what, param=param) from error

    def check(self, prompt: Ids, new: int, param: str) -> int:
        """What may be written after a prompt, at most.

        Raises:
            ApiError: 400: an empty prompt, ids beyond the vocabulary, or no room for `new` tokens.
        """
        limits, bounds = self.config.limits, self.backend.limits()
        if not prompt:
            raise ApiError(400, "the prompt is empty: send some text", param=param)
        if max(prompt) >= bounds.vocabulary or min(prompt) < 0:
            raise ApiError(400, f"token ids must be from 0 to {bounds.vocabulary - 1}", param=param)
        code = "context_length_exceeded"
        if limits.max_prompt_tokens is not None and len(prompt) > limits.max_prompt_tokens:
            raise ApiError(
                400, f"the prompt has {len(prompt)} tokens, this server takes {limits.max_prompt_tokens}: shorten it",
                param=param, code=code,
            )  # fmt: skip
        most = min(bounds.kv_tokens, bounds.context) if bounds.context is not None else bounds.kv_tokens
        if len(prompt) + new > most:
            raise ApiError(
                400, f"{len(prompt)} prompt tokens and {new} new ones do not fit in {most}: shorten the prompt, or ask for "
                "fewer", param=param, code=code,
            )  # fmt: skip
        return most - len(prompt)

    def room(self, prompt: Ids, asked: int | None, default: int, param: str) -> int:
        """Tokens to write: what is asked for, or else `default` as far as there is room.

        Raises:
            ApiError: 400: as `check`, or more is asked for than this server gives.
        """
        most = self.config.limits.max_new_tokens
        left = self.check(prompt, 1 if asked is None else asked, param)
        if asked is not None and asked > most:
            raise ApiError(400, f"max_tokens is {asked}, this server writes {most} at most", param="max_tokens")
        return min(left, default, most) if asked is None else asked

    def count(self, visit: Visit, kind: str, tokens: int) -> None:
        """Tokens of a prompt or an answer, for limits and metrics."""
        if tokens:
            self.limiter.count(visit.caller, tokens)
            self.metrics.tokens.labels(visit.model, kind).inc(tokens)

    def close(self) -> None:
        self._encoding.shutdown(wait=False, cancel_futures=True)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"

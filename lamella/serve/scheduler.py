"""The engine side of the server: one thread owns the engine and lets all requests share its passes.

Every pass takes up waiting work in turns of adapters within a budget of tokens, and gives every running answer its next
token. A row's part of the KV cache is reserved when it joins, so nothing that runs is ever pushed out. Label scores of
several tenants walk with them; a large request is scored over several passes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.console import notice
from lamella.engine import Engine
from lamella.engine.serving import Resident, Serving, read_resident
from lamella.errors import UserError
from lamella.hardware.memory import memory_limit_bytes
from lamella.models.paged import PagedCache
from lamella.serve.backend import (
    Busy,
    EngineFailed,
    Finished,
    GenerateRequest,
    Ids,
    Limits,
    LoadedAdapter,
    ScoreRequest,
    Stats,
    Token,
    TooLong,
    UnknownAdapter,
)
from lamella.serve.queues import Full, Lanes
from lamella.serve.sampling import Chooser
from lamella.serve.work import Answer, Job, Likeliest, Pass, Prompt, ScoreGroups, Scoring, run_pass
from lamella.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from lamella.serve.settings import ServeConfig

T = TypeVar("T")

PASS_FAILURES = (UserError, RuntimeError, MemoryError, OSError, IndexError, ValueError)
"""What a pass may fail with and the next one not; anything else ends the engine."""
DRAIN_STEP_S = 0.02


class EngineBackend:
    """`Backend` on one engine.

    Args:
        engine: open, without an adapter; from now on it is this backend's, which closes it.
        kv_bytes: of the KV cache.
        max_rows: answers written at the same time.
        max_batch_tokens: prompt and label tokens taken up by one pass (a longer single prompt goes alone).
        queue: requests that may wait.
        allowed_targets: modules that adapters may be on (`q_proj` ...); None: all.

    Raises:
        UserError: the model cannot answer token by token, or the cache is too small.
    """

    def __init__(
        self, engine: Engine, *, kv_bytes: int, max_rows: int = 64, max_batch_tokens: int = 4096, queue: int = 256,
        allowed_targets: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._serving = engine, Serving(engine)
        self._cache = PagedCache(self._serving.form(), kv_bytes, engine.walk.weights.device)
        self._max_rows, self._budget, self._bound = max_rows, max_batch_tokens, queue
        self._allowed = allowed_targets
        config = getattr(engine.config, "text_config", None) or engine.config
        self._vocabulary, self._context = int(config.vocab_size), context_of(config)
        self._wake = threading.Condition()
        self._waiting: Lanes[Job] = Lanes(queue, owner=lambda job: job.tenant)
        self._running: list[Answer] = []
        self._scoring = 0  # requests in the pass at work that wait no more
        self._errands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._adapters: dict[str, tuple[Resident, LoadedAdapter]] = {}
        self._draining = self._closing = self._ended = False
        self._tokens_in: Counter[str | None] = Counter()
        self._tokens_out: Counter[str | None] = Counter()
        self._by_rows: Counter[int] = Counter()
        self._finished: Counter[str] = Counter()
        self._scored = self._walks = 0
        self._walk_s = 0.0
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="lamella-engine", daemon=True)
        self._thread.start()

    # ---- adapters -----------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, folder: Path) -> LoadedAdapter:
        """See `Backend.load_adapter`. The folder is read beside running requests; the smoke test takes one pass."""
        resident = read_resident(self._engine, name, folder, self._serving.names, self._allowed)
        effect = self._on_engine(lambda: self._serving.effect(resident))
        loaded = LoadedAdapter(name, folder, resident.sites, resident.rank, resident.bytes, effect, resident.layout,
                               resident.facts)  # fmt: skip
        with self._wake:
            self._adapters[name] = (resident, loaded)
        return loaded

    def unload_adapter(self, name: str) -> None:
        with self._wake:
            if self._adapters.pop(name, None) is None:
                raise UnknownAdapter(f"no adapter {name!r} is loaded")

    def adapters(self) -> dict[str, LoadedAdapter]:
        with self._wake:
            return {name: loaded for name, (_, loaded) in self._adapters.items()}

    def _on_engine(self, errand: Callable[[], T]) -> T:
        """Have the engine's thread do something between two passes."""
        future: Future[T] = Future()
        with self._wake:
            self._refuse_when_ended()
            self._errands.append((future, errand))
            self._wake.notify_all()
        return future.result()

    def _refuse_when_ended(self) -> None:
        if self._ended or self._closing:
            raise EngineFailed("the engine has ended")

    # ---- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Token | Finished]:
        """See `Backend.generate`."""
        self._check_answer(request)
        results: asyncio.Queue[Any] = asyncio.Queue()
        tell = _teller(asyncio.get_running_loop(), results.put_nowait)
        chooser = Chooser(request)
        with self._wake:
            adapter = self._resident(request.adapter)
            job = Answer(request.adapter, adapter, tell, request, chooser)
            self._put(("answers", request.adapter), job)
        del adapter
        try:
            while True:
                result = await results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
                if isinstance(result, Finished):
                    return
        finally:
            self._cancel(job)

    async def score(self, request: ScoreRequest) -> NDArray[np.float64]:
        """See `Backend.score`."""
        return (await self._score(request, 0))[0]

    async def score_likeliest(self, request: ScoreRequest, top: int) -> tuple[NDArray[np.float64], list[Likeliest]]:
        """See `Backend.score_likeliest`."""
        return await self._score(request, top)

    async def _score(self, request: ScoreRequest, top: int) -> tuple[NDArray[np.float64], list[Likeliest]]:
        deepest = max(map(len, request.trie.paths))
        for prompt in request.prompts:
            self._check_prompt(prompt)
            self._check_context(len(prompt) + deepest - 1)
        edges_NE = np.full((len(request.prompts), request.trie.num_edges), np.nan)
        if not request.prompts:
            return edges_NE, []
        results: asyncio.Queue[Any] = asyncio.Queue()
        tell = _teller(asyncio.get_running_loop(), results.put_nowait)
        with self._wake:
            job = Scoring(
                request.adapter, self._resident(request.adapter), tell, request, edges_NE, len(request.prompts),
                top=top, likeliest=[[] for _ in request.prompts],
            )  # fmt: skip
            self._put(("scores", request.adapter), job)
        try:
            result = await results.get()
            if isinstance(result, BaseException):
                raise result
            return edges_NE, job.likeliest
        finally:
            self._cancel(job)

    def _check_prompt(self, prompt: Ids) -> None:
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise ValueError(f"token ids must lie in 0 .. {self._vocabulary - 1}; the prompt has {max(prompt)}")

    def _check_context(self, tokens: int) -> None:
        if self._context is not None and tokens > self._context:
            raise TooLong(f"prompt and answer take {tokens} tokens, the model's context is {self._context}")

    def _check_answer(self, request: GenerateRequest) -> None:
        self._check_prompt(request.prompt)
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; at least one token must be asked for")
        sampling = request.sampling
        if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0):
            raise ValueError(f"{sampling} has no meaning: temperature and top_k from 0, top_p above 0 and up to 1")
        for choice in request.choices or ():
            if choice and not (min(choice) >= 0 and max(choice) < self._vocabulary):
                raise ValueError(f"a choice has a token id outside 0 .. {self._vocabulary - 1}")
        tokens = len(request.prompt) + request.max_new_tokens
        self._check_context(tokens)
        if not self._cache.can_hold(tokens - 1):
            raise TooLong(f"prompt and answer take {tokens} tokens, the KV cache holds {self._cache.tokens}")

    def _resident(self, name: str | None) -> Resident | None:
        if name is None:
            return None
        if name not in self._adapters:
            raise UnknownAdapter(f"no adapter {name!r} is loaded")
        return self._adapters[name][0]

    def _put(self, lane: tuple[str, str | None], job: Job) -> None:
        self._refuse_when_ended()
        if self._draining:
            raise Busy("the server is about to stop", 5.0)
        try:
            gone = self._waiting.put(lane, job)
        except Full as error:
            raise Busy(str(error)) from None
        if gone is not None:
            gone.gone = True
            gone.tell(Busy(f"{self._bound} requests wait, most of them for {gone.tenant or 'the base'}"))
        self._wake.notify_all()

    def _cancel(self, job: Job) -> None:
        """Whoever asked has what he wants, or wants it no more."""
        with self._wake:
            job.gone = True
            if self._waiting.discard(job):
                self._finished["cancelled"] += 1
            self._wake.notify_all()

    # ---- what is --------------------------------------------------------------------------------------------------

    def limits(self) -> Limits:
        with self._wake:
            return Limits(self._context, self._vocabulary, self._max_rows, self._cache.tokens, self._cache.tokens_used,
                          self._bound)  # fmt: skip

    def stats(self) -> Stats:
        with self._wake:
            return Stats(
                running=len(self._running) + self._scoring, waiting=len(self._waiting), kv_tokens=self._cache.tokens,
                kv_tokens_used=self._cache.tokens_used, tokens_in=dict(self._tokens_in), tokens_out=dict(self._tokens_out),
                batches_by_rows=dict(self._by_rows), finished=dict(self._finished), scored=self._scored,
                walks=self._walks, walk_s=self._walk_s,
            )  # fmt: skip

    @property
    def ended(self) -> bool:
        """Whether the engine's thread is over: everything fails with `EngineFailed` from then on."""
        return self._ended

    async def drain(self, timeout_s: float) -> None:
        """See `Backend.drain`."""
        until_s = time.monotonic() + timeout_s
        with self._wake:
            self._draining = True
        while self._busy() and time.monotonic() < until_s:
            await asyncio.sleep(min(DRAIN_STEP_S, timeout_s))
        with self._wake:
            late = [*self._waiting, *self._running]
            for job in late:
                job.gone = True
                if self._waiting.discard(job):
                    self._finished["cancelled"] += 1
                job.tell(Finished("cancelled") if isinstance(job, Answer) else EngineFailed("the server stops"))
            self._wake.notify_all()

    def _busy(self) -> bool:
        with self._wake:
            return bool(not self._ended and (self._waiting or self._running or self._scoring))

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # a thread begins with the default
        try:
            while self._turn():
                pass
        finally:
            with self._wake:
                self._ended = True
                jobs = [*self._waiting, *self._running]
                for job in jobs:
                    self._waiting.discard(job)
                    job.tell(EngineFailed("the engine has ended"))
                self._running = []
                for future, _ in self._errands:
                    future.set_exception(EngineFailed("the engine has ended"))
                self._errands.clear()
            self._engine.close()

    def _turn(self) -> bool:
        """An errand, or a pass; False: it is time to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._errands or len(self._waiting) or self._running)
            if self._closing:
                return False
            errand = bool(self._errands)
            if not errand:
                self._let_go()
                work = self._take_up()
        if errand:
            self._run_errand()
        elif work:
            self._run(work)
        return True

    def _run_errand(self) -> None:
        future, errand = self._errands[0]
        try:
            result = errand()
        except PASS_FAILURES as error:
            self._errands.popleft()
            future.set_exception(error)
        else:
            self._errands.popleft()
            future.set_result(result)

    def _let_go(self) -> None:
        """Rows that nobody waits for leave."""
        for job in [job for job in self._running if job.gone]:
            self._leave(job, "cancelled")

    def _leave(self, job: Answer, why: str) -> None:
        self._running.remove(job)
        assert job.row is not None
        self._cache.release(job.row)
        self._finished[why] += 1

    def _take_up(self) -> Pass:
        """Waiting work in turns, as far as tokens, rows and the cache go.

        An answer without room in the cache keeps its turn, and no other joins before it: so it is not overtaken for ever.
        """
        running, joining, scores = list(self._running), [], ScoreGroups(self._budget)
        left, no_room = self._budget, False
        while left > 0:
            turn = left
            for lane, job in self._waiting.heads():
                if isinstance(job, Answer):
                    cost = len(job.request.prompt)
                    if no_room or (cost > left and left < self._budget):
                        continue
                    no_room = len(self._running) >= self._max_rows
                    job.row = None if no_room else self._cache.reserve(job.cache_tokens)
                    if job.row is None:
                        no_room = True
                        continue
                    joining.append(job)
                    self._running.append(job)
                    self._waiting.served(lane)
                else:
                    assert isinstance(job, Scoring)
                    prompt = Prompt(job, job.taken)
                    cost = scores.cost(prompt)
                    if cost > left and left < self._budget:
                        continue
                    scores.add(prompt)
                    job.taken += 1
                    self._waiting.served(lane, whole=job.taken == len(job.request.prompts))
                self._tokens_in[job.tenant] += len(job.request.prompt) if isinstance(job, Answer) else len(prompt.ids)
                left -= cost
                if left <= 0:
                    break
            if left == turn:
                break
        self._scoring = sum(job.taken == len(job.request.prompts) for job in scores.jobs)
        return Pass(running, joining, scores)

    def _run(self, work: Pass) -> None:
        start_s = time.monotonic()
        try:
            chosen = run_pass(self._serving, self._cache, work)
        except PASS_FAILURES as error:
            notice(f"a pass of {len(work.jobs)} requests failed: {type(error).__name__}: {error}")
            self._fail(work.jobs, f"a pass failed: {type(error).__name__}: {error}")
            return
        with self._wake:
            self._walks += 1
            self._walk_s += time.monotonic() - start_s
            rows = len(work.running) + len(work.joining)
            if rows:
                self._by_rows[rows] += 1
            for found in chosen:
                job = found.job
                if job.gone:
                    continue
                if found.token is None:
                    job.tell(EngineFailed("the model gave numbers that are not finite"))
                    self._leave(job, "failed")
                    continue
                written = len(job.tokens)
                end = job.take(found.token)
                self._tokens_out[job.tenant] += len(job.tokens) - written
                if end is not None:
                    self._leave(job, end.reason)
                    job.tell(end)
            for scoring in work.scores.jobs:
                if scoring.left == 0 and not scoring.gone:
                    self._tell_scores(scoring)
            self._scoring = 0

    def _tell_scores(self, job: Scoring) -> None:
        if np.isnan(job.edges_NE).any():
            self._finished["failed"] += 1
            job.tell(EngineFailed("the model gave log-probabilities that are not numbers"))
            return
        self._scored += 1
        job.tell(job.edges_NE)

    def _fail(self, jobs: Sequence[Job], what: str) -> None:
        with self._wake:
            self._scoring = 0
            for job in jobs:
                job.gone = True
                if isinstance(job, Answer):
                    self._leave(job, "failed")
                else:
                    self._waiting.discard(job)
                    self._finished["failed"] += 1
                job.tell(EngineFailed(what))


def _teller(loop: asyncio.AbstractEventLoop, put: Callable[[Any], None]) -> Callable[[Any], None]:
    """Gives results to a coroutine's queue from another thread; where its loop has ended, to nobody."""

    def tell(result: Any) -> None:
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(put, result)
            except RuntimeError:  # closed just now
                if not loop.is_closed():
                    raise

    return tell


def context_of(config: Any) -> int | None:
    """Tokens that a sequence may have so that others in the batch do not change it.

    Rotary tables of type `longrope` depend on the longest sequence of a batch once that one is beyond the original context.
    """
    context = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(table for table in rope.values() if isinstance(table, dict))]
    for table in tables:
        original = table.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if table.get("rope_type") == "longrope" and original is not None:
            context = min(context or int(original), int(original))
    return None if context is None else int(context)


def open_backend(config: ServeConfig) -> EngineBackend:
    """The backend that a `serve.toml` asks for; its adapters are loaded by the caller.

    Raises:
        UserError: what `Store.open`, `Engine.open` and `EngineBackend` refuse.
    """
    from lamella.store.reader import Store

    asked = config.engine
    kv_bytes, limit = parse_bytes(asked.kv_cache), memory_limit_bytes()
    if asked.device == "cpu" and kv_bytes > limit:
        raise UserError(
            f"engine.kv_cache is {asked.kv_cache}, and this machine has {format_bytes(limit)}", fix="give it less"
        )
    engine = Engine.open(
        Store.open(config.store), dtype=asked.dtype, device=asked.device, threads=asked.threads,
        budget_bytes=None if asked.budget is None else parse_bytes(asked.budget),
    )  # fmt: skip
    return EngineBackend(
        engine, kv_bytes=kv_bytes, max_rows=asked.max_rows, max_batch_tokens=asked.max_batch_tokens,
        queue=config.limits.queue,
    )  # fmt: skip

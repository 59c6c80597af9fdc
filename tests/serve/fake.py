"""A backend without a model: every adapter says the text in its folder's says.txt, and scores by a fixed rule."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np

from lamella.errors import UserError
from lamella.serve.backend import (
    Busy,
    EngineFailed,
    Finished,
    Limits,
    LoadedAdapter,
    Stats,
    Token,
    TooLong,
    UnknownAdapter,
)
from tests.fixtures import make_tokenizer

VOCABULARY = 512


def write_adapter(folder: Path, says: str, *, system: str | None = None, template: str | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "says.txt").write_text(says, encoding="utf-8")
    (folder / "lamella_adapter.json").write_text(json.dumps({"system": system}), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


class FakeBackend:
    """Deterministic. `context` and `queue` bound it, `pause_s` slows each token, `failed` breaks it.

    Attributes:
        seen: requests, in order; cancelled: ids of those closed before their end; unloaded: names.
    """

    def __init__(self, tokenizer=None, *, base_says="I am the base.", context=400, queue=8, pause_s=0.0):
        self._tokenizer = tokenizer or make_tokenizer()
        self._says = {None: base_says}
        self._adapters: dict[str, LoadedAdapter] = {}
        self.context, self.queue, self.pause_s, self.failed = context, queue, pause_s, False
        self.seen, self.cancelled, self.unloaded = [], [], []
        self.running = 0

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def limits(self):
        return Limits(self.context, VOCABULARY, 4, 10_000, 0, self.queue)

    def load_adapter(self, name, folder):
        if not (folder / "says.txt").is_file():
            raise UserError(
                "0 of 4 modules of the adapter are in the model", fix="export it for this base", path=folder
            )
        self._says[name] = (folder / "says.txt").read_text(encoding="utf-8")
        self._adapters[name] = LoadedAdapter(name, folder, 4, 2, 100, 1.0, "peft")
        return self._adapters[name]

    def unload_adapter(self, name):
        if name not in self._adapters:
            raise UnknownAdapter(name)
        del self._adapters[name], self._says[name]
        self.unloaded.append(name)

    def adapters(self):
        return dict(self._adapters)

    def _check(self, request, prompts):
        self.seen.append(request)
        if self.failed:
            raise EngineFailed("broken")
        if request.adapter not in self._says:
            raise UnknownAdapter(request.adapter)
        if any(len(prompt) > self.context for prompt in prompts):
            raise TooLong("too long")
        if self.running >= self.queue:
            raise Busy("the queue is full", 2.0)

    def _written(self, request):
        if request.choices is None:
            return self.ids(self._says[request.adapter])
        says = tuple(self.ids(self._says[request.adapter]))
        found = next((c for c in request.choices if c[: len(says)] == says), request.choices[0])
        return [i for i in found if i not in request.stop_ids]

    async def generate(self, request):
        self._check(request, [request.prompt])
        self.running += 1
        done = False
        try:
            ids = self._written(request)
            for n, token in enumerate(ids[: request.max_new_tokens]):
                await asyncio.sleep(self.pause_s)
                logprob = None if request.top_logprobs is None else -0.5 - n
                yield Token(token, logprob, tuple((k, -0.5 - k) for k in range(request.top_logprobs or 0)))
            done = True
            yield Finished("length" if len(ids) > request.max_new_tokens else "stop")
        finally:
            self.running -= 1
            if not done:
                self.cancelled.append(request.id)

    async def score(self, request):
        self._check(request, request.prompts)
        self.running += 1
        try:
            await asyncio.sleep(self.pause_s)
            return np.array([[edge_logp(self._says[request.adapter], prompt, e) for e in range(request.trie.num_edges)]
                             for prompt in request.prompts])  # fmt: skip
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        finally:
            self.running -= 1

    async def score_likeliest(self, request, top):
        edges = [[tuple((k, -0.25 - k) for k in range(top))] * request.trie.num_edges for _ in request.prompts]
        return await self.score(request), edges

    def stats(self):
        return Stats(self.running, 0, 10_000, 0, {None: 1}, {None: 1}, {1: 3, 2: 5}, {"stop": 1}, 1, 3, 0.5)

    @property
    def ended(self):
        return self.failed

    async def drain(self, timeout_s):
        pass

    def close(self):
        pass


def edge_logp(says: str, prompt: tuple[int, ...], edge: int) -> float:
    """Of the fake model."""
    return -0.1 - 3 * abs(math.sin(len(says) + sum(prompt) + 7 * edge))

"""The models that are served: the base, and an adapter per name, each with its own template, system text and task."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from lamella.data.encode import Encoder, load_tokenizer
from lamella.errors import UserError
from lamella.eval.encoder import StoreEncoder, own_system, own_template
from lamella.eval.run import thinking_opened
from lamella.eval.systems import run_notes
from lamella.eval.trie import LabelTrie
from lamella.models.layout import Tree
from lamella.serve.backend import Backend, LoadedAdapter
from lamella.serve.classify import Classifier, task_of
from lamella.serve.schema import ChatMessage

Ids = tuple[int, ...]


class TokenPath(LabelTrie):
    """One string of tokens as a tree without forks: scoring it gives log p of each after those before it."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.labels = ("",)
        self.branches = [Tree(list(ids), [True] * len(ids), [])]
        self.num_edges = len(ids)
        self.paths = (tuple(range(len(ids))),)


@dataclass(eq=False)
class ServedModel:
    """One name that callers may write in `model`.

    Attributes:
        adapter: the backend's name of it; None: the base.
        notes: what people should know of it.
        created: seconds since 1970.
    """

    name: str
    adapter: str | None
    encoder: StoreEncoder
    tokenizer: Tokenizer
    folder: Path | None = None
    classifier: Classifier | None = None
    notes: tuple[str, ...] = ()
    loaded: LoadedAdapter | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    leases: int = 0
    gone: bool = False

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.encoder.stop_ids)

    def chat_ids(self, messages: Sequence[ChatMessage]) -> tuple[Ids, bool]:
        """Prompt of a chat, as training encodes it, and whether it ends inside an opened `<think>`.

        Raises:
            UserError: the template refuses it.
        """
        ids = tuple(self.encoder.prompt_ids([message.to_dict() for message in messages]))
        return ids, thinking_opened(self.encoder, ids)

    def text_ids(self, text: str) -> Ids:
        """A plain text as the tokenizer encodes it: with BOS where it adds one, special tokens read."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=True).ids)

    def answer_ids(self, text: str) -> Ids:
        """Raises `UserError`: it cannot be encoded."""
        return tuple(self.encoder.answer_ids(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoder.decode(ids)

    def token_path(self, ids: Sequence[int]) -> LabelTrie:
        return TokenPath(ids)


class Registry:
    """What is served now. Changes are made one at a time; reading needs no lock.

    Args:
        store: the layer store, for its tokenizer and template.
        base: model name of the store without an adapter.
    """

    def __init__(self, store: Path, backend: Backend, base: str = "base") -> None:
        self._store = store
        self._backend = backend
        self._changing = threading.Lock()
        self._counting = threading.Lock()
        self._loads = 0
        self._encoders: dict[tuple[str | None, str | None], StoreEncoder] = {}
        tokenizer = load_tokenizer(store)
        self._tokenizer = tokenizer
        self._plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._plain.no_truncation()
        self._plain.no_padding()
        self.base = base
        self.models: dict[str, ServedModel] = {
            base: ServedModel(base, None, self._encoder(None, None), self._plain)
        }  # fmt: skip

    def _encoder(self, template: str | None, system: str | None) -> StoreEncoder:
        if (template, system) not in self._encoders:
            self._encoders[template, system] = StoreEncoder(
                Encoder(self._tokenizer, chat_template=template, system=system)
            )
        return self._encoders[template, system]

    def add(
        self, name: str, path: Path, task: Path | None = None, tenant: str | None = None, *, replace: bool = False
    ) -> ServedModel:
        """Load an adapter and serve it under `name`. Blocks for as long as loading takes; nothing is changed if it fails.

        Raises:
            UserError: the name is taken; no such folder, another base, an adapter that matches nothing, in part, or has no
                effect; a broken task.
        """
        if name == self.base:
            raise UserError(f"{name!r} is the base's name", fix="choose another name")
        with self._changing:
            old = self.models.get(name)
            if old is not None and not replace:
                raise UserError(f"{name!r} is served already", fix='remove it first, or say "replace": true')
            if not os.path.isdir(path):  # False also for names that no file system takes
                raise UserError("no such adapter folder", fix="give a run's or adapter's folder", path=path)
            encoder = self._encoder(own_template(path / "chat_template.jinja"), own_system(path))
            found = None if task is None else task_of(task, tenant, name)
            if found is None and tenant is not None:
                raise UserError(f"`tenant` of {name!r} without `task`", fix="name the task.toml too")
            classifier = None if found is None else Classifier(*found, encoder, self._backend.limits().vocabulary)
            self._loads += 1
            inner = name if old is None and name not in self._backend.adapters() else f"{name}@{self._loads}"
            loaded = self._backend.load_adapter(inner, path)
            made = ServedModel(name, inner, encoder, self._plain, path, classifier, run_notes(path), loaded)
            self.models[name] = made
            if old is not None:
                self._retire(old)
        self._forget_encoders()
        return made

    def remove(self, name: str) -> int:
        """Serve a name no more; requests in flight keep it, and their number is returned.

        Raises:
            UserError: no adapter is called so.
        """
        with self._changing:
            model = self.models.get(name)
            if model is None or model.adapter is None:
                known = ", ".join(n for n, m in self.models.items() if m.adapter is not None) or "none"
                raise UserError(f"no adapter {name!r} is served", fix=f"adapters: {known}")
            del self.models[name]
            left = model.leases
            self._retire(model)
        self._forget_encoders()
        return left

    def _forget_encoders(self) -> None:
        used = {id(model.encoder) for model in list(self.models.values())}
        for key, encoder in list(self._encoders.items()):
            if id(encoder) not in used:
                self._encoders.pop(key, None)

    def _retire(self, model: ServedModel) -> None:
        with self._counting:
            model.gone = True
            last = model.leases == 0
        if last:
            self._unload(model)

    def _unload(self, model: ServedModel) -> None:
        assert model.adapter is not None
        self._backend.unload_adapter(model.adapter)

    @contextmanager
    def lease(self, model: ServedModel) -> Iterator[None]:
        """A request's hold on a model: its adapter stays loaded until the last one ends."""
        with self._counting:
            if model.gone and model.leases == 0:
                raise KeyError(model.name)
            model.leases += 1
        try:
            yield
        finally:
            with self._counting:
                model.leases -= 1
                last = model.gone and model.leases == 0
            if last:
                self._unload(model)

"""A server over a fake backend: adapters `left` and `right` with tasks, `quiet` without one, and keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from lamella.serve.app import create_app
from lamella.serve.keys import KeyStore, NewKey, add_key
from lamella.serve.registry import Registry
from lamella.serve.service import Service
from lamella.serve.settings import ServeConfig
from tests.fixtures import make_tokenizer
from tests.serve.fake import FakeBackend, write_adapter

TASK = """
name = "places"
system = "Labels: {labels}"
prompt = "{text}\\nWhat is {entity}?"
[labels]
left = ["street", "number", "city"]
right = ["onion", "basil"]
"""


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def texts(tokenizer, tmp_path_factory):
    """Folder with a tokenizer (all the HTTP side needs of a store), adapters and a task."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer.save_pretrained(folder / "store")
    write_adapter(folder / "left", "street name é")
    write_adapter(folder / "right", "basil", system="Be short.")
    write_adapter(folder / "thinker", "<think>\nhm, a city\n</think>\n\nthe city")
    (folder / "task.toml").write_text(TASK)
    return folder


def serving(texts, tokenizer, *, keys=None, adapters=("left", "right"), backend=None, **limits):
    """Client, service and backend. `limits` go to the settings."""
    backend = backend or FakeBackend(tokenizer)
    tree = {"store": texts / "store", "limits": limits, "keys": keys}
    config = ServeConfig.model_validate(tree)
    registry = Registry(texts / "store", backend)
    for name in adapters:
        tasked = name in ("left", "right")
        registry.add(name, texts / name, texts / "task.toml" if tasked else None, name if tasked else None)
    service = Service(config, registry, backend, None if keys is None else KeyStore(keys))
    client = TestClient(create_app(service), raise_server_exceptions=True)
    return SimpleNamespace(client=client, service=service, backend=backend, registry=registry, app=client.app)


@pytest.fixture
def served(texts, tokenizer):
    return serving(texts, tokenizer, adapters=("left", "right", "thinker"))


@pytest.fixture
def keyed(texts, tokenizer, tmp_path):
    """`served` with keys: `.keys[name]` are headers."""
    path = tmp_path / "keys.json"
    made = {
        "left": NewKey("left", ("left",)), "right": NewKey("right", ("right",), base=True),
        "admin": NewKey("admin", admin=True), "watch": NewKey("watch", metrics=True),
    }  # fmt: skip
    texts_of = {name: add_key(path, new)[1] for name, new in made.items()}
    found = serving(texts, tokenizer, keys=path)
    found.secrets = texts_of
    found.keys = {name: {"Authorization": f"Bearer {key}"} for name, key in texts_of.items()}
    found.path = path
    return found


def chat(model="left", text="question", **more):
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    from tests.serve.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))

"""Clients that hang up: the work they asked for is cancelled, and what they held is given back."""

import asyncio
import json

import pytest

from tests.serve.conftest import chat, serving
from tests.serve.fake import FakeBackend


async def ask(app, path, body, after):
    """Ask, and hang up once `after(messages)` says so. Returns what was sent."""
    data = json.dumps(body).encode()
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "http_version": "1.1",
             "scheme": "http", "server": ("test", 80), "client": ("c", 1),
             "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]}  # fmt: skip
    sent, asked, hang_up = [], False, asyncio.Event()

    async def receive():
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": data, "more_body": False}
        await hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    running = asyncio.create_task(app(scope, receive, send))
    while not after(sent) and not running.done():
        await asyncio.sleep(0.001)
    hang_up.set()
    await asyncio.wait_for(running, 5)
    return sent


@pytest.mark.parametrize(
    ("path", "body", "when"),
    [
        ("/v1/chat/completions", chat(n=3), "running"), ("/v1/chat/completions", chat(stream=True), "running"),
        ("/v1/chat/completions", chat(stream=True), "streaming"), ("/v1/completions", {"model": "left", "prompt": "a"}, "running"),
        ("/v1/completions", {"model": "left", "prompt": [5, 6], "echo": True, "logprobs": 0}, "running"),
        ("/v1/classify", {"model": "left", "documents": [{"text": "a"}]}, "running"),
    ],
)  # fmt: skip
def test_what_nobody_waits_for_is_cancelled(texts, tokenizer, path, body, when):
    backend = FakeBackend(tokenizer, pause_s=0.02)
    found = serving(texts, tokenizer, backend=backend, per_key={"concurrent": 5})
    rows = body.get("n", 1)

    def after(sent):
        return len(sent) > 3 if when == "streaming" else backend.running == rows

    asyncio.run(ask(found.app, path, body, after))
    assert backend.running == 0
    assert len(backend.cancelled) == rows
    assert len(backend.seen) == rows  # nothing more is begun
    assert found.registry.models["left"].leases == 0
    assert found.service.limiter._uses[""].running == 0
    assert found.client.get("/health").status_code == 200


def test_a_stream_is_sent_while_it_is_written(texts, tokenizer):
    backend = FakeBackend(tokenizer, pause_s=0.001)
    found = serving(texts, tokenizer, backend=backend)
    sent = asyncio.run(ask(found.app, "/v1/chat/completions", chat(stream=True), lambda sent: False))
    bodies = [m for m in sent if m["type"] == "http.response.body" and m["body"]]
    assert len(bodies) > 5
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert backend.cancelled == []


@pytest.mark.parametrize(("then", "status"), [("nothing", 408), ("gone", None)])
def test_bodies_that_do_not_arrive(texts, tokenizer, then, status):
    found = serving(texts, tokenizer, body_timeout_s=0.05)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
             "http_version": "1.1", "headers": [(b"content-length", b"100")]}  # fmt: skip
    sent, pieces = [], [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive():
        if pieces:
            return pieces.pop()
        if then == "gone":
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    asyncio.run(found.app(scope, receive, send))
    assert [m["status"] for m in sent if m["type"] == "http.response.start"] == ([status] if status else [])
    assert found.backend.seen == []

"""The whole server on a tiny store: labels are those of `lamella eval`, and a process starts, answers, drains and ends."""

import asyncio
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from lamella.adapter import Adapter
from lamella.engine import Engine
from lamella.eval.encoder import StoreEncoder
from lamella.eval.run import evaluate
from lamella.eval.task import TaskRow, build_task, read_task_config
from lamella.models.layout import pack_rows
from lamella.serve.app import create_app
from lamella.serve.registry import Registry
from lamella.serve.scheduler import open_backend
from lamella.serve.service import Service
from lamella.serve.settings import load_serve_config
from lamella.store.reader import Store
from tests.fixtures import WORDS
from tests.serve.tiny import Served

TENANTS = {"t0": "left", "t1": "right"}


def documents(count):
    return [
        {"text": " ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(3 + i)), "entity": WORDS[i], "id": i}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def inside(tiny, tmp_path_factory):
    """The server in this process: (client, backend)."""
    config = load_serve_config(tiny.settings(tmp_path_factory.mktemp("inside")))
    backend = open_backend(config)
    registry = Registry(config.store, backend)
    for entry in config.adapters:
        registry.add(entry.name, entry.path, entry.task, entry.tenant)
    yield TestClient(create_app(Service(config, registry, backend))), backend
    backend.close()


@pytest.fixture(scope="module")
def engine(tiny):
    made = Engine.open(Store.open(tiny.store), dtype="fp32", threads=1)
    yield made
    made.close()


@pytest.mark.parametrize("name", list(TENANTS))
@pytest.mark.parametrize("mode", ["likelihood", "constrained"])
def test_classify_gives_the_predictions_of_eval(tiny, inside, engine, name, mode):
    config, tenant, asked = read_task_config(tiny.task), TENANTS[name], documents(12)
    config = config.model_copy(update={"labels": {tenant: config.labels[tenant]}})
    rows = [
        TaskRow(tenant=tenant, text=d["text"], entity=d["entity"], label=config.labels[tenant][0], id=d["id"])
        for d in asked
    ]
    engine.attach(Adapter.load(tiny.adapters[name], engine.skeleton))
    encoder = StoreEncoder.open(tiny.store, tiny.adapters[name])
    wanted = evaluate(build_task(config, [], rows), engine, encoder, mode=mode, resamples=100).predictions
    tree = inside[0].post("/v1/classify", json={"model": name, "documents": asked, "mode": mode}).json()
    assert len({round(said.margin, 3) for said in wanted}) == len(asked)
    for got, said in zip(tree["results"], wanted, strict=True):
        assert got["label"] == said.label
        assert got["logprobs"] == pytest.approx(said.scores, abs=2e-5)
        assert got["margin"] == pytest.approx(said.margin, abs=2e-5)


@pytest.mark.parametrize("name", ["base", "t0", "t1"])
def test_chats_and_scored_prompts_are_those_of_the_engine(tiny, inside, engine, name):
    client, folder = inside[0], tiny.adapters.get(name)
    engine.attach(None if folder is None else Adapter.load(folder, engine.skeleton))
    encoder = StoreEncoder.open(tiny.store, folder)
    messages = [{"role": "user", "content": "the layer walk"}]
    ids = encoder.prompt_ids(messages)
    body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    found = engine.generate([ids], 12, encoder.stop_ids)[0]
    written = [i for i in found.ids if i not in encoder.stop_ids]
    assert [t["token"] for t in choice["logprobs"]["content"]] == [encoder.decode([i]) for i in written]
    assert choice["finish_reason"] == found.finish
    plain = {"model": name, "prompt": [*ids, *written], "echo": True, "logprobs": 0, "max_tokens": 0}
    scored = client.post("/v1/completions", json=plain).json()["choices"][0]["logprobs"]["token_logprobs"]
    told = [t["logprob"] for t in choice["logprobs"]["content"]]
    assert np.allclose(scored[len(ids) :], told, atol=2e-5)
    most = client.post("/v1/completions", json={**plain, "logprobs": 3}).json()["choices"][0]["logprobs"]
    assert most["token_logprobs"] == scored
    logp_TV = engine.logits(pack_rows([([*ids, *written], [])])).log_softmax(-1)
    best = logp_TV[:-1].topk(3)
    for top, values, tokens in zip(most["top_logprobs"][1:], best.values.tolist(), best.indices.tolist(), strict=True):
        texts = [encoder.decode([i]) for i in tokens]
        likeliest = {
            text: value for text, value in zip(reversed(texts), reversed(values), strict=True)
        }  # some read alike
        assert {text: top[text] for text in likeliest} == pytest.approx(likeliest, abs=2e-5)
    greedy = [max(top.values()) == own for top, own in zip(most["top_logprobs"][1:], scored[1:], strict=True)]
    assert all(greedy[len(ids) - 1 :])  # what was written greedily is told as greedy
    long = client.post("/v1/completions", json={**plain, "prompt": [5 + n % 400 for n in range(900)]}).json()
    assert len(long["choices"][0]["logprobs"]["token_logprobs"]) == 900


def test_answers_of_two_tenants_differ(inside):
    texts = set()
    for name in ("base", "t0", "t1"):
        body = {"model": name, "messages": [{"role": "user", "content": "once"}], "temperature": 0, "max_tokens": 12}
        texts.add(inside[0].post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])
    assert len(texts) == 3


def long_chat(**more):
    """Written until the token limit: every choice is a long label."""
    return {"model": "t0", "messages": [{"role": "user", "content": "each block"}], "n": 8, "max_tokens": 400,
            "guided_choice": [f"{WORDS[k]} " * 150 for k in range(3)], **more}  # fmt: skip


def test_a_process_from_start_to_end(tiny, tmp_path):
    settings = tiny.settings(tmp_path, drain_s=20)
    with Served(settings) as served:
        assert served.started["models"] == ["base", "t0", "t1"]
        body = {"model": "t1", "documents": documents(2)}
        assert httpx.post(f"{served.url}/v1/classify", json=body, timeout=60).status_code == 200

        # a client that hangs up: its rows leave the engine
        async def hang_up():
            async with httpx.AsyncClient(timeout=60) as client:
                ask = client.stream("POST", f"{served.url}/v1/chat/completions", json=long_chat(stream=True))
                async with ask as response:
                    assert response.status_code == 200
                    await anext(response.aiter_lines())
                    served.until(lambda: served.metric("lamella_running") == 8)

        asyncio.run(hang_up())
        served.until(lambda: served.metric("lamella_running") == 0)

        # SIGHUP: t1 goes, t2 comes
        tiny.settings(tmp_path, names=("t0", "t2"), drain_s=20)
        served.process.send_signal(signal.SIGHUP)
        served.until(
            lambda: [m["id"] for m in httpx.get(f"{served.url}/v1/models").json()["data"]] == ["base", "t0", "t2"]
        )

        # SIGTERM: what runs is finished, nothing new is taken, exit code 0
        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=long_chat(stream=True), timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            served.stop()
            told = [line.removeprefix("data: ") for line in lines if line]
        assert told[-1] == "[DONE]"
        finished = [json.loads(line)["choices"][0] for line in told[:-1]]
        assert [c["finish_reason"] for c in finished if c["finish_reason"]] == ["stop"] * 8
        assert served.process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")
    assert "stopped" in served.log.read_text()
    assert "Traceback" not in served.log.read_text()


def test_a_drain_has_an_end(tiny, tmp_path):
    """What runs longer than `drain_s` is cut, streamed or not, and that ends well too."""
    with Served(tiny.settings(tmp_path, drain_s=0)) as served, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(httpx.post, f"{served.url}/v1/chat/completions", json=long_chat(), timeout=60)
        served.until(lambda: served.metric("lamella_running") == 8)
        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=long_chat(stream=True), timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            served.stop()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert served.process.wait(30) == 0
        assert whole.result().status_code == 503
    assert "Traceback" not in served.log.read_text()

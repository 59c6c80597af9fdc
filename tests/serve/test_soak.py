"""Many clients of several tenants for a long time, adapters swapped meanwhile: no wrong answer, no error but 429, no leak.

LAMELLA_SOAK_S (600) seconds, LAMELLA_SOAK_CLIENTS (50) clients; prints one JSON line.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter

import httpx
import psutil
import pytest

from lamella.adapter import Adapter
from lamella.engine import Engine
from lamella.eval.encoder import StoreEncoder
from lamella.serve.keys import NewKey, add_key
from lamella.store.reader import Store
from tests.fixtures import WORDS
from tests.serve.tiny import Served

SECONDS = float(os.environ.get("LAMELLA_SOAK_S", "600"))
CLIENTS = int(os.environ.get("LAMELLA_SOAK_CLIENTS", "50"))
TOKENS = 10
QUESTIONS = [" ".join(WORDS[(k * 5 + i) % len(WORDS)] for i in range(2 + 3 * k)) for k in range(6)]
KNOWN = ("base", "t0", "t1", "t2")
RSS_SHARE, RSS_BYTES = 0.01, 8 << 20
"""How far the end may lie above the middle: the allocator's caches come and go by some MiB. In ten minutes some thousand
adapters of 4 to 25 kB, with their Python objects, and ten thousands of answers come and go between the two: were they kept,
it would be more."""


def known_answers(tiny):
    """(model, question) -> text, by the engine alone."""
    engine = Engine.open(Store.open(tiny.store), dtype="fp32", threads=1)
    found = {}
    for name in KNOWN:
        folder = tiny.adapters.get(name)
        engine.attach(None if folder is None else Adapter.load(folder, engine.skeleton))
        encoder = StoreEncoder.open(tiny.store, folder)
        for n, question in enumerate(QUESTIONS):
            ids = encoder.prompt_ids([{"role": "user", "content": question}])
            written = engine.generate([ids], TOKENS, encoder.stop_ids)[0].ids
            found[name, n] = encoder.decode([i for i in written if i not in encoder.stop_ids])
    engine.close()
    for n in range(len(QUESTIONS)):
        assert len({found[name, n] for name in KNOWN}) == len(KNOWN), "adapters must differ"
    return found


class Soak:
    def __init__(self, tiny, url, keys, known):
        self.tiny, self.url, self.known = tiny, url, known
        self.asking, self.admin = ({"Authorization": f"Bearer {key}"} for key in keys)
        self.counts = Counter()
        self.wrong, self.errors, self.seconds, self.rss = [], [], [], []
        self.labels = {}

    async def run(self, pid):
        limits = httpx.Limits(max_connections=CLIENTS + 4)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as http:
            for name in ("t0", "t1"):
                self.labels[name] = (
                    await http.post("/v1/classify", json=self.documents(name), headers=self.asking)
                ).json()["results"]
            self.end_s = time.monotonic() + SECONDS
            await asyncio.gather(*(self.client(http, n) for n in range(CLIENTS)), self.swapper(http), self.watch(pid))

    def documents(self, name):
        return {"model": name, "documents": [{"text": q, "entity": "x"} for q in QUESTIONS]}

    def body(self, name, n, **more):
        return {
            "model": name,
            "messages": [{"role": "user", "content": QUESTIONS[n]}],
            "temperature": 0,
            "max_tokens": TOKENS,
            **more,
        }

    def judge(self, right, got, what):
        self.counts[what] += 1
        if not right:
            self.wrong.append((what, str(got)[:200]))

    async def client(self, http, number):
        rnd = random.Random(number)
        while time.monotonic() < self.end_s:
            kind = rnd.choice(("whole", "whole", "stream", "classify", "hang up"))
            name, n = rnd.choice(("base", "t0", "t1", "moving")), rnd.randrange(len(QUESTIONS))
            start_s = time.monotonic()
            try:
                await getattr(self, kind.replace(" ", "_"))(http, name, n)
            except httpx.HTTPError as error:
                self.errors.append(f"{kind}: {error!r}")
            self.seconds.append(time.monotonic() - start_s)

    async def accepted(self, response):
        """Whether there is an answer; 429 is the only refusal that may be."""
        if response.status_code == 200:
            return True
        if response.status_code == 429:
            self.counts["429"] += 1
            await asyncio.sleep(min(float(response.headers["retry-after"]), 2))
        else:
            await response.aread()
            self.errors.append(f"{response.status_code}: {response.text[:200]}")
        return False

    def wanted(self, name, n):
        """`moving` is t1 or t2 at any time."""
        return {self.known[one, n] for one in (("t1", "t2") if name == "moving" else (name,))}

    async def whole(self, http, name, n):
        response = await http.post("/v1/chat/completions", json=self.body(name, n), headers=self.asking)
        if await self.accepted(response):
            got = response.json()["choices"][0]["message"]["content"]
            self.judge(got in self.wanted(name, n), (name, n, got), "whole")

    async def stream(self, http, name, n):
        async with http.stream(
            "POST", "/v1/chat/completions", json=self.body(name, n, stream=True), headers=self.asking
        ) as response:
            if not await self.accepted(response):
                return
            got, last = "", ""
            async for line in response.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    got += event["choices"][0]["delta"].get("content", "") if "choices" in event else str(event)
        self.judge(got in self.wanted(name, n) and last == "data: [DONE]", (name, n, got), "stream")

    async def hang_up(self, http, name, n):
        async with http.stream(
            "POST", "/v1/chat/completions", json=self.body(name, n, stream=True), headers=self.asking
        ) as response:
            if await self.accepted(response):
                await anext(response.aiter_lines())
                self.counts["hang up"] += 1

    async def classify(self, http, name, n):
        name = name if name in self.labels else "t0"
        response = await http.post("/v1/classify", json=self.documents(name), headers=self.asking)
        if await self.accepted(response):
            for got, wanted in zip(response.json()["results"], self.labels[name], strict=True):
                gap = max(abs(got["logprobs"][label] - value) for label, value in wanted["logprobs"].items())
                self.judge(got["label"] == wanted["label"] and gap < 1e-4, (name, got), "classify")

    async def swapper(self, http):
        """`moving` goes back and forth; another one comes, answers and goes."""
        turn = 0
        while time.monotonic() < self.end_s:
            turn += 1
            now, new = ("t2", "t1")[turn % 2], f"new-{turn % 3}"
            steps = [("POST", "/admin/adapters", {"name": "moving", "path": str(self.tiny.adapters[now]), "replace": True}),
                     ("POST", "/admin/adapters", {"name": new, "path": str(self.tiny.adapters["t2"])})]  # fmt: skip
            for method, path, body in steps:
                response = await http.request(method, path, json=body, headers=self.admin)
                if response.status_code != 201:
                    self.errors.append(f"{path}: {response.status_code} {response.text[:200]}")
            self.known.update({(new, n): self.known["t2", n] for n in range(len(QUESTIONS))})
            await self.whole(http, new, turn % len(QUESTIONS))
            response = await http.delete(f"/admin/adapters/{new}", headers=self.admin)
            if response.status_code != 200:
                self.errors.append(f"delete: {response.status_code} {response.text[:200]}")
            self.counts["swaps"] += 1
            await asyncio.sleep(0.05)

    async def watch(self, pid):
        process = psutil.Process(pid)
        while time.monotonic() < self.end_s:
            self.rss.append(process.memory_info().rss)
            await asyncio.sleep(min(1, SECONDS / 50))


@pytest.mark.serve
@pytest.mark.timeout(SECONDS + 300)
def test_soak(tiny, tmp_path):
    keys = tmp_path / "keys.json"
    made = [
        add_key(keys, NewKey("all", ("*",), base=True, metrics=True))[1],
        add_key(keys, NewKey("admin", admin=True))[1],
    ]
    known = known_answers(tiny)
    path = tiny.settings(tmp_path, keys=keys)
    path.write_text(path.read_text() + f'[[adapters]]\nname = "moving"\npath = "{tiny.adapters["t1"]}"\n')
    with Served(path) as served:
        soak = Soak(tiny, served.url, made, known)
        asyncio.run(soak.run(served.process.pid))
        served.stop()
        code = served.process.wait(60)
        log = served.log.read_text()
    at = len(soak.rss) // 5
    middle, end = (statistics.median(part) for part in (soak.rss[2 * at : 3 * at], soak.rss[4 * at :]))
    ranked = sorted(soak.seconds)
    told = {
        "kind": "soak", "clients": CLIENTS, "seconds": SECONDS, "requests": len(ranked), "checked": sum(soak.counts.values()),
        **{name: soak.counts[name] for name in ("whole", "stream", "classify", "hang up", "429", "swaps")},
        "wrong": len(soak.wrong), "errors": len(soak.errors), "p50_s": round(ranked[len(ranked) // 2], 3),
        "p99_s": round(ranked[len(ranked) * 99 // 100], 3), "rss_middle_mb": round(middle / 1e6, 1), "rss_end_mb": round(end / 1e6, 1),
    }  # fmt: skip
    sys.stdout.write(json.dumps(told) + "\n")
    assert soak.wrong == []
    assert soak.errors == []
    assert min(soak.counts[kind] for kind in ("whole", "stream", "classify", "hang up", "swaps")) > 0
    assert end <= middle * (1 + RSS_SHARE) + RSS_BYTES
    assert code == 0
    assert "Traceback" not in log

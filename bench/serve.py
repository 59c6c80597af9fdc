"""Decoding and scoring of several tenants together, and one by one: `python -m bench.serve`.

    python -m bench.serve [--store STORE] [--adapter FOLDER ...] [--tenants 4] [--rows 1,4,16,50]

Requests go to the server's engine side (no HTTP) by turns of tenants. An adapter given once is loaded under as many names as
there are tenants, each with memory of its own. One JSON line per number of rows: output tokens/s of so many answers
together, and of answers one after the other (a few of them), with what passes looked like; then one line for label scores:
requests/s together and one by one. Prompts are random ids; nothing stops early.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from lamella.console import notice
from lamella.engine import Engine
from lamella.eval.trie import LabelTrie
from lamella.serve.backend import GenerateRequest, ScoreRequest, Token
from lamella.serve.scheduler import EngineBackend
from lamella.store.reader import Store
from lamella.units import parse_bytes

DEMO = Path(".cache/demo")
ONE_BY_ONE = 3
"""Requests measured one after the other."""


def prompt(rnd: random.Random, tokens: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rnd.randrange(vocabulary) for _ in range(tokens))


async def written(backend: EngineBackend, request: GenerateRequest) -> int:
    """Tokens of one answer."""
    return sum([isinstance(item, Token) async for item in backend.generate(request)])


async def timed(work: Sequence[Callable[[], Awaitable[Any]]], together: bool) -> float:
    start_s = time.perf_counter()
    if together:
        await asyncio.gather(*(one() for one in work))
    else:
        for one in work:
            await one()
    return time.perf_counter() - start_s


def decode(backend: EngineBackend, names: Sequence[str | None], rows: int, args: argparse.Namespace) -> dict[str, Any]:
    rnd, vocabulary = random.Random(0), backend.limits().vocabulary
    requests = [
        GenerateRequest(str(n), names[n % len(names)], prompt(rnd, args.prompt_tokens, vocabulary), args.new_tokens, frozenset())
        for n in range(rows)
    ]  # fmt: skip
    work = [lambda r=r: written(backend, r) for r in requests]
    asyncio.run(timed(work, together=True))  # kernels of these shapes are compiled
    before = backend.stats()
    together_s = asyncio.run(timed(work, together=True))
    after = backend.stats()
    alone = work[:ONE_BY_ONE]
    alone_s = asyncio.run(timed(alone, together=False))
    many, few = rows * args.new_tokens / together_s, len(alone) * args.new_tokens / alone_s
    walks = after.walks - before.walks
    return {
        "kind": "decode", "rows": rows, "tenants": min(rows, len(names)), "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens, "tokens_per_s": round(many, 1), "one_by_one_tokens_per_s": round(few, 1),
        "ratio": round(many / few, 2), "walks": walks, "ms_per_walk": round((after.walk_s - before.walk_s) / walks * 1e3, 2),
    }  # fmt: skip


def score(backend: EngineBackend, names: Sequence[str | None], args: argparse.Namespace) -> dict[str, Any]:
    rnd, vocabulary = random.Random(1), backend.limits().vocabulary
    labels = [str(n) for n in range(10)]
    tries = {name: LabelTrie(labels, [[*prompt(rnd, 2, vocabulary), n, 2] for n in range(10)]) for name in names}
    common = {name: prompt(rnd, args.prompt_tokens // 2, vocabulary) for name in names}
    requests = []
    for n in range(args.scores):
        name = names[n % len(names)]
        ids = common[name] + prompt(rnd, args.prompt_tokens - args.prompt_tokens // 2, vocabulary)
        requests.append(ScoreRequest(str(n), name, (ids,), tries[name]))
    work = [lambda r=r: backend.score(r) for r in requests]
    asyncio.run(timed(work, together=True))
    together_s = asyncio.run(timed(work, together=True))
    alone = work[: 4 * ONE_BY_ONE]
    alone_s = asyncio.run(timed(alone, together=False))
    many, few = len(work) / together_s, len(alone) / alone_s
    return {
        "kind": "score", "requests": len(work), "tenants": len(names), "prompt_tokens": args.prompt_tokens, "labels": 10,
        "requests_per_s": round(many, 2), "one_by_one_requests_per_s": round(few, 2), "ratio": round(many / few, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, default=DEMO / "stores" / "SmolLM2-135M-Instruct")
    parser.add_argument("--adapter", type=Path, action="append", help="folder; default: the demo's")
    parser.add_argument("--tenants", type=int, default=4, help="names that the adapters are loaded under")
    parser.add_argument("--rows", default="1,4,16,50", help="numbers of answers together")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--scores", type=int, default=64, help="score requests")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-cache", default="1GiB")
    args = parser.parse_args()
    store = Store.open(args.store)
    engine = Engine.open(store, dtype=args.dtype, threads=args.threads)
    backend = EngineBackend(engine, kv_bytes=parse_bytes(args.kv_cache))
    adapters = args.adapter or [DEMO / "runs" / "engines-dense"]
    names = [f"tenant-{n}" for n in range(args.tenants)]
    for n, name in enumerate(names):
        loaded = backend.load_adapter(name, adapters[n % len(adapters)])
        notice(f"{name}: {loaded.path}, {loaded.modules} pairs, largest effect {loaded.effect:.3g}")
    facts = engine.facts()
    settings = {"store": store.path.name, "dtype": facts["dtype"], "threads": facts["threads"]}
    try:
        for rows in map(int, args.rows.split(",")):
            print(json.dumps({**settings, **decode(backend, names, rows, args)}), flush=True)
        print(json.dumps({**settings, **score(backend, names, args)}), flush=True)
    finally:
        backend.close()


if __name__ == "__main__":
    main()

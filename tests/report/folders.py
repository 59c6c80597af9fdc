"""Folders of runs for the page's tests: what a run, `compare`, `loadtest` and `decide` leave, of any length."""

import json
import math
import random
from pathlib import Path

from lamella.trace.summary import DeviceFacts, summarise


def line(step, loss, ranks=1, rng=random):
    devices = [
        {"rank": r, "step_s": 1.0, "busy_s": 0.9 - 0.2 * r, "compute_s": 0.8, "wait_s": {"disk": 0.05 + 0.1 * r}, "move_s": {},
         "read_s": 0.1, "tokens": 400, "rows": 4, "peak_bytes": 900_000_000 + r, "bytes": {"disk": 5_000_000}}
        for r in range(ranks)
    ]  # fmt: skip
    return {"step": step, "loss": loss, "grad_norm": 1 + rng.random(), "learning_rate": 2e-4 * math.exp(-step / 500),
            "rows": 8, "tokens": 800, "label_tokens": 90, "step_s": 1.0, "tokens_per_s": 790 + 20 * rng.random(),
            "utilisation": 0.31, "rss_bytes": 9e8 + 1e5 * step, "planned_s": 0.9, "devices": devices, "skipped": None,
            "epoch": 0, "flop_per_s": 1e11, "flops": 1e11}  # fmt: skip


def metrics_lines(steps, seed=0, ranks=1):
    rng = random.Random(seed)
    return [
        line(k + 1, 0.4 + 3 * math.exp(-k / (steps / 6 + 1)) + 0.2 * rng.random(), ranks, rng) for k in range(steps)
    ]


def write_lines(path: Path, lines, mode="w"):
    with path.open(mode) as file:
        file.writelines(json.dumps(x) + "\n" for x in lines)


def piece(name, cause, rank, lane, at_us, us, step):
    return {
        "ph": "X",
        "name": name,
        "cat": cause,
        "pid": rank + 1,
        "tid": lane,
        "ts": at_us,
        "dur": us,
        "args": {"step": step},
    }


def trace(ranks=1, steps=3, layers=12):
    events = []
    for r in range(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": r + 1, "tid": 0, "args": {"name": f"rank {r} cpu"}})
        for t, lane in ((1, "main"), (2, "read")):
            events.append({"ph": "M", "name": "thread_name", "pid": r + 1, "tid": t, "args": {"name": lane}})
        at = 0.0
        for s in range(steps):
            for k in range(2 * layers):
                for name, cause, us in (
                    ("dequantise layer", "dequantise", 4000.0),
                    ("compute layer", "compute", 40000.0),
                ):
                    events.append(piece(f"{name} {k}", cause, r, 1, at, us, s))
                    at += us
                events.append(piece(f"read {k}", "read", r, 2, at - 30000, 9000.0, s))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def plan(ranks=1):
    parts = {"program": 6e8, "base": 1.1e8, "adapter": 3e7, "optimizer": 4e7, "activations": 2.2e8}
    machine = {
        "name": "box", "source": "measured", "notes": [],
        "hosts": [{"name": "box", "cores": 8, "ram_bytes": 64 << 30, "limit_bytes": 64 << 30,
                   "disk": {"path": ".", "read_bytes_per_s": 2.1e9, "kind": "nvme"}}],
        "devices": [{"name": "RTX 3090", "kind": "cuda", "host": 0, "memory_bytes": 24 << 30, "matmul_flops_per_s": 7.1e13,
                     "memory_bytes_per_s": 9e11} for _ in range(ranks)],
        "host_links": [{"device": r, "to_device_bytes_per_s": 2.4e10, "from_device_bytes_per_s": 2.2e10} for r in range(ranks)],
        "peer_links": [{"a": 0, "b": 1, "bytes_per_s": 1.1e10, "kind": "pcie"}] if ranks > 1 else [],
    }  # fmt: skip
    figures = {"steps": 400, "step_s": 0.9, "ranks": [
        {"rank": r, "name": "RTX 3090",
         "parts": parts, "need": sum(parts.values()), "have": 2.0e9 - 6e8 * r} for r in range(ranks)]}  # fmt: skip
    return {"kind": "lamella plan", "machine": machine, "figures": figures, "money": {"usd_per_hour": 1.2}}


def measured():
    def system(name, base):
        tenants = {t: {"macro_f1": {"value": base + d, "low": base + d - 0.06, "high": base + d + 0.05}}
                   for t, d in (("addresses", 0.05), ("parties", -0.1), ("foods", 0.02), ("courts", 0.0))}  # fmt: skip
        return {
            "name": name,
            "rows": 400,
            "tenants": tenants,
            "average": {"value": base, "low": base - 0.03, "high": base + 0.03},
        }

    return {
        "systems": [system("zero-shot", 0.15), system("8-shot", 0.2), system("tuned", 0.78), system("TF-IDF", 0.66)]
    }


def receipt(lines, ranks=1, load=True, status="ok", steps=None):
    facts = [DeviceFacts(label="RTX 3090") for _ in range(ranks)]
    tree = {
        "status": status, "reason": "" if status == "ok" else "interrupted by the user", "written": "2026-12-01T00:00:00+00:00",
        "name": "demo", "versions": {"lamella": "0.1.0"}, "warnings": [],
        "comparison": [{"setting": "dtype", "asked": "auto", "in_effect": "bf16", "ok": True},
                       {"setting": "budget_bytes", "asked": 2 << 30, "in_effect": 2 << 30, "ok": True}],
        "figures": {"steps": len(lines), "steps_planned": steps or len(lines), "peak_rss_bytes": 950_000_000},
        "devices": summarise(lines, facts),
    }  # fmt: skip
    if load:
        rng = random.Random(1)
        tree["expert_load"] = {f"layer {k}": [int(100 * rng.random() ** 2) for _ in range(16)] for k in range(8)}
    return tree


def write_run(folder: Path, steps=400, seed=0, ranks=2, *, done=True, load=True, status="ok", f1=True):
    folder.mkdir(parents=True, exist_ok=True)
    lines = metrics_lines(steps, seed, ranks)
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(
        folder / "validation.jsonl",
        [{"step": k, "loss": 1 + 2 * math.exp(-k / 90), "best": True} for k in range(50, steps + 1, 50)],
    )
    (folder / "config.json").write_text(json.dumps(
        {"name": folder.name, "store": "stores/qwen3-30b", "lora": {"rank": 16, "alpha": 32.0}, "train": {"steps": steps}}))  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan(ranks)))
    (folder / "trace.json").write_text(json.dumps(trace(ranks)))
    if done:
        (folder / "receipt.json").write_text(json.dumps(receipt(lines[-200:], ranks, load, status, steps)))
    if f1:
        (folder / "eval").mkdir(exist_ok=True)
        (folder / "eval" / "metrics.json").write_text(json.dumps(measured()))
    return folder


def comparison():
    systems = measured()["systems"]
    candidates = [
        {"name": s["name"], "where": "here", "role": role, "model": "m", "adapter": None, "answering": "likelihood",
         "metrics": {**s, "invalid_rate": 0.01, "truncated_rate": 0.0},
         "tokens": {"input": 51_000, "output": 900, "reasoning": 0, "cached_input": 0},
         "latency_s": {"p50": 0.21, "p99": 0.9, "mean": 0.3},
         "money": {"currency": "USD", "total": 0.1, "per_1000_documents": 0.25, "prices": {}}, "errors": 0, "retries": 0,
         "from_cache": 0, "wall_s": 90.0, "notes": []}
        for s, role in zip(systems, ("self-hosted-base", "self-hosted-base", "self-hosted-tuned", "baseline"), strict=True)
    ]  # fmt: skip
    each = {"value": 0.63, "low": 0.58, "high": 0.68, "p": 0.001, "p_holm": 0.004, "significant": True}
    return {"kind": "compare", "version": 1, "name": "four tenants", "rows": 400, "tenants": ["addresses", "parties", "foods", "courts"],
            "candidates": candidates,
            "differences": [{"before": "zero-shot", "after": "tuned", "average": each, "tenants": {"addresses": each}}],
            "confusion": {"tuned": {"courts": {"labels": ["civil", "penal"], "predicted": ["civil", "penal", "(none)"],
                                               "counts": [[40, 9, 1], [2, 38, 0]]}}}}  # fmt: skip


def load_test():
    four = {"p50": 0.2, "p90": 0.4, "p99": 0.8, "mean": 0.25}
    return {"kind": "loadtest", "version": 1, "url": "http://127.0.0.1:8000", "model": "tenants", "mode": "chat", "concurrency": 32,
            "duration_s": 60.0, "requests": {"sent": 1200, "ok": 1180, "rejected": 20, "errors": 0}, "ttft_s": four, "tpot_s": four,
            "e2e_s": four, "label_s": None, "throughput": {"requests_per_s": 19.6}, "goodput":
            {"target": {"e2e": "1s"}, "requests_per_s": 19.1, "share": 0.97}}  # fmt: skip


def decision():
    options = [
        {"name": name, "kind": name, "f1": {"value": f1, "low": f1 - 0.02, "high": f1 + 0.02}, "per_1000_documents": cost,
         "per_month": cost * 200, "parts": {}, "utilisation": 0.4, "capacity_documents_per_month": 1e6,
         "over_utilisation": [[u / 10, cost * 4 / u] for u in range(1, 11)]}
        for name, f1, cost in (("self-hosted tuned", 0.78, 2.0), ("self-hosted base", 0.3, 2.1), ("API base", 0.71, 4.4))
    ]  # fmt: skip
    sensitivity = [
        {"input": n, "low": 1.0, "high": 2.0, "net_low": lo, "net_high": hi, "verdict_low": "deploy", "verdict_high": "wait"}
        for n, lo, hi in (("documents per month", -300.0, 900.0), ("machine price", 650.0, 120.0), ("worth of a point of F1", 200.0, 700.0))
    ]  # fmt: skip
    return {"kind": "decide", "version": 1, "name": "entities", "verdict": "deploy",
            "sentence": "Deploy the tuned model: it earns 450 USD a month.",
            "because": ["it is better in every tenant"], "would_change_it": ["fewer than 90,000 documents a month"],
            "look_again": "2027-03-01", "currency": "USD", "options": options, "break_even": [], "sensitivity": sensitivity,
            "net_value_per_month": 450.0, "inputs": {"documents_per_month": 200_000}}  # fmt: skip


def write_all(folder: Path, runs=3):
    for k in range(runs):
        write_run(folder / f"run-{k:03d}", 400 + 20 * k, k, status="ok" if k != 1 else "failed")
    for name, tree in (("compare", comparison()), ("loadtest", load_test()), ("decide", decision())):
        (folder / f"{name}.json").write_text(json.dumps(tree))
    return folder

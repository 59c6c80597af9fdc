"""Other load generators, run where they are installed, and their results in the form of `loadtest.json`.

Sources: vllm/benchmarks/serve.py (`--save-result --save-detailed`); guidellm 0.8, `GenerativeBenchmarksReport`.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lamella.endpoint.client import read_key
from lamella.errors import UserError
from lamella.files import write_json, write_text
from lamella.loadtest.measure import ENOUGH, Answer, Sample, summarise
from lamella.loadtest.prompts import Models, Prompt
from lamella.loadtest.run import Plan, whole

PATHS = {"chat": "/chat/completions", "completions": "/completions"}


def run_tool(tool: str, plan: Plan, models: Models, prompts: Sequence[Prompt], output: Path) -> dict[str, Any]:
    """Run `vllm bench serve` or `guidellm run` for each level, and write the file after each.

    Raises:
        UserError: not installed, an option that it does not have, it failed, or its result is not as expected.
    """
    program = shutil.which(tool)
    if program is None:
        raise UserError(f"--tool {tool}: the program is not installed", fix=f"install {tool}, or leave --tool out")
    check(tool, plan, models)
    levels: list[dict[str, Any]] = []
    tree: dict[str, Any] = {}
    for concurrency in plan.concurrency or (None,):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            rows = (json.dumps({"prompt": "\n\n".join(m["content"] for m in p.messages)}) + "\n" for p in prompts)
            write_text(folder / "prompts.jsonl", rows)
            make = vllm_command if tool == "vllm" else guidellm_command
            result = _result(tool, [program, *make(plan, models.names[0], concurrency, folder)], plan, folder)
        level = vllm_level(result, plan) if tool == "vllm" else guidellm_level(result)
        rate = None if concurrency is not None else plan.rate
        levels.append({"concurrency": concurrency, "rate": rate, **level})
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        tree = whole(plan, models.shown, tool, levels, created)
        write_json(output, tree)
    return tree


def check(tool: str, plan: Plan, models: Models) -> None:
    """Refuse what the program cannot do. Raises `UserError`."""
    if len(models.names) != 1 or models.of_tenant:
        raise UserError(f"--tool {tool} asks one model", fix="give one --model without a tenant")
    if plan.mode not in PATHS:
        raise UserError(f"--tool {tool} has no --mode {plan.mode}", fix="use chat or completions")
    if "label" in (plan.targets or {}):
        raise UserError(f"--target label: --tool {tool} judges no labels", fix="use e2e, or leave --tool out")
    if tool == "vllm" and (plan.until.requests is None or plan.until.duration_s is not None):
        raise UserError("--tool vllm ends after a number of requests", fix="give --requests in place of --duration")
    if tool == "guidellm":
        wrong = [option for option, given in (("--warmup", plan.warmup), ("--target", plan.targets), ("--key-env", plan.key_env))
                 if given]  # fmt: skip
        if wrong:
            raise UserError(f"{wrong[0]} is not handed to guidellm", fix="leave it out, or leave --tool out")


def vllm_command(plan: Plan, model: str, concurrency: int | None, folder: Path) -> list[str]:
    """Arguments of `vllm`; the key goes through its environment."""
    parts = urlsplit(plan.url)
    load = ["--request-rate", f"{plan.rate:g}"] if concurrency is None else ["--max-concurrency", str(concurrency)]
    return [
        "bench", "serve", "--backend", "openai-chat" if plan.mode == "chat" else "openai",
        "--base-url", f"{parts.scheme}://{parts.netloc}", "--endpoint", parts.path + PATHS[plan.mode], "--model", model,
        "--dataset-name", "custom", "--dataset-path", str(folder / "prompts.jsonl"), "--skip-chat-template",
        "--custom-output-len", str(plan.max_tokens), "--num-prompts", str(plan.until.requests), *load,
        "--num-warmups", str(plan.warmup), "--seed", str(plan.seed), "--temperature", "0", "--skip-tokenizer-init",
        "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json",
    ]  # fmt: skip


def guidellm_command(plan: Plan, model: str, concurrency: int | None, folder: Path) -> list[str]:
    """Arguments of `guidellm` 0.8; its options take JSON."""
    base = plan.url.removesuffix("/v1")
    backend = {"kind": "openai_http", "target": base, "model": model, "request_format": "/v1" + PATHS[plan.mode],
               "max_tokens": plan.max_tokens, "timeout": plan.timeout_s}  # fmt: skip
    profile: dict[str, Any] = {"kind": "concurrent", "streams": [concurrency]}
    if concurrency is None:
        profile = {"kind": "poisson", "rate": [plan.rate]}
    limits: list[dict[str, Any]] = []
    if plan.until.requests is not None:
        limits.append({"kind": "max_requests", "count": plan.until.requests})
    if plan.until.duration_s is not None:
        limits.append({"kind": "max_duration", "seconds": plan.until.duration_s})
    data = {"kind": "json_file", "path": str(folder / "prompts.jsonl")}
    written = {"kind": "json", "path": str(folder / "result.json")}
    options = [("--backend", backend), ("--profile", profile), ("--data", data), ("--output", written)]
    options += [("--constraint", limit) for limit in limits]
    return ["run", "--disable-progress", *(word for name, tree in options for word in (name, json.dumps(tree)))]


def _result(tool: str, command: list[str], plan: Plan, folder: Path) -> dict[str, Any]:
    key = read_key(plan.key_env)
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    if key is not None:  # no other key goes to this server
        environment["OPENAI_API_KEY"] = key
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    file = folder / "result.json"
    said = done.stdout.replace(key, "***") if key else done.stdout
    if done.returncode or not file.is_file():
        last = " | ".join(said.strip().splitlines()[-3:])
        raise UserError(f"{tool} ended with code {done.returncode} and {'a' if file.is_file() else 'no'} result: {last}",
                        fix=f"look at `{tool}` itself, or leave --tool out")  # fmt: skip
    sys.stderr.write(said)
    tree = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(tree, dict):
        raise UserError(f"{tool} wrote no JSON object", fix="leave --tool out")
    return tree


def _few(ok: int) -> list[str]:
    told = f"{ok} answered requests: p99 of fewer than {ENOUGH} is little more than the slowest"
    return [told] if ok < ENOUGH else []


def vllm_level(tree: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """A level from the detailed result of `vllm bench serve`: every request, in seconds.

    Raises:
        UserError: not such a result, or requests that do not add up.
    """
    try:
        rows: list[tuple[float, float, float, list[float], int, str]] = list(
            zip(tree["start_times"], tree["latencies"], tree["ttfts"], tree["itls"], tree["output_lens"], tree["errors"],
                strict=True)
        )  # fmt: skip
        samples = [_vllm_sample(*row) for row in rows]
        duration_s, completed = float(tree["duration"]), int(tree["completed"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the result of vllm is not as expected: {error!r}", fix="leave --tool out") from error
    level = summarise(samples, duration_s, plan.targets or {})
    if level["requests"]["ok"] != completed:
        raise UserError(
            f"the result of vllm counts {completed} answers, its requests {level['requests']['ok']}",
            fix="leave --tool out",
        )
    level["late_s"] = None
    notes = ["by vllm: latencies count from sending; prompt tokens are not counted; labels are not judged"]
    if plan.warmup:
        notes.append(f"{plan.warmup} warm-up requests of vllm before the level are left out")
    return {**level, "notes": notes + _few(completed)}


def _vllm_sample(start_s: float, took_s: float, ttft_s: float, gaps_s: list[float], output: int, error: str) -> Sample:
    if error or not output:  # a failed request has no output there, an answered one at least 1
        last = error.strip().splitlines()[-1] if error.strip() else "no reason given"
        refused = last == "Too Many Requests" or "429" in last
        return Sample(start_s, start_s, Answer(start_s + took_s, "rejected" if refused else "error", said=last))
    first_s = start_s + ttft_s
    answer = Answer(start_s + took_s, "ok", first_s, first_s + sum(gaps_s), None, output)
    return Sample(start_s, start_s, answer)


def guidellm_level(tree: dict[str, Any]) -> dict[str, Any]:
    """A level from guidellm's report of one benchmark: its own figures of successful requests.

    Raises:
        UserError: not such a report, or none or several benchmarks in it.
    """
    try:
        [bench] = tree["benchmarks"]
        metrics, duration_s = bench["metrics"], float(bench["duration"])
        total = metrics["request_totals"]
        ok, errors, cut = (int(total[k]) for k in ("successful", "errored", "incomplete"))
        figures = {
            "ttft_s": _guidellm_figures(metrics["time_to_first_token_ms"], 1e-3),
            "tpot_s": _guidellm_figures(metrics["inter_token_latency_ms"], 1e-3),
            "e2e_s": _guidellm_figures(metrics["request_latency"], 1.0),
        }
        tokens = {side: int(metrics[f"{name}_token_count"]["successful"]["total_sum"])
                  for side, name in (("input", "prompt"), ("output", "output"))}  # fmt: skip
        rates = {"requests_per_s": ok / duration_s, "output_tokens_per_s": tokens["output"] / duration_s}
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"the report of guidellm is not as expected: {error!r}", fix="leave --tool out") from error
    notes = ["by guidellm: 429 is among the errors; labels are not judged"]
    if cut:
        notes.append(f"{cut} requests were cut off when it ended; they are in no figure")
    return {
        "duration_s": duration_s, "requests": {"sent": ok + errors, "ok": ok, "rejected": 0, "errors": errors},
        **figures, "label_s": None, "labels": None, "tokens": {**tokens, "reasoning": None},
        "throughput": {**rates, "labels_per_s": None}, "goodput": None, "late_s": None, "errors": [],
        "notes": notes + _few(ok),
    }  # fmt: skip


def _guidellm_figures(summary: dict[str, Any], to_s: float) -> dict[str, Any] | None:
    good = summary["successful"]
    if not good or not good["count"]:
        return None
    values = {p: float(good["percentiles"][p]) * to_s for p in ("p50", "p90", "p99")}
    return {
        **values,
        "mean": float(good["mean"]) * to_s,
        "samples": int(good["count"]),
        "few_for_p99": good["count"] < ENOUGH,
    }

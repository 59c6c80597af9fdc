"""`lamella loadtest`: how fast a server answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("loadtest")(loadtest)


def loadtest(
    url: Annotated[str, typer.Argument(metavar="URL", help="Server, as http://127.0.0.1:8000/v1.")],
    mode: Annotated[
        Literal["chat", "completions", "classify"],
        typer.Option(help="chat and completions are streamed; classify is Lamella's own /v1/classify."),
    ] = "chat",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model, or TENANT=MODEL. Several: in turn. Default: the server's only one."),
    ] = None,
    task: Annotated[Path | None, typer.Option(help="task.toml: ask its test rows, and count completed labels.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of {text, entity?, tenant?} or {messages, tenant?}.")
    ] = None,
    synthetic: Annotated[str | None, typer.Option(help="Made-up prompts of so many words: 200 or 64-512.")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Closed loop: so many requests at a time; several levels as 1,8,32. Default: 1."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: so many requests per second, Poisson arrivals.")
    ] = None,
    duration: Annotated[str | None, typer.Option(help="Send for so long per level: 30s, 5min.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Send so many per level. Default: 100 without --duration.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each level that are not measured.")] = 0,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Goodput counts answers within it: e2e=2s, ttft=300ms, tpot=50ms, label=2s."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token limit of an answer. Default: the task's, else 64.")
    ] = None,
    timeout: Annotated[str, typer.Option(help="An answer later than this is an error.")] = "5min",
    seed: Annotated[int, typer.Option(help="Of arrivals and made-up prompts.")] = 0,
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key; it is never shown or written.")
    ] = None,
    tool: Annotated[
        Literal["lamella", "vllm", "guidellm"],
        typer.Option(help="vllm, guidellm: run that program where it is installed, and read its result."),
    ] = "lamella",
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("loadtest.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's object in place of the table.")] = False,
) -> None:
    """Time to first token, per token, per answer and per completed label, throughput and goodput of a server."""
    from lamella.console import notice, out
    from lamella.errors import UserError
    from lamella.loadtest import run as runs
    from lamella.loadtest.drive import Until
    from lamella.loadtest.measure import parse_time, read_targets
    from lamella.loadtest.prompts import read_models
    from lamella.loadtest.settings import read_levels, read_prompts
    from lamella.loadtest.table import show

    levels = read_levels(concurrency, rate)
    targets = read_targets(target or [])
    asked, default_tokens = read_prompts(task, prompts, synthetic, seed)
    if mode == "classify" and (wrong := targets.keys() & {"ttft", "tpot"}):
        raise UserError(f"--target {min(wrong)}: classify streams no tokens", fix="use e2e or label")
    if "label" in targets and mode != "classify" and not any(p.parser for p in asked):
        raise UserError("--target label: the prompts have no labels", fix="give a task with --task, or use e2e")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UserError(
            "is a folder, or in no folder", fix="give a file in a folder that there is with -o", path=output
        )
    until = Until(
        requests or (None if duration else 100),
        None if duration is None else parse_time(duration, "--duration"),
    )
    plan = runs.Plan(
        runs.base_of(url), mode, levels, rate, until, warmup, seed, max_tokens or default_tokens,
        parse_time(timeout, "--timeout"), targets, key_env,
    )  # fmt: skip
    names = model or [runs.the_only_model(plan)]
    models = read_models(names, asked)
    if tool == "lamella":
        tree = runs.run(plan, asked, models, output)
    else:
        from lamella.loadtest.tools import run_tool

        tree = run_tool(tool, plan, models, asked, output)
    for note in dict.fromkeys(note for level in tree["levels"] for note in level["notes"]):
        notice(note)
    for level in tree["levels"]:
        for error in level["errors"]:
            notice(f"error, {error['count']} times: {error['said']}")
    if as_json:
        typer.echo(json.dumps(tree, ensure_ascii=False))
        return
    out.print(show(tree))
    notice(f"written: {output}")

"""Writes docs/reference: `python -m tests.guide.write_reference`. A test compares."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from lamella.cli import app
from lamella.compare.settings import CompareConfig
from lamella.compare.spans import SpanTaskConfig
from lamella.config import RunConfig
from lamella.decide.settings import DecideConfig
from lamella.eval.task import TaskConfig
from lamella.guide.settings import settings_of
from lamella.serve.settings import ServeConfig
from lamella.store.formats import Formats

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
FILES: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("run.toml", RunConfig, "`lamella train`, `lamella plan`, `lamella data`; `lamella init` writes one. Every key can be set on the "
     "command line: `train.steps=100`."),
    ("task.toml", TaskConfig, "`lamella eval`, `lamella compare`, and adapters of `lamella serve`."),
    ("task.toml of spans", SpanTaskConfig, "`lamella compare`: tasks whose answer is a list of entities."),
    ("compare.toml", CompareConfig, "`lamella compare`."),
    ("serve.toml", ServeConfig, "`lamella serve`."),
    ("decide.toml", DecideConfig, "`lamella decide`."),
    ("quantize.toml", Formats, "`lamella quantize --formats`."),
)  # fmt: skip
MADE = "<!-- Written by `python -m tests.guide.write_reference`; a test compares. -->\n\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def config_page() -> str:
    parts = [
        MADE,
        "# Settings\n\nUnknown keys are refused with the nearest valid name. Paths in a file are relative to the file.\n",
    ]
    for name, model, use in FILES:
        parts.append(f"\n## {name}\n\n{use}\n")
        for table, group in groupby(settings_of(model), key=lambda s: s.table):
            settings = list(group)
            if table:
                mark = f"[[{table}]]" if settings[0].many else f"[{table}]"
                parts.append(f"\n### {name.split(' ')[0]}: {mark}\n")
            parts.append("\n| key | is | default | |\n|---|---|---|---|\n")
            for s in settings:
                default = "required" if s.required else "-" if s.default is None else f"`{s.default}`"
                parts.append(f"| `{s.name}` | {cell(s.kind)} | {cell(default)} | {cell(s.text)} |\n")
    return "".join(parts)


def verbs(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name, sub in getattr(command, "commands", {}).items():
        if getattr(sub, "hidden", False):
            continue
        found += verbs(sub, (*path, name)) if getattr(sub, "commands", None) else [((*path, name), sub)]
    return found


def cli_page() -> str:
    parts = [MADE, "# Commands\n\nExit codes: 0 done, 1 failed or not trusted, 2 bad input, 3 does not fit (`plan`), 130 interrupted. "
             "Results go to stdout, everything else to stderr. `lamella --install-completion` makes your shell complete verbs and "
             "options.\n"]  # fmt: skip
    for path, command in verbs(typer.main.get_command(app)):
        parts.append(f"\n## lamella {' '.join(path)}\n\n{(command.help or '').replace(chr(92) + '[', '[')}\n")
        parts.append("\n| | |\n|---|---|\n")
        for p in command.params:
            if p.name == "help" or getattr(p, "hidden", False):
                continue
            names = (
                ", ".join(f"`{n}`" for n in (*p.opts, *p.secondary_opts))
                if p.param_type_name == "option"
                else f"`{(p.metavar or p.name.upper())}`"
            )
            default = p.default
            shown = (
                ""
                if default is None or default is False or callable(default) or default == ()
                else f" Default: `{getattr(default, 'value', default)}`."
            )
            parts.append(f"| {names} | {cell(p.help or '')}{cell(shown)} |\n")
    return "".join(parts)


PAGES = {"config.md": config_page, "cli.md": cli_page}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, make in PAGES.items():
        (FOLDER / file).write_text(make())

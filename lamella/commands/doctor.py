"""`lamella doctor`: what this environment can do."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    pass

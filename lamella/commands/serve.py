"""`lamella serve`: an OpenAI-compatible server on a store."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    pass

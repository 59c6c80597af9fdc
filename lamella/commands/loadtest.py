"""`lamella loadtest`: how fast a server answers."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    pass

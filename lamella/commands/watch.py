"""`lamella watch`: runs in the browser; `lamella report`: one run as a page."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    pass

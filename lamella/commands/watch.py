"""`lamella watch`: runs in the browser; `lamella report`: runs as one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lamella.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command("watch")(watch)
    app.command("report")(report)


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of runs, or one run.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own shows runs to all who reach it.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8080,
    allow_host: Annotated[list[str] | None, typer.Option(help="Name by which browsers may call this server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it listens as one JSON object.")] = False,
) -> None:
    """Show runs live: loss, devices, plan and measurement, memory, F1, comparisons, the decision. Ctrl-C ends it."""
    import socket

    import uvicorn

    from lamella.console import notice
    from lamella.report.watch import make_app

    if not folder.is_dir():
        raise UserError("no such folder", fix="give the folder of runs, such as runs", path=folder)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}", fix="give another --port") from error
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    names = frozenset({host, *(allow_host or [])})
    if as_json:
        typer.echo(json.dumps({"url": address, "folder": str(folder)}))
    notice(f"{folder} at {address}")
    if host not in ("127.0.0.1", "::1", "localhost"):
        notice("warning: all who reach this address see these runs; there is no password")
    server = uvicorn.Server(uvicorn.Config(make_app(folder, names), log_level="warning", server_header=False))
    server.run(sockets=[listening])


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a folder of runs.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file to write. Default: report.html in the folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the page shows as one JSON object.")] = False,
) -> None:
    """Write runs as one HTML file that needs no network: to keep, to send, to open anywhere."""
    from lamella.console import notice
    from lamella.report.page import report_data, write_report

    written = write_report(folder, out)
    if as_json:
        typer.echo(json.dumps({"written": str(written), **report_data(folder)}))
    notice(f"written: {written}")

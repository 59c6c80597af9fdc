"""The `lamella` command. One verb, one module in `lamella.commands`; heavy imports happen when a verb runs."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

import typer
from rich.markup import escape

from lamella import __version__
from lamella.commands import (
    compare,
    data,
    decide,
    demo,
    doctor,
    eval,
    export,
    init,
    loadtest,
    plan,
    probe,
    quantize,
    serve,
    store,
    train,
    watch,
)
from lamella.console import err
from lamella.errors import UserError
from lamella.hardware.allocator import restart_tuned
from lamella.hardware.collector import quiet_start
from lamella.ranks.report import launched, say

INTERRUPTED = 130
app = typer.Typer(
    name="lamella", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
    help="Fine-tune language models that do not fit, one thin layer at a time.",
)  # fmt: skip


def _version(value: bool) -> None:
    if value:
        typer.echo(f"lamella {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


for module in (
    init, doctor, probe, plan, quantize, store, data, train, eval, compare, export, serve, loadtest, decide, watch, demo,
):  # fmt: skip
    module.register(app)
for command in app.registered_commands:  # [classes] in a text is no markup
    command.help = escape(inspect.getdoc(command.callback) or "")


def main() -> None:
    """Entry point: user errors end in one message and their exit code, Ctrl-C in 130."""
    ours = Path(sys.argv[0]).stem in ("lamella", "__main__")  # not when a program calls this
    ours = ours and "_LAMELLA_COMPLETE" not in os.environ  # nor when a shell completes a word
    if ours and sys.argv[1:2] != ["plan"]:  # which takes no tensors
        restart_tuned()
    if ours:
        quiet_start()
    try:
        app()
    except UserError as error:
        say(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:  # typer makes one of the other
            raise
        if not launched():
            err.print("interrupted")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

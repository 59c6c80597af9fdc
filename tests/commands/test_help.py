"""Help texts say what the docstrings say; how commands end."""

import inspect
import re

import pytest
import typer
from typer.testing import CliRunner

from lamella import cli
from lamella.cli import app

COMMANDS = {c.name or c.callback.__name__: inspect.getdoc(c.callback) or "" for c in app.registered_commands}
BRACKETED = re.compile(r"\[+\w+\]+")


@pytest.mark.parametrize("name", [name for name, text in COMMANDS.items() if BRACKETED.search(text)])
def test_words_in_brackets_are_shown(name):
    shown = CliRunner().invoke(app, [name, "--help"]).stdout
    for word in BRACKETED.findall(COMMANDS[name]):
        assert word in shown
        assert f"\\{word}" not in shown


def test_some_command_has_such_words():
    assert "[classes]" in COMMANDS["quantize"]


def test_ctrl_c_is_answered(monkeypatch, capsys):
    def pressed() -> None:
        raise KeyboardInterrupt

    stopped = typer.Typer()
    stopped.command()(pressed)
    monkeypatch.setattr(cli, "app", stopped)
    monkeypatch.setattr("sys.argv", ["pytest"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"

"""Help texts say what the docstrings say."""

import inspect
import re

import pytest
from typer.testing import CliRunner

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

"""Every verb has `--json`; a shell completes verbs and options."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lamella.cli import app

VERBS = Path(sys.executable).with_name("lamella")


def leaves(command, path=()):
    for name, sub in getattr(command, "commands", {}).items():
        yield from leaves(sub, (*path, name))
    if not getattr(command, "commands", None):
        yield path, command


def test_every_verb_prints_json_when_asked():
    lacking = []
    for path, command in leaves(typer.main.get_command(app)):
        options = {name for parameter in command.params for name in parameter.opts}
        if "--json" not in options:
            lacking.append(" ".join(path))
    assert not lacking


def completed(words):
    """What bash offers for the last word, through the script that `--show-completion` prints."""
    env = {
        **os.environ,
        "PATH": f"{VERBS.parent}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    script = subprocess.run(
        [str(VERBS), "--show-completion", "bash"], env=env, capture_output=True, text=True, check=True
    ).stdout
    function = next(line.split("-F ")[1].split()[0] for line in script.splitlines() if line.startswith("complete "))
    listed = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; {function} lamella; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(not VERBS.exists() or shutil.which("bash") is None, reason="needs the installed command and bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["lamella", "tr"], ["train"]),
        (["lamella", "quantize", "--str"], ["--strict"]),
        (["lamella", "store", "sy"], ["synth"]),
    ],
)
def test_bash_completes(words, offered):
    assert completed(words) == offered

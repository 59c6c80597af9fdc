import json
import os
import platform
import subprocess
import sys

import pytest

from lamella.hardware.allocator import TUNABLES, is_tuned, wants_restart

GLIBC = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
PROGRAM = """
import json, os, sys
from lamella.hardware.allocator import is_tuned, restart_tuned
restart_tuned()
print(json.dumps([is_tuned(), os.getpid(), sys.argv, sys.stdin.read(), os.environ.get("GLIBC_TUNABLES")]))
"""


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES"))}


@pytest.mark.skipif(not GLIBC, reason="glibc only")
def test_a_command_starts_again_once_with_its_arguments_and_input():
    command = [sys.executable, "-c", PROGRAM, "a", "--b=c d"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean(), text=True)
    out, _ = process.communicate("typed")
    assert json.loads(out) == [True, process.pid, ["-c", "a", "--b=c d"], "typed", TUNABLES]


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "LD_PRELOAD"])
def test_what_the_user_chose_stays(name):
    value = "" if name == "LD_PRELOAD" else "glibc.malloc.check=0" if name == "GLIBC_TUNABLES" else "2"
    assert not wants_restart({name: value})
    env = {**clean(), name: value}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, input="", check=True
    )
    assert json.loads(done.stdout)[0] is False
    assert json.loads(done.stdout)[4] == env.get("GLIBC_TUNABLES")


@pytest.mark.skipif(not GLIBC, reason="glibc only")
def test_a_tuned_process_does_not_start_again():
    assert wants_restart({})
    assert not wants_restart({"GLIBC_TUNABLES": TUNABLES})
    assert is_tuned({"GLIBC_TUNABLES": TUNABLES})
    assert not is_tuned({})


@pytest.mark.skipif(not GLIBC, reason="glibc only")
def test_the_command_line_runs_tuned():
    probe = "import os, sys; sys.argv = ['lamella', '--version']; from lamella.cli import main\n" \
            "try: main()\nfinally: print(os.environ.get('GLIBC_TUNABLES'))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", probe], env=clean(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == TUNABLES

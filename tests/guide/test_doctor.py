"""`lamella doctor`, here and in environments that lack something."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.guide import doctor
from lamella.guide.doctor import Finding
from lamella.hardware.host import host_facts


def told(**env):
    done = subprocess.run([sys.executable, "-m", "lamella", "doctor", "--json"], capture_output=True, text=True,
                          env={**os.environ, **env})  # fmt: skip
    tree = json.loads(done.stdout)
    return done.returncode, {check["name"]: check for check in tree["checks"]}, tree


def test_here_it_works():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    tree = json.loads(result.stdout)
    assert result.exit_code == 0 and tree["works"]
    names = {check["name"] for check in tree["checks"]}
    assert names >= {"python", "compiler", "kernels", "torch", "memory", "cores", "disk", "limits", "folders"}
    for check in tree["checks"]:
        assert check["state"] in ("ok", "note") or check["fix"], check
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert "kernels" in shown and "what to do" in shown


def test_a_kernel_that_cannot_be_is_a_problem():
    code, checks, tree = told(LAMELLA_KERNELS="c-quantum")
    assert code == 1 and not tree["works"]
    assert checks["kernels"]["state"] == "problem" and "c-quantum" in checks["kernels"]["said"]


def test_without_a_compiler_it_says_what_is_lost(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(doctor.build, "find", lambda: None)
    (found,) = doctor.compiler()
    assert found.state == "warning" and "no-such-compiler" in found.said and "gcc" in found.fix
    monkeypatch.setattr(doctor.build, "find", lambda: "built")
    assert doctor.compiler()[0].state == "note"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch>=99", "torch is"),
        ("no-such-package-at-all>=1", "no-such-package-at-all is not installed"),
        ("numpy<0.1", "<0.1 is needed"),
    ],
)
def test_versions_out_of_range_are_problems(line, said):
    (found,) = doctor.packages([line, "pytest>=1", "ray; extra == 'ray'"])
    assert found.state == "problem" and said in found.said and line in found.fix


def test_limits_of_the_process_are_told():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096)); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY));"
        "from lamella.guide import doctor; print([f.said for f in doctor.limits()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "at most 200" in done.stdout and "cut at" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 200


def test_small_memory_and_quotas_are_told():
    facts = replace(host_facts(), free_bytes=1 << 30, limit_bytes=2 << 30, ram_bytes=64 << 30, cores=8, cpu_quota=2.0)
    (memory,), (cores,) = doctor.memory(facts), doctor.cores(facts)
    assert memory.state == "warning" and "control group" in memory.said and "memory.budget" in memory.fix
    assert cores.state == "warning" and "compute.threads = 2" in cores.fix


def test_only_a_problem_prevents_work():
    assert doctor.works([Finding("a", "warning", "slow"), Finding("b", "note", "x")])
    assert not doctor.works([Finding("a", "problem", "broken")])


def test_folders_that_cannot_be_written(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: str(file / "below"))
    assert "temporary files" in {f.name for f in doctor.writable()}

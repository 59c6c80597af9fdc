"""Building, finding and choosing the C library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lamella import kernels
from lamella.errors import UserError
from lamella.kernels import build

REPO = Path(__file__).parents[2]


def run_python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """`python -c` imports the package that lies in `cwd`."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_build_writes_one_library_and_no_scraps(tmp_path):
    stale = tmp_path / "_nf4-000000000000.so"
    stale.write_bytes(b"")
    made = build.build(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [build.library_name()]
    assert made == tmp_path / build.library_name()


def test_changed_sources_have_another_name(tmp_path, monkeypatch):
    copy = shutil.copytree(build.SOURCES_DIR, tmp_path / "cpu")
    monkeypatch.setattr(build, "SOURCES_DIR", copy)
    before = build.library_name()
    (copy / "nf4.c").write_text((copy / "nf4.c").read_text() + "\n")
    assert build.library_name() != before


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(build.CompileError, match="no-such-compiler"):
        build.build(tmp_path)


def test_a_compile_error_is_shown_and_leaves_nothing(tmp_path, monkeypatch):
    copy = shutil.copytree(build.SOURCES_DIR, tmp_path / "cpu", ignore=shutil.ignore_patterns("*.so"))
    (copy / "nf4.c").write_text("not C")
    monkeypatch.setattr(build, "SOURCES_DIR", copy)
    target = tmp_path / "out"
    with pytest.raises(build.CompileError, match=r"nf4\.c"):
        build.build(target)
    assert list(target.iterdir()) == []


@pytest.mark.slow
def test_where_the_package_cannot_be_written_the_cache_serves(tmp_path, monkeypatch):
    copy = shutil.copytree(build.SOURCES_DIR, tmp_path / "cpu", ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(build, "SOURCES_DIR", copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.find() is None
    real = build._compile

    def refuse(folder, name):  # permissions do not stop root
        if folder == copy:
            raise PermissionError(13, "Permission denied")
        return real(folder, name)

    monkeypatch.setattr(build, "_compile", refuse)
    made = build.build()
    assert made.parent == tmp_path / "cache" / "lamella"
    assert build.find() == made


def test_without_a_compiler_torch_is_used_and_said_once(tmp_path):
    package = tmp_path / "lamella"
    shutil.copytree(REPO / "lamella" / "kernels", package / "kernels", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    for name in ("__init__.py", "errors.py", "units.py", "console.py"):
        shutil.copy(REPO / "lamella" / name, package)
    code = (
        "import torch, lamella.kernels as k; x = torch.randn(100); c, a = k.quantize_nf4(x);"
        "k.dequantize_nf4(c, a, x); print(k.__file__, k.backend())"
    )
    nowhere = {"CC": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_python(code, tmp_path, **nowhere)
    assert done.stdout.split() == [str(package / "kernels" / "__init__.py"), "torch"], done.stderr
    assert done.stderr.count("plain torch is used") == 1
    assert "no-such-compiler" in done.stderr
    asked = run_python(code, tmp_path, **nowhere, LAMELLA_KERNELS="c-portable")
    assert asked.returncode == 1
    assert "UserError: kernels 'c-portable' cannot be loaded" in asked.stderr


@pytest.mark.parametrize("name", ["c-portable", "torch"])
def test_the_environment_forces_a_path(name):
    done = run_python("import lamella.kernels as k; print(k.backend())", REPO, LAMELLA_KERNELS=name)
    assert done.stdout.split() == [name], done.stderr


def test_unknown_and_unsupported_paths_are_refused(monkeypatch):
    with pytest.raises(UserError, match="c-avx9"):
        kernels.resolve("c-avx9")
    monkeypatch.setattr(kernels.CpuKernels, "supported", staticmethod(lambda lib, name: name == "c-portable"))
    with pytest.raises(UserError, match="cannot run 'c-avx512'"):
        kernels.resolve("c-avx512")
    assert kernels.resolve()[0] == "c-portable"


def test_public_functions_use_the_resolved_backend():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    codes, absmax = kernels.quantize_nf4(x)
    state = kernels.quantize_absmax(absmax)
    out = kernels.dequantize_nf4(codes, state, torch.empty(1000, dtype=torch.bfloat16))
    same = kernels.dequantize_nf4(codes, kernels.dequantize_absmax(state), torch.empty(1000, dtype=torch.bfloat16))
    assert torch.equal(out, same)
    assert kernels.backend() in kernels.BACKENDS

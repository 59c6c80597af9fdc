"""Built at install: a wheel of the package holds the compiled library, which is the one these sources ask for."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lamella.kernels import build

REPO = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_holds_the_compiled_library(tmp_path):
    compiler = os.environ.get("CC", "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"no C compiler: {compiler} is not there")
    copy = tmp_path / "source"
    copy.mkdir()
    shutil.copytree(REPO / "lamella", copy / "lamella", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, copy], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        library = f"lamella/kernels/cpu/{build.library_name()}"
        assert [name for name in archive.namelist() if name.endswith(".so")] == [library]
        archive.extractall(tmp_path / "installed")
    code = "import lamella.kernels as k; print(k.__file__, k.backend())"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "installed", capture_output=True, text=True, check=False,
        env={**os.environ, "CC": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path / "cache"), "LAMELLA_KERNELS": "c-portable"},
    )  # fmt: skip
    file, backend = ran.stdout.split()
    assert file.startswith(str(tmp_path / "installed")), ran.stderr
    assert backend == "c-portable", ran.stderr

"""Compiles the CPU kernels with the system compiler: `python -m lamella.kernels.build`.

Imports nothing but the standard library, because `setup.py` loads this file by its path, in an
environment without torch.

The library's name carries a hash of its sources and flags, so that changed sources are never
run as an old build. It goes into the package's folder, or where that cannot be written into the
user's cache folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES_DIR = Path(__file__).parent / "cpu"
# No contraction and no fast-math: every path gives the same bits.
COMMON_FLAGS = ("-std=c11", "-O3", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno", "-pthread")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c", "-mprfchw")
_AMX = (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
# Sources that need instructions beyond the baseline; each must compile to an empty unit without them.
X86_FLAGS = {
    "avx2.c": ("-mavx2", "-mfma", "-mf16c"),
    "avx512.c": ("-mavx512f", "-mavx512bw", "-mavx2", "-mfma", "-mf16c", "-mprfchw"),
    "amx_attention.c": _AMX,
    "amx_experts.c": _AMX,
    "lora_rows.c": (*_AVX512, "-mavx512bf16"),
    "paged.c": (*_AVX512, "-mavx512bf16"),
    "rows.c": (*_AVX512, "-mavx512bf16"),
}


class CompileError(Exception):
    """No compiler, no folder to write to, or the compiler refused the sources."""


def _flags(source: str) -> tuple[str, ...]:
    return X86_FLAGS.get(source, ()) if platform.machine() in ("x86_64", "AMD64") else ()


def library_name() -> str:
    """File name of the library built from the sources as they are now."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, platform.machine())).encode())
    for file in sorted(SOURCES_DIR.glob("*.[ch]")):
        digest.update(file.name.encode() + repr(_flags(file.name)).encode() + file.read_bytes())
    return f"_nf4-{digest.hexdigest()[:12]}.so"


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lamella"


def find() -> Path | None:
    """The built library, or None."""
    name = library_name()
    for folder in (SOURCES_DIR, cache_dir()):
        if (folder / name).is_file():
            return folder / name
    return None


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise CompileError(f"no C compiler: {command[0]!r} not found (install gcc or clang, or set CC)")
    return command


def _compile(folder: Path, name: str) -> Path:
    """Compile into `folder` under a temporary name, then rename: a half-written library is never seen."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        objects = []
        for source in sorted(SOURCES_DIR.glob("*.c")):
            objects.append(str(Path(scratch, source.name).with_suffix(".o")))
            _call([*compiler, *COMMON_FLAGS, *_flags(source.name), "-c", str(source), "-o", objects[-1]])
        made = Path(scratch, name)
        _call([*compiler, "-shared", "-pthread", *objects, "-lm", "-o", str(made)])
        return made.replace(folder / name)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


def build(folder: Path | None = None) -> Path:
    """Build the library and return its path.

    Args:
        folder: where to put it; default the package's own folder, else the user's cache folder.

    Raises:
        CompileError: no compiler, compile error, or no folder can be written.
    """
    name = library_name()
    refused = ""
    for target in (folder,) if folder is not None else (SOURCES_DIR, cache_dir()):
        try:
            target.mkdir(parents=True, exist_ok=True)
            made = _compile(target, name)
        except OSError as error:
            refused = f"cannot write to {target}: {error.strerror or error}"
            continue
        if target != cache_dir():  # the cache may serve several installs
            for old in set(target.glob("_nf4-*.so")) - {made}:
                old.unlink(missing_ok=True)
        return made
    raise CompileError(refused)


if __name__ == "__main__":
    print(build())

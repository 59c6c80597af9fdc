"""A small script in an engine's own Python: request in a JSON file, logits back in an `.npz`.

The scripts (`scripts/*.py` beside this file) import nothing of Lamella, which the other environment does not have.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamella.console import notice
from lamella.errors import RunFailed, UserError
from lamella.export.engines.seen import Answer, Asked, Seen, seen_whole

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Engine:
    """An engine that a script drives.

    Attributes:
        name: as the user says it; script: file in `scripts/`.
        module: that its Python must have; package: the registry's name of it.
        takes_gguf: models and adapters are GGUF files.
    """

    name: str
    script: str
    module: str
    package: str
    takes_gguf: bool = False

    def interpreter(self, python: Path | None) -> Path:
        """Raises `UserError`: the engine is not installed there."""
        return interpreter_of(self.name, self.module, self.package, python)

    def answer(self, asked: Asked, base_too: bool, python: Path | None) -> Answer:
        """Run it.

        Args:
            base_too: ask for the model without its adapter as well.
            python: interpreter of the engine's environment; None: this one.

        Raises:
            UserError: the engine is not installed there.
            RunFailed: it stopped, or gave no numbers; with the end of what it said.
        """
        interpreter = self.interpreter(python)
        with tempfile.TemporaryDirectory(prefix="lamella-export-") as scratch:
            request, result = Path(scratch) / "request.json", Path(scratch) / "result.npz"
            request.write_text(json.dumps(_request(asked, base_too)))
            notice(f"{self.name}: {len(asked.prompts)} prompts")
            run_script(self.name, interpreter, SCRIPTS / self.script, [str(request), str(result)], asked.threads)
            with np.load(result, allow_pickle=False) as found:
                arrays = {key: found[key] for key in found.files}
        return Answer(
            self.name, str(arrays["version"]), _seen("tuned", arrays, asked), _seen("base", arrays, asked) if base_too else None
        )  # fmt: skip


TRANSFORMERS = Engine("transformers", "transformers_logits.py", "transformers", "transformers peft")
LLAMA_CPP = Engine("llama.cpp", "llama_cpp_logits.py", "llama_cpp", "llama-cpp-python", takes_gguf=True)
MLX = Engine("mlx", "mlx_logits.py", "mlx_lm", "mlx-lm")


def interpreter_of(engine: str, module: str, package: str, python: Path | None) -> Path:
    """The Python that has an engine.

    Raises:
        UserError: it does not have it, or is none.
    """
    fix = (f"python -m venv .engines/{engine}; .engines/{engine}/bin/pip install {package}; then "
           f"--engine {engine}=.engines/{engine}/bin/python")  # fmt: skip
    if python is None:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{engine} is not installed beside Lamella", fix=fix)
        return Path(sys.executable)
    try:
        found = subprocess.run(
            [python, "-c", f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"],
            capture_output=True, check=False, timeout=120,
        )  # fmt: skip
    except OSError as error:
        raise UserError(
            f"cannot be run: {error.strerror}", fix="give the environment's bin/python", path=python
        ) from error
    if found.returncode:
        raise UserError(f"has no module {module!r}", fix=fix, path=python)
    return python


def run_script(engine: str, interpreter: Path, script: Path, arguments: list[str], threads: int) -> None:
    """Run a script to its end, without access to any hub.

    Raises:
        RunFailed: with the last lines that it wrote.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [interpreter, script, *arguments], env=environment, capture_output=True, text=True, errors="replace",
            check=False, timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{engine}: no answer in {LIMIT_S:g} s", fix="give fewer or shorter prompts") from error
    if done.returncode:
        raise RunFailed(f"{engine} stopped with exit code {done.returncode}:\n{last_lines(done.stderr)}",
                        fix="the export was not verified; see what the engine says")  # fmt: skip


def last_lines(text: str, most: int = 12) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-most:])


def _request(asked: Asked, base_too: bool) -> dict[str, Any]:
    return {
        "model": str(asked.model.resolve()), "adapter": None if asked.adapter is None else str(asked.adapter.resolve()),
        "prompts": [list(p) for p in asked.prompts], "first": [r.start for r in asked.wanted()], "dtype": asked.dtype,
        "threads": asked.threads, "base_too": base_too,
    }  # fmt: skip


def _seen(which: str, arrays: dict[str, np.ndarray], asked: Asked) -> Seen:
    parts = [arrays[f"{which}_{i}"] for i in range(len(asked.prompts))]
    for part, wanted in zip(parts, asked.wanted(), strict=True):
        if part.ndim != 2 or len(part) != len(wanted) or not np.isfinite(part).all():
            raise RunFailed(f"the engine gave logits of shape {list(part.shape)}, or not finite ones, for {len(wanted)} positions",
                            fix="the export was not verified")  # fmt: skip
    return seen_whole(parts)

"""The peers of `bench.train`: their environments, their settings, and how a side is run.

Each peer lives in a virtual environment of its own in the checkout, made on first use from the pins below. torch is
pinned to one release: an open range brings several GB of CUDA libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ENVIRONMENT = dict(os.environ)  # taken before lamella sets how long threads spin: a peer runs as its users run it

ROOT = Path(__file__).parent.parent


class SideFailed(RuntimeError):
    """A side ended with an error; `reason` is its last line."""

    def __init__(self, command: list[str], code: int, stderr: str) -> None:
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        self.reason = lines[-1] if lines else f"ended with code {code} and said nothing"
        super().__init__(f"{' '.join(command)} ended with {code}:\n{stderr[-4000:]}")


@dataclass(frozen=True)
class Environment:
    """A virtual environment: its folder in the checkout, what pip installs, and what it must not keep.

    `unwanted`: dependencies whose registry builds need CUDA; text training does not use them.
    """

    folder: str
    pins: tuple[str, ...]
    unwanted: tuple[str, ...] = ()

    def python(self) -> Path:
        """Its interpreter; the environment is made, or brought to the pins, when needed.

        Raises:
            SideFailed: pip cannot install the pins.
        """
        folder = ROOT / self.folder
        python, stamp = folder / "bin" / "python", folder / ".pins"
        wanted = "\n".join((*self.pins, *(f"not {name}" for name in self.unwanted)))
        if not stamp.is_file() or stamp.read_text() != wanted:
            print(f"setting up {self.folder}", file=sys.stderr)
            if not python.exists():
                venv.create(folder, with_pip=True)
            pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            _run([*pip, "install", *self.pins])
            if self.unwanted:
                _run([*pip, "uninstall", "--yes", *self.unwanted])
            stamp.write_text(wanted)
        return python


def _run(command: list[str], **more: Any) -> str:
    """What the command prints.

    Raises:
        SideFailed: it ended with an error.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode:
        raise SideFailed(command, done.returncode, done.stderr)
    return done.stdout


TRANSFORMERS = Environment(
    ".bench-venv",
    ("torch==2.13.0", "transformers==5.24.0", "peft==0.21.2", "bitsandbytes==0.50.2", "accelerate==1.15.0"),
)
UNSLOTH = Environment(
    ".bench-venv-unsloth",
    ("torch==2.13.0", "unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "transformers==5.17.0", "peft==0.21.2",
     "bitsandbytes==0.50.2", "trl==1.15.0", "triton==3.9.0", "torchvision==0.28.0"),
    unwanted=("torchvision", "xformers"),
)  # fmt: skip
SWIFT = Environment(
    ".bench-venv-swift",
    ("torch==2.13.0", "ms-swift==4.6.0", "transformers==5.19.0", "peft==0.20.0", "bitsandbytes==0.50.2",
     "trl==0.29.1"),
)  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """One way to train with a peer.

    Attributes:
        name: what is printed.
        group: "transformers", "unsloth" or "ms-swift": what `--peer` chooses by.
        environment, script: who runs it.
        options: given to the script with the job.
        variables: of the process' environment.
    """

    name: str
    group: str
    environment: Environment
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        # -P: the bench folder must not shadow packages of the peer (there is a `kernels`).
        return [str(self.environment.python()), "-P", str(ROOT / "bench" / self.script)]


def transformers(name: str, **options: Any) -> Peer:
    return Peer(f"transformers + PEFT, {name}", "transformers", TRANSFORMERS, "peer_train.py", options)


def unsloth(name: str, compiled: bool = False) -> Peer:
    variables = {"UNSLOTH_CPU_COMPILE": "1"} if compiled else {}
    return Peer(f"Unsloth, {name}", "unsloth", UNSLOTH, "peer_unsloth.py", {}, variables)


def swift(name: str) -> Peer:
    return Peer(f"ms-swift, {name}", "ms-swift", SWIFT, "peer_swift.py")


def ask(command: list[str], job: dict[str, Any], variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one side on a job and read the JSON line that it ends with.

    Raises:
        SideFailed: it ended with an error.
    """
    threads = str(job.get("threads", os.cpu_count()))
    env = {**_ENVIRONMENT, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", **(variables or {})}
    answer: dict[str, Any] = json.loads(_run(command, input=json.dumps(job), cwd=ROOT, env=env).splitlines()[-1])
    return answer

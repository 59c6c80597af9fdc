"""What this environment can do, check by check, and what to do where something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from lamella.errors import UserError
from lamella.files import free_bytes
from lamella.hardware import nvml
from lamella.hardware.disk import disk_kind
from lamella.hardware.host import HostFacts, host_facts
from lamella.kernels import build
from lamella.track.tracking import MODULES
from lamella.units import format_bytes

State = Literal["ok", "note", "warning", "problem"]
LEAST_FILES = 1024
LEAST_MEMORY = 4 << 30
LEAST_DISK = 10 << 30
OPTIONAL = {
    "triton": "kernels on NVIDIA GPUs", "peft": "comparing with PEFT", "bitsandbytes": "comparing with bitsandbytes",
    "ray": "starting ranks through Ray", **{module: f'log = ["{name}"]' for name, module in MODULES.items()},
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One check's outcome.

    Attributes:
        state: "problem" prevents work, "warning" costs speed or a feature, "note" is worth knowing.
        said: what was found. fix: what to do; "" where nothing is to be done.
    """

    name: str
    state: State
    said: str
    fix: str = ""


def examine(folder: Path) -> list[Finding]:
    """Run all checks.

    Args:
        folder: where stores and runs are to lie.
    """
    facts = host_facts()
    checks: Sequence[Callable[[], list[Finding]]] = (
        python, packages, compiler, kernels, torch_build, gpus, lambda: memory(facts), lambda: cores(facts),
        lambda: disk(folder), limits, writable, optional,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """`{"works": bool, "checks": [...]}`."""
    return {"works": works(findings), "checks": [asdict(f) for f in findings]}


def works(findings: Sequence[Finding]) -> bool:
    """Whether nothing prevents work."""
    return not any(f.state == "problem" for f in findings)


def python() -> list[Finding]:
    """Interpreter and its encoding."""
    found = [Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        found.append(
            Finding("encoding", "warning", f"file names are {encoding}", "set LC_ALL=C.UTF-8, or PYTHONUTF8=1")
        )
    return found


def packages(needed: Sequence[str] | None = None) -> list[Finding]:
    """Required packages against the versions that are supported.

    Args:
        needed: requirement lines; None: those of the installed package.
    """
    if needed is None:
        try:
            needed = importlib.metadata.requires("lamella") or []
        except importlib.metadata.PackageNotFoundError:
            return [
                Finding(
                    "packages", "note", "lamella runs from a checkout, so versions are not compared", "pip install -e ."
                )
            ]
    wrong, count = [], 0
    for line in needed:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(
                Finding("packages", "problem", f"{requirement.name} is not installed", f"pip install '{line}'")
            )
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(
                Finding("packages", "problem", f"{requirement.name} is {version}, {requirement.specifier} is needed",
                        f"pip install '{line}'")
            )  # fmt: skip
    return wrong or [Finding("packages", "ok", f"{count} needed ones are there, in supported versions")]


def compiler() -> list[Finding]:
    """A C compiler, or a library built before."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    path = shutil.which(command[0])
    if path is None:
        if build.find() is not None:
            return [Finding("compiler", "note", f"no {command[0]!r}, and the kernels are built already")]
        return [Finding("compiler", "warning", f"no C compiler ({command[0]!r}): kernels fall back to plain torch, many times slower",
                        "install gcc or clang, or set CC")]  # fmt: skip
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return [Finding("compiler", "ok", said[0] if said else path)]


def kernels() -> list[Finding]:
    """Which CPU kernels run here: built now if they were not."""
    from lamella import kernels as ours
    from lamella.kernels import attention, experts, rows

    try:
        name = ours.backend()
        parts = {
            "4-bit": name, "experts": experts.route() or "torch", "attention": ", ".join(attention.supported()) or "torch",
            "norms and heads": "C" if rows.supported() else "torch",
        }  # fmt: skip
    except UserError as error:
        return [Finding("kernels", "problem", error.what, error.fix or "")]
    said = "; ".join(f"{part}: {path}" for part, path in parts.items())
    if name == "torch":
        return [Finding("kernels", "warning", said, "install gcc or clang, or unset LAMELLA_KERNELS")]
    if parts["experts"] == "torch":
        return [Finding("kernels", "note", f"{said} (fused experts need AVX-512 with bf16, or AMX)")]
    return [Finding("kernels", "ok", said)]


def torch_build() -> list[Finding]:
    """torch: its build, and whether it fits the machine."""
    if find_spec("torch") is None:
        return []  # `packages` tells it
    import torch

    cuda = torch.version.cuda
    threads = torch.get_num_threads()
    said = f"torch {torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU build'}, {threads} threads"
    if cuda and not torch.cuda.is_available():
        return [Finding("torch", "note", f"{said}; it sees no GPU")]
    library, _ = nvml.load()
    if library is not None:
        library.nvmlShutdown()
        if not cuda:
            return [
                Finding("torch", "warning", f"{said}, and there is an NVIDIA driver", "install a CUDA build of torch")
            ]
    return [Finding("torch", "ok", said)]


def gpus() -> list[Finding]:
    """NVIDIA devices and what their kernels need."""
    import torch

    library, why = nvml.load()
    if library is None:
        return [Finding("gpu", "note", f"{why}; training runs on the CPU")]
    driver = nvml.driver(library)
    library.nvmlShutdown()
    if not torch.cuda.is_available():
        return [
            Finding(
                "gpu", "warning", f"driver {driver}, and torch cannot use it", "install a torch built for this driver"
            )
        ]
    found = []
    for k in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(k)
        capability = (device.major, device.minor)
        said = f"{device.name}, {format_bytes(device.total_memory)}, driver {driver}"
        if capability < (8, 0):
            found.append(Finding(f"cuda:{k}", "note", f"{said}; no bf16 tensor cores"))
        else:
            found.append(Finding(f"cuda:{k}", "ok", said))
    from lamella.kernels.triton import missing

    if (why_not := missing()) is not None:
        found.append(Finding("triton", "warning", f"GPU kernels are plain torch: {why_not}", "pip install triton"))
    return found


def memory(facts: HostFacts) -> list[Finding]:
    """RAM, and what limits it."""
    said = f"{format_bytes(facts.free_bytes)} free of {format_bytes(facts.ram_bytes)}"
    if facts.limit_bytes < facts.ram_bytes:
        said += f"; a control group allows {format_bytes(facts.limit_bytes)}"
    if facts.free_bytes < LEAST_MEMORY:
        return [
            Finding("memory", "warning", said, "end other programs, or set memory.budget: layers are then streamed")
        ]
    return [Finding("memory", "ok", said)]


def cores(facts: HostFacts) -> list[Finding]:
    """Cores, quotas and who else uses them."""
    said = f"{facts.cores} of {facts.cores_of_machine}, {facts.cpu}"
    if facts.cpu_quota is not None and facts.cpu_quota < facts.cores:
        return [Finding("cores", "warning", f"{said}; a control group grants the time of {facts.cpu_quota:g}",
                        f"set compute.threads = {max(1, int(facts.cpu_quota))}")]  # fmt: skip
    if facts.busy:
        return [Finding("cores", "note", f"{said}; {facts.load:.1f} processes ran on average in the last minute")]
    return [Finding("cores", "ok", said)]


def disk(folder: Path) -> list[Finding]:
    """Room and kind of the disk that is to hold stores."""
    free = free_bytes(folder)
    kind = disk_kind(folder)
    said = f"{format_bytes(free)} free on {kind} at {folder.resolve()}"
    if kind in ("nfs", "nfs4", "cifs", "fuse", "hdd"):
        return [
            Finding(
                "disk", "warning", f"{said}: layers that are streamed come at its pace", "put stores on a local SSD"
            )
        ]
    if free < LEAST_DISK:
        return [Finding("disk", "warning", said, "an 8B model's checkpoint and store take about 21 GB")]
    return [Finding("disk", "ok", said)]


def limits() -> list[Finding]:
    """Open files, locked memory, size of files."""
    found = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        found.append(Finding("open files", "warning", f"at most {soft}", f"ulimit -n {min(LEAST_FILES, hard)}"))
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        found.append(Finding("file size", "warning", f"files are cut at {format_bytes(size)}", "ulimit -f unlimited"))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        found.append(Finding("address space", "warning", f"limited to {format_bytes(space)}: mapped stores count in it",
                             "ulimit -v unlimited"))  # fmt: skip
    return found or [
        Finding("limits", "ok", f"{'any number of' if soft == resource.RLIM_INFINITY else soft} open files")
    ]


def writable() -> list[Finding]:
    """Folders for scratch files and for built kernels."""
    found = []
    for name, folder in (("temporary files", Path(tempfile.gettempdir())), ("cache", build.cache_dir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
        except OSError as error:
            fix = "set TMPDIR" if name.startswith("temp") else "set XDG_CACHE_HOME"
            found.append(Finding(name, "warning", f"{folder} cannot be written: {error.strerror}", fix))
    return found or [Finding("folders", "ok", "temporary files and cache can be written")]


def optional() -> list[Finding]:
    """Packages that only some work needs."""
    there = [name for name in OPTIONAL if find_spec(name) is not None]
    missing = [f"{name} ({use})" for name, use in OPTIONAL.items() if name not in there]
    found = [Finding("optional", "ok", f"there: {', '.join(there)}")] if there else []
    if missing:
        found.append(Finding("optional", "note", f"not there: {', '.join(missing)}"))
    return found

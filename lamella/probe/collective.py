"""How fast local ranks sum and pass on tensors, measured in processes of their own: `torchrun` with this module.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m lamella.probe.collective OUT cpu [BYTES ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lamella.hardware.machine import Collective

SIZES = (4 << 10, 1 << 20, 32 << 20)
_REPEATS = 8


def measure_collectives(
    devices: Sequence[int], kind: str, sizes: Sequence[int], folder: Path, limit_s: float
) -> tuple[list[Collective], str]:
    """An all-reduce over one rank a device, and a transfer from the first to the second, of each size.

    Args:
        devices: as numbered in the machine; ranks on one CPU all have its number.
        kind: "cuda" (NCCL; rank r on cuda:r) or "cpu" (gloo).
        folder: for the result's file.

    Returns:
        What was measured, and why nothing was ("").
    """
    out = folder / "collectives.json"
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if kind == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // len(devices)))
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(devices)),
               "-m", "lamella.probe.collective", str(out), kind, *map(str, sizes)]  # fmt: skip
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return [], f"collectives: no end within {limit_s:g} s"
    if done.returncode != 0:
        return [], f"collectives: a rank ended with exit code {done.returncode}: {_last_line(done.stderr)}"
    return parse(out.read_text(), devices), ""


def parse(text: str, devices: Sequence[int]) -> list[Collective]:
    """Rank 0's findings, with the machine's numbers of devices."""
    found = []
    for line in json.loads(text):
        ends = devices if line["op"] == "all_reduce" else devices[:2]
        found.append(Collective(devices=tuple(ends), nbytes=line["nbytes"], seconds=line["seconds"],
                                backend=line["backend"], op=line["op"]))  # fmt: skip
    return found


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line]
    return lines[-1] if lines else "no message"


def run_rank(out: Path, kind: str, sizes: Sequence[int]) -> None:
    """One rank: joins, measures, and the first writes what it found."""
    import torch
    import torch.distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", local)
    if kind != "cpu":
        torch.cuda.set_device(device)
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(backend)
    found = []
    for nbytes in sizes:
        tensor = torch.ones(nbytes // 4, device=device)

        def reduce(tensor: torch.Tensor = tensor) -> None:
            tensor.fill_(1.0)
            dist.all_reduce(tensor)

        def there_and_back(tensor: torch.Tensor = tensor) -> None:
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            elif rank == 1:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)

        for op, work, ways in (("all_reduce", reduce, 1), ("send", there_and_back, 2)):
            seconds = _best_s(work, device.type == "cuda") / ways
            found.append({"op": op, "nbytes": nbytes, "seconds": seconds, "backend": backend})
        if tensor[0].item() != dist.get_world_size():
            raise SystemExit(f"the sum of ones over {dist.get_world_size()} ranks is {tensor[0].item():g}")
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def _best_s(work: Callable[[], None], on_device: bool) -> float:
    """Seconds of the fastest run; the ranks begin each together."""
    import torch
    import torch.distributed as dist

    best = float("inf")
    for turn in range(_REPEATS + 1):
        dist.barrier()
        start_s = time.perf_counter()
        work()
        if on_device:
            torch.cuda.synchronize()
        if turn > 0:
            best = min(best, time.perf_counter() - start_s)
    return best


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]])

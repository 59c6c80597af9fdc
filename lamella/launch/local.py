"""Starts the ranks of a run on this host, through the agent that is behind `torchrun`, and speaks for them.

Rank 0 has the terminal; what the others print goes to files that are read when one of them dies without a report. All
ranks end together.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from lamella.config import RunConfig
from lamella.launch.supervise import Mode, supervise
from lamella.launch.verdict import End
from lamella.ranks.report import LAUNCHED

_LOG_LINES = 40
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def local_ranks(config: RunConfig) -> int:
    """How many ranks to start here: one per entry of `[[devices]]`, or (device "cuda") per visible GPU; 1: none."""
    if config.devices:
        return len(config.devices)
    if config.compute.device != "cuda":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def start_ranks(config: RunConfig, count: int, arguments: Sequence[str], mode: Mode = "auto") -> None:
    """Run `lamella train <arguments>` as `count` ranks until it is done. Raises as `supervise` does.

    Args:
        arguments: run file and overrides.
    """
    supervise(config, mode, lambda mode: _run_once(count, [*arguments, *([] if mode == "auto" else [f"--{mode}"])]))


def _run_once(count: int, arguments: Sequence[str]) -> tuple[list[End], bool]:
    """Start all ranks and wait for them. Returns the ends that were not good, and whether the user asked to stop."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet()
    with tempfile.TemporaryDirectory(prefix="lamella-ranks-") as folder, _environment(), _forwarding() as asked:
        agent = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, max_restarts=0,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            logs_specs=DefaultLogsSpecs(folder, {rank: Std.ALL if rank else Std.NONE for rank in range(count)}),
            signals_to_handle="SIGQUIT",  # the others are ours, see _forwarding
        )  # fmt: skip
        command = ["-m", "lamella", "train", *arguments]
        try:
            elastic_launch(agent, sys.executable)(*command)
        except ChildFailedError as error:
            return [_end(failure, Path(folder)) for failure in error.failures.values()], bool(asked)
    return [], bool(asked)


def _end(failure, folder: Path) -> End:  # type: ignore[no-untyped-def]
    """A `ProcessFailure` of the agent, with the rank's report or else what it wrote last."""
    report = failure.error_file_data.get("lamella")
    if report is None:
        logs = sorted(folder.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"))
        lines = logs[-1].read_text(encoding="utf-8", errors="replace").splitlines() if logs else []
        return End(failure.local_rank, failure.exitcode, log="\n".join(lines[-_LOG_LINES:]))
    return End(failure.local_rank, failure.exitcode, failure.message, report["exit_code"], report["lost"],
               report["time_s"])  # fmt: skip


def _quiet() -> None:
    """The agent's own log says again what `decide` says; LOGLEVEL, by which torchrun is asked for more, brings it back."""
    if "LOGLEVEL" not in os.environ:
        logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)


@contextmanager
def _environment() -> Iterator[None]:
    """What all ranks inherit. Ranks on one host talk over its loopback device, whatever its name resolves to."""
    more = {LAUNCHED: "1"}
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        more["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            del os.environ[name]


@contextmanager
def _forwarding() -> Iterator[list[int]]:
    """Each signal to stop goes on to the ranks as SIGINT (they are in sessions of their own). Yields those received.

    The first asks for the end after the step under way, the second for the end at once. The agent's own handlers would
    kill the ranks after 30 s.
    """
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        ranks = psutil.Process().children()
        if not ranks:
            raise KeyboardInterrupt
        for rank in ranks:
            rank.send_signal(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGQUIT)}
    for number in _SIGNALS:
        if before[number] is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, forward)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

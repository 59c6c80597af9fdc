"""Ray as launcher (`pip install lamella[ray]`): Ray Train places one worker per rank, each runs `train_run`.

Ray places processes and says who is rank 0; the ranks then form their own group as under `torchrun`. Starting again
after a loss is `supervise`'s matter, as for local ranks, so bad input ends at once here too. Store, data and runs_dir
must be on storage that all nodes share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lamella.config import RunConfig, anchor, build_run_config
from lamella.errors import RankLost, UserError
from lamella.hardware.allocator import TUNABLES
from lamella.launch.supervise import Mode, supervise
from lamella.launch.verdict import End
from lamella.ranks.place import check_count

_PASSED_ON = ("LAMELLA_", "NCCL_", "GLOO_", "GLIBC_TUNABLES")


def train_with_ray(
    config: RunConfig,
    mode: Mode = "auto",
    *,
    workers: int | None = None,
    resources: dict[str, float] | None = None,
) -> None:
    """Train on a Ray cluster: the one that `ray.init` joined, or else one on this machine.

    Args:
        workers: ranks; None: as many as `[[devices]]`.
        resources: what Ray reserves per rank; None: a GPU each if the run uses CUDA, and one CPU.

    Raises:
        UserError: bad input, Ray is not installed.
        RunFailed: the run failed, or ranks were lost more often than `launch.restarts`.
    """
    try:
        import ray
        from ray.train import FailureConfig, ScalingConfig, TrainingFailedError
        from ray.train import RunConfig as RayRunConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise UserError(f"Ray is not there: {error}", fix="pip install 'lamella[ray]'") from error

    count = len(config.devices) if workers is None else workers
    if count < 1:
        raise UserError("no [[devices]] and no number of workers", fix="give one of them")
    check_count(config, count)
    uses_gpu = any(device.startswith("cuda") for device in [config.compute.device, *(d.device for d in config.devices)])
    tree = config.model_dump(mode="json")
    anchor(tree, Path.cwd())  # workers have other working folders
    env = {"GLIBC_TUNABLES": TUNABLES} | {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
    if not ray.is_initialized():
        ray.init()

    def attempt(mode: Mode) -> tuple[list[End], bool]:
        reports = ray.remote(num_cpus=0)(_Reports).remote()
        trainer = TorchTrainer(
            _work,
            train_loop_config={"config": tree, "mode": mode, "reports": reports},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=count, use_gpu=uses_gpu, resources_per_worker=resources),
            run_config=RayRunConfig(
                name=f"lamella-{config.name}",
                storage_path=str(Path.cwd() / config.runs_dir / ".ray"),
                failure_config=FailureConfig(max_failures=0),
                worker_runtime_env={"env_vars": env},
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            told: dict[int, End] = ray.get(reports.all.remote())
            failures: dict[int, Exception] = getattr(error, "worker_failures", {})
            silent = [End(rank, 1, log=str(failure)) for rank, failure in failures.items() if rank not in told]
            ends = [*told.values(), *silent]
            if not ends:  # Ray's own failure, such as resources that it does not have
                raise
            return ends, False
        return [], False

    supervise(config, mode, attempt)


class _Reports:
    """An actor that keeps why ranks ended."""

    def __init__(self) -> None:
        self._ends: dict[int, End] = {}

    def add(self, end: End) -> None:
        self._ends[end.rank] = end

    def all(self) -> dict[int, End]:
        return self._ends


def _work(settings: dict[str, Any]) -> None:
    """What each worker runs; Ray has set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
    import ray

    from lamella.train.loop import train_run

    _part_from_rays_group()
    try:
        train_run(build_run_config(settings["config"]), settings["mode"])
    except UserError as error:
        end = End(int(os.environ["RANK"]), error.exit_code, error.render(), error.exit_code, isinstance(error, RankLost),
                  time.time())  # fmt: skip
        ray.get(settings["reports"].add.remote(end))
        raise


def _part_from_rays_group() -> None:
    """Close the process group that Ray has opened, and agree on a free port for our own."""
    import socket

    import torch.distributed as dist

    if not dist.is_initialized():  # one worker alone
        return
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])

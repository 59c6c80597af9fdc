"""The trackers, each through its own library, imported when it is used."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from lamella.console import notice
from lamella.track.tracking import Status, TrackedRun, Tracker


class TensorBoard:
    """Event files in `<run>/tensorboard`."""

    def start(self, run: TrackedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), flush_secs=10)
        if run.known_as is None:
            rows = "".join(f"| {name} | {value} |\n" for name, value in run.settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")
        return str(folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: Status) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


class MLflow:
    """A run in `track.mlflow_uri`, by default a SQLite file beside the runs."""

    _STATUS = {"ok": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}  # noqa: RUF012

    def start(self, run: TrackedRun) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(run.uri or f"sqlite:///{(run.shared / 'mlflow.db').resolve()}")
        if run.known_as is not None:
            self._client.update_run(run.known_as, status="RUNNING")
            self._id = run.known_as
            return self._id
        found = self._client.get_experiment_by_name(run.project)
        if found is None:
            place = None if run.uri else (run.shared / "mlflow").resolve().as_uri()
            experiment = self._client.create_experiment(run.project, artifact_location=place)
        else:
            experiment = found.experiment_id
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        settings = [Param(name, str(value)[:500]) for name, value in run.settings.items()]
        for first in range(0, len(settings), 100):
            self._client.log_batch(self._id, params=settings[first : first + 100])
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[Metric(n.replace("%", ""), v, now_ms, step) for n, v in values.items()]
        )

    def finish(self, status: Status) -> None:
        self._client.set_tag(self._id, "lamella.status", status)
        self._client.set_terminated(self._id, self._STATUS[status])


class Trackio:
    """A local trackio project in `<runs>/trackio`, unless TRACKIO_DIR says where; `trackio show` opens it."""

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("TRACKIO_DIR", str((run.shared / "trackio").resolve()))
        import trackio

        name = run.known_as or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        settings = {
            key: value if isinstance(value, int | float | bool) else str(value) for key, value in run.settings.items()
        }
        self._run = trackio.init(project=run.project, name=name, config=settings, resume="allow", embed=False)
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()


class Wandb:
    """Weights & Biases; without WANDB_API_KEY (or a login) and WANDB_MODE, offline in `<run>/wandb`."""

    def start(self, run: TrackedRun) -> str:
        import wandb

        mode: Any = None
        if not os.environ.get("WANDB_API_KEY") and not os.environ.get("WANDB_MODE"):
            mode = "offline"
            if run.known_as is None:
                notice("wandb: no WANDB_API_KEY, so the run is kept in its folder; `wandb sync` sends it later")
        self._run = wandb.init(
            project=run.project, name=run.name, id=run.known_as, resume="allow", mode=mode, dir=str(run.folder),
            config=dict(run.settings), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: Status) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "ok" else 1)


def open_tracker(name: str) -> Tracker:
    """The tracker of this name of `log`."""
    kinds: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "trackio": Trackio, "wandb": Wandb}
    return kinds[name]()

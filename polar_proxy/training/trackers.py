"""Experiment trackers: `report_to = ["tensorboard", "wandb", "mlflow", "trackio"]` in `[grpo]`.

Each tracker gets the numbers of every line of metrics.jsonl: each number has the name `KIND/NAME`, and the step of its
line. Each tracker needs its own package: pip install 'polar-proxy[NAME]'. When a killed run is resumed, the tracker
continues the same record, because the run's id is kept in the run's folder. The resumed run repeats the steps after the
last checkpoint. Depending on the tracker, the numbers of repeated steps replace the old numbers or follow them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from polar_proxy.errors import UsageError
from polar_proxy.types import Json


class MetricsTracker(Protocol):
    """Receives the lines of a run as they are written."""

    def log(self, kind: str, step: int, values: Json) -> None:
        """Record one line of the run's log. `step`: the number of steps done."""
        ...

    def close(self) -> None: ...


def open_trackers(names: Sequence[str], run: Path, config: Json, last_step: int) -> list[MetricsTracker]:
    """Open the trackers of a run. `last_step`: the last step of a resumed run, 0 for a new one.

    Raises UsageError if the package of a tracker is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"report_to = {name!r} needs a package: pip install 'polar-proxy[{name}]'.")
    return [TRACKERS[name](run, config, last_step) for name in names]


def numbers_of(kind: str, values: Json) -> dict[str, float]:
    """Return the numeric values of a log line, each under the name that trackers show: `kind/name`."""
    return {
        f"{kind}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoardTracker:
    """Writes event files into RUN/tensorboard. Steps after the last checkpoint disappear when a run is resumed."""

    def __init__(self, run: Path, config: Json, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=last_step + 1)  # type: ignore[no-untyped-call, unused-ignore]

    def log(self, kind: str, step: int, values: Json) -> None:
        for name, value in numbers_of(kind, values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Logs to Weights & Biases. WANDB_MODE=offline writes to RUN/wandb only."""

    def __init__(self, run: Path, config: Json, last_step: int) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="polar",
            id=_tracker_id(run),
            name=run.name,
            dir=str(run),
            config=config,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
        )
        self._run.define_metric("*", step_metric="step")  # wandb's own step must not decrease, and a resumed run's may

    def log(self, kind: str, step: int, values: Json) -> None:
        self._run.log({"step": step, **numbers_of(kind, values)})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """Logs to MLflow: to MLFLOW_TRACKING_URI, or to a database in RUN/mlflow.db."""

    def __init__(self, run: Path, config: Json, last_step: int) -> None:
        import mlflow

        uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{run / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name("polar")
        artifacts = (run / "mlflow").as_uri()
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("polar", artifacts)
        found = self._client.search_runs([experiment_id], f"tags.polar_run = '{_tracker_id(run)}'")
        if found:
            self._run_id = found[0].info.run_id
        else:
            created = self._client.create_run(experiment_id, run_name=run.name, tags={"polar_run": _tracker_id(run)})
            self._run_id = created.info.run_id
            for key, value in config.items():
                self._client.log_param(self._run_id, key, value)

    def log(self, kind: str, step: int, values: Json) -> None:
        for name, value in numbers_of(kind, values).items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackioTracker:
    """Logs to Trackio's database on this machine (TRACKIO_DIR)."""

    def __init__(self, run: Path, config: Json, last_step: int) -> None:
        import trackio

        self._run: Any = trackio.init(
            project="polar", name=f"{run.name}-{_tracker_id(run)[-6:]}", config=config, resume="allow", embed=False
        )

    def log(self, kind: str, step: int, values: Json) -> None:
        self._run.log(numbers_of(kind, values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Json, int], MetricsTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def _tracker_id(run: Path) -> str:
    """Return the run's id, which `training.run` keeps in the run's folder. Without an id, return the folder's name."""
    file = run / "run_id"
    return file.read_text() if file.exists() else run.name

"""Each tracker's own library, offline, has the metrics of a run."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.training import trackers
from polar_proxy.training.metrics import MetricsLog

pytestmark = pytest.mark.slow


def write_run(run: Path, name: str, steps: tuple[int, ...] = (1, 2)) -> None:
    with MetricsLog(run, report_to=[name], config={"loss": "dapo"}) as log:
        for step in steps:
            log.write("step", step, {"reward": step / 4, "groups": ["g"], "updated": True, "loss": None})


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format (doc/log_format.md of LevelDB), whose first block has 7 bytes
    less."""
    at, parts = 0, b""
    while at + 7 <= len(log):
        room = 32768 - (at + 7) % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", log[at + 4 : at + 7])
        parts += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_wandb_has_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'polar-proxy[wandb]'")
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    write_run(tmp_path / "first", "wandb")
    wandb.teardown()  # its service writes the file after the run's `finish` has returned; this waits for its end
    (file,) = (tmp_path / "first" / "wandb").glob("offline-run-*/*.wandb")
    rewards = []
    for data in leveldb_records(file.read_bytes()[7:]):  # after W&B's own header
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        rewards += [float(values[name]) for name in values if name == "step/reward"]
    assert rewards == [0.25, 0.5]


def test_mlflow_has_the_metrics_and_a_resumed_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install 'polar-proxy[mlflow]'")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    write_run(tmp_path / "first", "mlflow")
    write_run(tmp_path / "first", "mlflow", (3,))
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("polar")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"loss": "dapo"}
    history = client.get_metric_history(run.info.run_id, "step/reward")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_trackio_has_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="pip install 'polar-proxy[trackio]'")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path, raising=False)
    write_run(tmp_path / "first", "trackio")
    (file,) = tmp_path.glob("polar*.db")
    with sqlite3.connect(file) as connection:
        rows = connection.execute("SELECT step, json_extract(metrics, '$.step/reward') FROM metrics").fetchall()
    assert [step for step, _ in rows] == [1, 2]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'polar-proxy\[wandb\]'"):
        write_run(tmp_path, "wandb")


def test_only_numbers_are_sent() -> None:
    values = {"reward": 1, "updated": True, "groups": ["g"], "loss": None, "kl": 0.5}
    assert trackers.numbers_of("step", values) == {"step/reward": 1.0, "step/kl": 0.5}

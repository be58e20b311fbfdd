"""Rows of a `tokens-jsonl` export, as read from its lines."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from polar_proxy.export.datasets import DATASET_FORMATS, SessionExport
from polar_proxy.traces.builders import BuildResult, build
from polar_proxy.traces.certificate import certify
from polar_proxy.types import CallRecord, Json


def rows_of(calls: Sequence[CallRecord], builder: str = "merged", on_drift: str = "split") -> list[Json]:
    return rows(calls, build(calls, builder, on_drift=on_drift))


def rows(calls: Sequence[CallRecord], built: BuildResult) -> list[Json]:
    selection = SessionExport({"session_id": "sess_1"}, calls, built.traces, built.excluded, certify(calls, built))
    return [orjson.loads(orjson.dumps(row)) for row in DATASET_FORMATS["tokens-jsonl"](selection)]


def lines(made: Sequence[Json]) -> list[bytes]:
    return [orjson.dumps(row) + b"\n" for row in made]

"""`polar_proxy.read` gives Arrow, pandas and Polars what the database has."""

from __future__ import annotations

import asyncio
import builtins
import importlib
from typing import Any

import orjson
import pytest

import polar_proxy
from polar_proxy.errors import UsageError
from tests.reading.conftest import Recorded

pandas = pytest.importorskip("pandas", reason="pip install 'polar-proxy[pandas]'")
pyarrow = pytest.importorskip("pyarrow", reason="pip install 'polar-proxy[arrow]'")


def test_rollouts_are_selected_by_conditions(recorded: Recorded) -> None:
    db = polar_proxy.read(recorded.url)
    frame = db.rollouts(where="reward>=1").to_pandas()
    assert frame["rollout_id"].tolist() == [recorded.best]
    assert (frame["masked"].dtype, frame["calls"].tolist()) == (bool, [4])
    assert str(frame["created"].dtype).startswith("datetime64")
    assert len(db.rollouts()) == 2
    assert len(db.rollouts(where="reward>=2")) == 0
    assert list(db.rollouts(where="reward>=2").to_pandas().columns) == list(frame.columns)


def test_sessions_calls_and_traces_belong_to_the_selected_rollouts(recorded: Recorded) -> None:
    db = polar_proxy.read(recorded.url)
    assert len(db.sessions()) == 3
    assert db.sessions(where="reward>=1").columns["rollout_id"] == [recorded.best]
    calls = db.calls(where="reward>=1", messages=True, tokens=True)
    assert calls.columns["call_id"] == [call.call_id for call in recorded.calls]
    for row, call in zip(calls, recorded.calls, strict=True):
        assert row["token_ids"] == call.choices[0].token_ids.tolist()
        assert row["logprobs"] == call.choices[0].logprobs.tolist()
        assert row["prompt_ids"] == (None if call.prompt_ids is None else call.prompt_ids.tolist())
        assert orjson.loads(row["answers"])[0]["content"] == call.choices[0].message.content
        assert len(orjson.loads(row["message_list"])) == len(call.messages)
    for row in db.traces(where="reward>=1", tokens=True):
        assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"]) == row["length"]
        assert sum(row["loss_mask"]) == row["trained_tokens"]


def test_other_libraries_take_a_frame_by_arrows_interface(recorded: Recorded) -> None:
    frame = polar_proxy.read(recorded.url).calls(tokens=True)
    table = pyarrow.table(frame)
    assert table.num_rows == len(frame) == 12
    polars = pytest.importorskip("polars", reason="pip install polars")
    taken = polars.DataFrame(frame)
    assert taken["call_id"].to_list() == frame.columns["call_id"]
    assert taken["token_ids"].to_list() == frame.columns["token_ids"]


async def test_reading_works_while_an_event_loop_runs(recorded: Recorded) -> None:
    """As in a notebook."""
    await asyncio.sleep(0)
    assert len(polar_proxy.read(recorded.url).rollouts()) == 2


def test_a_missing_package_is_named(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *rest: Any) -> Any:
        raise ModuleNotFoundError(name=name)

    frame = polar_proxy.read(recorded.url).rollouts()
    monkeypatch.setattr(importlib, "import_module", missing)
    assert builtins.len(list(frame)) == 2
    with pytest.raises(UsageError, match=r"pip install 'polar-proxy\[pandas\]'"):
        frame.to_pandas()

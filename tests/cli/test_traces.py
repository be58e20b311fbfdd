"""`polar build`, as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from polar_proxy.store import open_store
from polar_proxy.types import new_id
from tests.cli.process import error_text, polar, polar_json
from tests.traces.test_canonical import DRIFTED, FIRST


@pytest.fixture
async def session_id(polar_home: Path) -> str:
    """A session of two turns, the second drifted."""
    async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
        row = await store.sessions.create(key_hash=None, label=None, origin="open")
        names = {"a": new_id("call"), "b": new_id("call"), None: None}
        for call in (FIRST, DRIFTED):
            fields = {name: getattr(call, name) for name in call.__slots__}
            own = {"call_id": names[call.call_id], "base_call_id": names[call.base_call_id]}
            await store.calls.commit(type(call)(**{**fields, **own, "session_id": row.session_id}))
    return row.session_id


async def test_another_builder_at_any_time(session_id: str, tmp_path: Path) -> None:
    split = polar_json("build", session_id, cwd=tmp_path)
    assert (split["builder"], split["on_drift"], split["skipped"]) == ("merged", "split", {})
    (told,) = split["sessions"]
    assert told["session_id"] == session_id
    assert told["calls"] == {"recorded": 2, "trained": 2, "excluded": {}}
    assert (told["traces"], told["grades"], told["drift"]) == (2, {"exact": 2}, {"split": 1})

    (tree,) = polar_json("build", session_id, "--builder", "tree", cwd=tmp_path)["sessions"]
    assert tree["trained_tokens"] == told["trained_tokens"]
    assert tree["tokens"] < told["tokens"]

    (joined,) = polar_json("build", "--on-drift", "canonical", cwd=tmp_path)["sessions"]
    assert (joined["traces"], joined["grades"], joined["drift"]) == (1, {"approximate": 1}, {"canonical": 1})
    printed = polar("build", session_id, "--on-drift", "canonical", cwd=tmp_path)
    assert "1 canonical" in printed.stdout

    file = tmp_path / "train.jsonl"
    counts = polar_json("export", "--format", "tokens-jsonl", "--all-grades", "--out", str(file), cwd=tmp_path)
    assert counts["rows"] == 1
    assert orjson.loads(file.read_bytes())["certificate"]["on_drift"] == "canonical"
    check = [sys.executable, "-m", "polar_proxy.traces.check", str(file), "--json"]
    done = subprocess.run(check, capture_output=True, timeout=120)
    assert (done.returncode, orjson.loads(done.stdout)) == (0, {"rows": 1, "bad": []})


def test_what_cannot_be_is_told(session_id: str, tmp_path: Path) -> None:
    assert "--engine" in error_text(polar("build", session_id, "--on-drift", "rescore", cwd=tmp_path))
    assert "canonical" in error_text(polar("build", session_id, "--on-drift", "ignore", cwd=tmp_path))
    assert "merged" in error_text(
        polar("build", session_id, "--builder", "tree", "--on-drift", "canonical", cwd=tmp_path)
    )
    assert "sess_0" in error_text(polar("build", "sess_0", cwd=tmp_path))
    assert "either" in error_text(polar("build", session_id, "--where", "reward>0", cwd=tmp_path))

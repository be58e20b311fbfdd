"""The checker accepts correct rows and detects every mutation of `mutations.py`, wherever it is made."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from polar_proxy.traces.builders import ON_DRIFT, build
from polar_proxy.traces.certificate import hash_json, hash_spans
from polar_proxy.traces.check import check_lines, check_row, main
from polar_proxy.traces.scoring import rescore
from polar_proxy.types import CallRecord, Json
from tests.factories import call
from tests.traces.conversations import conversations
from tests.traces.mutations import MUTATIONS
from tests.traces.random_sessions import sessions
from tests.traces.rows import lines, rows, rows_of
from tests.traces.test_canonical import DRIFTED, FIRST, PositionScorer

pytestmark = pytest.mark.slow

BUILDS = [("per_call", "split"), ("tree", "split"), *(("merged", policy) for policy in ON_DRIFT)]


@pytest.mark.parametrize(("builder", "on_drift"), BUILDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=conversations())
def test_accepts_rows_of_conversations(builder: str, on_drift: str, calls: list[CallRecord]) -> None:
    made = rows_of(calls, builder, on_drift)
    checked = check_lines(lines(made))
    assert checked.bad == []
    assert checked.rows == len(made)


@pytest.mark.parametrize("builder", ["per_call", "tree", "merged"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(session=sessions())
def test_accepts_rows_of_random_sessions(builder: str, session: tuple[list[CallRecord], dict[str, str]]) -> None:
    assert check_lines(lines(rows_of(session[0], builder))).bad == []


async def test_accepts_rescored_rows() -> None:
    built = await rescore(build([FIRST, DRIFTED], on_drift="rescore"), PositionScorer())
    (row,) = rows([FIRST, DRIFTED], built)
    assert check_row(row).problems == []
    assert row["grade"] == "approximate"


@pytest.mark.parametrize("mutation", MUTATIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=conversations(), build=st.sampled_from(BUILDS), seed=st.integers(0, 1 << 30))
def test_detects_every_mutation(mutation: str, calls: list[CallRecord], build: tuple[str, str], seed: int) -> None:
    made = rows_of(calls, *build)
    changed = copy.deepcopy(made)
    assume(made and MUTATIONS[mutation](changed, Random(seed)))
    assume(changed != made)
    assert check_lines(lines(changed)).bad


def _forged(row: Json, change: Callable[[Json], object]) -> Json:
    """Return the row with a changed certificate whose hashes were all computed again."""
    row = copy.deepcopy(row)
    certificate = row["certificate"]
    change(certificate)
    outside_seed = ("grade", "audit", "spans", "seed", "head")
    seed = hash_json(b"", {name: value for name, value in certificate.items() if name not in outside_seed})
    certificate["seed"] = seed.hex()
    logprobs = [np.nan if value is None else value for value in [None] * len(row["prompt_ids"]) + row["logprobs"]]
    spans = [{name: value for name, value in span.items() if name != "hash"} for span in certificate["spans"]]
    hashes = hash_spans(
        seed, spans, np.array(row["prompt_ids"] + row["response_ids"], np.int32), np.array(logprobs, np.float32)
    )
    for span, link in zip(certificate["spans"], hashes, strict=True):
        span["hash"] = certificate["head"] = link.hex()
    return row


SECOND = call("b", 1, [1, 9, 7, 2, 3, 9, 4], [5, 6], weight_version="3")
(ROW,) = rows_of([FIRST, SECOND])
SCORER = {"engine": "vllm", "version": "1", "model": "m", "weight_version": None}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda fields: fields["spans"][3].update(prompt_mode="continue"), "continued is missing"),
        (
            lambda fields: fields.update(grade_reasons=["off_distribution"], grade="approximate"),
            "off_distribution is given without cause",
        ),
        (lambda fields: fields["spans"][3].update(changes={"top_k": 5}), "off_distribution is missing"),
        (lambda fields: fields["spans"][3].update(versions=[[0, "3..4"]]), "weights_changed is missing"),
        (lambda fields: fields["spans"][3].update(versions=[[1, "3"]]), "do not tile"),
        (lambda fields: fields["spans"][3].update(versions=[[0, "3"], [2, "4"]]), "do not tile"),
        (lambda fields: fields["spans"][3].update(versions=[[0, "3"], [0, "4"]]), "do not tile"),
        (lambda fields: fields["spans"][3].update(engine=5), "not described"),
        (lambda fields: fields["spans"][3].update(call_id="c"), "the context of b is not followed"),
        (lambda fields: fields["spans"][3].update(start=1, end=3), "not whole"),
        (lambda fields: fields["spans"][2].update(start=7, end=8), "begins at 7"),
        (lambda fields: fields.update(on_drift=None), "on_drift cannot be None"),
        (lambda fields: fields.update(branch_hash="0" * 32), "must be set together"),
        (lambda fields: fields.update(rescored=SCORER), "rescored is missing"),
    ],
)
def test_detects_contradictions_with_correct_hashes(change: Callable[[Json], object], expected: str) -> None:
    row = _forged(ROW, change)
    row["grade"] = row["certificate"]["grade"]
    row["spans"] = [
        {name: certified.get(name, own.get(name)) for name in own}
        for own, certified in zip(row["spans"], row["certificate"]["spans"], strict=True)
    ]
    assert any(expected in problem for problem in check_row(row).problems), check_row(row).problems


def test_audit_may_lower_the_grade_but_not_raise_it() -> None:
    assert check_row(_audited(ROW, "rejected")).problems == []
    (approximate,) = rows_of([FIRST, DRIFTED], on_drift="canonical")
    assert check_row(_audited(approximate, "rejected")).problems == []
    assert any("grade" in problem for problem in check_row(_audited(approximate, "exact")).problems)


def _audited(row: Json, grade: str) -> Json:
    row = {**copy.deepcopy(row), "grade": grade}
    row["certificate"].update(grade=grade, audit={"max_abs_diff": 3.0})
    return row


def test_reward_and_task_are_not_covered() -> None:
    """docs/guide/data.md says so: the certificate does not cover what the row says of its rollout."""
    assert check_row({**ROW, "reward": 1.0, "task_id": "another"}).problems == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "not JSON"),
        (b'{"logprobs": [NaN]}', "not JSON"),
        (b"[]", "not a row"),
        (b"{}", "no certificate"),
        (b'{"certificate": {"schema": 3}}', "update Polar"),
        (b'{"certificate": {"schema": 1}}', "export the row again"),
    ],
)
def test_rejects_lines_that_are_not_rows(line: bytes, expected: str) -> None:
    (bad,) = check_lines([b"\n", line]).bad
    assert bad.line == 2
    assert expected in bad.problems[0]


def test_detects_an_answer_in_two_rows() -> None:
    one, other = rows_of([FIRST], "tree"), rows_of([FIRST], "tree")
    (bad,) = check_lines(lines([*one, *other])).bad
    assert (bad.line, bad.trace_id) == (2, other[0]["trace_id"])
    assert "line 1 already" in bad.problems[0]
    assert check_lines(lines([*one, *rows_of([FIRST], "merged")])).bad == []


def test_detects_branches_after_other_tokens() -> None:
    made = rows_of([FIRST, DRIFTED, call("c", 2, [1, 9, 7, 2, 8], [6])], "tree")
    assert [row["branch_at"] for row in made] == [0, 3, 4]
    assert check_lines(lines(made[::-1])).bad == []
    other = rows_of([call("a", 0, [1, 9, 8], [2, 3, 9])], "tree")
    root = _forged(other[0], lambda fields: fields.update(trace_id=made[0]["trace_id"]))
    root["trace_id"] = made[0]["trace_id"]
    found = check_lines(lines([root, *made[1:]])).bad
    assert ["other tokens" in bad.problems[0] for bad in found] == [True, True]


def test_command_reports_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"".join(lines([ROW])))
    assert main([str(file)]) == 0
    assert capsys.readouterr() == ("", "1 rows, 0 bad\n")
    bad = copy.deepcopy(ROW)
    bad["response_ids"][0] += 1
    file.write_bytes(b"".join(lines([ROW, bad])))
    assert main([str(file)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{file}:2: {ROW['trace_id']}: the hash of span 1 (sampled, a) does not match")
    assert (out.count("\n"), err) == (1, "2 rows, 1 bad\n")
    assert main([str(file), "--json"]) == 1
    report = orjson.loads(capsys.readouterr().out)
    assert (report["rows"], [entry["line"] for entry in report["bad"]]) == (2, [2])
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_command_imports_no_database_or_engine(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"".join(lines([ROW])))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "polar_proxy.traces.check", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "1 rows, 0 bad\n")
    code = "import polar_proxy.traces.check, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout.split()
    assert not {"torch", "transformers", "sqlalchemy", "fastapi", "aiohttp"} & set(loaded)

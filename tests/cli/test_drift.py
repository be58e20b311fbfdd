"""`polar doctor` and `polar doctor drift` with the scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.process import error_text, polar, polar_json

pytestmark = pytest.mark.usefixtures("polar_home")

SCRIPTED = ("--engine", "scripted", "--sandbox", "process")
RESERIALISING = ("doctor", "drift", "--harness", "tests.conformance.small_agent:ReserialisingAgent", *SCRIPTED)
SMALL = ("doctor", "drift", "--harness", "tests.conformance.small_agent:SmallAgent", *SCRIPTED)


def test_doctor_without_a_verb_prints_its_checks(tmp_path: Path) -> None:
    found = polar_json("doctor", cwd=tmp_path)
    assert {"python", "git", "database"} <= {check["name"] for check in found["checks"]}


def test_drift_reports_first_difference_cause_and_fix(tmp_path: Path) -> None:
    found = polar_json(*RESERIALISING, cwd=tmp_path)
    assert (found["verdict"], found["calls"], found["bases"]) == ("drift", 8, 7)
    assert found["drifted"] == sum(found["causes"].values()) > 2
    assert set(found["causes"]) == {"arguments_reserialised"}
    assert "continue" in found["fixes"]["arguments_reserialised"]
    first = found["first"]
    assert first["sampled"] != first["rendered"]
    assert first["in_answer"] > 0
    assert '"command":' in first["before"] + "".join(first["sampled"])


def test_drift_prints_a_readable_summary(tmp_path: Path) -> None:
    done = polar(*RESERIALISING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("left its tokens", "the first difference", "arguments_reserialised", "--prompt-mode continue"):
        assert words in done.stdout


def test_drift_reports_no_drift_and_stops_after_the_turns(tmp_path: Path) -> None:
    found = polar_json(*SMALL, "--turns", "3", cwd=tmp_path)
    assert (found["verdict"], found["calls"], found["bases"], found["first"]) == ("no_drift", 3, 2, None)
    assert found["outcomes"] == ["stopped"]


def test_drift_and_fidelity_reject_unusable_arguments(tmp_path: Path) -> None:
    drift = ("doctor", "drift", "--harness")
    assert "--engine-url" in error_text(polar(*drift, "pi", "--engine", "vllm", "--awkward", cwd=tmp_path))
    assert "no-such" in error_text(polar(*drift, "no-such", *SCRIPTED, cwd=tmp_path))
    assert "scripts/fidelity.sh" in error_text(polar("conformance", "--fidelity", "--engine", "local", cwd=tmp_path))

"""`polar doctor` and `polar doctor drift`, with the scripted engine."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.cli.runner import polar_error, polar_json, polar_ok

pytestmark = pytest.mark.slow

SCRIPTED = ("--engine", "scripted", "--sandbox", "process")
RESERIALISES_ARGUMENTS = ("doctor", "drift", "--harness", "tests.conformance.small_agent:ReserialisingAgent", *SCRIPTED)
KEEPS_ARGUMENTS = ("doctor", "drift", "--harness", "tests.conformance.small_agent:SmallAgent", *SCRIPTED)


def test_doctor_checks_the_installation() -> None:
    found = polar_json("doctor")
    assert {"python", "git", "database"} <= {check["name"] for check in found["checks"]}


def test_doctor_lists_missing_packages_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("aiodocker", "asyncpg"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    checks = {check["name"]: check for check in polar_json("doctor")["checks"]}
    assert checks["harnesses"]["state"] == "note"
    assert "codex" in checks["harnesses"]["detail"]
    assert [name for name in checks if name.startswith("harness ")] == ["harness shell"]  # it is part of Polar
    assert checks["packages"]["detail"] == "not installed: aiodocker (for the docker sandbox), asyncpg (for PostgreSQL)"
    assert checks["packages"]["fix"] == "pip install 'polar-proxy[docker,postgres]'"


def test_drift_reports_the_first_difference_and_its_cause() -> None:
    found = polar_json(*RESERIALISES_ARGUMENTS)
    assert (found["verdict"], found["calls"], found["bases"]) == ("drift", 8, 7)
    assert found["drifted"] == sum(found["causes"].values()) > 2
    assert set(found["causes"]) == {"arguments_reserialised"}
    assert "continue" in found["fixes"]["arguments_reserialised"]
    first = found["first"]
    assert first["sampled"] != first["rendered"]
    assert first["in_answer"] > 0
    assert '"command":' in first["before"] + "".join(first["sampled"])


def test_drift_explains_itself_to_people() -> None:
    printed = polar_ok(*RESERIALISES_ARGUMENTS, "--turns", "3")
    for words in (
        "without its exact tokens",
        "the first difference",
        "arguments_reserialised",
        "--prompt-mode continue",
    ):
        assert words in printed


def test_drift_reports_a_harness_without_drift() -> None:
    found = polar_json(*KEEPS_ARGUMENTS, "--turns", "3")
    assert (found["verdict"], found["calls"], found["bases"], found["first"]) == ("no_drift", 3, 2, None)
    assert found["outcomes"] == ["stopped"]


def test_reports_invalid_options() -> None:
    drift = ("doctor", "drift", "--harness")
    assert "--engine-url" in polar_error(*drift, "pi", "--engine", "vllm", "--awkward")
    assert "no-such" in polar_error(*drift, "no-such", *SCRIPTED)
    assert "scripts/fidelity.sh" in polar_error("conformance", "--fidelity", "--engine", "local")


def test_serve_names_what_a_folder_lacks(tmp_path: Path) -> None:
    assert "chat template and tokenizer.json of" in polar_error("doctor", "serve", str(tmp_path))

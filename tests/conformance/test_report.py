"""The report files, and the command `polar conformance`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from polar_proxy.conformance.checks import CHECKS, CheckResult
from polar_proxy.conformance.measure import HarnessRow
from polar_proxy.conformance.report import CONFORMANCE
from polar_proxy.engines.scripted import INFO
from tests.cli.runner import polar, polar_error, polar_json
from tests.rollouts.test_run import strays

pytestmark = pytest.mark.slow

POLAR = str(Path(sys.executable).with_name("polar"))
AGENT = ["--harness", "tests.conformance.small_agent:SmallAgent"]


def row(name: str, **changes: object) -> dict[str, object]:
    result = HarnessRow(name, "1.0", "openai_chat", "yes", calls=3, edges={"root": 1, "continues": 2})
    result.checks = {"lost": CheckResult("ok", "0 of 3"), "long_run": CheckResult("failed", "a | b\nc")}
    for key, value in changes.items():
        setattr(result, key, value)
    return CONFORMANCE.document([asdict(result)], engine=INFO, sandbox="process", slow_seconds=20)


def test_merging_keeps_rows_of_other_harnesses() -> None:
    found = CONFORMANCE.merged(CONFORMANCE.merged(None, row("b")), row("a"))
    assert [one["name"] for one in found["harnesses"]] == ["a", "b"]
    again = CONFORMANCE.merged(found, row("b", calls=9))
    assert [one["calls"] for one in again["harnesses"]] == [3, 9]


def test_page_is_made_from_the_document() -> None:
    page = CONFORMANCE.markdown(json.loads(json.dumps(row("codex", lost=2))))
    assert "| codex | 1.0 | openai_chat | yes | 3 | 2 | 0 |" in page
    assert "| 26 turns | failed | a \\| b c |" in page
    assert "| 429 | not run |" in page, "a check without a result was not run"
    assert "* **lost**" in page


@pytest.fixture
def own_folders(polar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_command_writes_both_files(own_folders: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two of the checks: `test_measure.py` runs all of them."""
    out = tmp_path / "docs"
    for name in CHECKS.keys() - {"lost", "exit_ok"}:
        monkeypatch.delitem(CHECKS, name)
    printed = polar_json("conformance", *AGENT, "--sandbox", "process", "--slow", "0.2", "--out-dir", str(out))
    assert printed == json.loads((out / "conformance.json").read_text())
    assert printed["harnesses"][0]["checks"].keys() == CHECKS.keys()
    assert printed["harnesses"][0]["lost"] == printed["harnesses"][0]["doubled"] == 0
    assert "small-agent" in (out / "conformance.md").read_text()


def test_exits_with_1_after_a_failed_check_and_does_not_write_partial_results(
    own_folders: None, tmp_path: Path
) -> None:
    out = tmp_path / "docs"
    agent = ["--harness", "tests.conformance.small_agent:ForgetfulAgent"]
    done = polar("conformance", *agent, "--sandbox", "process", "--check", "tool_round_trip", "--out-dir", str(out))
    assert done.exit_code == 1, done.stderr
    assert "failed" in done.stdout
    assert not out.exists()


def test_interrupted_command_leaves_no_process_and_no_file(own_folders: None, polar_home: Path) -> None:
    command = [POLAR, "conformance", *AGENT, "--sandbox", "process", "--check", "slow_first_byte", "--slow", "100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not [line for line in strays(polar_home) if "small_agent.py" in line] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [line for line in strays(polar_home) if "small_agent.py" in line]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert strays(polar_home) == []
    assert list(Path(os.environ["TMPDIR"]).glob("polar-conformance-*")) == []


@pytest.mark.parametrize("option", ["--check", "--harness", "--sandbox"])
def test_usage_errors_are_one_line_without_traceback(own_folders: None, option: str) -> None:
    assert "error:" in polar_error("conformance", option, "nothing")

"""The files, and the command line around them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polar_proxy.conformance import CheckResult, HarnessRow, document, markdown, merged
from tests.rollouts.test_run import strays

POLAR = str(Path(sys.executable).with_name("polar"))
AGENT = ["--harness", "tests.conformance.small_agent:SmallAgent"]


def row(name: str, **changes: object) -> dict[str, object]:
    made = HarnessRow(name, "1.0", "openai_chat", "yes", calls=3, edges={"root": 1, "continues": 2})
    made.checks = {"lost": CheckResult("ok", "0 of 3"), "long_run": CheckResult("failed", "a | b\nc")}
    for key, value in changes.items():
        setattr(made, key, value)
    return document([made], engine="scripted", sandbox="process", slow=20, measured="2026-01-01 00:00 UTC")


def test_rows_of_other_harnesses_stay() -> None:
    found = merged(merged(None, row("b")), row("a"))
    assert [one["name"] for one in found["harnesses"]] == ["a", "b"]
    again = merged(found, row("b", calls=9))
    assert [one["calls"] for one in again["harnesses"]] == [3, 9]


def test_the_page_is_made_of_the_file() -> None:
    page = markdown(json.loads(json.dumps(row("codex", lost=2))))
    assert "| codex | 1.0 | openai_chat | yes | 3 | 2 | 0 |" in page
    assert "| 26 turns | failed | a \\| b c |" in page
    assert "| 429 | not run |" in page, "a check without a cell was not run"
    assert "* **lost**" in page


@pytest.fixture
def own_places(polar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def test_the_command_writes_both_files(own_places: None, tmp_path: Path) -> None:
    out = tmp_path / "docs"
    command = [POLAR, "conformance", *AGENT, "--sandbox", "process", "--slow", "0.2", "--out-dir", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads((out / "conformance.json").read_text())
    assert printed["harnesses"][0]["lost"] == printed["harnesses"][0]["doubled"] == 0
    assert "small-agent" in (out / "conformance.md").read_text()


def test_a_failed_check_is_an_exit_code_and_a_part_is_not_written(own_places: None, tmp_path: Path) -> None:
    out = tmp_path / "docs"
    agent = ["--harness", "tests.conformance.small_agent:ForgetfulAgent"]
    command = [POLAR, "conformance", *agent, "--sandbox", "process", "--check", "tool_round_trip"]
    done = subprocess.run([*command, "--out-dir", str(out)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1, done.stderr
    assert "failed" in done.stdout
    assert not out.exists()


def test_stopped_in_the_middle_nothing_is_left(own_places: None, polar_home: Path) -> None:
    command = [POLAR, "conformance", *AGENT, "--sandbox", "process", "--check", "slow_first_byte", "--slow", "100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not [line for line in strays(polar_home) if "small_agent.py" in line] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [line for line in strays(polar_home) if "small_agent.py" in line]
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 130, words
    assert strays(polar_home) == []
    assert list(Path(os.environ["TMPDIR"]).glob("polar-conformance-*")) == []


def test_usage_errors_are_one_line(own_places: None) -> None:
    for arguments in (["--check", "nothing"], ["--harness", "nothing"], ["--sandbox", "nothing"]):
        done = subprocess.run(
            [POLAR, "conformance", *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2, (arguments, done.stderr)
        assert "error:" in done.stderr
        assert "Traceback" not in done.stderr

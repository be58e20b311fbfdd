"""The command with real agents that install and run in reasonable time.

The others (OpenHands, aider, terminus-2, Mistral Vibe, Cline) take one to three minutes each: `polar conformance
--harness NAME` measures them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

POLAR = str(Path(sys.executable).with_name("polar"))
ESSENTIAL = ("tool_round_trip", "parallel_calls", "long_run", "retry_429", "retry_500", "client_killed", "exit_failed")
COUNTED = ("evidence", "recorded_first", "lost", "doubled")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("harness", ["codex", "claude-code", "pi", "gemini-cli", "qwen-code", "mini-swe-agent"])
def test_real_agent_loses_and_doubles_no_call(harness: str, tmp_path: Path) -> None:
    env = {**os.environ, "POLAR_HOME": str(tmp_path / "home")}
    env["POLAR_HARNESSES"] = os.environ.get("POLAR_CACHE_DIR") or str(Path("~/.polar/harnesses").expanduser())
    command = [POLAR, "conformance", "--harness", harness, "--slow", "3", "--patience", "3", "--json"]
    done = subprocess.run(
        [*command, "--out-dir", str(tmp_path / "docs")],
        capture_output=True,
        text=True,
        env=env,
        timeout=880,
        check=False,
    )
    assert done.stdout, done.stderr
    (row,) = json.loads(done.stdout)["harnesses"]
    checks: dict[str, dict[str, Any]] = row["checks"]
    assert (row["lost"], row["doubled"]) == (0, 0), checks
    assert {name: checks[name] for name in (*ESSENTIAL, *COUNTED) if checks[name]["status"] != "ok"} == {}
    assert {name: cell for name, cell in checks.items() if cell["status"] == "failed"} == {}
    assert row["calls"] >= 26
    written = json.loads((tmp_path / "docs" / "conformance.json").read_text())
    assert written["harnesses"][0]["name"] == harness
    assert f"## {harness} " in (tmp_path / "docs" / "conformance.md").read_text()
    assert done.returncode == 0

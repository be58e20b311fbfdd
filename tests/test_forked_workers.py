"""`pytest --processes` reports what pytest in one process reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.process import ROOT

pytestmark = pytest.mark.slow

FILES = {
    "test_passes.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_fails.py": "def test_fails():\n    print('a printed line')\n    assert 1 == 2\ndef test_next(): pass\n",
    "test_errors.py": "import pytest\n@pytest.fixture\ndef broken(): raise OSError\ndef test_errors(broken): pass\n",
    "test_warns.py": "import warnings\ndef test_warns(): warnings.warn('take care', stacklevel=1)\n",
    "test_skips.py": "import pytest\ndef test_skips(): pytest.skip('no such part')\n",
}
CRASH = {"test_crashes.py": "import os\ndef test_crashes(): os.kill(os.getpid(), 9)\ndef test_next(): pass\n"}


def run_pytest(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    for name, content in files.items():
        (folder / name).write_text(content)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.forked_workers", "--processes", "2", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_outcomes_outputs_and_warnings_are_reported(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, FILES)
    assert "1 failed, 4 passed, 1 skipped, 1 warning, 1 error" in done.stdout
    assert "a printed line" in done.stdout
    assert "assert 1 == 2" in done.stdout
    assert "UserWarning: take care" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


def test_success_is_reported(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, {"test_passes.py": FILES["test_passes.py"], "test_warns.py": FILES["test_warns.py"]})
    assert "3 passed, 1 warning" in done.stdout
    assert done.returncode == pytest.ExitCode.OK


def test_a_test_that_kills_its_process_has_failed_and_the_others_run(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, {**CRASH, "test_passes.py": FILES["test_passes.py"]})
    assert "1 failed, 3 passed" in done.stdout
    assert "ended with exit code -9" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


def test_stops_at_the_first_failure_on_request(tmp_path: Path) -> None:
    slow = "import time\ndef test_slow(): time.sleep(0.5)\n"
    others = {f"test_{number}.py": slow for number in range(1, 41)}
    done = run_pytest(tmp_path, {"test_0.py": FILES["test_fails.py"], **others}, "-x")
    assert "stopping after 1 failures" in done.stdout
    assert "41 passed" not in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED

"""Reading the verbose output of unittest, from real runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from polar_proxy.tasks import parse_unittest

MODULE = """
import os
import unittest

class T(unittest.TestCase):
    def test_good(self):
        pass
    def test_bad(self):
        self.assertEqual(1, 2)
    def test_error(self):
        raise RuntimeError("test_good (t.T.test_good) ... ok")
    def test_prints(self):
        print("noise", flush=True)
    def test_skipped(self):
        self.skipTest("no reason")
    @unittest.expectedFailure
    def test_surprise(self):
        pass
    def test_z_dies(self):
        if os.environ.get("DIE"):
            os._exit(3)
"""


def run(tmp_path: Path, **env: str) -> str:
    (tmp_path / "t.py").write_text(MODULE)
    argv = [sys.executable, "-m", "unittest", "-v", "t"]
    done = subprocess.run(
        argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout


def test_each_verdict_is_told_apart(tmp_path: Path) -> None:
    assert parse_unittest(run(tmp_path)) == {
        "t.T.test_good": "passed",
        "t.T.test_bad": "failed",
        "t.T.test_error": "error",
        "t.T.test_prints": "passed",
        "t.T.test_skipped": "skipped",
        "t.T.test_surprise": "failed",
        "t.T.test_z_dies": "passed",
    }


def test_a_test_in_which_the_process_died_is_an_error(tmp_path: Path) -> None:
    assert parse_unittest(run(tmp_path, DIE="1"))["t.T.test_z_dies"] == "error"


def test_the_ids_of_python_3_10_are_completed() -> None:
    assert parse_unittest("test_a (tests.x.T) ... ok\n") == {"tests.x.T.test_a": "passed"}


def test_no_output_is_no_test() -> None:
    assert parse_unittest("") == {}
    assert parse_unittest("ModuleNotFoundError: No module named 'x'\n") == {}

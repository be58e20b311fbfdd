"""Log parsers, on real output of the runners that are installed and on documented output of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polar_proxy.allowed_code import NO_CODE
from polar_proxy.errors import BadTaskError
from polar_proxy.rewards.log_parsers import PARSERS, get_parser, parse_unittest

pytestmark = pytest.mark.slow

PYTEST = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2, "PASSED test_p.py::test_bad - no"
@pytest.fixture
def broken(): raise RuntimeError
def test_error(broken): pass
@pytest.mark.skip(reason="later")
def test_skipped(): pass
@pytest.mark.xfail
def test_xfail(): assert False
@pytest.mark.parametrize("p", ["/usr/lib/x", "a b", "//y"])
def test_p(p): pass
class TestC:
    def test_m(self): print("FAILED nothing")
"""


@pytest.fixture(scope="module")
def pytest_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("p")
    (folder / "test_p.py").write_text(PYTEST)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-c", "/dev/null", "test_p.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_pytest(pytest_log: str) -> None:
    verdicts = get_parser("pytest")(pytest_log)
    assert verdicts["test_p.py::test_good"] == "passed"
    assert verdicts["test_p.py::test_bad"] == "failed"
    assert verdicts["test_p.py::test_error"] == "error"
    assert verdicts["test_p.py::test_xfail"] == "xfailed"
    assert verdicts["test_p.py::TestC::test_m"] == "passed"
    assert verdicts["test_p.py::test_p[/usr/lib/x]"] == "passed"
    assert verdicts["test_p.py::test_p[a"] == "passed"  # as the data sets cut it
    assert "test_p.py::test_skipped" not in verdicts  # its summary line names no test
    assert get_parser("parse_log_pytest_v2")(pytest_log)["test_p.py::test_p[a b]"] == "passed"
    options = get_parser("parse_log_requests")(pytest_log)
    assert options["test_p.py::test_p[/x]"] == "passed"
    assert options["test_p.py::test_p[//y]"] == "passed"


def test_pytest_lines_of_a_verbose_run() -> None:
    log = "t.py::a PASSED  [ 50%]\nt.py::b[x y] \x1b[31mFAILED\x1b[0m [100%]\nt.py::c SKIPPED\n"
    assert get_parser("pytest")(log) == {"t.py::a": "passed", "t.py::b[x y]": "failed", "t.py::c": "skipped"}


def test_r2e_reads_the_summary_alone(pytest_log: str) -> None:
    verdicts = get_parser("r2e")(pytest_log)
    assert verdicts["TestC.test_m"] == "passed"
    assert verdicts["test_bad"] == "failed"
    assert get_parser("r2e")("PASSED t.py::a\n=== short test summary info ===\nFAILED t.py::a - x\n") == {"a": "failed"}


def test_django(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "import unittest\n\nclass T(unittest.TestCase):\n"
        "    def test_a(self):\n        'A docstring.'\n"
        "    def test_b(self):\n        print('System check', flush=True)\n"
        "    def test_c(self):\n        self.fail()\n"
        "    def test_d(self):\n        self.skipTest('x')\n"
    )
    command = [sys.executable, "-m", "unittest", "-v", "t"]
    done = subprocess.run(command, cwd=tmp_path, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False)
    verdicts = get_parser("django")(done.stdout)
    where = "t.T" if sys.version_info < (3, 11) else "t.T.{}"
    assert verdicts["A docstring."] == "passed"
    assert verdicts[f"test_b ({where.format('test_b')})"] == "passed"
    assert verdicts[f"test_c ({where.format('test_c')})"] == "failed"
    assert verdicts[f"test_d ({where.format('test_d')})"] == "skipped"


def test_parses_sympy_go_cargo_and_tap() -> None:
    assert get_parser("sympy")("test_a ok\ntest_b F\ntest_c E\ntest_d f\n") == {
        "test_a": "passed",
        "test_b": "failed",
        "test_c": "error",
        "test_d": "xfailed",
    }
    go = "=== RUN   TestA\n--- PASS: TestA (0.00s)\n    --- FAIL: TestA/sub (x) (1.2s)\n--- SKIP: TestB (0.00s)\n"
    assert get_parser("gotest")(go) == {"TestA": "passed", "TestA/sub (x)": "failed", "TestB": "skipped"}
    cargo = "test a::b ... ok\ntest c ... FAILED\ntest d ... ignored\ntest result: FAILED. 1 passed\n"
    assert get_parser("cargo")(cargo) == {"a::b": "passed", "c": "failed", "d": "skipped"}
    tap = "TAP version 14\n1..4\nok 1 - a\nnot ok 2 - b c\nok 3 d # SKIP no\n# comment\n"
    assert get_parser("tap")(tap) == {"a": "passed", "b c": "failed", "d": "skipped"}
    assert all(parse("") == {} for parse in PARSERS.values())


def custom_parser(log: str) -> dict[str, str]:
    return {line: "passed" if line != "odd" else "perhaps" for line in log.split()}


def test_a_custom_parser_must_return_known_verdicts() -> None:
    code = NO_CODE.including(f"{__name__}:custom_parser", "no.such:parser")
    parse = get_parser(f"{__name__}:custom_parser", code)
    assert parse("a b") == {"a": "passed", "b": "passed"}
    with pytest.raises(BadTaskError, match=r"returned the verdicts \['perhaps'\]"):
        parse("odd")
    with pytest.raises(BadTaskError, match="cannot load"):
        get_parser("no.such:parser", code)
    with pytest.raises(BadTaskError, match="is not allowed here"):
        get_parser("no.such:parser")


UNITTEST_MODULE = """
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


def run_unittest(tmp_path: Path, **env: str) -> str:
    (tmp_path / "t.py").write_text(UNITTEST_MODULE)
    argv = [sys.executable, "-m", "unittest", "-v", "t"]
    done = subprocess.run(
        argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout


def test_parses_each_unittest_verdict(tmp_path: Path) -> None:
    assert parse_unittest(run_unittest(tmp_path)) == {
        "t.T.test_good": "passed",
        "t.T.test_bad": "failed",
        "t.T.test_error": "error",
        "t.T.test_prints": "passed",
        "t.T.test_skipped": "skipped",
        "t.T.test_surprise": "failed",
        "t.T.test_z_dies": "passed",
    }


def test_a_unittest_without_a_verdict_is_an_error(tmp_path: Path) -> None:
    assert parse_unittest(run_unittest(tmp_path, DIE="1"))["t.T.test_z_dies"] == "error"


def test_completes_the_unittest_ids_of_python_3_10() -> None:
    assert parse_unittest("test_a (tests.x.T) ... ok\n") == {"tests.x.T.test_a": "passed"}


def test_output_without_unittests_has_no_verdicts() -> None:
    assert parse_unittest("") == {}
    assert parse_unittest("ModuleNotFoundError: No module named 'x'\n") == {}

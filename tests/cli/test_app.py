"""The whole command: errors are one clear line with an exit code, `--help` is quick, secrets are not printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polar_proxy import __version__
from polar_proxy.export.exporter import FORMATS
from tests.cli.process import POLAR, environment
from tests.cli.runner import polar, polar_error, polar_json, polar_ok

pytestmark = pytest.mark.slow


def test_console_script_prints_one_line_for_an_error(polar_home: Path, tmp_path: Path) -> None:
    done = subprocess.run([POLAR, "sessions"], env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "polar.db" in done.stderr
    assert not polar_home.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["sessions"],
        ["sessions", "--json"],
        ["show", "call_0"],
        ["export"],
        ["export", "--format", "tokens-jsonl", "--out", "x.jsonl", "--json"],
        ["db", "stats"],
    ],
    ids=" ".join,
)
def test_reading_never_creates_a_database(polar_home: Path, tmp_path: Path, arguments: list[str]) -> None:
    error = polar_error(*arguments)
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    assert not polar_home.exists()
    assert not (tmp_path / "x.jsonl").exists()


def test_reports_invalid_options() -> None:
    polar_ok("db", "upgrade")
    for arguments, message in (
        (("show", "call_0"), "begins with 'call_0'"),
        (("show", "sess_0"), "begins with 'sess_0'"),
        (("show", "roll_0"), "begins with 'roll_0'"),
        (("show", "[/red]"), "begins with '[/red]'"),
        (("show", "task_1", "--json"), "begins with 'task_1'"),
        (("export", "--format", "csv"), f"choose {', '.join(FORMATS)}."),
        (("export", "--builder", "forest"), "per_call"),
        (("export", "--where", "colour=red"), "colour"),
        (("export", "--session", "sess_0"), "sess_0"),
        (("export", "--json"), "--out must be a file"),
        (("export", "--out", "missing/x.jsonl"), "Cannot write"),
        (("sessions", "--db", "mysql://x/y"), "SQLite or PostgreSQL"),
        (("sessions", "--limit", "0"), "--limit"),
        (("sessions", "--nonsense"), "--nonsense"),
        (("serve", "--port", "70000"), "--port"),
        (("serve", "--engine", "none"), "There is no engine 'none'"),
        (("serve", "--engine", "vllm"), "--engine-url"),
        (("serve", "--engine", "tests.nowhere:Engine"), "Cannot load engine"),
        (("serve", "--executor", "slurm"), "There is no executor 'slurm'"),
        (("session", "new", "--temperature", "-1"), "--temperature"),
        (("frobnicate",), "frobnicate"),
    ):
        done = polar(*arguments)
        assert (done.exit_code, done.stdout) == (2, ""), arguments
        assert message in done.stderr, arguments


def test_prints_the_version() -> None:
    assert polar_ok("--version") == f"polar {__version__}\n"


def test_does_not_print_passwords() -> None:
    printed = polar_ok("db", "path", "--db", "postgresql://polar:hunter2@db.example/polar")
    assert "db.example" in printed
    assert "hunter2" not in printed


def test_a_prompt_mode_is_render_or_continue() -> None:
    for mode in ("render", "continue"):
        assert polar_json("session", "new", "--prompt-mode", mode)["key"].startswith("sk-")
    for mode in ("observe", "watch"):
        assert "prompt_mode" in polar_error("session", "new", "--prompt-mode", mode)


def test_a_misspelt_verb_names_the_right_one() -> None:
    assert "Did you mean 'status'" in polar_error("statsu")


def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path: Path) -> None:
    """`sys.modules` refuses the package as if it were not installed."""
    code = "import sys; sys.modules['torch'] = None; from polar_proxy.cli import main; main()"
    for command in (["train", "adapter", "folder"], ["run", "swe-task", "--sandbox", "process"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *command], env=environment(), cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        error = next(line for line in done.stderr.splitlines() if line.startswith("error:"))
        assert "needs torch: pip install 'polar-proxy[local]'" in error
        assert "Traceback" not in done.stderr

"""What cannot be is told in one clear line with an exit code, never as a traceback. In-process: start-up is slow."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from polar_proxy.cli import main
from tests.cli.process import error_text, polar


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["polar", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_a_real_process(polar_home: Path, tmp_path: Path) -> None:
    """Looking at a database that does not exist says so in one line, and does not make it."""
    done = polar("sessions", cwd=tmp_path)
    assert len(error_text(done).strip().splitlines()) == 1
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
def test_an_empty_home(
    polar_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert len(said.err.strip().splitlines()) == 1
    assert not polar_home.exists()
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["show", "roll_0"], "There is no roll_0"),
        (["show", "sess_0"], "There is no sess_0"),
        (["show", "call_0"], "There is no call_0"),
        (["show", "[/red]"], "'[/red]' is not an id"),
        (["show", "task_1", "--json"], "is not an id"),
        (["export", "--format", "csv"], "tokens-jsonl"),
        (["export", "--builder", "forest"], "per_call"),
        (["export", "--where", "colour=red"], "colour"),
        (["export", "--session", "sess_0"], "sess_0"),
        (["export", "--json"], "--out must be a file"),
        (["export", "--out", "missing/x.jsonl"], "Cannot write"),
        (["sessions", "--db", "mysql://x/y"], "SQLite or PostgreSQL"),
        (["sessions", "--limit", "0"], "--limit"),
        (["sessions", "--nonsense"], "--nonsense"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--engine", "none"], "There is no engine 'none'"),
        (["serve", "--engine", "vllm"], "--engine-url"),
        (["serve", "--engine", "tests.nowhere:Engine"], "Cannot load engine"),
        (["session", "new", "--temperature", "-1"], "--temperature"),
        (["frobnicate"], "frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be(
    polar_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["polar", "db", "upgrade"])
    with pytest.raises(SystemExit):
        main()
    capfd.readouterr()
    assert run(monkeypatch, *arguments) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert told in said.err
    assert "Traceback" not in said.err


def test_the_database(polar_home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def ask(*arguments: str) -> dict[str, object]:
        assert run(monkeypatch, *arguments, "--json") == 0
        found = orjson.loads(capfd.readouterr().out)
        assert isinstance(found, dict)
        return found

    where = ask("db", "path")["db"]
    assert isinstance(where, str)
    assert where.endswith("/polar-home/polar.db")
    made = ask("db", "upgrade")
    assert made["db"] == where
    assert made["revision"]
    assert ask("db", "stats")
    assert ask("sessions") == {"sessions": []}
    key = ask("session", "new", "--label", "mine", "--max-tokens", "7")
    assert str(key["key"]).startswith("sk-")
    (session,) = ask("sessions")["sessions"]  # type: ignore[misc]
    assert (session["session_id"], session["label"], session["calls"]) == (key["session_id"], "mine", 0)
    assert str(key["key"]).encode() not in (polar_home / "polar.db").read_bytes()


def test_a_password_is_not_shown(
    polar_home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "db", "path", "--db", "postgresql://polar:hunter2@db.example/polar") == 0
    said = capfd.readouterr().out
    assert "db.example" in said
    assert "hunter2" not in said

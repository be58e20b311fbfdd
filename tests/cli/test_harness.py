"""`polar harness`: list, info, install, check and prune, with harnesses that need no download."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from harness_adapters.base import Installation, LaunchContext, LaunchPlan, list_adapters
from harness_adapters.shell import ShellCommand
from tests.cli.runner import polar
from tests.fakes.acp_definition import write_definition


class CompleteHarness(ShellCommand):
    """A harness that meets all requirements; each subclass violates one."""

    info = replace(
        ShellCommand.info, needs=("sh",), version_command=("sh", "-c", "echo tool 1.2"), tested_versions=("1.0", "1.4")
    )

    def __init__(self) -> None:
        super().__init__("sh -c true")

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        return replace(super().install(cache_root), version=version or "1.2")


class NeedsProgram(CompleteHarness):
    info = replace(CompleteHarness.info, needs=("no-such-program",))


class CrashesAtStart(CompleteHarness):
    info = replace(CompleteHarness.info, version_command=("sh", "-c", "echo missing library >&2; exit 3"))


class ExposesKey(CompleteHarness):
    """Puts the key into the argument list, which every user of the machine can read."""

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        return replace(super().launch(installed, context), argv=("sh", "-c", context.api_key))


class LaunchesMissingProgram(CompleteHarness):
    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        return replace(super().launch(installed, context), argv=("no-such-program",))


class NotInstalled(CompleteHarness):
    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        return False


def harness(*arguments: str) -> tuple[int, Any, str]:
    """Run `polar harness`; return its exit code, its JSON document (None if it printed none) and its error text."""
    done = polar("harness", *arguments, "--json")
    return done.exit_code, orjson.loads(done.stdout) if done.stdout else None, done.stderr


def own(name: str) -> str:
    return f"tests.cli.test_harness:{name}"


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def test_list_names_every_adapter() -> None:
    code, found, _ = harness("list")
    assert code == 0
    rows = {row["name"]: row for row in found["harnesses"]}
    assert set(rows) == set(list_adapters())
    assert not rows["aider"]["installed"]
    assert rows["aider"]["wire_apis"] == ["openai_chat"]
    assert rows["terminus-2"]["runtime"].startswith("python 3.12")
    assert all(row["version"] for row in rows.values())


def test_info_shows_everything_known() -> None:
    code, found, _ = harness("info", "openhands")
    assert code == 0
    assert found["package"] == "pypi:openhands"
    assert "Exits with 0" in found["notes"]
    assert found["features"] == sorted(found["features"])
    assert found["tested_versions"] == ["1.16.0", "1.16.0"]


def test_add_makes_a_harness_of_a_definition_file(tmp_path: Path) -> None:
    file = write_definition(tmp_path / "mine")
    code, found, _ = harness("add", str(file))
    assert code == 0
    assert Path(found["path"]).read_bytes() == file.read_bytes()
    _, listed, _ = harness("list")
    (row,) = [row for row in listed["harnesses"] if row["name"] == "small-acp"]
    assert (row["installed"], row["package"]) == (True, "none")
    code, found, _ = harness("check", "small-acp", "--sandbox", "process")
    assert {check["name"]: check["state"] for check in found["checks"]}["launch"] == "ok"


def test_add_refuses_a_wrong_file_and_a_known_name(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('name = "wrong"\n')
    assert harness("add", str(wrong))[::2] == (2, f"error: {wrong}: summary: Field required\n")
    code, _, error = harness("add", str(write_definition(tmp_path, "codex")))
    assert code == 2
    assert "'codex' is a built-in harness; choose another name" in error


def test_prune_needs_a_docker_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody-listens")
    code, found, error = harness("prune")
    assert (code, found) == (1, None)
    assert "the Docker engine does not answer" in error


@pytest.mark.full
def test_prune_removes_nothing_of_an_unknown_base_image() -> None:
    code, found, error = harness("prune", "--base", "polar-no-such-base:1")
    if "Docker engine" in error:
        pytest.skip(f"no Docker engine ({error.strip()}): scripts/docker_engine.sh start")
    assert (code, found) == (0, {"removed": [], "kept": [], "bytes": 0})


def test_install_reports_an_installed_harness() -> None:
    code, found, _ = harness("install", "shell:my-agent {instruction}")
    assert code == 0
    (installed,) = found["installed"]
    assert (installed["name"], installed["version"], installed["already_there"]) == ("shell", "my-agent", True)


def test_installs_several_harnesses_although_one_of_them_fails() -> None:
    code, found, _ = harness("install", "shell:my-agent", "shell", own("CompleteHarness"))
    assert code == 1
    assert [one["version"] for one in found["installed"]] == ["my-agent", "1.2"]
    (failure,) = found["failed"]
    assert failure["name"] == "shell"
    assert "the command is missing" in failure["error"]
    done = polar("harness", "install", "shell:my-agent", own("CompleteHarness"))
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["shell my-agent", "shell 1.2"]
    assert "was not installed: the command is missing" in polar("harness", "install", "shell").stderr


def test_finds_an_adapter_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter_of_this_folder.py").write_text(
        "from harness_adapters.shell import ShellCommand\n\n\n"
        "class Mine(ShellCommand):\n    def __init__(self) -> None:\n        super().__init__('mine')\n"
    )
    before = list(sys.path)
    code, found, _ = harness("info", "adapter_of_this_folder:Mine")
    assert (code, found["version"]) == (0, "mine")
    assert sys.path == before
    (tmp_path / "broken_in_this_folder.py").write_text("1 / 0\n")
    code, _, error = harness("info", "broken_in_this_folder:Mine")
    assert code == 2
    assert "Cannot load broken_in_this_folder:Mine" in error
    assert "ZeroDivisionError" in error


def test_check_passes_for_a_complete_harness() -> None:
    code, found, _ = harness("check", own("CompleteHarness"), "--sandbox", "process")
    assert (code, found["ok"]) == (0, True)
    assert [(check["name"], check["state"]) for check in found["checks"]] == [
        ("installed", "ok"),
        ("sandbox", "ok"),
        ("needs sh", "ok"),
        ("starts", "ok"),
        ("launch", "ok"),
    ]


def test_check_notes_an_untested_version() -> None:
    code, found, _ = harness("check", own("CompleteHarness") + "@1.20", "--sandbox", "process")
    states = {check["name"]: check for check in found["checks"]}
    assert states["tested"]["state"] == "note"
    assert "1.0 to 1.4" in states["tested"]["detail"]
    assert states["starts"]["state"] == "failed", "the program prints another version"
    assert (code, found["ok"]) == (1, False)


@pytest.mark.parametrize(
    ("name", "check", "state", "detail"),
    [
        ("NeedsProgram", "needs no-such-program", "missing", "not on PATH in the process sandbox"),
        ("CrashesAtStart", "starts", "failed", "exit code 3: missing library"),
        ("ExposesKey", "launch", "failed", "the key is in the argument list"),
        ("LaunchesMissingProgram", "launch", "missing", "no-such-program is not in the process sandbox"),
    ],
)
def test_check_names_the_problem(name: str, check: str, state: str, detail: str) -> None:
    code, found, _ = harness("check", own(name), "--sandbox", "process")
    assert (code, found["ok"]) == (1, False)
    (problem,) = [one for one in found["checks"] if one["state"] not in ("ok", "note")]
    assert (problem["name"], problem["state"]) == (check, state)
    assert detail in problem["detail"]


def test_check_without_installing_says_how_to_install() -> None:
    code, found, _ = harness("check", own("NotInstalled"), "--no-install")
    assert (code, found["ok"]) == (1, False)
    (check,) = found["checks"]
    assert check["state"] == "missing"
    assert check["fix"] == f"polar harness install {own('NotInstalled')}"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["info", "nothing"], 2, "the known ones are: "),
        (["check", "collections:OrderedDict"], 2, "is not a harness adapter"),
        (["check", "shell:true", "--sandbox", "jail"], 2, "There is no sandbox 'jail'"),
        (["install", "aider@1", "--version", "2"], 2, "Two versions"),
        (["install", "aider", "codex", "--version", "2"], 2, "--version is for one harness"),
        (["install", "aider", "nothing"], 2, "the known ones are: "),
        (["info", "tests.cli.test_harness:harness"], 2, "is not a harness adapter"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_reports_invalid_options(arguments: list[str], exit_code: int, message: str) -> None:
    code, found, error = harness(*arguments)
    assert (code, found) == (exit_code, None)
    assert message in error

"""`polar harness list|info|install|check`, in-process, with harnesses that need no download."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from harness_adapters import Installation, LaunchContext, LaunchPlan, list_adapters
from harness_adapters.shell import ShellCommand
from polar_proxy.cli import main

pytestmark = pytest.mark.usefixtures("polar_home")


class Careful(ShellCommand):
    """A harness with requirements; the subclasses lack one each."""

    info = replace(
        ShellCommand.info, needs=("sh",), version_command=("sh", "-c", "echo tool 1.2"), tested_versions=("1.0", "1.4")
    )

    def __init__(self) -> None:
        super().__init__("sh -c true")

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        return replace(super().install(cache_root), version=version or "1.2")


class Needy(Careful):
    info = replace(Careful.info, needs=("no-such-program",))


class Crashing(Careful):
    info = replace(Careful.info, version_command=("sh", "-c", "echo missing library >&2; exit 3"))


class Telling(Careful):
    """Puts the key where everybody can read it."""

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        return replace(super().launch(installed, context), argv=("sh", "-c", context.api_key))


class Vanished(Careful):
    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        return replace(super().launch(installed, context), argv=("no-such-program",))


class Absent(Careful):
    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        return False


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run `polar harness ...` and return its exit code, its document and its standard error."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, Any, str]:
        monkeypatch.setattr(sys, "argv", ["polar", "harness", *arguments, "--json"])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capfd.readouterr()
        return int(caught.value.code or 0), orjson.loads(said.out) if said.out else None, said.err

    return call


def own(name: str) -> str:
    return f"tests.cli.test_harness:{name}"


def test_list_names_every_adapter(ask: Any) -> None:
    code, found, _ = ask("list")
    assert code == 0
    rows = {row["name"]: row for row in found["harnesses"]}
    assert set(rows) == set(list_adapters())
    assert not rows["aider"]["installed"]
    assert rows["aider"]["wire_apis"] == ["openai_chat"]
    assert rows["terminus-2"]["runtime"].startswith("python 3.12")
    assert all(row["version"] for row in rows.values())


def test_info_tells_all_facts(ask: Any) -> None:
    code, found, _ = ask("info", "openhands")
    assert code == 0
    assert found["package"] == "pypi:openhands"
    assert "Exits with 0" in found["notes"]
    assert found["features"] == sorted(found["features"])
    assert found["tested_versions"] == ["1.16.0", "1.16.0"]


def test_prune_without_an_engine(ask: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every adapter is asked what it would be prebuilt as before the engine is; a command line has no such thing."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody-listens")
    code, found, told = ask("prune")
    assert (code, found) == (1, None)
    assert "the Docker engine does not answer" in told


@pytest.mark.full
def test_prune_finds_nothing_on_an_image_that_nothing_was_baked_on(ask: Any) -> None:
    code, found, told = ask("prune", "--base", "polar-no-such-base:1")
    if "Docker engine" in told:
        pytest.skip(f"no Docker engine ({told.strip()}): scripts/docker_engine.sh start")
    assert (code, found) == (0, {"removed": [], "kept": [], "bytes": 0})


def test_install_says_where(ask: Any) -> None:
    code, found, _ = ask("install", "shell:my-agent {instruction}")
    assert code == 0
    assert (found["name"], found["version"], found["already_there"]) == ("shell", "my-agent", True)


def test_check_of_what_would_run(ask: Any) -> None:
    code, found, _ = ask("check", own("Careful"), "--sandbox", "process")
    assert (code, found["ok"]) == (0, True)
    assert [(check["name"], check["state"]) for check in found["checks"]] == [
        ("installed", "ok"),
        ("sandbox", "ok"),
        ("needs sh", "ok"),
        ("starts", "ok"),
        ("launch", "ok"),
    ]


def test_check_of_a_version_that_nobody_ran(ask: Any) -> None:
    code, found, _ = ask("check", own("Careful") + "@1.20", "--sandbox", "process")
    states = {check["name"]: check for check in found["checks"]}
    assert states["tested"]["state"] == "note"
    assert "1.0 to 1.4" in states["tested"]["detail"]
    assert states["starts"]["state"] == "failed", "it says that it is another version"
    assert (code, found["ok"]) == (1, False)


@pytest.mark.parametrize(
    ("name", "failing", "state", "told"),
    [
        ("Needy", "needs no-such-program", "missing", "not on PATH in the process sandbox"),
        ("Crashing", "starts", "failed", "exit code 3: missing library"),
        ("Telling", "launch", "failed", "the key is in the argument list"),
        ("Vanished", "launch", "missing", "no-such-program is not in the process sandbox"),
    ],
)
def test_check_names_what_is_wrong(ask: Any, name: str, failing: str, state: str, told: str) -> None:
    code, found, _ = ask("check", own(name), "--sandbox", "process")
    assert (code, found["ok"]) == (1, False)
    (wrong,) = [check for check in found["checks"] if check["state"] not in ("ok", "note")]
    assert (wrong["name"], wrong["state"]) == (failing, state)
    assert told in wrong["detail"]


def test_check_without_installing_says_how(ask: Any) -> None:
    code, found, _ = ask("check", own("Absent"), "--no-install")
    assert (code, found["ok"]) == (1, False)
    (check,) = found["checks"]
    assert check["state"] == "missing"
    assert check["fix"] == f"polar harness install {own('Absent')}"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["info", "nothing"], 2, "the known ones are: "),
        (["check", "collections:OrderedDict"], 2, "is not a harness adapter"),
        (["check", "shell:true", "--sandbox", "jail"], 2, "There is no sandbox 'jail'"),
        (["install", "aider@1", "--version", "2"], 2, "Two versions"),
        (["install", "shell"], 1, "the command is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be(ask: Any, arguments: list[str], code: int, told: str) -> None:
    got, found, said = ask(*arguments)
    assert (got, found) == (code, None)
    assert told in said

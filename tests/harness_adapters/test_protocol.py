"""The adapter protocol and the cached environments, without installing a real harness."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters import (
    HarnessAdapter,
    HarnessError,
    Installation,
    InstallError,
    LaunchContext,
    UnknownHarnessError,
    get_adapter,
    list_adapters,
)
from harness_adapters.mini_swe_agent import MiniSweAgent
from harness_adapters.toolkit import python_venv
from harness_adapters.toolkit.python_venv import VenvRecipe

CONTEXT = LaunchContext(
    base_url="http://127.0.0.1:9/v1",
    api_key="sk-secret",
    model="polar-tiny",
    instruction="Fix -- `it`; $(now)",
    home="/home/agent",
    workdir="/workspace",
)
# No requirements: a bare environment is enough to show how the cache behaves, and it needs no package index.
BARE = VenvRecipe(name="bare", version="1", requirements=(), check=("-c", "import json"))


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Leave pip out of the recipe's steps and list the steps that are taken."""
    steps: list[list[str]] = []
    real = python_venv._step

    def step(recipe: VenvRecipe, what: str, argv: list[str], *, strict: bool = True) -> None:
        steps.append(list(argv))
        if "pip" in argv:
            return
        argv = [*argv[:3], "--without-pip", *argv[3:]] if "venv" in argv else argv
        real(recipe, what, argv, strict=strict)

    monkeypatch.setattr(python_venv, "_step", step)
    return steps


def test_adapters_are_found_by_name_and_by_class() -> None:
    assert "mini-swe-agent" in list_adapters()
    assert list_adapters() == tuple(sorted(list_adapters()))
    assert isinstance(get_adapter("mini-swe-agent"), HarnessAdapter)
    assert isinstance(get_adapter("harness_adapters.mini_swe_agent:MiniSweAgent"), MiniSweAgent)
    with pytest.raises(UnknownHarnessError, match=r"there are: .*mini-swe-agent"):
        get_adapter("nothing")
    with pytest.raises(UnknownHarnessError, match="cannot load"):
        get_adapter("harness_adapters.nothing:At")
    with pytest.raises(TypeError, match="is no harness adapter"):
        get_adapter("collections:OrderedDict")


def test_the_adapters_know_nothing_of_polar() -> None:
    for path in Path(python_venv.__file__).parent.glob("*.py"):
        assert "import polar_proxy" not in path.read_text()
        assert "from polar_proxy" not in path.read_text()


def test_the_plan_is_pure_and_hides_the_key(tmp_path: Path) -> None:
    adapter = get_adapter("mini-swe-agent")
    installed = Installation("mini-swe-agent", "2.4.6", tmp_path, tmp_path / "bin" / "python", (tmp_path,))
    plan = adapter.launch(installed, CONTEXT)
    assert plan == adapter.launch(installed, CONTEXT)
    assert "sk-secret" not in " ".join(plan.argv)
    assert plan.env["OPENAI_API_KEY"] == "sk-secret"
    assert plan.env["OPENAI_API_BASE"] == CONTEXT.base_url
    assert CONTEXT.instruction in plan.argv
    assert plan.mounts == (tmp_path,)
    assert adapter.launch(installed, replace(CONTEXT, max_steps=3)).argv != plan.argv
    assert "model.model_class=litellm_response" not in plan.argv
    responses = adapter.launch(installed, replace(CONTEXT, wire_api="openai_responses"))
    assert "model.model_class=litellm_response" in responses.argv
    for change in ({"resume": True}, {"wire_api": "anthropic_messages"}):
        with pytest.raises(HarnessError, match="mini-swe-agent"):
            adapter.launch(installed, replace(CONTEXT, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "tail", "expected"),
    [
        (0, "Exit:\n\nSaved trajectory to '/h/t.json'\n", ("ok", "submitted")),
        (0, "Exit:\nLimitsExceeded\nSaved trajectory to '/h/t.json'\n", ("ok", "ended by LimitsExceeded")),
        (0, "User:\nx\n\nExit:\nRepeatedFormatError\nSaved\n", ("ok", "ended by RepeatedFormatError")),
        (1, "Traceback\nBoom: it broke\n\n", ("failed", "mini-swe-agent exited with 1: Boom: it broke")),
        (-9, "", ("failed", "mini-swe-agent exited with -9: no output")),
        (None, "anything", ("timed_out", "mini-swe-agent was stopped by the clock")),
    ],
)
def test_the_exit_is_read(code: int | None, tail: str, expected: tuple[str, str]) -> None:
    assert get_adapter("mini-swe-agent").interpret(code, tail) == expected


def test_an_environment_is_made_once(tmp_path: Path, no_pip: list[list[str]]) -> None:
    assert not python_venv.is_ready(BARE, tmp_path)
    first = python_venv.ensure(BARE, tmp_path)
    taken = len(no_pip)
    assert python_venv.is_ready(BARE, tmp_path)
    assert python_venv.ensure(BARE, tmp_path) == first
    assert len(no_pip) == taken
    assert first.program.exists()
    assert first.root in first.mounts
    assert all(not mount.is_relative_to("/usr") for mount in first.mounts)
    assert Path(sys.base_prefix).is_relative_to("/usr") or Path(sys.base_prefix) in first.mounts


def test_installers_at_the_same_time_make_one_environment(tmp_path: Path, no_pip: list[list[str]]) -> None:
    threads = [threading.Thread(target=python_venv.ensure, args=(BARE, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("venv" in argv for argv in no_pip) == 1


def test_a_half_made_environment_is_made_again(tmp_path: Path, no_pip: list[list[str]]) -> None:
    folder = BARE.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "left over").write_text("from a killed installer")
    python_venv.ensure(BARE, tmp_path)
    assert not (folder / "left over").exists()
    assert no_pip


def test_a_failed_install_says_why_and_leaves_nothing(tmp_path: Path, no_pip: list[list[str]]) -> None:
    broken = replace(BARE, check=("-c", "raise SystemExit('the wheel is square')"))
    with pytest.raises(InstallError, match="could not start it once: bare 1") as caught:
        python_venv.ensure(broken, tmp_path)
    assert "the wheel is square" in str(caught.value)
    assert not broken.folder(tmp_path).exists()
    assert no_pip


def test_another_recipe_gets_another_folder(tmp_path: Path) -> None:
    assert BARE.folder(tmp_path) != replace(BARE, requirements=("mcp",)).folder(tmp_path)

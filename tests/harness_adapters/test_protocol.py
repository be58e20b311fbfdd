"""The adapter protocol, adapters by name, and mini-swe-agent's implementation of it. No harness is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import harness_adapters
from harness_adapters.base import (
    HarnessAdapter,
    HarnessError,
    Installation,
    LaunchContext,
    UnknownHarnessError,
    get_adapter,
    list_adapters,
)
from harness_adapters.mini_swe_agent import MiniSweAgent

CONTEXT = LaunchContext(
    base_url="http://127.0.0.1:9/v1",
    api_key="sk-secret",
    model="polar-tiny",
    instruction="Fix -- `it`; $(now)",
    home="/home/agent",
    workdir="/workspace",
)


def test_get_adapter_by_name_and_by_class() -> None:
    assert "mini-swe-agent" in list_adapters()
    assert list_adapters() == tuple(sorted(list_adapters()))
    assert isinstance(get_adapter("mini-swe-agent"), HarnessAdapter)
    assert isinstance(get_adapter("harness_adapters.mini_swe_agent:MiniSweAgent"), MiniSweAgent)
    with pytest.raises(UnknownHarnessError, match=r"the known ones are: .*mini-swe-agent"):
        get_adapter("nothing")
    with pytest.raises(UnknownHarnessError, match="cannot load"):
        get_adapter("harness_adapters.nothing:At")
    with pytest.raises(UnknownHarnessError, match=r"is not a harness adapter.*lacks"):
        get_adapter("collections:OrderedDict")


def test_adapters_do_not_import_polar() -> None:
    for path in Path(harness_adapters.__file__).parent.rglob("*.py"):
        assert "import polar_proxy" not in path.read_text()
        assert "from polar_proxy" not in path.read_text()


def test_launch_is_pure_and_hides_the_key(tmp_path: Path) -> None:
    adapter = get_adapter("mini-swe-agent")
    installed = Installation("mini-swe-agent", "2.4.6", tmp_path, tmp_path / "bin" / "python", (tmp_path,))
    plan = adapter.launch(installed, CONTEXT)
    assert plan == adapter.launch(installed, CONTEXT)
    assert "sk-secret" not in " ".join(plan.argv)
    assert plan.env["OPENAI_API_KEY"] == "sk-secret"
    assert plan.env["OPENAI_API_BASE"] == CONTEXT.base_url
    assert CONTEXT.instruction in plan.argv
    assert adapter.launch(installed, replace(CONTEXT, max_steps=3)).argv != plan.argv
    assert "model.model_class=litellm_response" not in plan.argv
    responses = adapter.launch(installed, replace(CONTEXT, wire_api="openai_responses"))
    assert "model.model_class=litellm_response" in responses.argv
    for change in ({"resume": True}, {"wire_api": "anthropic_messages"}):
        with pytest.raises(HarnessError, match="mini-swe-agent"):
            adapter.launch(installed, replace(CONTEXT, **change))  # type: ignore[arg-type]


def test_root_url_has_no_version() -> None:
    assert replace(CONTEXT, base_url="http://h/s/1/v1").root_url == "http://h/s/1"


@pytest.mark.parametrize(
    ("code", "tail", "expected"),
    [
        (0, "Exit:\n\nSaved trajectory to '/h/t.json'\n", ("ok", "submitted")),
        (0, "Exit:\nLimitsExceeded\nSaved trajectory to '/h/t.json'\n", ("ok", "ended by LimitsExceeded")),
        (0, "User:\nx\n\nExit:\nRepeatedFormatError\nSaved\n", ("ok", "ended by RepeatedFormatError")),
        (1, "Traceback\nBoom: it broke\n\n", ("failed", "mini-swe-agent exited with 1: Boom: it broke")),
        (-9, "", ("failed", "mini-swe-agent exited with -9: no output")),
        (None, "anything", ("timed_out", "mini-swe-agent was stopped at its time limit")),
    ],
)
def test_interpret_mini_swe_agent(code: int | None, tail: str, expected: tuple[str, str]) -> None:
    assert get_adapter("mini-swe-agent").interpret(code, tail) == expected

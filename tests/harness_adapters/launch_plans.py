"""A launch context, and the promises that every launch plan keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness_adapters.base import HarnessAdapter, Installation, LaunchContext, LaunchPlan, McpServer, Skill

KEY = "sk-secret-0123456789"
INSTRUCTION = "-- Fix `it`; $(now) \"and\" 'then'\n{model} ü"
CONTEXT = LaunchContext(
    base_url="http://127.0.0.1:9/v1",
    api_key=KEY,
    model="polar-tiny",
    instruction=INSTRUCTION,
    home="/home/agent",
    workdir="/workspace",
)
MCP = (
    McpServer("files", command=("mcp-files", "--root", "/a b"), env={"LEVEL": '"1"'}),
    McpServer("web", url="http://127.0.0.1:9/mcp"),
)
SKILL = Skill("say-hello", "---\nname: say-hello\ndescription: Says hello.\n---\nSay hello.\n")


def installed(adapter: HarnessAdapter, root: Path = Path("/cache/x")) -> Installation:
    return Installation(adapter.name, adapter.default_version, root, root / "bin" / "python", (root,))


def plan(adapter: HarnessAdapter, **changes: Any) -> LaunchPlan:
    """Return the plan for `CONTEXT` with `changes`, after checking the promises of every plan."""
    context = replace(CONTEXT, **changes)
    first = adapter.launch(installed(adapter), context)
    assert first == adapter.launch(installed(adapter), context), "not pure"
    assert not any(KEY in word for word in first.argv), "the key is in the argument list"
    assert (KEY in first.env.values()) != adapter.info.intercepted, "the key is not in the environment"
    assert not any(KEY in text for text in first.files.values()), "the key is in a file, too"
    assert first.env["HOME"] == context.home
    for name in first.files:
        assert not name.startswith("/")
        assert ".." not in PurePosixPath(name).parts
    return first


def assert_interpreted(adapter: HarnessAdapter, code: int | None, tail: str, outcome: str, message: str) -> None:
    """Assert the outcome of a run that ended with `code`, and that its detail contains `message`."""
    found, detail = adapter.interpret(code, tail)
    assert found == outcome
    assert message in detail


def info_is_complete(adapter: HarnessAdapter) -> None:
    info = adapter.info
    assert info.homepage.startswith("https://")
    assert info.package.partition(":")[0] in ("pypi", "npm")
    assert info.wire_apis
    assert info.runtime
    assert info.summary
    assert info.command

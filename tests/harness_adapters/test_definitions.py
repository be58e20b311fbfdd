"""Harnesses that TOML files describe: the errors of a wrong file, and the plans of the right ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness_adapters.acp.adapter import AcpHarness
from harness_adapters.base import HarnessError, InstallError, UnknownHarnessError, get_adapter, list_adapters
from harness_adapters.definitions.harness import catalogue, load_harness
from harness_adapters.definitions.schema import DefinitionError
from harness_adapters.toolkit.adapter import toml_text
from polar_proxy.conformance.profiles import HarnessProfile, profile_of
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.fakes.acp_definition import AGENT, write_definition
from tests.harness_adapters import real_runs
from tests.harness_adapters.launch_plans import KEY, SKILL, assert_interpreted, info_is_complete, plan

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples" / "harnesses").glob("*.toml"))
BASE: Mapping[str, Any] = {
    "name": "mine",
    "summary": "Mine",
    "program": "mine",
    "wire_api": "openai_chat",
    "install": {"path": "/opt/mine/bin/mine"},
    "connection": {"env": {"OPENAI_API_KEY": "{api_key}", "OPENAI_BASE_URL": "{base_url}"}},
    "run": {"command": ["{program}", "{arguments}", "{resume}", "{instruction}"]},
}


def changed(**tables: Any) -> dict[str, Any]:
    """Return a definition with these tables changed; the keys of `connection` and `run` are merged."""
    merged = dict(BASE)
    for name, value in tables.items():
        merged[name] = {**merged.get(name, {}), **value} if name in ("connection", "run") else value
    return merged


def write(folder: Path, table: Mapping[str, Any]) -> Path:
    path = folder / "mine.toml"
    path.write_text(toml_text(table))
    return path


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(wire_api="smtp"), "wire_api: Input should be"),
        (changed(colour="red"), "colour: Extra inputs are not permitted"),
        (changed(name="Not A Name"), "name: use lower-case letters"),
        (changed(install={"npm": "x", "pypi": "y"}), "install: must have exactly one of npm, pypi and path"),
        (changed(install={"npm": "x", "version": "1"}), "install: entry is missing; it is required with npm"),
        (changed(install={"pypi": "x", "version": "1"}), "install: imports is missing"),
        (changed(install={"path": "bin/mine"}), "install: path must be absolute"),
        (changed(connection={"env": {"A": "b"}}), 'connection: env has no variable with the value "{api_key}"'),
        (changed(connection={"arguments": ["--key", "{api_key}"]}), "connection.arguments[1]: the API key belongs in"),
        (changed(run={"command": ["{program}", "{modle}"]}), "run.command[1]: {modle} is not a placeholder; use"),
        (changed(run={"command": []}), "run.command: Tuple should have at least 1 item"),
        (changed(run={"files": {"../x": ""}}), "'../x' is not a path below HOME"),
        (changed(run={"files": {"/etc/x": ""}}), "'/etc/x' is not a path below HOME"),
        (changed(run={"command": ["{mount:/etc}/x"]}), "run.command[0]: a definition cannot use {mount:PATH}"),
        (changed(connection={"settings": {"a.ini": {"x": 1}}}), "'a.ini' must end in .json, .toml or .yaml"),
        (changed(connection={"settings": {"a.json": {"x": "{instruction}"}}}), "connection.settings.a.json.x: {instr"),
        (changed(exit={"failed": "("}), "exit.failed: is not a regular expression"),
        ({key: value for key, value in BASE.items() if key != "run"}, "[run] or [acp] is missing"),
        ({key: value for key, value in BASE.items() if key != "install"}, "install: Field required"),
    ],
)  # fmt: skip
def test_an_error_names_the_file_and_the_key(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    path = write(tmp_path, table)
    with pytest.raises(DefinitionError) as caught:
        load_harness(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_an_error_of_the_syntax_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nsummary = [\n')
    with pytest.raises(DefinitionError, match=r"mine.toml is not TOML: .*(line 3|document)"):
        load_harness(path)
    with pytest.raises(DefinitionError, match="cannot be read"):
        load_harness(tmp_path / "nothing.toml")


def test_a_plan_fills_in_the_placeholders(tmp_path: Path) -> None:
    listed = ["{base_url}/x", True, "{context_length}"]
    settings = {"cfg/s.json": {"ctx": "{context_length}", "ms": "{timeout_ms}", "{model}": listed}}
    table = changed(
        connection={"arguments": ["--model", "p/{model}"], "settings": settings},
        run={
            "resume": ["--continue"],
            "env": {"STEPS": "{max_steps}", "BRACES": "{{x}}"},
            "settings": {"cfg/s.json": {"more": {"cwd": "{workdir}"}}},
            "files": {"task.txt": "{instruction}"},
            "skills": ".mine/skills",
        },
    )
    harness = load_harness(write(tmp_path, table))
    instruction = "say {model} and '$(x)'"
    made = plan(harness, instruction=instruction, skills=(SKILL,), max_steps=7, request_timeout_seconds=2.5)
    assert made.argv == ("/cache/x/bin/python", "--model", "p/polar-tiny", instruction)
    assert made.env["STEPS"] == "7"
    assert made.env["BRACES"] == "{x}"
    assert made.env["OPENAI_API_KEY"] == KEY
    assert made.files["task.txt"] == instruction
    assert json.loads(made.files["cfg/s.json"]) == {
        "ms": 2500,
        "polar-tiny": ["http://127.0.0.1:9/v1/x", True],
        "more": {"cwd": "/workspace"},
    }
    assert made.files[f".mine/skills/{SKILL.name}/SKILL.md"] == SKILL.text
    assert json.loads(plan(harness, context_length=100).files["cfg/s.json"])["ctx"] == 100
    assert plan(harness, resume=True).argv[3] == "--continue"
    assert harness.info.features == {"resume", "skills"}


def test_reads_failures_and_limits(tmp_path: Path) -> None:
    limits = [{"code": 53, "name": "its turn limit", "pattern": "^turns$"}]
    table = changed(exit={"failed": "^Error: .*", "limits": limits, "errors": ["Fatal"]})
    harness = load_harness(write(tmp_path, table))
    assert_interpreted(harness, 0, "fine\n", "ok", "finished")
    assert_interpreted(harness, 0, "x\nError: no model\nbye\n", "failed", "mine failed: Error: no model")
    assert_interpreted(harness, 53, "turns\n", "ok", "ended by its turn limit")
    assert_interpreted(harness, 2, "Fatal: a\nother\n", "failed", "mine exited with 2: Fatal: a")


def test_a_program_of_this_machine_is_mounted(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    (folder / "bin").mkdir(parents=True)
    harness = load_harness(write(tmp_path, changed(install={"path": str(folder), "entry": "bin/mine"})))
    assert not harness.is_installed(tmp_path)
    with pytest.raises(InstallError, match=r"correct install\.path and install\.entry"):
        harness.install(tmp_path)
    (folder / "bin" / "mine").touch()
    installed = harness.install(tmp_path)
    assert (installed.program, installed.mounts) == (folder / "bin" / "mine", (folder,))
    with pytest.raises(InstallError, match="is a program of this machine"):
        harness.install(tmp_path, "2")


def test_finds_definitions_of_the_user_by_name_only(tmp_path: Path) -> None:
    write_definition(tmp_path)
    assert "small-acp" in list_adapters(tmp_path)
    assert "small-acp" not in list_adapters()
    found = get_adapter("small-acp", tmp_path)
    assert isinstance(found, AcpHarness)
    assert found.install(tmp_path).mounts[0] == AGENT
    for name in ("../small-acp", str(tmp_path / "small-acp"), "small-acp.toml"):
        with pytest.raises(UnknownHarnessError):
            get_adapter(name, tmp_path)


def test_a_user_cannot_take_the_name_of_one_of_polars_harnesses(tmp_path: Path) -> None:
    write_definition(tmp_path, "codex")
    assert get_adapter("codex", tmp_path).info.package == "npm:@openai/codex"


def test_a_wrong_conformance_profile_is_named(tmp_path: Path) -> None:
    assert profile_of(load_harness(write(tmp_path, changed()))) == HarnessProfile("mine")
    with pytest.raises(HarnessError, match=r"mine: \[conformance\] tol"):
        profile_of(load_harness(write(tmp_path, changed(conformance={"tol": "bash"}))))


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_polars_own_definitions_keep_the_promises(name: str) -> None:
    adapter = get_adapter(name)
    info_is_complete(adapter)
    assert adapter.name == name
    assert profile_of(adapter).name == name
    whole = json.dumps([plan(adapter).argv, *map(dict, (plan(adapter).env, plan(adapter).files))])
    assert ("polar-tiny" in whole) != adapter.info.intercepted


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_and_new(path: Path) -> None:
    harness = load_harness(path)
    assert harness.name == path.stem
    assert harness.name not in list_adapters()
    try:
        plan(harness)
    except HarnessError as error:
        pytest.fail(str(error))


def test_there_are_five_examples() -> None:
    assert len(EXAMPLES) == 5


@pytest.mark.slow
async def test_the_agent_in_an_example_file_works(serve: Serve, store: Store, tmp_path: Path) -> None:
    harness = load_harness(next(path for path in EXAMPLES if path.stem == "python-loop"))
    replies = [real_runs.call("bash", '{"command": "rev a.txt > b.txt; echo seen"}'), "All done."]
    async with serve(ScriptedEngine(real_runs.play(*replies))) as gateway:
        ran = await real_runs.run(harness, harness.install(tmp_path), gateway, store, tmp_path, timeout=60)
    assert harness.interpret(ran.exit_code, ran.output) == ("ok", "finished")
    assert (ran.workdir / "b.txt").read_text() == "olleh\n"
    assert [call.edge for call in ran.calls] == ["root", "continues"]
    assert "seen" in ran.calls[1].messages[-1].decode()

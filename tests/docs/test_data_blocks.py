"""Every block that is no program is what Polar reads or prints; every setting named in the text exists.

Shell: test_commands.py. SQL: tests/store/test_documentation.py. Python: test_quick_commands.py and
tests/client/test_docs.py.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from polar_proxy.allowed_code import AllowedCode
from polar_proxy.config import Settings
from polar_proxy.rollouts.stopping import early_stop_check
from polar_proxy.tasks import Task, load_tasks
from polar_proxy.training.config import GrpoConfig
from tests.docs.blocks import BLOCKS, PAGES, ROOT, Block, of_language

TEXTS = "\n".join(page.read_text() for page in PAGES)
DRAWINGS = {
    "README.md: task -> sandbox [ agent ]": "how the parts are connected",
    "docs/guide/tasks.md: running-mean/": "a listing of examples/tasks/harbor",
    "docs/architecture.md: cli            parse": "the layers, which tests/test_layers.py holds",
}
ROW = {"task_id": "one", "instruction": "Do it."}
COMMAND = {"kind": "command", "argv": ["true"]}
CODE = AllowedCode(frozenset({"my_judges:judge"}))


def test_every_block_is_run_or_read() -> None:
    """A block in another language, or an unlabelled one that is not listed, needs a test."""
    read = {"sh", "indented", "sql", "python", "json", "toml"}
    others = [str(block) for block in BLOCKS if block.language not in read]
    known = (*DRAWINGS, "docs/guide/tasks.md: refused")
    assert [name for name in others if not name.startswith(known)] == []
    assert [name for name in known if not any(other.startswith(name) for other in others)] == []


SWE_BENCH_ROW = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "problem_statement": "p",
    "test_patch": "diff --git a/t.py b/t.py\n",
    "FAIL_TO_PASS": ["t.py::test"],
    "PASS_TO_PASS": [],
    "test_command": "pytest -rA",
}
HIDDEN_TESTS = {"test_command": ["python", "-m", "unittest"], "fail_to_pass": ["tests.test_one"]}


def rows_with(example: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a task file that contains an example."""
    if "defaults" in example:
        return [example, SWE_BENCH_ROW]
    if "kind" in example:
        return [{**ROW, "evaluator": example, **(HIDDEN_TESTS if example["kind"] == "tests" else {})}]
    return [{**ROW, **({"evaluator": COMMAND} if "evaluator" not in example else {}), **example}]


def load(file: Path, rows: list[dict[str, Any]]) -> tuple[list[Task], list[str]]:
    """Write a task file, and return its tasks and its refusals without the folder's name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks, refused = load_tasks(str(file), None, None, CODE)
    return tasks, [str(one) for one in refused or ()]


@pytest.mark.parametrize("block", of_language("json"), ids=str)
def test_json_examples_are_read(block: Block, tmp_path: Path) -> None:
    for example in re.split(r"\n(?=\{)", block.text.strip()):
        tasks, refused = load(tmp_path / "tasks.jsonl", rows_with(json.loads(example)))
        assert refused == []
        (task,) = tasks
        assert "stop_when" not in example or early_stop_check(task.metadata) is not None
        assert (
            "instance_id_1776" not in example or task.environment.image == "swebench/sweb.eval.x86_64.a_1776_b-1:latest"
        )


def test_refusal_is_printed_as_documented(tmp_path: Path) -> None:
    (block,) = [block for block in of_language("") if block.text.startswith("refused")]
    rows = [{**ROW, "task_id": f"task-{number}", "evaluator": COMMAND} for number in range(3)]
    rows.append({**ROW, "task_id": "sum-3", "evaluators": [{"kind": "command", "argvv": ["true"]}]})
    tasks, refused = load(tmp_path / "tasks.jsonl", rows)
    assert len(tasks) == 3
    assert [f"refused {one}" for one in refused] == [block.text.strip()]


def test_toml_of_a_harbor_task_is_read(tmp_path: Path) -> None:
    (block,) = [one for one in of_language("toml") if "engines" not in one.text]
    folder = tmp_path / "running-mean"
    shutil.copytree(ROOT / "examples" / "tasks" / "harbor" / "running-mean", folder)
    settings = folder / "task.toml"
    settings.write_text(settings.read_text().replace(block.text, ""))
    assert not load_tasks(str(folder), None, None, CODE)[0][0].environment.without_image
    settings.write_text(settings.read_text() + block.text)
    assert load_tasks(str(folder), None, None, CODE)[0][0].environment.without_image


def test_toml_of_the_settings_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [one for one in of_language("toml") if "engines" in one.text]
    monkeypatch.setenv("POLAR_HOME", str(tmp_path))
    (tmp_path / "polar.toml").write_text(block.text)
    settings = Settings()
    assert [route.engine for route in settings.routes] == list(settings.engines) == ["candidate"]


def named_settings() -> list[str]:
    return sorted(set(re.findall(r"`((?:[a-z_]+\.)?[a-z_]+ = [^`]+)`", TEXTS)) - {"max_async_steps = n"})


NO_SETTINGS = {"by_value = true", "train_timed_out = true", "loss_mask = 1", "parallel_tool_calls = false"}
"""Fields of tasks, rows and requests."""
TOGETHER_WITH = {"weight_transfer": {"device": "cuda"}}


@pytest.mark.parametrize("line", named_settings())
def test_settings_named_in_the_text_exist(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`polar.toml` or `[grpo]` accepts the line, and refuses it with another name."""
    if line in NO_SETTINGS:
        return
    monkeypatch.setenv("POLAR_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = tomllib.loads(line)
    (name,) = given
    if name in Settings.model_fields:
        Path("polar.toml").write_text(line)
        Settings()
        Path("polar.toml").write_text(f"x_{line}" if "." not in line else line.replace(".", ".x_", 1))
        with pytest.raises(ValidationError, match="x_"):
            Settings()
    else:
        given |= TOGETHER_WITH.get(name, {})
        GrpoConfig(**given)
        with pytest.raises(ValidationError, match="x_"):
            GrpoConfig(**{f"x_{name}": given[name]})


def test_environment_variables_named_in_the_text_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = set(re.findall(r"(POLAR_[A-Z]+__[A-Z_]+)", TEXTS))
    assert "POLAR_GATEWAY__PORT" in variables
    for variable in variables:
        section, name = variable.removeprefix("POLAR_").lower().split("__")
        assert name in type(getattr(Settings(), section)).model_fields, variable

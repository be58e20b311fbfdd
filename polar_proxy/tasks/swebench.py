"""Tasks from rows in SWE-bench's form: SWE-bench, SWE-Gym, SWE-rebench (1 and 2), R2E-Gym, and rows with a repository.

The data sets agree on `repo`, `base_commit`, `problem_statement`, `test_patch`, `FAIL_TO_PASS` and `PASS_TO_PASS`, and
differ in the fields that name the image of the repository and how its tests are run:

| data set | image | tests |
|---|---|---|
| SWE-bench, version 5 | `image` | `eval_script`, `log_parser`, `eval_type` |
| SWE-bench before version 5, SWE-Gym | none: set `image` in the file's defaults | `test_command`, or `COMMANDS[repo]` |
| SWE-rebench | `docker_image` | `install_config`: `test_cmd` (text; the test files are appended), `log_parser` |
| SWE-rebench V2 | `image_name` | `install_config`: `test_cmd` (list), `log_parser`; workspace /NAME-OF-REPO |
| R2E-Gym | `docker_image` | the image's `run_tests.sh`, compared with `expected_output_json` |

Polar's own fields, in a row or in the file's defaults: `repository` (path or URL of a git repository or bundle, instead
of an image), `test_command`, `parser`, `workdir`, `timeout_seconds`, `instruction`, and `without_image` (the task also
runs without the image, if it has a `repository`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_proxy.errors import BadTaskError
from polar_proxy.rewards import SwebenchEvaluator
from polar_proxy.rewards.base import patched_files
from polar_proxy.tasks.task import Environment, GitRepository, Row, Task, resolve_path

TIMEOUT_SECONDS = 1800.0
"""The benchmark's own time limit of one evaluation."""
_DATA_SUFFIXES = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
# The images of SWE-bench and SWE-Gym have their Python in a conda environment of this name.
_CONDA = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi\n"
_PYTEST = "pytest -rA {test_files}"
# (command, log parser) for SWE-bench's twelve repositories, because rows before version 5 do not contain them.
COMMANDS: dict[str, tuple[str, str]] = {
    "astropy/astropy": (_PYTEST, "pytest_v2"),
    "django/django": (
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {test_modules}",
        "django",
    ),
    "matplotlib/matplotlib": (_PYTEST, "pytest"),
    "mwaskom/seaborn": (_PYTEST, "pytest"),
    "pallets/flask": (_PYTEST, "pytest"),
    "psf/requests": (_PYTEST, "pytest_options"),
    "pydata/xarray": (_PYTEST, "pytest"),
    "pylint-dev/pylint": (_PYTEST, "pytest_options"),
    "pytest-dev/pytest": (_PYTEST, "pytest"),
    "scikit-learn/scikit-learn": (_PYTEST, "pytest_v2"),
    "sphinx-doc/sphinx": ("tox --current-env -epy39 -v -- {test_files}", "pytest_v2"),
    "sympy/sympy": ("bin/test -C --verbose {test_files}", "sympy"),
}
R2E_HIDDEN = (
    "/r2e_tests",
    *(
        f"/testbed/{name}"
        for name in (
            "r2e_tests",
            "run_tests.sh",
            "expected_test_output.json",
            "execution_result.json",
            "parsed_commit.json",
            "syn_issue.json",
            "modified_files.json",
            "modified_entities.json",
        )
    ),
)
"""Paths to hide from the agent in images of R2E-Gym: tests and answers."""


def is_swebench_row(row: Mapping[str, Any]) -> bool:
    return "problem_statement" in row and ("base_commit" in row or "commit_hash" in row)


def swebench_task(row: Row, position: int, folder: Path) -> Task:
    """Make a task from a row of a file in `folder`. A path in the row's field `repository` is relative to this folder.

    `position`: the task's seed. Raises `BadTaskError`.
    """
    r2e = "expected_output_json" in row
    task_id = _text(row, "instance_id", required=not r2e)
    repo = _text(row, "repo", required=False) or _text(row, "repo_name", required=r2e)
    if r2e and not task_id:
        task_id = f"{repo}-{_text(row, 'commit_hash')[:12]}"
    statement = _text(row, "problem_statement")
    evaluator = _r2e_evaluator(row) if r2e else _evaluator(row, repo)
    return Task(
        task_id=task_id,
        family="swebench",
        seed=position,
        instruction=_text(row, "instruction", required=False).replace("{problem_statement}", statement) or statement,
        fail_to_pass=() if r2e else named_tests(row, "FAIL_TO_PASS"),
        pass_to_pass=() if r2e else named_tests(row, "PASS_TO_PASS"),
        timeout_seconds=_number(row, "timeout_seconds", TIMEOUT_SECONDS),
        metadata={name: row[name] for name in ("repo", "base_commit", "version", "language") if row.get(name)},
        environment=_environment(row, repo, folder, r2e, task_id),
        evaluators=(evaluator,),
    )


def _environment(row: Row, repo: str, folder: Path, r2e: bool, task_id: str) -> Environment:
    image = next((str(row[name]) for name in ("image", "image_name", "docker_image") if row.get(name)), None)
    repository = _text(row, "repository", required=False)
    if image is None and not repository:
        raise BadTaskError(
            "has neither image nor repository: add one to each row, or begin the file with the line "
            '{"defaults": {"image": "registry/name.{instance_id}:latest"}}'
        )
    if image is not None:
        for name, value in (
            ("{instance_id}", task_id),
            ("{instance_id_1776}", task_id.replace("__", "_1776_")),
            ("{instance_id_s}", task_id.replace("__", "_s_")),
            ("{repo_name}", repo.rpartition("/")[2]),
        ):
            image = image.replace(name, value.lower())
    workdir = _text(row, "workdir", required=False)
    if not workdir and not repository:
        workdir = f"/{repo.rpartition('/')[2]}" if row.get("image_name") else "/testbed"
    commit = _text(row, "base_commit", required=not r2e)
    return Environment(
        image=image,
        without_image=bool(row.get("without_image")) and bool(repository),
        repository=GitRepository(resolve_path(repository, folder), commit) if repository else None,
        # R2E-Gym's rows name the commit of the fix; their images hold the commit before it.
        base_commit=None if r2e or repository else commit,
        workdir=workdir or None,
        hide=R2E_HIDDEN if r2e else (),
    )


def _evaluator(row: Row, repo: str) -> SwebenchEvaluator:
    test_patch = _text(row, "test_patch", required=not row.get("eval_script"))
    config = row.get("install_config") or {}
    if not isinstance(config, dict):
        raise BadTaskError("install_config: must be an object")
    given = row.get("test_command")
    known_command, known_parser = COMMANDS.get(repo, ("", ""))
    if given is None and (listed := config.get("test_cmd")):
        # Version 1 appends the test files to its command, version 2 includes them.
        given = listed if isinstance(listed, list) else f"{listed} {{test_files}}"
    given = given or known_command
    command = "\n".join(str(line) for line in given) if isinstance(given, list) else str(given)
    if not command and not row.get("eval_script"):
        raise BadTaskError(
            f"has no test_command, eval_script or install_config.test_cmd, and Polar has no known command for {repo!r}"
        )
    parser = row.get("parser") or row.get("log_parser") or config.get("log_parser") or known_parser or "pytest"
    image = not row.get("repository")
    return SwebenchEvaluator(
        test_patch=test_patch,
        command=(_CONDA if image else "") + _fill_in_tests(command, test_patch) if command else "",
        eval_script=_text(row, "eval_script", required=False) or None,
        parser=str(parser),
        fail_only=row.get("eval_type") == "fail_only",
    )


def _r2e_evaluator(row: Row) -> SwebenchEvaluator:
    expected = row["expected_output_json"]
    try:
        table = json.loads(expected) if isinstance(expected, str) else expected
        verdicts = {str(test).split(" - ")[0]: str(verdict) for test, verdict in table.items()}
    except (json.JSONDecodeError, AttributeError):
        raise BadTaskError("expected_output_json: must be a JSON object that gives each test a verdict") from None
    if not verdicts:
        raise BadTaskError("expected_output_json: must name at least one test; without a test, any result would pass")
    # The image keeps the tests outside the repository, but its script looks for them inside.
    command = "[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests\nbash run_tests.sh"
    return SwebenchEvaluator(command=command, parser="r2e", expected=verdicts)


def _fill_in_tests(command: str, test_patch: str) -> str:
    files = [path for path in patched_files(test_patch) if not path.endswith(_DATA_SUFFIXES)]
    modules = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]
    return command.replace("{test_files}", shlex.join(files)).replace("{test_modules}", shlex.join(modules))


def _text(row: Row, name: str, *, required: bool = True) -> str:
    value: Any = row.get(name)
    if value is None or value == "":
        if required:
            raise BadTaskError(f"{name}: is missing")
        return ""
    if not isinstance(value, str):
        raise BadTaskError(f"{name}: must be text")
    return value


def _number(row: Row, name: str, default: float) -> float:
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadTaskError(f"{name}: must be a number")
    return float(value)


def named_tests(row: Row, name: str) -> tuple[str, ...]:
    """Read FAIL_TO_PASS or PASS_TO_PASS: a list in some data sets, the JSON text of a list in others.

    Raises `BadTaskError`.
    """
    if name not in row:
        raise BadTaskError(f"{name}: is missing")
    value: Any = row[name]
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except json.JSONDecodeError:
            raise BadTaskError(f"{name}: is text, but not a JSON list: {value[:60]!r}") from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadTaskError(f"{name}: must be a list of test names")
    return tuple(value)

"""Which paths a patch touches, and which parts of it never reach an evaluator."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from polar_proxy.rewards import CommandEvaluator, EvaluationInput, Score
from polar_proxy.rewards.base import PatchDoesNotApplyError, SandboxFactory
from polar_proxy.rewards.patches import changed_paths, patterns_to_leave_out
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.tasks import get_source
from tests.rewards.conftest import EXAMPLES, ScriptRunner, needs

pytestmark = pytest.mark.slow

FAMILY = get_source("swe-task").task(0)
HIDDEN = sorted(FAMILY.hidden_files)[0]
STEM = HIDDEN.removesuffix(".py")
GREET = get_source(str(EXAMPLES / "jsonl" / "tasks.jsonl")).task(0)


def sandboxes() -> SandboxFactory:
    task_sandboxes = TaskSandboxes("process")
    return lambda: task_sandboxes.fresh(FAMILY, {})


def diff(folder: Path, script: str) -> bytes:
    """Return what the script changes, as a git diff."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["sh", "-ec", script, "sh"], cwd=folder, check=True)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "-Af"], cwd=folder, check=True)
    return subprocess.run(
        ["git", "diff", "--cached", "--binary", "4b825dc642cb6eb9a060e54bf8d69288fbee4904"],
        cwd=folder,
        capture_output=True,
        check=True,
    ).stdout


async def left_out(patch: bytes) -> set[str]:
    patterns = await patterns_to_leave_out(EvaluationInput(FAMILY, patch), sandboxes())
    return set(await changed_paths(patch)) - set(await changed_paths(patch, patterns))


async def test_paths_come_from_git_and_not_from_the_text(tmp_path: Path) -> None:
    script = r"""mkdir -p 'a b/ü'; echo x >'a b/ü/c'; echo x >"$(printf 'n\nl')"; printf '\0' >bin
    echo x >"$(printf '\377')"; printf 'diff --git a/tests/t.py b/tests/t.py\n' >text; ln -s / link; : >empty"""
    names = {"a b/ü/c", "n\nl", "bin", "\\xff", "text", "link", "empty"}
    patch = diff(tmp_path, script)
    assert set(await changed_paths(patch)) == names
    # Without the header, whose names git would compare, it takes off the first folder.
    bare = b"--- w/tests/x.py\n+++ w/tests/x.py\n@@ -0,0 +1 @@\n+x\n"
    assert await changed_paths(bare) == ("tests/x.py",)
    assert await changed_paths(b"\n") == ()
    with pytest.raises(PatchDoesNotApplyError):
        await changed_paths(b"no patch")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"mkdir -p {STEM}; echo x >{STEM}/__init__.py; mkdir src; echo x >src/tests.py", {f"{STEM}/__init__.py"}),
        ("mkdir tests; echo x >tests/conftest.py; echo x >conftest.py", {"tests/conftest.py", "conftest.py"}),
        ("ln -s / tests", {"tests"}),
        (f"mkdir -p {HIDDEN}; echo x >{HIDDEN}/x; ln -s . loop", {f"{HIDDEN}/x"}),
        (
            "mkdir -p a/__pycache__; echo x >a/b.pyc; echo x >a/__pycache__/y; echo x >a/b.py",
            {"a/b.pyc", "a/__pycache__/y"},
        ),
        (
            "mkdir a; for f in x.cpython-311-x86_64-linux-gnu.so x.so y.so x.abi3.so x.py; do echo x >a/$f; done",
            {"a/x.cpython-311-x86_64-linux-gnu.so", "a/x.so", "a/x.abi3.so"},
        ),
        ("mkdir '[*]'; echo x >'[*]/x.so'; echo x >'[*]/x.py'; mkdir a; echo x >a/x.so", {"[*]/x.so"}),
        ("echo x >x.py; mkdir lib; echo x >lib/x.so", set()),
    ],
)
async def test_leaves_out_what_takes_the_place_of_tests_and_sources(
    tmp_path: Path, script: str, expected: set[str]
) -> None:
    assert await left_out(diff(tmp_path / "work", script)) == expected


@pytest.mark.parametrize(
    ("hidden", "folder", "others"),
    [
        ("testing/test_x.py", {"testing/help.py", "testing/conftest.py", "conftest.py"}, {"src/testing.py"}),
        ("pkg/unit_tests/a/test_x.py", {"pkg/unit_tests/help.py", "pkg/conftest.py"}, {"src/conftest.py"}),
        ("checks/a/test_x.py", {"conftest.py", "checks/conftest.py", "checks/a/conftest.py"}, {"checks/a/help.py"}),
        ("contest/test_x.py", {"contest/conftest.py"}, {"contest/help.py"}),
        ("tests/data.txt", {"tests/x"}, {"conftest.py"}),
    ],
)
async def test_helpers_of_hidden_tests_are_left_out(
    tmp_path: Path, hidden: str, folder: set[str], others: set[str]
) -> None:
    files = " ".join(sorted(folder | others))
    patch = diff(tmp_path / "work", f"for f in {files}; do mkdir -p $(dirname $f); echo x >$f; done")
    work = EvaluationInput(replace(FAMILY, hidden_files={hidden: ""}), patch)
    kept = await changed_paths(patch, await patterns_to_leave_out(work, sandboxes()))
    assert set(kept) == others


async def test_an_extension_module_beside_a_source_of_the_base_is_left_out(tmp_path: Path) -> None:
    source = next(name for name in sorted(FAMILY.files) if name.count("/") == 1 and name.endswith(".py"))
    module = source.removesuffix(".py") + ".so"
    assert await left_out(diff(tmp_path, f"mkdir -p $(dirname {module}); echo x >{module}")) == {module}


@pytest.mark.parametrize("kind", [needs("process"), needs("bubblewrap"), needs("docker")])
@pytest.mark.parametrize(
    "script",
    [
        "rm -rf tests; echo x >tests",
        "rm -rf tests; ln -s /proc tests",
        "rm -rf tests; ln -s tests tests",
        f"rm -rf {HIDDEN}; mkdir -p {HIDDEN}/x; echo x >{HIDDEN}/x/y",
        f"rm -f {HIDDEN}; mkdir -p tests; ln -s /proc/sysrq-trigger {HIDDEN}",
        f"rm -f {HIDDEN}; mkdir -p tests; ln -s $(basename {HIDDEN}) {HIDDEN}",
    ],
    ids=["file-for-folder", "link-for-folder", "loop-for-folder", "folder-for-test", "link-for-test", "loop-for-test"],
)
async def test_what_is_at_the_place_of_hidden_tests_scores_0(run_script: ScriptRunner, kind: str, script: str) -> None:
    score = await run_script(FAMILY, script, kind)
    assert score.reward == 0.0
    assert score.detail["left_out"]


@pytest.mark.parametrize("kind", [needs("process"), needs("bubblewrap")])
async def test_a_package_beside_a_hidden_test_does_not_run_instead_of_it(run_script: ScriptRunner, kind: str) -> None:
    forged = ("import unittest\nclass TestGreet(unittest.TestCase):\n  def test_name(self):\n    pass\n").replace(
        "\n", "\\n"
    )
    score = await run_script(GREET, f"mkdir test_greet; printf '{forged}' >test_greet/__init__.py", kind)
    assert (score.reward, score.detail["left_out"]) == (0.0, ["test_greet/__init__.py"])


async def test_files_of_a_command_are_hidden_files(run_script: ScriptRunner) -> None:
    own = replace(
        GREET, hidden_files={}, evaluators=(CommandEvaluator(("sh", "a/judge.sh"), files={"a/judge.sh": "true"}),)
    )
    score: Score = await run_script(own, "ln -s / a")
    assert (score.reward, score.detail["left_out"]) == (1.0, ["a"])

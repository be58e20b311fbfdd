"""Code that the user names on the command line is found in the current folder; code named by data is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from polar_proxy.allowed_code import AllowedCode
from polar_proxy.cli.common import import_named_code
from polar_proxy.errors import BadTaskError, UsageError
from tests.cli.process import POLAR, environment


def test_a_named_module_is_found_in_the_current_folder_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "named_here.py").write_text("import helper_here\n\nvalue = helper_here.value\n")
    (tmp_path / "helper_here.py").write_text("value = 5\n")
    (tmp_path / "other_here.py").write_text("value = 6\n")
    before = list(sys.path)
    import_named_code("named_here:value", None, "swe-task", "shell:named_here", "json:dumps")
    assert sys.path == before
    code = AllowedCode(frozenset({"named_here:value", "other_here:value"}))
    assert code.load("named_here:value") == 5
    with pytest.raises(BadTaskError, match="cannot load other_here:value"):
        code.load("other_here:value")


def test_an_error_in_a_named_module_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "unreadable_here.py").write_text("def broken(:\n")
    before = list(sys.path)
    with pytest.raises(UsageError, match=r"Cannot load unreadable_here:x from .*: SyntaxError"):
        import_named_code("unreadable_here:x")
    assert sys.path == before


@pytest.mark.slow
def test_tasks_of_the_current_folder_are_submitted(tmp_path: Path) -> None:
    """Run by the installed program, because the current folder is not on its module path."""
    (tmp_path / "my_tasks.py").write_text(
        "def tasks():\n"
        "    evaluator = {'kind': 'command', 'argv': ['true']}\n"
        "    return [{'task_id': 'mine', 'instruction': 'Do it.', 'evaluator': evaluator}]\n"
    )
    done = subprocess.run(
        [POLAR, "submit", "my_tasks:tasks", "--harness", "shell:true", "--json"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout)["groups"] == 1

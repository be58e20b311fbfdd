"""Runs a task's own command. If the command uses pytest, a plugin watches it (`test_runner/pytest_guard.py`)."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from polar_proxy.rewards.base import CommandResult, Workspace
from polar_proxy.rewards.isolated import runner_parts
from polar_proxy.rewards.log_parsers import LogParser, Verdict

_REPORT_LIMIT = 8 << 20
_SETTINGS = {"pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "conftest.py", "sitecustomize.py"}
_IMPORTED_FIRST = {*sys.stdlib_module_names, "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"}
"""Names of the modules that pytest imports before the plugin. Under ``python -m``, a module of such a name in the
workspace is imported instead of the real one."""
_VARIABLES = """\
export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}" PYTEST_ADDOPTS="-p $1${PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}"
export PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1 PYTHONPYCACHEPREFIX="$0/bytecode"
shift
exec "$@"
"""


@dataclass(frozen=True)
class GuardedResult:
    """Output of a command, with the failed tests and signs of forgery that the plugin saw."""

    result: CommandResult
    failed: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def log(self) -> bytes:
        return self.result.stdout + self.result.stderr

    def correct(self, verdicts: Mapping[str, Verdict], parse: LogParser) -> dict[str, Verdict]:
        """Return the log's verdicts, but with `failed` for each test that the plugin saw fail."""
        failed = parse("short test summary info\n" + "".join(f"FAILED {test}\n" for test in self.failed))
        return {**verdicts, **failed}


async def run_guarded(
    workspace: Workspace,
    argv: Sequence[str],
    text: str,
    changed_paths: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    seconds: float,
) -> GuardedResult:
    """Run a command. If it uses pytest, give pytest the guard's plugin, and end the programs that the command leaves
    running.

    `text`: the command as it was written, or the text of its scripts. If the text names pytest, the command counts
    as one that uses pytest.
    """
    if "pytest" not in text and "py.test" not in text:
        return GuardedResult(await workspace.exec(argv, env=env, timeout=seconds))
    name = f"plugin_{secrets.token_hex(8)}"
    folder = f"{workspace.home}/{secrets.token_hex(8)}"
    report = f"{folder}/{secrets.token_hex(8)}"
    await workspace.write(f"{folder}/{name}.py", _plugin(report, changed_paths).encode())
    result = await workspace.exec(("sh", "-c", _VARIABLES, folder, name, *argv), env=env, timeout=seconds)
    await workspace.kill_all()
    try:
        events = [json.loads(line) for line in (await workspace.read(report, _REPORT_LIMIT)).splitlines()]
    except FileNotFoundError:
        # No pytest ran, or not with this plugin: suspicious only if the patch changes how pytest starts.
        changed = any(map(_changes_start, changed_paths))
        return GuardedResult(result, (), ("canary_passed",) if changed else ())
    ended = {event["ended"]: event for event in events if "ended" in event}
    complete = all(event["started"] in ended for event in events if "started" in event)
    signs = {sign for event in ended.values() for sign in event["signs"]}
    if not complete and not result.timed_out:
        signs.add("canary_passed")
    failed = {test for event in ended.values() for test in event["failed"]}
    return GuardedResult(result, tuple(sorted(failed)), tuple(sorted(signs)))


def _changes_start(path: str) -> bool:
    """Return whether a patch that changes this file could keep pytest from loading the plugin."""
    top = path.partition("/")[0].removesuffix(".py")
    return PurePosixPath(path).name in _SETTINGS or path.endswith(".pth") or top in _IMPORTED_FIRST - {"test"}


def _plugin(report: str, changed_paths: Sequence[str]) -> str:
    """Return the plugin's source. With a Python before 3.8, the tests run without the plugin's checks."""
    source = runner_parts(("canaries", "integrity", "pytest_guard"))
    guard = f'sys.modules["polar_test_runner.pytest_guard"].PytestGuard({report!r}, {list(changed_paths)!r})'
    lines = (
        "import sys",
        "if sys.version_info >= (3, 8):",
        f"    exec({source!r})",
        f"    guard = {guard}",
        "    def pytest_configure(config):",
        "        guard.start(config)",
        "else:",
        f"    with open({report!r}, 'a') as file:",
        "        file.write('{}\\n')",
    )
    return "\n".join(lines) + "\n"

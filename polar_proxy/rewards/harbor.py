"""The `harbor` evaluator: the task's own ``tests/test.sh`` and the reward file that it writes.

https://www.harborframework.com/docs/tasks: tests appear as /tests, and the script writes
``/logs/verifier/reward.json`` (a number, or an object of numbers) or ``reward.txt`` (a number). Polar differs in
two points: the script runs in a fresh sandbox to which the agent's changes below the workspace were applied, not in the
agent's own container; and if there are both files, there is no reward.

The script runs the agent's code as the same user. Therefore the agent's code can still write the reward file, after the
script has written it or in place of the script.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from polar_proxy.errors import BadTaskError
from polar_proxy.rewards.base import (
    CommandResult,
    EvaluatedTask,
    EvaluationInput,
    Evaluator,
    EvaluatorError,
    SandboxFactory,
    Score,
    Workspace,
    patched_workspace,
)
from polar_proxy.rewards.guarded import run_guarded
from polar_proxy.types import Json

LOGS = "/logs"
TESTS = "/tests"
VERIFIER = f"{LOGS}/verifier"
_REWARD_FILE_LIMIT = 1 << 20


@dataclass(frozen=True)
class HarborEvaluator(Evaluator):
    """Runs ``tests/test.sh`` on the patched workspace and reads the reward that it writes."""

    tests: str
    """Folder on this machine; it appears as /tests."""
    digest: str
    """`files_digest` of `tests` when the task was read: tests that changed since then are not run."""
    kind: Literal["harbor"] = "harbor"
    weight: float = 1.0
    env: Mapping[str, str] = field(default_factory=dict)
    reward_key: str = "reward"
    """If reward.json has several numbers, the name of the number to use as the reward. All numbers are recorded."""

    def check(self, task: EvaluatedTask) -> None:
        if not os.path.isdir(self.tests):
            raise BadTaskError(f"{self.tests}: there is no such folder")

    @property
    def host_paths(self) -> Iterable[str]:
        return (self.tests,)

    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        """Run the script. There is no reward if the script writes none, runs out of time or is killed."""
        files = folder_files(Path(self.tests))
        if files_digest(files) != self.digest:
            raise EvaluatorError(f"{self.tests} has changed since its task was read; run the task again")
        programs = [f"{TESTS}/{name}" for name, (_, executable) in files.items() if executable]
        seconds = work.task.timeout_seconds
        async with patched_workspace(sandboxes, work) as workspace:
            await workspace.write_tree({name: data for name, (data, _) in files.items()}, root=TESTS)
            await workspace.exec(("chmod", "+x", f"{TESTS}/test.sh", *programs), timeout=60)
            await workspace.exec(("mkdir", "-p", VERIFIER), timeout=60)
            command = ("sh", "-c", f"exec {TESTS}/test.sh 2>&1")
            text = " ".join(data.decode(errors="replace") for name, (data, _) in files.items() if name.endswith(".sh"))
            ran = await run_guarded(workspace, command, text, work.changed_paths, env=self.env, seconds=seconds)
            result, log = ran.result, ran.log
            detail: Json = {"patch_applied": True, "exit_code": result.exit_code, "timed_out": result.timed_out}
            try:
                rewards = await _read_rewards(workspace, result, seconds)
                value = _select_reward(rewards, self.reward_key)
            except ValueError as error:
                return Score(None, {**detail, "no_reward": str(error)}, log)
        if ran.signs:  # the program under test changed its tests' process
            value = min(value, 0.0)
        return Score(value, {**detail, "solved": value >= 1, "rewards": rewards}, log, signs=ran.signs)


async def _read_rewards(workspace: Workspace, result: CommandResult, seconds: float) -> Json:
    """Return the numbers of the reward file by name.

    Raises ValueError if there is no valid reward file, or if the tests timed out or were killed.

    The sandbox's processes are ended first, so that no program of the agent can still change the files. The files are
    read from outside of the sandbox, because the agent may have replaced programs inside, such as `cat`.
    """
    if result.timed_out:
        raise ValueError(f"tests/test.sh did not end within {seconds:g} s")
    if result.exit_code >= 128:
        signal = result.exit_code - 128
        raise ValueError(f"tests/test.sh was killed by signal {signal}, so its reward file is not trusted")
    try:
        tree = await workspace.read_tree(LOGS)
    except OSError as error:
        raise ValueError(f"{LOGS} cannot be read: {error}") from error
    try:
        found = [name for name in ("reward.json", "reward.txt") if f"verifier/{name}".encode() in tree.entries]
        if not found:
            raise ValueError(f"tests/test.sh wrote neither {VERIFIER}/reward.json nor reward.txt")
        if len(found) > 1:
            raise ValueError(
                "both reward.json and reward.txt exist, so one of them may not be from tests/test.sh: the script must "
                "write only one"
            )
        path = f"verifier/{found[0]}".encode()
        entry = tree.entries[path]
        if not stat.S_ISREG(entry.mode) or entry.size > _REWARD_FILE_LIMIT:
            raise ValueError(f"{found[0]} is not a regular file, or is larger than {_REWARD_FILE_LIMIT >> 20} MiB")
        data = await asyncio.to_thread(tree.read, path)
    finally:
        tree.close()
    try:
        return parse_reward(found[0], data.decode())
    except ValueError as error:  # includes UnicodeDecodeError
        raise ValueError(f"{found[0]}: {error}") from error


def parse_reward(name: str, text: str) -> Json:
    """Parse a reward file into numbers by name; a bare number is called ``reward``. Raises ValueError unless all values
    are finite numbers."""
    if not text.strip():
        raise ValueError("is empty")
    value = json.loads(text) if name.endswith(".json") else float(text)
    values = value if isinstance(value, dict) else {"reward": value}
    for key, number in values.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{key} is {number!r}, which is not a finite number")
    return {str(key): float(number) for key, number in values.items()}


def _select_reward(rewards: Json, key: str) -> float:
    if key in rewards:
        return float(rewards[key])
    if len(rewards) == 1:
        return float(next(iter(rewards.values())))
    raise ValueError(f"reward.json has no {key}; it has: {', '.join(sorted(rewards)) or 'no numbers'}")


def folder_files(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Return relative path -> (content, whether the file is executable) for every file below `folder`.

    Raises `BadTaskError` for links, which could lead to any file of this machine."""
    found: dict[str, tuple[bytes, bool]] = {}
    if folder.is_symlink():
        raise BadTaskError(f"{folder.name}: is a link; a task may hold only files and folders")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise BadTaskError(f"{folder.name}/{name}: is a link; a task may hold only files and folders")
        if path.is_file() and "__pycache__" not in path.parts:
            found[name] = (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found


def files_digest(files: Mapping[str, tuple[bytes, bool]]) -> str:
    """Return the SHA-256 over the names, modes and contents of files from `folder_files`."""
    digest = hashlib.sha256()
    for name, (data, executable) in files.items():
        digest.update(f"{len(name.encode())}:{name}:{int(executable)}:{len(data)}:".encode() + data)
    return digest.hexdigest()

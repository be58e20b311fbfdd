"""The `harbor` evaluator: the task's own ``tests/test.sh`` and the reward file that it writes.

https://www.harborframework.com/docs/tasks: tests appear as /tests, the script writes ``/logs/verifier/reward.json`` (a
number, or an object of numbers; it comes first) or ``reward.txt`` (a number). What is other here: the script runs in a
fresh sandbox with the agent's changes below the workspace, not in the agent's own container.
"""

from __future__ import annotations

import json
import math
import posixpath
from pathlib import Path

from polar_proxy.rewards.base import (
    EvaluationInput,
    EvaluatorError,
    SandboxFactory,
    Score,
    Workspace,
    apply_patch,
    patch_does_not_apply,
)
from polar_proxy.tasks.evaluation import HarborEvaluator
from polar_proxy.tasks.harbor import LOGS, TESTS, folder_digest, folder_files
from polar_proxy.types import Json

VERIFIER = f"{LOGS}/verifier"
_LIMIT = 1 << 20


async def harbor(evaluation: HarborEvaluator, attempt: EvaluationInput, fresh: SandboxFactory) -> Score:
    """Run test.sh on the patched workspace. No reward where it writes none, or runs out of its time."""
    folder = Path(evaluation.tests)
    if folder_digest(folder) != evaluation.digest:
        raise EvaluatorError(f"{folder} has changed since its task was read; run the task again")
    files = folder_files(folder)
    async with fresh() as workspace:
        if (why := await apply_patch(attempt.patch, workspace)) is not None:
            return patch_does_not_apply(why)
        await workspace.write_tree({name: data for name, (data, _) in files.items()}, root=TESTS)
        programs = [f"{TESTS}/{name}" for name, (_, program) in files.items() if program]
        await workspace.exec(("chmod", "+x", f"{TESTS}/test.sh", *programs), timeout=60)
        await workspace.exec(("mkdir", "-p", VERIFIER), timeout=60)
        command = ("sh", "-c", f"exec {TESTS}/test.sh 2>&1")
        result = await workspace.exec(command, env=evaluation.env, timeout=attempt.task.timeout_seconds)
        # What the agent's programs left running must not write the reward after the script did.
        await workspace.kill_all()
        rewards, why_none = await _rewards(workspace)
    log = result.stdout + result.stderr
    detail: Json = {"patch_applied": True, "exit_code": result.exit_code, "timed_out": result.timed_out}
    if result.timed_out:
        why_none = f"tests/test.sh did not end within {attempt.task.timeout_seconds:g} s"
    elif result.exit_code >= 128:
        why_none = f"tests/test.sh was ended by signal {result.exit_code - 128}, so its reward file is not believed"
    if why_none is None:
        value, why_none = _chosen(rewards, evaluation.reward_key)
    else:
        value = None
    if why_none is not None:
        return Score(None, {**detail, "no_reward": why_none}, log)
    return Score(value, {**detail, "solved": value is not None and value >= 1, "rewards": rewards}, log)


async def _rewards(workspace: Workspace) -> tuple[Json, str | None]:
    """The numbers of the reward file by name, or the reason why there are none."""
    for name in ("reward.json", "reward.txt"):
        try:
            text = (await workspace.read(posixpath.join(VERIFIER, name), _LIMIT)).decode()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            return {}, f"{name} cannot be read: {error}"
        try:
            return parse_reward(name, text), None
        except ValueError as error:
            return {}, f"{name}: {error}"
    return {}, f"tests/test.sh wrote neither {VERIFIER}/reward.json nor reward.txt"


def parse_reward(name: str, text: str) -> Json:
    """The numbers in a reward file; a bare number is called ``reward``. Raises ValueError."""
    if not text.strip():
        raise ValueError("is empty")
    value = json.loads(text) if name.endswith(".json") else float(text)
    values = value if isinstance(value, dict) else {"reward": value}
    for key, number in values.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{key} is {number!r}, which is no finite number")
    return {str(key): float(number) for key, number in values.items()}


def _chosen(rewards: Json, key: str) -> tuple[float | None, str | None]:
    if key in rewards:
        return float(rewards[key]), None
    if len(rewards) == 1:
        return float(next(iter(rewards.values()))), None
    return None, f"reward.json names {', '.join(sorted(rewards)) or 'nothing'}, and none is called {key}"

"""Runs a shell script as the agent in a real sandbox and scores it with the task's evaluators."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.allowed_code import NO_CODE
from polar_proxy.rewards import EvaluationInput, Score
from polar_proxy.rollouts.agent_patch import read_patch, save_base
from polar_proxy.rollouts.scoring import score_work
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.rollouts.workspace import prepare_workspace
from polar_proxy.tasks import Task
from sandboxes import images
from sandboxes.base import Mount, SandboxKind
from sandboxes.choice import available, open_sandbox

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"
ScriptRunner = Callable[..., Awaitable[Score]]
AVAILABLE = {item.kind: item for item in available()}


def needs(kind: SandboxKind) -> Any:
    """Return the kind as a test parameter that is skipped if there is no such sandbox, with the reason."""
    item = AVAILABLE[kind]
    skip = pytest.mark.skipif(not item.ok, reason=f"{kind}: {item.why_not}. {item.how_to_get}")
    return pytest.param(kind, marks=[skip, pytest.mark.full] if kind == "docker" else [skip])


def with_local_image(folder: Path, copy: Path) -> Path:
    """Copy a Harbor folder and base its Dockerfile on the default sandbox image, so that no registry is needed."""
    shutil.copytree(folder, copy)
    dockerfile = copy / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("python:3.12-slim", images.tag()))
    return copy


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the register of sandboxes and the bundles below the temporary directory."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def run_script() -> ScriptRunner:
    """Return a function that runs a script on a task and returns its score; the script may read the folder `mount`."""

    async def run(task: Task, script: str, kind: SandboxKind = "process", *, mount: Path | None = None) -> Score:
        task_sandboxes = TaskSandboxes(kind)
        mounts = (Mount(mount, str(mount)),) if mount else ()
        spec = await task_sandboxes.spec(task, memory_mb=1024, labels={}, mounts=mounts)
        async with await open_sandbox(kind, spec) as sandbox:
            await prepare_workspace(task, sandbox, await task_sandboxes.bundle(task))
            base = await save_base(sandbox, snapshot=task.environment.snapshot)
            done = await sandbox.exec(("sh", "-c", script), timeout=60)
            assert done.exit_code == 0, done.stderr
            patch, _ = await read_patch(sandbox, base)
        return await score_work(
            EvaluationInput(task, patch, 0, code=NO_CODE.including(*task.code_names)),
            lambda: task_sandboxes.fresh(task, {}),
        )

    return run

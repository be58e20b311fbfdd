"""The agent's repository contains the history up to the base commit, and nothing later."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.rollouts.workspace import WorkspaceError, git, prepare_workspace, truncate_git_history
from polar_proxy.tasks import Environment, GitRepository, Task, get_source
from sandboxes.base import Sandbox
from sandboxes.choice import open_sandbox
from tests.rewards.conftest import EXAMPLES, needs

pytestmark = pytest.mark.slow

ROWS = EXAMPLES / "swebench"
IDENTITY = ("-c", "user.name=x", "-c", "user.email=x@example.org")


def run(folder: Path, *arguments: str) -> str:
    command = ["git", *IDENTITY, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


async def visible_history(sandbox: Sandbox) -> dict[str, str]:
    """Return everything that the repository shows from inside the sandbox."""
    questions = {
        "log": ("log", "--all", "--format=%s"),
        "refs": ("for-each-ref", "--format=%(refname)"),
        "remotes": ("remote", "-v"),
        "reflog": ("reflog", "--all"),
        "unreachable": ("fsck", "--unreachable", "--no-reflogs", "--no-progress"),
        "status": ("status", "--porcelain"),
        "config": ("config", "--local", "--list"),
    }
    return {name: (await git(sandbox, *words)).decode().strip() for name, words in questions.items()}


def assert_nothing_later(seen: dict[str, str], log: list[str]) -> None:
    assert seen["log"].splitlines() == log
    assert seen["refs"] == "refs/heads/main"
    assert (seen["remotes"], seen["reflog"], seen["unreachable"], seen["status"]) == ("", "", "", "")
    assert "secret" not in seen["config"]


@pytest.mark.parametrize("kind", [needs("process"), needs("bubblewrap")])
async def test_a_bundled_repository_ends_at_its_base_commit(kind: str) -> None:
    task = get_source(str(ROWS / "rows.jsonl")).task(0)
    task_sandboxes = TaskSandboxes(kind)  # type: ignore[arg-type]
    spec = await task_sandboxes.spec(task, memory_mb=512, labels={})
    bundle = await task_sandboxes.bundle(task)
    assert bundle == await task_sandboxes.bundle(task)
    async with await open_sandbox(task_sandboxes.kind, spec) as sandbox:
        await prepare_workspace(task, sandbox, bundle)
        base = (await git(sandbox, "rev-parse", "HEAD")).decode().strip()
        assert task.environment.repository is not None
        assert base == task.environment.repository.commit
        assert_nothing_later(await visible_history(sandbox), ["Count items"])
        for path in (".git/FETCH_HEAD", ".git/ORIG_HEAD"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read(path)
        # The bundle, which the sandbox can read, contains nothing later either.
        refs = await sandbox.exec(("git", "bundle", "list-heads", str(bundle)))
        assert refs.stdout.decode().split() == [base, "refs/heads/base"]


async def test_reads_a_folder_or_url_without_changing_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    run(tmp_path, "clone", "-q", str(ROWS / "tally.bundle"), str(source))
    before = run(source, "for-each-ref")
    task = Task("x", "x", 0, "x", environment=Environment(repository=GitRepository(str(source), "v1.0~1")))
    task_sandboxes = TaskSandboxes("process")
    async with await open_sandbox("process") as sandbox:
        await prepare_workspace(task, sandbox, await task_sandboxes.bundle(task))
        base = (await git(sandbox, "rev-parse", "HEAD")).decode().strip()
        assert base == run(source, "rev-parse", "v1.0~1")
        assert_nothing_later(
            await visible_history(sandbox), ["Shares of the whole", "most_common: most frequent first", "Count items"]
        )
    assert run(source, "for-each-ref") == before
    # A URL, here of this machine.
    remote = Task("x", "x", 0, "x", environment=Environment(repository=GitRepository(source.as_uri(), base)))
    async with await open_sandbox("process") as sandbox:
        await prepare_workspace(remote, sandbox, await task_sandboxes.bundle(remote))
        assert (await git(sandbox, "rev-parse", "HEAD")).decode().strip() == base
        assert len((await visible_history(sandbox))["log"].splitlines()) == 3
    missing = Task("x", "x", 0, "x", environment=Environment(repository=GitRepository(str(source), "0" * 40)))
    with pytest.raises(WorkspaceError, match="cannot be read"):
        await task_sandboxes.bundle(missing)


@pytest.mark.parametrize("source", ["--upload-pack=touch {};://", "ext::touch {} :// x"])
async def test_a_repository_never_names_a_command_for_git(tmp_path: Path, source: str) -> None:
    """Rows are checked when they are read; git itself takes the source as nothing but a source as well."""
    touched = tmp_path / "touched"
    run(tmp_path, "init", "-q", "repository")
    repository = GitRepository(source.format(touched), str(tmp_path / "repository"))
    with pytest.raises(WorkspaceError, match="cannot be read"):
        await TaskSandboxes("process").bundle(Task("x", "x", 0, "x", environment=Environment(repository=repository)))
    assert not touched.exists()


@pytest.mark.parametrize("detached", [False, True])
async def test_truncates_the_history_of_a_clone_in_an_image(tmp_path: Path, detached: bool) -> None:
    """The image holds a clone with its full history, reset to the base commit and changed a little."""
    async with await open_sandbox("process") as sandbox:
        place = Path(sandbox.workdir)
        run(place, "clone", "-q", str(ROWS / "tally.bundle"), ".")
        fix = run(place, "rev-parse", "v1.0~2")
        base = run(place, "rev-parse", f"{fix}~1")
        (place / "secret.txt").write_text("stashed")
        run(place, "stash", "-q", "-u")
        run(place, "notes", "add", "-m", "a note", fix)
        run(place, "remote", "add", "upstream", "https://user:secret@example.org/tally.git")
        run(place, "checkout", "-q", *(["--detach"] if detached else []), base)
        if not detached:
            run(place, "checkout", "-q", "-B", "work")
        run(place, "gc", "-q")
        (place / "tally.py").write_text((place / "tally.py").read_text() + "# set up\n")
        (place / "built.txt").write_text("by the image")
        await truncate_git_history(sandbox, base)
        assert_nothing_later(await visible_history(sandbox), ["The environment's own changes", "Count items"])
        assert run(place, "show", "--format=", "--name-only", "HEAD").split() == ["built.txt", "tally.py"]
        with pytest.raises(subprocess.CalledProcessError):
            run(place, "cat-file", "-e", fix)


async def test_refuses_an_image_without_the_base_commit(tmp_path: Path) -> None:
    async with await open_sandbox("process") as sandbox:
        run(Path(sandbox.workdir), "clone", "-q", str(ROWS / "tally.bundle"), ".")
        with pytest.raises(WorkspaceError, match="rev-parse failed"):
            await truncate_git_history(sandbox, "1" * 40)


async def test_task_files_become_a_repository_with_one_commit() -> None:
    task = get_source("swe-task").task(0)
    async with await open_sandbox("process") as sandbox:
        await prepare_workspace(task, sandbox)
        assert_nothing_later(await visible_history(sandbox), ["Initial commit"])

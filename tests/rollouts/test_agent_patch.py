"""The agent's patch is read from outside: nothing that an agent leaves in its sandbox falsifies it or stops Polar."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from polar_proxy.rewards.patches import changed_paths
from polar_proxy.rollouts import agent_patch
from polar_proxy.rollouts.agent_patch import BaseTree, read_patch, save_base
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.rollouts.workspace import prepare_workspace
from polar_proxy.tasks import Environment, Task
from sandboxes import images, tree
from sandboxes.base import Sandbox, SandboxKind
from sandboxes.choice import open_sandbox
from tests.loop_watch import slowness, watched
from tests.rewards.conftest import needs

pytestmark = pytest.mark.slow

TASK = Task("x", "x", 0, "x", files={"a.py": "x = 1\n", "b/c.py": "y = 1\n", ".gitignore": "*.o\n/out/\n"})
SNAPSHOT = replace(TASK, environment=Environment(snapshot=True))
ALL_KINDS = [needs("process"), needs("bubblewrap"), needs("docker")]


@asynccontextmanager
async def agent_ended(kind: SandboxKind, script: str, task: Task = TASK) -> AsyncIterator[tuple[Sandbox, BaseTree]]:
    """Yield the sandbox of an agent that ran the script, and its base."""
    task_sandboxes = TaskSandboxes(kind)
    spec = await task_sandboxes.spec(task, memory_mb=1024, labels={})
    async with await open_sandbox(kind, spec) as sandbox:
        await prepare_workspace(task, sandbox)
        base = await save_base(sandbox, snapshot=task.environment.snapshot)
        done = await sandbox.exec(("sh", "-c", script), timeout=120)
        assert done.exit_code == 0, done.stderr
        yield sandbox, base


async def patch_of(kind: SandboxKind, script: str, task: Task = TASK) -> tuple[bytes, str | None]:
    """Return the patch of an agent that runs the script."""
    async with agent_ended(kind, script, task) as (sandbox, base):
        return await read_patch(sandbox, base)


async def paths_of(kind: SandboxKind, script: str, task: Task = TASK) -> set[str]:
    patch, problem = await patch_of(kind, script, task)
    assert problem is None
    return set(await changed_paths(patch))


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    "trick",
    [
        "true",
        "git config diff.noprefix true; git config diff.mnemonicPrefix true; git config core.quotePath false",
        "printf '* diff=x filter=y ident -text\\n' >.git/info/attributes; git config diff.x.textconv 'echo forged';"
        "git config diff.external 'echo forged'; git config filter.y.clean 'echo forged'",
        "echo '*' >.git/info/exclude; git update-index --assume-unchanged a.py",
        "git add -A; git commit -qm x; git replace HEAD HEAD~1; git checkout -q --orphan other; git commit -qm y",
        "rm -rf .git",
        "rm -rf .git; mkfifo .git",
        "echo broken >.git/index; echo broken >.git/HEAD; rm -rf .git/objects",
        "mkdir -p ~/bin; printf '#!/bin/sh\\necho forged\\n' >~/bin/git; chmod +x ~/bin/git;"
        "cp ~/bin/git /usr/bin/git 2>/dev/null || true",
        "(while :; do cp .gitignore .git/index; rm -rf .git/objects; sleep 0.01; done) >/dev/null 2>&1 &",
    ],
    ids=["plain", "prefix", "drivers", "ignored", "history", "no-git", "fifo", "broken", "program", "background"],
)
async def test_an_agent_cannot_falsify_its_patch(kind: SandboxKind, trick: str) -> None:
    if kind == "process" and "/usr/bin/git" in trick:
        pytest.skip("a process sandbox isolates nothing: this would replace the machine's own git")
    work = "git config user.name x; git config user.email x; printf 'x = 2\\n' >a.py; rm b/c.py; echo z >new.py;"
    patch, problem = await patch_of(kind, work + trick)
    assert problem is None
    assert b"forged" not in patch
    assert b"\n-x = 1\n+x = 2\n" in patch
    assert patch.count(b"diff --git a/") == 3
    assert set(await changed_paths(patch)) == {"a.py", "b/c.py", "new.py"}


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_what_counts_as_work(kind: SandboxKind) -> None:
    script = """mkdir out sub lib; echo 1 >out/a; echo 1 >a.o; echo 1 >lib/b.o; git init -q sub; echo 1 >sub/deep;
    chmod +x a.py; ln -s /etc/passwd link; ln -s link/none loop; mkfifo pipe; echo 1 >:magic; printf '\\0\\r\\n' >bin
    : >empty; echo 1 >"$(printf 'n\\nl')"; echo 1 >"$(printf '\\377')"; echo 1 >lib/..x; ln lib/..x lib/hard
    echo 1 >'q"\\b'"""
    counted = {
        "a.py",
        "link",
        "loop",
        ":magic",
        "bin",
        "empty",
        "n\nl",
        "\\xff",
        "lib/..x",
        "lib/hard",
        "sub/deep",
        'q"\\b',
    }
    assert await paths_of(kind, script) == counted
    assert await paths_of(kind, script, SNAPSHOT) == counted | {"out/a", "a.o", "lib/b.o"}
    assert await paths_of(kind, "rm -rf b; ln -s /proc b; echo '!a.o' >>.gitignore; echo 1 >a.o") == {
        *("b", "b/c.py", ".gitignore", "a.o"),
    }
    assert await paths_of(kind, "touch a.py; chmod 640 a.py b/c.py; git gc -q; mkdir empty") == set()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ('python3 -c \'import os\nfor _ in range(3000): os.mkdir("dd"); os.chdir("dd")\'', "path is longer"),
        ('python3 -c \'for n in range(600): open(f"f{n}", "w")\'', "more than 500 files"),
        ("truncate -s 7G sparse", "MiB"),
        ("head -c 70000000 /dev/zero >large", "more than 64 MiB"),
        ("head -c 3000000 /dev/urandom >large", "larger than 2 MiB"),
        (
            "for n in $(seq 20); do mkdir $n; truncate -s 1M $n/.gitignore; done",
            ".gitignore files have more than 16 MiB",
        ),
        (
            'python3 -c \'import os\nfor _ in range(10): os.mkdir("d" * 250); os.chdir("d" * 250)\n'
            'for n in range(3300): open(f"{n:0250}", "w")\'',
            "paths of all files and folders together are longer than 8 MiB",
        ),
    ],
    ids=["deep", "many", "sparse", "large", "large-patch", "ignore-files", "long-paths"],
)
async def test_a_tree_beyond_the_limits_is_the_agents_fault(
    kind: SandboxKind, script: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit, lower in (
        (tree, "ENTRIES", {"more than 500 files": 500}),
        (tree, "ALL_PATHS_BYTES", {"paths of all files and folders together are longer than 8 MiB": 8 << 20}),
        (agent_patch, "PATCH_BYTES", {"larger than 2 MiB": 2 << 20}),
    ):
        monkeypatch.setattr(module, limit, lower.get(problem, getattr(module, limit)))
    monkeypatch.setattr("sandboxes.docker_engine.ARCHIVE_BYTES", 256 << 20)
    patch, found = await patch_of(kind, script)
    assert patch == b""
    assert problem in (found or "")


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_obeys_an_ignore_file_below_a_thousand_folders(kind: SandboxKind) -> None:
    nest = """python3 -c 'import os\nfor _ in range(1400): os.mkdir("d"); os.chdir("d")
for name in "x.tmp", "y": open(name, "w")\nopen(".gitignore", "w").write("*.tmp")'"""
    assert await paths_of(kind, nest) == {"d/" * 1400 + ".gitignore", "d/" * 1400 + "y"}


async def test_reading_does_not_block_the_event_loop() -> None:
    script = 'python3 -c \'import os\nfor n in range(8000): os.mkdir(str(n)); open(f"{n}/.gitignore", "w")\''
    async with agent_ended("process", script) as (sandbox, base):
        with watched() as watch:
            patch, problem = await read_patch(sandbox, base)
    assert problem is None
    assert patch.count(b"diff --git a/") == 8_000
    assert watch.worst_work < 0.05 * slowness()


async def test_files_that_nobody_may_read_are_read(tmp_path: Path) -> None:
    script = "mkdir locked; echo 1 >locked/a; echo 1 >b.py; chmod 0 locked/a b.py; chmod 0 locked"
    assert await paths_of("process", script) == {"locked/a", "b.py"}


@pytest.mark.parametrize("kind", [needs("docker")])
async def test_reads_only_what_changed_in_an_image(kind: SandboxKind, tmp_path: Path) -> None:
    """The workspace lies in the image, with its repository: only names that changed are read, each as it is now."""
    (tmp_path / "Dockerfile").write_text(
        f"FROM {images.tag()}\nUSER root\nWORKDIR /testbed\n"
        "RUN git init -q . && mkdir a b c && echo 1 >a/x && echo 1 >b/x && echo 1 >c/x && echo 1 >top"
        " && echo '*.o' >.gitignore && git add -A && git -c user.name=x -c user.email=x commit -qm x"
        " && echo 1 >a/old.o\n"
    )
    task = replace(TASK, files={}, environment=Environment(build=str(tmp_path)))
    script = "echo 2 >a/x; rm a/old.o; echo 1 >a/y.o; rm -rf b; ln -s a b; mkdir d; echo 1 >d/x; echo 1 >d/x.o"
    assert await paths_of(kind, script, task) == {"a/x", "b", "b/x", "d/x"}
    assert await paths_of(kind, "true", task) == set()
    assert await paths_of(kind, "rm top; echo '' >.gitignore; echo 1 >a/y.o", task) == {
        *("top", ".gitignore", "a/y.o", "a/old.o"),
    }
    assert await paths_of(kind, "rm -r c; mkdir c; echo 1 >c/x; echo 1 >c/y", task) == {"c/y"}


async def test_reading_is_cancelled_with_its_attempt() -> None:
    reading = asyncio.ensure_future(patch_of("process", "sleep 5"))
    await asyncio.sleep(0.5)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading

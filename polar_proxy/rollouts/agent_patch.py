"""The agent's work as a patch, read from outside of the agent's sandbox.

Before the agent starts, `save_base` copies the workspace's files into a repository of Polar's own on this machine.
After the agent ended and its processes were killed, `read_patch` lists the workspace from outside (`sandboxes.tree`),
writes what differs into that repository, and lets this machine's git make the diff. No program, configuration or
repository that the agent could change takes part (`clean_git.py`). Files are compared byte by byte, without conversion
of line ends.

The patch covers every file of the base, and every new file that git would not ignore. With `Environment.snapshot`,
ignored files count too. Files in nested repositories count, but not the `.git` folders of these repositories.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polar_proxy.clean_git import CleanGitError, GitOutputTooLargeError, clean_git, run_clean_git
from polar_proxy.rollouts.workspace import WorkspaceError, pack_files
from polar_proxy.temporary import temporary_folder
from sandboxes.base import Sandbox
from sandboxes.tree import LINK, SandboxTree, TreeTooLarge

_CHANGED_BYTES = 64 << 20
"""Limit of the total size, in bytes, of the files that the agent added or changed."""
PATCH_BYTES = 32 << 20
_IGNORE_FILE_BYTES = 1 << 20
"""Size in bytes above which a .gitignore file is not obeyed."""
_ALL_IGNORE_FILES_BYTES = 16 << 20
"""Limit of the total size, in bytes, of the .gitignore files that are obeyed."""
_DIFF = (
    *("diff-tree", "-r", "-p", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers", "--unified=3"),
)
_WORK = "refs/polar/work"
_GITLINK = 0o160000
# Every attribute that changes a diff; the repository has no other attributes.
_ATTRIBUTES = "* -text -filter -ident -working-tree-encoding !diff\n"


@dataclass(frozen=True, slots=True)
class BaseTree:
    """The workspace before the agent started: a tree in a repository outside of the sandbox."""

    repository: Path
    tree: str
    snapshot: bool


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of the base tree. `blob` is git's hash of its content."""

    mode: int
    blob: str
    size: int


async def save_base(sandbox: Sandbox, *, snapshot: bool) -> BaseTree:
    """Copy the prepared workspace, in which no agent has run yet, out of the sandbox.

    Raises `WorkspaceError` if the workspace cannot be copied.
    """
    tree, pack = await pack_files(sandbox, snapshot=snapshot)
    repository = sandbox.host_folder / "base.git"
    try:
        await asyncio.to_thread(repository.parent.mkdir, mode=0o700, exist_ok=True)
        await clean_git("init", "-q", "--bare", "--template=", str(repository))
        await asyncio.to_thread(_write_attributes, repository)
        await clean_git("index-pack", "--stdin", repository=repository, stdin=pack)
    except CleanGitError as error:
        raise WorkspaceError(f"the workspace cannot be copied: {error}") from error
    return BaseTree(repository, tree, snapshot)


async def read_patch(sandbox: Sandbox, base: BaseTree) -> tuple[bytes, str | None]:
    """End the agent's processes, and return the agent's changes since `base` as a binary diff, with None.

    If the changes are too large or cannot be read, return an empty diff, with the reason."""
    try:
        with contextlib.closing(await sandbox.read_tree()) as tree:
            return await asyncio.to_thread(_diff, tree, base), None
    except TreeTooLarge as error:
        return b"", str(error)
    except GitOutputTooLargeError:
        return b"", f"the patch is larger than {PATCH_BYTES >> 20} MiB"
    except CleanGitError as error:
        await _check_repository(base)
        return b"", str(error)


def _diff(tree: SandboxTree, base: BaseTree) -> bytes:
    """Return the changes as a binary diff. Blocking.

    Raises `TreeTooLarge` if the files are too large, `GitOutputTooLargeError` if the diff is larger than
    `PATCH_BYTES`, and `CleanGitError` if git fails."""
    before = _base_files(base)
    added = [path for path in tree.entries if path not in before]
    ignored = set() if base.snapshot else _ignored(added, tree, base, before)
    changes = _changes(tree, before, ignored)
    if not changes:
        return b""
    commands = _import_commands(base.tree, changes)
    run_clean_git("fast-import", "--quiet", "--force", repository=base.repository, stdin=commands)
    return run_clean_git(*_DIFF, base.tree, f"{_WORK}^{{tree}}", repository=base.repository, output_limit=PATCH_BYTES)


def _base_files(base: BaseTree) -> dict[bytes, BaseFile]:
    listing = run_clean_git("ls-tree", "-r", "-z", "-l", "--full-tree", base.tree, repository=base.repository)
    files = {}
    for line in listing.split(b"\0")[:-1]:
        head, _, path = line.partition(b"\t")
        mode, _, blob, size = head.decode().split()
        if int(mode, 8) != _GITLINK:
            files[path] = BaseFile(int(mode, 8), blob, int(size))
    return files


def _ignored(added: list[bytes], tree: SandboxTree, base: BaseTree, before: Mapping[bytes, BaseFile]) -> set[bytes]:
    """Return the files of `added` that the workspace's .gitignore files exclude. Raises `TreeTooLarge` if the
    .gitignore files are too large in total."""
    if not added:
        return set()
    with temporary_folder() as folder:
        _write_files(folder, _ignore_files(tree, base, before))
        listing = run_clean_git(
            *("check-ignore", "-z", "--stdin", "--no-index"),
            repository=base.repository,
            work_tree=folder,
            stdin=b"".join(b"./%s\0" % path for path in added),  # ./ because a colon at the beginning is magic
            exit_codes=(0, 1),  # 1: none is ignored
        )
    return {path.removeprefix(b"./") for path in listing.split(b"\0")[:-1]}


def _ignore_files(tree: SandboxTree, base: BaseTree, before: Mapping[bytes, BaseFile]) -> dict[bytes, bytes]:
    """Return path and content of each .gitignore file, except links and large files. Raises `TreeTooLarge`."""
    paths = [path for path in tree.entries if _is_ignore_file(path, tree)]
    if sum(tree.entries[path].size for path in paths) > _ALL_IGNORE_FILES_BYTES:
        raise TreeTooLarge(f"the .gitignore files have more than {_ALL_IGNORE_FILES_BYTES >> 20} MiB in total")
    rules = {path: tree.read(path) for path in paths}
    if b".gitignore" in before and not tree.covers(b".gitignore"):  # unchanged, so it was not read
        rules[b".gitignore"] = run_clean_git("cat-file", "blob", before[b".gitignore"].blob, repository=base.repository)
    return rules


def _is_ignore_file(path: bytes, tree: SandboxTree) -> bool:
    entry = tree.entries[path]
    return os.path.basename(path) == b".gitignore" and entry.mode != LINK and entry.size <= _IGNORE_FILE_BYTES


def _write_files(folder: Path, files: Mapping[bytes, bytes]) -> None:
    root = os.fsencode(folder)
    made = {b""}
    for path, data in files.items():
        _make_folders(root, os.path.dirname(path), made)
        Path(folder, os.fsdecode(path)).write_bytes(data)


def _make_folders(root: bytes, path: bytes, made: set[bytes]) -> None:
    """Make a folder below `root` and its missing parents, and add them to `made`.

    There is no recursion, because thousands of parents may be missing."""
    missing = []
    while path not in made:
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        os.mkdir(os.path.join(root, folder))
    made.update(missing)


def _changes(
    tree: SandboxTree, before: Mapping[bytes, BaseFile], ignored: set[bytes]
) -> dict[bytes, tuple[int, bytes] | None]:
    """Return the changes by path: (mode, content) of an added or changed file, None for a deleted file.

    Raises `TreeTooLarge`."""
    changes: dict[bytes, tuple[int, bytes] | None] = {}
    changed_bytes = 0
    for path, entry in tree.entries.items():
        base = before.get(path)
        if path in ignored or (base is not None and _is_same(tree, path, base)):
            continue
        changed_bytes += entry.size
        if changed_bytes > _CHANGED_BYTES:
            raise TreeTooLarge(f"the added and changed files have more than {_CHANGED_BYTES >> 20} MiB in total")
        changes[path] = (entry.mode, tree.read(path))
    changes |= dict.fromkeys(path for path in before if path not in tree.entries and tree.covers(path))
    return changes


def _is_same(tree: SandboxTree, path: bytes, base: BaseFile) -> bool:
    entry = tree.entries[path]
    if (entry.mode, entry.size) != (base.mode, base.size):
        return False
    return hashlib.sha1(b"blob %d\0" % entry.size + tree.read(path), usedforsecurity=False).hexdigest() == base.blob


def _import_commands(tree: str, changes: Mapping[bytes, tuple[int, bytes] | None]) -> bytes:
    """Return the input of `git fast-import` that makes the commit `_WORK`: the base tree with the changes."""
    lines = [f'commit {_WORK}\ncommitter polar <polar@localhost> 0 +0000\ndata 0\nM 040000 {tree} ""\n'.encode()]
    # A file may have become a folder, so what was deleted goes first.
    lines += [b"D %s\n" % _quoted(path) for path, change in changes.items() if change is None]
    for path, change in changes.items():
        if change is not None:
            mode, data = change
            lines.append(b"M %o inline %s\ndata %d\n%s\n" % (mode, _quoted(path), len(data), data))
    return b"".join(lines)


def _quoted(path: bytes) -> bytes:
    return b'"' + path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


async def _check_repository(base: BaseTree) -> None:
    """Raise `WorkspaceError` if git cannot work on this machine at all, for example because the disk is full.

    Called after git has failed on the agent's work. If this check passes, the agent's work is at fault."""
    try:
        await clean_git("hash-object", "-w", "--stdin", repository=base.repository, stdin=os.urandom(1 << 16))
    except CleanGitError as error:
        raise WorkspaceError(f"the agent's work cannot be read: {error}") from error


def _write_attributes(repository: Path) -> None:
    (repository / "info").mkdir(exist_ok=True)
    (repository / "info" / "attributes").write_text(_ATTRIBUTES)

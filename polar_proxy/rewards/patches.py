"""The agent's patch before it is applied: which paths it touches, and which parts of it are left out.

git itself names the paths and leaves parts out (`git apply --numstat -z --exclude`), so what is examined is what
is applied. Hidden files are those that decide the reward (`hidden_files` of the task, `protected_files` of its
evaluators). The following parts of a patch are left out, so that the workspace keeps the base commit's files there:

* a file or folder at the path of a hidden file, and a file at the path of a folder that contains a hidden file;
* everything in the test folder (`tests`, `unit_tests`, `spec`, ...) that contains a hidden file;
* if a hidden Python file is in no test folder, whatever Python could import instead of it (`test_x/` or `test_x.so`
  instead of `test_x.py`);
* each `conftest.py` in the folders that contain a hidden Python file;
* Python's bytecode, and extension modules that Python would import instead of a source file in the same folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from polar_proxy.clean_git import CleanGitError, clean_git
from polar_proxy.rewards.base import EvaluationInput, PatchDoesNotApplyError, SandboxFactory, hidden_paths

_BYTECODE = ("*.pyc", "*.pyo", "__pycache__", "__pycache__/*", "*/__pycache__", "*/__pycache__/*")
_TEST_FOLDER = re.compile(r"([a-z0-9]+[_-])*(tests?|specs?|testing|e2e)|__tests__")
_EXTENSION_MODULE = re.compile(r"^(?P<module>[^./]+)(\.[\w-]+)?\.(so|pyd)$")
_GLOB_CHARACTERS = re.compile(r"([*?\[\\])")
_MOST_EXTENSIONS = 200
_EXISTS = 'for f; do [ -e "$f" ] && printf "%s\\0" "$f"; done; true'


async def changed_paths(patch: bytes, leave_out: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the paths that git would change when it applies the patch without the parts that match `leave_out`.

    Bytes that are not UTF-8 are escaped. Raises `PatchDoesNotApplyError` for a patch that git cannot read.
    """
    if not patch.strip():
        return ()
    excludes = [f"--exclude={pattern}" for pattern in leave_out]
    try:
        listing = await clean_git("apply", "--numstat", "-z", *excludes, "-", stdin=patch)
    except CleanGitError as error:
        raise PatchDoesNotApplyError(str(error)) from error
    lines = listing.decode(errors="backslashreplace").split("\0")
    return tuple(line.split("\t", 2)[2] for line in lines if line)


async def patterns_to_leave_out(work: EvaluationInput, sandboxes: SandboxFactory) -> tuple[str, ...]:
    """Return the patterns of `git apply --exclude` for the parts of the patch that must not reach an evaluator."""
    patterns = (*_BYTECODE, *_hidden_patterns(hidden_paths(work.task)))
    paths = await changed_paths(work.patch, patterns)
    return (*patterns, *[_exact(path) for path in await _shadowing_extensions(paths, sandboxes)])


def _hidden_patterns(hidden: Iterable[str]) -> Iterator[str]:
    """Yield the patterns of everything that could take the place of a hidden file, or be imported instead of it."""
    for path in sorted({PurePosixPath(path) for path in hidden}):
        folders = [folder for folder in path.parents if folder.parts]
        for place in (path, *folders):
            yield _exact(str(place))
        yield f"{_exact(str(path))}/*"
        tests = next((folder for folder in folders if _TEST_FOLDER.fullmatch(folder.name.lower())), None)
        if tests is not None:
            yield f"{_exact(str(tests))}/*"
        elif path.suffix == ".py":
            module = _exact(str(path.with_suffix("")))
            yield from (module, f"{module}/*", f"{module}.*")
        if path.suffix == ".py":
            yield from (_exact(str(folder / "conftest.py")) for folder in path.parents)


async def _shadowing_extensions(paths: tuple[str, ...], sandboxes: SandboxFactory) -> list[str]:
    """Return the extension modules among `paths` that Python would load instead of a source in the same folder."""
    sources: dict[str, list[str]] = {}
    for path in paths:
        if found := _EXTENSION_MODULE.match(PurePosixPath(path).name):
            stem = PurePosixPath(path).with_name(found["module"])
            sources[path] = [f"{stem}.py", f"{stem}/__init__.py"]
    if not sources:
        return []
    if len(sources) > _MOST_EXTENSIONS:
        raise PatchDoesNotApplyError(
            f"the patch adds {len(sources)} extension modules; at most {_MOST_EXTENSIONS} are allowed"
        )
    async with sandboxes() as workspace:
        asked = [source for names in sources.values() for source in names]
        answer = await workspace.exec(("sh", "-c", _EXISTS, "sh", *asked), timeout=60)
    existing = {*paths, *answer.stdout.decode(errors="replace").split("\0")}
    return [path for path, names in sources.items() if not existing.isdisjoint(names)]


def _exact(path: str) -> str:
    """Return a pattern that only this path matches."""
    return _GLOB_CHARACTERS.sub(r"\\\1", path)

"""Reads the workspace that a Dockerfile describes, for tasks that may run without their image (see `harbor`)."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from polar_proxy.errors import BadTaskError
from polar_proxy.tasks.task_folder import check_inside, read_text

_IGNORED_INSTRUCTIONS = {"FROM", "RUN", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL"}
_ENV = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class DockerfileWorkspace:
    workdir: str
    files: dict[str, str]
    """The text of each file, by its path relative to `workdir`."""
    executable: tuple[str, ...]
    """Paths of the executable files among `files`."""
    env: dict[str, str]


def read_dockerfile(context: Path, workdir: str | None = None) -> DockerfileWorkspace:
    """Return the workspace that ``context/Dockerfile`` describes.

    `workdir` is used if no WORKDIR line names a folder below /. Raises `BadTaskError` if the workspace cannot be made
    without the image; the error names the file or line that is the cause.
    """
    if (context / ".dockerignore").exists():
        raise BadTaskError(
            "environment/.dockerignore: without the image, Polar cannot apply this file; remove without_image"
        )
    current, stages = "/", 0
    copies: list[tuple[int, Path, str]] = []
    env: dict[str, str] = {}
    for number, word, rest in _instructions(read_text(context, "Dockerfile")):
        if word == "WORKDIR":
            if "$" in rest:
                raise _needs_image(number, f"WORKDIR {rest}")
            current = posixpath.normpath(posixpath.join(current, rest))
        elif word == "COPY":
            copies += [(number, source, target) for source, target in _copied_files(context, current, rest, number)]
        elif word == "ENV":
            env.update(_variables(rest, number))
        elif word not in _IGNORED_INSTRUCTIONS:
            raise _needs_image(number, word)
        stages += word == "FROM"
        if stages > 1:
            raise _needs_image(number, "a second FROM")
    root = current if current != "/" else workdir
    if root is None:
        raise BadTaskError(
            "environment/Dockerfile: has no WORKDIR line that names a folder below /; add one or remove without_image"
        )
    files: dict[str, str] = {}
    executable: list[str] = []
    for number, source, target in copies:
        if not target.startswith(root.rstrip("/") + "/"):
            raise _needs_image(number, f"COPY to {target}, outside {root},")
        name = posixpath.relpath(target, root)
        try:
            files[name] = source.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise BadTaskError(
                f"environment/Dockerfile:{number}: {source.name} is not text, so the task needs the image; "
                "remove without_image"
            ) from None
        if source.stat().st_mode & 0o100:
            executable.append(name)
    return DockerfileWorkspace(root, files, tuple(executable), env)


def _needs_image(number: int, what: str) -> BadTaskError:
    return BadTaskError(f"environment/Dockerfile:{number}: {what} needs the image; remove without_image")


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Return (line number, instruction in capitals, arguments), with continued lines joined and without comments."""
    found: list[tuple[int, str, str]] = []
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        start = start if pending else number
        if stripped.endswith("\\"):
            pending += stripped[:-1] + " "
            continue
        word, _, rest = (pending + stripped).partition(" ")
        if "<<" in rest and word.upper() in ("RUN", "COPY"):
            raise _needs_image(start, "a here-document")
        found.append((start, word.upper(), rest.strip()))
        pending = ""
    if pending:
        raise BadTaskError(
            f"environment/Dockerfile:{start}: the last instruction ends in a backslash: it is incomplete"
        )
    return found


def _copied_files(context: Path, current: str, rest: str, number: int) -> list[tuple[Path, str]]:
    """Return each file of one COPY line with its absolute target.

    COPY copies the contents of a folder, not the folder: https://docs.docker.com/reference/dockerfile/#copy
    """
    words = _words(rest, number)
    words = [word for word in words if not word.startswith("--chown=")]
    if len(words) < 2 or any(word.startswith("--") or set("*?[$") & set(word) for word in words):
        raise _needs_image(number, f"COPY {rest}")
    *sources, target = words
    goal = posixpath.normpath(posixpath.join(current, target))
    into = target.endswith(("/", "/.")) or target in (".", "./") or goal == current or len(sources) > 1
    found: list[tuple[Path, str]] = []
    for name in sources:
        source = (context / name.lstrip("/")).resolve()
        if not source.is_relative_to(context.resolve()) or not (source.is_file() or source.is_dir()):
            raise BadTaskError(f"environment/Dockerfile:{number}: COPY {name}: there is no such file in environment/")
        if source.is_dir():
            inside = [path for path in sorted(source.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
            for path in inside:
                check_inside(context.resolve(), path)
            found += [(path, posixpath.join(goal, path.relative_to(source).as_posix())) for path in inside]
        else:
            found.append((source, posixpath.join(goal, source.name) if into else goal))
    return found


def _words(rest: str, number: int) -> list[str]:
    """Split the arguments of COPY or ENV, which are words or a JSON list of them."""
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise _needs_image(number, f"the malformed line {rest[:80]!r}")
    return words


def _variables(rest: str, number: int) -> dict[str, str]:
    words = _words(rest, number)
    if words and "=" not in words[0]:  # the old form: ENV NAME value
        name, _, value = rest.partition(" ")
        words = [f"{name}={value.strip()}"]
    found: dict[str, str] = {}
    for word in words:
        match = _ENV.fullmatch(word)
        if match is None or "$" in match["value"]:
            raise _needs_image(number, f"ENV {rest}")
        found[match["name"]] = match["value"]
    return found

"""What a Dockerfile puts into its workspace, for tasks that may run without their image (see `harbor`)."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from polar_proxy.tasks.task import BadTaskError

_IGNORED_INSTRUCTIONS = {"FROM", "RUN", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL"}
_ENV = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class DockerfileWorkspace:
    """The workspace, what lies in it (relative path -> text), which of it is a program, and variables."""

    workdir: str
    files: dict[str, str]
    programs: tuple[str, ...]
    env: dict[str, str]


def read_dockerfile(context: Path, workdir: str | None = None) -> DockerfileWorkspace:
    """Read ``context/Dockerfile``. `workdir` is used where it has no WORKDIR line.

    Raises `BadTaskError` with the line for what would need the image.
    """
    if (context / ".dockerignore").exists():
        raise BadTaskError("environment/.dockerignore: needs the image")
    here, stages = "/", 0
    copies: list[tuple[int, Path, str]] = []
    env: dict[str, str] = {}
    for number, word, rest in _instructions((context / "Dockerfile").read_text(encoding="utf-8")):
        if word == "WORKDIR":
            here = posixpath.normpath(posixpath.join(here, rest))
        elif word == "COPY":
            copies += [(number, source, target) for source, target in _copy(context, here, rest, number)]
        elif word == "ENV":
            env.update(_env(rest, number))
        elif word not in _IGNORED_INSTRUCTIONS:
            raise _needs(number, word)
        stages += word == "FROM"
        if stages > 1:
            raise _needs(number, "a second FROM")
    root = here if here != "/" else workdir
    if root is None:
        raise BadTaskError("environment/Dockerfile: has no WORKDIR, which is where the agent works without the image")
    files: dict[str, str] = {}
    programs: list[str] = []
    for number, source, target in copies:
        if not target.startswith(root.rstrip("/") + "/"):
            raise BadTaskError(f"environment/Dockerfile:{number}: COPY to {target}, outside of {root}, needs the image")
        name = posixpath.relpath(target, root)
        try:
            files[name] = source.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise BadTaskError(
                f"environment/Dockerfile:{number}: {source.name} is no text, so it needs the image"
            ) from None
        if source.stat().st_mode & 0o100:
            programs.append(name)
    return DockerfileWorkspace(root, files, tuple(programs), env)


def _needs(number: int, what: str) -> BadTaskError:
    return BadTaskError(f"environment/Dockerfile:{number}: {what} needs the image; take without_image back")


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line, word in capitals, rest) of each instruction, continued lines joined and comments left out."""
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
            raise _needs(start, "a here-document")
        found.append((start, word.upper(), rest.strip()))
        pending = ""
    return found


def _copy(context: Path, here: str, rest: str, number: int) -> list[tuple[Path, str]]:
    """Each file of one COPY line with its absolute target.

    https://docs.docker.com/reference/dockerfile/#copy: of a folder the contents are copied.
    """
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    words = [word for word in words if not word.startswith("--chown=")]
    if len(words) < 2 or any(word.startswith("--") or set("*?[$") & set(word) for word in words):
        raise _needs(number, f"COPY {rest}")
    *sources, target = words
    goal = posixpath.normpath(posixpath.join(here, target))
    into = target.endswith(("/", "/.")) or target in (".", "./") or goal == here or len(sources) > 1
    found: list[tuple[Path, str]] = []
    for name in sources:
        source = (context / name.lstrip("/")).resolve()
        if not source.is_relative_to(context.resolve()) or not source.exists():
            raise BadTaskError(f"environment/Dockerfile:{number}: COPY {name}: there is none in environment/")
        if source.is_dir():
            inside = [path for path in sorted(source.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
            found += [(path, posixpath.join(goal, path.relative_to(source).as_posix())) for path in inside]
        else:
            found.append((source, posixpath.join(goal, source.name) if into else goal))
    return found


def _env(rest: str, number: int) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:  # the old form: ENV NAME value
        name, _, value = rest.partition(" ")
        words = [f"{name}={value.strip()}"]
    found: dict[str, str] = {}
    for word in words:
        match = _ENV.fullmatch(word)
        if match is None or "$" in match["value"]:
            raise _needs(number, f"ENV {rest}")
        found[match["name"]] = match["value"]
    return found

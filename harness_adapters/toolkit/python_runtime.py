"""Finding the Python that a harness needs, where that is not the one which runs Polar.

Promises: the interpreter returned has exactly one of the asked minor versions and can make virtual environments, which
was seen by starting it; nothing is installed outside the cache. The order is: the Python that runs Polar, those on PATH
and in the places where version managers keep theirs, one that was fetched earlier, then one that `uv` fetches.

There is no package on PyPI or npm that carries an interpreter; uv takes it from the python-build-standalone project's
releases, or from the mirror that UV_PYTHON_INSTALL_MIRROR names. A machine that reaches neither has to bring its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_adapters.base import InstallError

_PROBE = "import json, sys, ensurepip, ssl, venv; print(json.dumps([list(sys.version_info[:3]), sys.base_prefix]))"
_FETCHED = ".python"
_SECONDS = 20
_FETCH_SECONDS = 600
_TAIL_CHARACTERS = 600


@dataclass(frozen=True)
class PythonInterpreter:
    """A Python that works."""

    program: Path
    version: tuple[int, int, int]
    base_prefix: Path

    @property
    def minor(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"


def own() -> PythonInterpreter:
    """The Python that runs this."""
    major, minor, micro = sys.version_info[:3]
    return PythonInterpreter(Path(sys.executable), (major, minor, micro), Path(sys.base_prefix))


def find(minors: Sequence[str], cache_root: Path) -> PythonInterpreter | None:
    """An interpreter of one of `minors` (best first, such as ``3.12``) that is on this machine, or None."""
    if own().minor in minors:
        return own()
    for minor in minors:
        for candidate in _candidates(minor, cache_root):
            found = _probe(candidate)
            if found is not None and found.minor == minor:
                return found
    return None


def ensure(minors: Sequence[str], cache_root: Path) -> PythonInterpreter:
    """Like `find`, and fetch `minors[0]` into the cache when there is none. Raises `InstallError`."""
    found = find(minors, cache_root)
    if found is not None:
        return found
    why = _fetch(minors[0], cache_root / _FETCHED)
    found = find(minors, cache_root)
    if found is None:
        wanted, best = " or ".join(minors), minors[0]
        raise InstallError(
            f"Python {wanted} is needed, and this machine has none (looked on PATH, in pyenv's, uv's and conda's "
            f"folders); fetching one with uv failed: {why}\n"
            f"Install it (apt install python{best}-venv, pyenv install {best}, uv python install {best}), "
            "or set UV_PYTHON_INSTALL_MIRROR to a mirror of python-build-standalone, and try again."
        )
    return found


def _candidates(minor: str, cache_root: Path) -> Iterator[Path]:
    """Files that may be this Python. More than the first on PATH: a pyenv shim there may refuse to start."""
    name = f"python{minor}"
    home = Path.home()
    places = [Path(entry) for entry in os.get_exec_path()]
    places += [Path("/usr/local/bin"), Path("/usr/bin"), Path("/opt/homebrew/bin")]
    for parent, pattern in (
        (home / ".pyenv" / "versions", f"{minor}.*/bin"),
        (home / ".local" / "share" / "uv" / "python", f"cpython-{minor}.*/bin"),
        (cache_root / _FETCHED, f"cpython-{minor}.*/bin"),
        (home / "miniconda3" / "envs", "*/bin"),
        (home / "miniforge3" / "envs", "*/bin"),
    ):
        places += sorted(parent.glob(pattern), reverse=True)
    seen = set()
    for place in places:
        path = place / name
        if path not in seen and os.access(path, os.X_OK):
            seen.add(path)
            yield path


def _probe(program: Path) -> PythonInterpreter | None:
    """What `program` says of itself, or None where it does not start or lacks what a venv needs (Debian splits it)."""
    try:
        done = subprocess.run(
            [str(program), "-I", "-c", _PROBE],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
        (major, minor, micro), base_prefix = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return PythonInterpreter(program, (major, minor, micro), Path(base_prefix))


def _fetch(minor: str, folder: Path) -> str:
    """Have uv put Python `minor` below `folder`, one process at a time; returns why it could not, or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return _run_uv(minor, folder)


def _run_uv(minor: str, folder: Path) -> str:
    tools = folder / "uv"
    uv = tools / "bin" / "uv"
    # Into a folder of its own: whoever runs Polar keeps their environment.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
    steps = [] if uv.is_file() else [[*pip, "--target", str(tools), "uv"]]
    steps += [[str(uv), "python", "install", "--no-bin", "--install-dir", str(folder), minor]]
    for step in steps:
        try:
            done = subprocess.run(
                step, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
            return f"{lines[0].strip()} ... {lines[-1].strip()}"[-_TAIL_CHARACTERS:]
    return ""

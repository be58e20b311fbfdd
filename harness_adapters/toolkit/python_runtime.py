"""Finding the Python that a harness needs if that is not the Python that runs Polar.

Promises: the interpreter returned has one of the requested minor versions and can make virtual environments, which is
checked by starting it; nothing is installed outside the cache. The search order is: the Python that runs Polar, those
on PATH and in the folders of version managers, one that was fetched earlier, and then one that `uv` fetches.

No package on PyPI or npm contains an interpreter. uv takes it from the releases of the python-build-standalone project,
or from the mirror in UV_PYTHON_INSTALL_MIRROR. On a machine without access to either, the user must install it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_adapters.base import InstallError
from harness_adapters.toolkit.cache import exclusive_lock

_PROBE = "import json, sys, ensurepip, ssl, venv; print(json.dumps([list(sys.version_info[:3]), sys.base_prefix]))"
_PROBE_SECONDS = 20
_FETCHED = ".python"
_FETCH_SECONDS = 600
_TAIL_CHARACTERS = 600


@dataclass(frozen=True)
class PythonInterpreter:
    """A Python that was started successfully."""

    program: Path
    version: tuple[int, int, int]
    base_prefix: Path

    @property
    def minor(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"


def own_python() -> PythonInterpreter:
    """Return the Python that runs this code."""
    major, minor, micro = sys.version_info[:3]
    return PythonInterpreter(Path(sys.executable), (major, minor, micro), Path(sys.base_prefix))


def find_python(minors: Sequence[str], cache_root: Path) -> PythonInterpreter | None:
    """Return an interpreter of one of `minors` (best first, such as ``3.12``) on this machine, or None."""
    if own_python().minor in minors:
        return own_python()
    for minor in minors:
        for candidate in _candidates(minor, cache_root):
            found = _probe(candidate)
            if found is not None and found.minor == minor:
                return found
    return None


def ensure_python(minors: Sequence[str], cache_root: Path) -> PythonInterpreter:
    """Like `find_python`, but fetch `minors[0]` into the cache if there is none. Raises `InstallError`."""
    found = find_python(minors, cache_root)
    if found is not None:
        return found
    reason = _fetch(minors[0], cache_root / _FETCHED)
    found = find_python(minors, cache_root)
    if found is None:
        wanted, best = " or ".join(minors), minors[0]
        raise InstallError(
            f"Python {wanted} is needed, and this machine has none (searched PATH and the folders of pyenv, uv and "
            f"conda); fetching one with uv failed: {reason}\n"
            f"Install it (apt install python{best}-venv, pyenv install {best}, uv python install {best}), "
            "or set UV_PYTHON_INSTALL_MIRROR to a mirror of python-build-standalone, and try again."
        )
    return found


def _candidates(minor: str, cache_root: Path) -> Iterator[Path]:
    """Yield files that may be a Python of version `minor`. The first one on PATH may be a pyenv shim that does not
    start."""
    name = f"python{minor}"
    home = Path.home()
    folders = [Path(entry) for entry in os.get_exec_path()]
    folders += [Path("/usr/local/bin"), Path("/usr/bin"), Path("/opt/homebrew/bin")]
    for parent, pattern in (
        (home / ".pyenv" / "versions", f"{minor}.*/bin"),
        (home / ".local" / "share" / "uv" / "python", f"cpython-{minor}.*/bin"),
        (cache_root / _FETCHED, f"cpython-{minor}.*/bin"),
        (home / "miniconda3" / "envs", "*/bin"),
        (home / "miniforge3" / "envs", "*/bin"),
    ):
        folders += sorted(parent.glob(pattern), reverse=True)
    seen = set()
    for folder in folders:
        path = folder / name
        if path not in seen and os.access(path, os.X_OK):
            seen.add(path)
            yield path


def _probe(program: Path) -> PythonInterpreter | None:
    """Start `program` and describe it. None if it does not start, or lacks a module for making a venv (a separate
    Debian package)."""
    try:
        done = subprocess.run(
            [str(program), "-I", "-c", _PROBE],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS,
        )  # fmt: skip
        (major, minor, micro), base_prefix = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return PythonInterpreter(program, (major, minor, micro), Path(base_prefix))


def _fetch(minor: str, folder: Path) -> str:
    """Install Python `minor` below `folder` with uv, one process at a time. Return the error, or an empty string."""
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder / ".lock"):
        tools = folder / "uv"
        uv = tools / "bin" / "uv"
        # uv goes into its own folder, so that the environment that runs Polar does not change.
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

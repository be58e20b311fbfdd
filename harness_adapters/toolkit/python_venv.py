"""Installing a Python harness, or another program, into its own cached environment, on a Python that it supports.

Nothing is installed outside the cache. Before an interpreter is used, a trial start checks that it has one of the
requested minor versions and can make virtual environments. Interpreters are tried in this order: the Python that runs
Polar, those on PATH and in the folders of version managers, and those that were fetched earlier. If none of them fits,
`uv` fetches an interpreter.

No package on PyPI or npm contains an interpreter. uv therefore downloads it from the releases of the
python-build-standalone project, or from the mirror in UV_PYTHON_INSTALL_MIRROR. If neither can be reached, the user
must install Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness_adapters.base import Installation, InstallError
from harness_adapters.toolkit import cache
from harness_adapters.toolkit.adapter import ConnectableHarness

LITELLM_ENV: Mapping[str, str] = {
    # Otherwise every start downloads a price list from the internet, and waits for the failure.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
    "PYTHONUNBUFFERED": "1",
}
"""Environment of every harness that uses litellm, so that it contacts the endpoint only."""
LITELLM_UNSET = ("OPENAI_BASE_URL",)
"""Variables to remove from the environment, because litellm prefers them to ``OPENAI_API_BASE``."""

OWN_MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
_PROBE = "import sys, ensurepip, ssl, venv; print('%d.%d' % sys.version_info[:2])"
_PROBE_SECONDS = 20
_FETCHED = ".python"
_PIP_INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input")


class VenvPackage:
    """A package of PyPI in its own cached environment."""

    name: str
    default_version: str
    imports: str
    """Names of modules, separated by commas, that are imported to check the installation."""
    extra_requirements: tuple[str, ...] = ()
    """pip requirements besides the package."""
    pythons: tuple[str, ...] = ()
    """Minor versions that the package runs on, best first. If there are none, the environment gets the Python that runs
    Polar."""

    @property
    def package(self) -> str:
        return self.name

    def requirements(self, version: str) -> tuple[str, ...]:
        return (f"{self.package}=={version}", *self.extra_requirements)

    def folder(self, cache_root: Path, version: str) -> Path:
        # The interpreter is part of the recipe, because a venv breaks when its base interpreter changes.
        recipe: list[object] = [self.requirements(version), sys.base_prefix, sys.version_info[:3]]
        if self.pythons and OWN_MINOR not in self.pythons:
            # pyvenv.cfg names the interpreter. Searching for one would make looking into the cache slow.
            recipe = [self.requirements(version), self.pythons]
        # Absolute but not resolved: the sandbox mounts it at this path.
        return cache.folder_of(cache_root.absolute(), self.name, version, recipe)

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        folder = self.folder(cache_root, version or self.default_version)
        return cache.is_complete(folder) and (folder / "bin" / "python").exists()

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        """Return the environment, making it first if it is missing or incomplete.

        Raises `InstallError` with the installer's last output.
        """
        version = version or self.default_version
        folder = self.folder(cache_root, version)
        program = folder / "bin" / "python"
        if cache.is_complete(folder) and not program.exists():
            shutil.rmtree(folder)  # a link whose target, the base interpreter, was removed
        cache.ensure_folder(folder, lambda path: self._build(path, version, cache_root.absolute()))
        return Installation(self.name, version, folder, program, mounts=(folder, *_interpreter_mounts(folder)))

    def _build(self, folder: Path, version: str, cache_root: Path) -> None:
        requirements = self.requirements(version)
        base = ensure_python(self.pythons, cache_root) if self.pythons else Path(sys.executable)
        python = str(folder / "bin" / "python")
        advice = (
            f"Check that pip reaches a package index (pip install {' '.join(requirements)}) and that the disk has room."
        )

        def step(what: str, argv: Sequence[str], *, strict: bool = True) -> None:
            cache.run_step(f"{what}: {self.name} {version}", argv, advice=advice, strict=strict)

        step("create its environment", [str(base), "-m", "venv", str(folder)])
        step("install it", [python, *_PIP_INSTALL, "--no-compile", *requirements])
        # Every rollout pays for the start-up, and the sandbox mounts the folder read-only, so compile now.
        # compileall fails for files of other Python versions, which pip would have skipped silently.
        step("compile it", [python, "-m", "compileall", "-q", "-j", "0", str(folder / "lib")], strict=False)
        step("start it once", [python, "-c", f"import {self.imports}"])


class VenvHarness(VenvPackage, ConnectableHarness):
    @property
    def package(self) -> str:
        return self.info.package.removeprefix("pypi:")

    @property
    def install_command(self) -> tuple[str, ...]:
        python = ("--python", self.pythons[0]) if self.pythons else ()
        extras = (word for requirement in self.extra_requirements for word in ("--with", requirement))
        return ("uv", "tool", "install", *python, *extras, self.package)


def _interpreter_mounts(folder: Path) -> tuple[Path, ...]:
    """Return the base interpreter's folders that are not below /usr. Sandboxes must mount them, too."""
    settings = dict(line.split(" = ", 1) for line in (folder / "pyvenv.cfg").read_text().splitlines() if " = " in line)
    base = Path(settings["home"]).parent
    roots = {base, base.resolve(), (folder / "bin" / "python").resolve().parent.parent}
    return tuple(sorted(root for root in roots if not root.is_relative_to("/usr")))


def find_python(minors: Sequence[str], cache_root: Path) -> Path | None:
    """Return an interpreter of one of `minors` (best first, such as ``3.12``) on this machine, or None."""
    if OWN_MINOR in minors:
        return Path(sys.executable)
    candidates = (path for minor in minors for path in _candidates(minor, cache_root) if _is_python(path, minor))
    return next(candidates, None)


def ensure_python(minors: Sequence[str], cache_root: Path) -> Path:
    """Like `find_python`, but if no interpreter is found, fetch `minors[0]` into the cache.

    Raises `InstallError` if the interpreter cannot be fetched or does not start."""
    found = find_python(minors, cache_root)
    if found is not None:
        return found
    best = minors[0]
    advice = (
        f"Python {' or '.join(minors)} is needed, and this machine has none (searched PATH and the folders of pyenv, "
        f"uv and conda).\nInstall it (apt install python{best}-venv, pyenv install {best}, uv python install {best}), "
        "or set UV_PYTHON_INSTALL_MIRROR to a mirror of python-build-standalone, and try again."
    )
    _fetch(best, cache_root / _FETCHED, advice)
    found = find_python(minors, cache_root)
    if found is None:
        raise InstallError(f"the Python that uv fetched does not start.\n{advice}")
    return found


def _candidates(minor: str, cache_root: Path) -> Iterator[Path]:
    """Yield all files that may be a Python of version `minor`. The first file on PATH is not enough: a pyenv shim may
    not start."""
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


def _is_python(program: Path, minor: str) -> bool:
    """Return whether `program` starts, is Python `minor`, and has the modules for making a venv (Debian has them in a
    separate package)."""
    try:
        done = subprocess.run(
            [str(program), "-I", "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == minor.encode()


def _fetch(minor: str, folder: Path, advice: str) -> None:
    """Install Python `minor` below `folder` with uv. A lock lets one process install at a time.

    Raises `InstallError` if uv or this Python cannot be installed."""
    folder.mkdir(parents=True, exist_ok=True)
    with cache.exclusive_lock(folder / ".lock"):
        tools = folder / "uv"
        uv = tools / "bin" / "uv"
        if not uv.is_file():
            # uv goes into its own folder, so that the environment that runs Polar does not change.
            pip = [sys.executable, *_PIP_INSTALL, "--target", str(tools), "uv"]
            cache.run_step(f"install uv, which fetches Python {minor}", pip, advice=advice)
        install = [str(uv), "python", "install", "--no-bin", "--install-dir", str(folder), minor]
        cache.run_step(f"fetch Python {minor} with uv", install, advice=advice)

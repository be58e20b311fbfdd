"""Check what is installed (`polar doctor`), and that a harness would start in a sandbox (`polar harness check`)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import shutil
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

from harness_adapters.base import (
    HarnessAdapter,
    HarnessError,
    Installation,
    LaunchContext,
    get_adapter,
    list_adapters,
)
from polar_proxy.config import Settings
from polar_proxy.engines.factory import POLAR_TINY, make_engine
from polar_proxy.errors import PolarError
from polar_proxy.intercept.certificates import is_made
from polar_proxy.intercept.proxy import Mitmproxy
from polar_proxy.prices import PriceTable
from polar_proxy.store import Store
from sandboxes.base import DockerRuntime, Mount, ResourceLimits, Sandbox, SandboxError, SandboxKind, SandboxSpec
from sandboxes.choice import Availability, available, choose, open_sandbox
from sandboxes.docker_engine import describe_engine
from sandboxes.self_test import HOW_TO_GO_ON, describe_leaks, find_leaks

_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """The result of one check."""

    name: str
    state: Literal["ok", "missing", "failed", "note"]
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class InstallCheck(PreflightCheck):
    """The result of one check of `polar doctor`."""

    needed: bool = False
    """True if Polar's demo cannot run without this part."""


def check_tested_version(adapter: HarnessAdapter, installed: Installation) -> list[PreflightCheck]:
    """Return a note if the adapter was not tested with the installed version."""
    low, high = adapter.info.tested_versions or (adapter.default_version, adapter.default_version)
    if low == high == "any" or _version_key(low) <= _version_key(installed.version) <= _version_key(high):
        return []
    detail = f"this adapter was tested with {low} to {high}, not with {installed.version}"
    return [PreflightCheck("tested", "note", detail)]


async def check_in_sandbox(
    adapter: HarnessAdapter, installed: Installation, kind: SandboxKind | Literal["auto"]
) -> list[PreflightCheck]:
    """Open a sandbox and check the required programs, the version, and a planned launch."""
    try:
        choice = await asyncio.to_thread(choose, kind)
        spec = SandboxSpec(
            mounts=tuple(Mount(path, str(path)) for path in installed.mounts),
            limits=ResourceLimits(memory_mb=None if choice.kind == "process" else 4096),
        )
        async with await open_sandbox(choice.kind, spec) as sandbox:
            return [
                PreflightCheck("sandbox", "ok", choice.reason),
                *[await _check_program(sandbox, program) for program in adapter.info.needs],
                *await _check_start(adapter, installed, sandbox),
                await _check_launch(adapter, installed, sandbox),
            ]
    except (SandboxError, OSError) as error:
        return [PreflightCheck("sandbox", "failed", str(error), "polar doctor")]


async def _check_program(sandbox: Sandbox, program: str) -> PreflightCheck:
    result = await sandbox.exec(["sh", "-c", 'command -v "$1"', "sh", program], timeout=_TIMEOUT_SECONDS)
    if result.exit_code == 0:
        return PreflightCheck(f"needs {program}", "ok", result.stdout.decode(errors="replace").strip())
    place = {"docker": "in the sandbox's image", "bubblewrap": "on this machine", "process": "on this machine"}
    fix = f"install {program} {place[sandbox.kind]} with its package manager (apt-get install {program})"
    return PreflightCheck(f"needs {program}", "missing", f"not on PATH in the {sandbox.kind} sandbox", fix)


async def _check_start(adapter: HarnessAdapter, installed: Installation, sandbox: Sandbox) -> list[PreflightCheck]:
    """Check that the harness prints the installed version. If it has no version command, return an empty list."""
    program, root = str(installed.program), str(installed.root)
    argv = [word.replace("{program}", program).replace("{root}", root) for word in adapter.info.version_command]
    if not argv:
        return []
    result = await sandbox.exec(argv, env={"HOME": sandbox.home}, timeout=_TIMEOUT_SECONDS)
    output = (result.stdout + result.stderr).decode(errors="replace").strip()
    if result.timed_out or result.exit_code != 0:
        cause = "did not end" if result.timed_out else f"exit code {result.exit_code}"
        return [PreflightCheck("starts", "failed", f"{' '.join(argv)}: {cause}: {output[-400:]}")]
    line = next((line.strip() for line in output.splitlines() if installed.version in line), "")
    if not line:
        detail = f"it prints {output[-200:]!r}, not {installed.version}"
        return [PreflightCheck("starts", "failed", detail, "remove it and install it again")]
    return [PreflightCheck("starts", "ok", line[:200])]


async def _check_launch(adapter: HarnessAdapter, installed: Installation, sandbox: Sandbox) -> PreflightCheck:
    """Plan a launch, write its files and look for its program, but start nothing."""
    key = "sk-not-a-key-0123456789"
    context = LaunchContext(
        base_url="http://127.0.0.1:9/v1",
        api_key=key,
        model="model",
        instruction="Say hello.",
        home=sandbox.home,
        workdir=sandbox.workdir,
    )
    try:
        plan = adapter.launch(installed, context)
    except HarnessError as error:
        return PreflightCheck("launch", "failed", str(error))
    if any(key in word for word in plan.argv):
        return PreflightCheck("launch", "failed", "the key is in the argument list, where every user can read it")
    for name, text in plan.files.items():
        await sandbox.write(f"{sandbox.home}/{name}", text.encode(), 0o600)
    program = plan.argv[0]
    found = await sandbox.exec(["sh", "-c", 'command -v "$1"', "sh", program], env=plan.env, timeout=_TIMEOUT_SECONDS)
    if found.exit_code != 0:
        return PreflightCheck("launch", "missing", f"{program} is not in the {sandbox.kind} sandbox")
    shown = " ".join(plan.argv[:3])
    return PreflightCheck("launch", "ok", f"{shown} ... ({len(plan.files)} files, {len(plan.env)} variables)")


def _version_key(version: str) -> list[int]:
    return [int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")]


# The installation


async def check_installation(
    settings: Settings, database: AbstractAsyncContextManager[Store], *, engine: bool
) -> list[InstallCheck]:
    """Check what is installed; with `engine`, also the configured engine."""
    git = shutil.which("git")
    checks = [
        InstallCheck("python", "ok", platform.python_version(), "Polar needs Python 3.11 or newer", needed=True),
        InstallCheck(
            "git",
            "ok" if git else "missing",
            git or "not on PATH",
            "install git with your system's package manager",
            needed=True,
        ),
        *_packages(),
        _bundled_policy(),
        *await _sandboxes(settings),
        *_harnesses(settings),
        _interception(settings),
        await _database(database),
    ]
    return checks + (await _engine(settings) if engine else [])


_OPTIONAL_PACKAGES = {
    "torch": ("the local engine", "local"),
    "transformers": ("the local engine", "local"),
    "aiodocker": ("the docker sandbox", "docker"),
    "asyncpg": ("PostgreSQL", "postgres"),
}
"""Name of an optional package -> (the part of Polar that needs it, the extra of pyproject.toml that installs it)."""


def _packages() -> list[InstallCheck]:
    """Return one check for each installed package, and a single check for all missing packages."""
    checks, missing, extras = [], [], []
    for name, (purpose, extra) in _OPTIONAL_PACKAGES.items():
        try:
            checks.append(InstallCheck(name, "ok", f"{importlib.metadata.version(name)} (for {purpose})"))
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{name} (for {purpose})")
            extras.append(extra)
    if missing:
        fix = f"pip install 'polar-proxy[{','.join(dict.fromkeys(extras))}]'"
        checks.append(InstallCheck("packages", "missing", f"not installed: {', '.join(missing)}", fix))
    return checks


def _bundled_policy() -> InstallCheck:
    weights = POLAR_TINY / "model.safetensors"
    if weights.is_file():
        return InstallCheck("polar-tiny", "ok", f"bundled policy, {weights.stat().st_size / 1e6:.1f} MB")
    return InstallCheck("polar-tiny", "missing", f"no weights in {POLAR_TINY}", "reinstall Polar")


async def _sandboxes(settings: Settings) -> list[InstallCheck]:
    found = await asyncio.to_thread(available)
    return [await _sandbox(item, settings.sandboxes.docker_runtime) for item in found]


async def _sandbox(item: Availability, runtime: DockerRuntime) -> InstallCheck:
    name = f"sandbox {item.kind}"
    if not item.ok:
        return InstallCheck(name, "missing", item.why_not, item.how_to_get)
    if item.kind == "process":
        return InstallCheck(name, "ok", "usable; isolates nothing")
    engine = ""
    try:
        opened = await find_leaks(item.kind, runtime=runtime)
        if item.kind == "docker":
            engine = f"; {await describe_engine(runtime)}"
    except SandboxError as error:
        return InstallCheck(name, "failed", str(error), item.how_to_get)
    if opened is None:
        return InstallCheck(name, "note", f"usable{engine}; not tested, because its image has no python3")
    if opened:
        return InstallCheck(name, "failed", describe_leaks(item.kind, opened), HOW_TO_GO_ON)
    return InstallCheck(name, "ok", f"usable, nothing gets out{engine}")


def _harnesses(settings: Settings) -> list[InstallCheck]:
    """Return one check for each installed harness, and a single check for all others, which `polar run` installs."""
    checks, others = [], []
    for name in list_adapters(settings.harness_cache):
        adapter = get_adapter(name, settings.harness_cache)
        if adapter.is_installed(settings.harness_cache):
            checks.append(InstallCheck(f"harness {name}", "ok", f"{adapter.default_version} installed"))
        else:
            others.append(name)
    if others:
        checks.append(InstallCheck("harnesses", "note", f"installed at their first use: {', '.join(others)}"))
    return checks


def _interception(settings: Settings) -> InstallCheck:
    mitmproxy = Mitmproxy()
    authority = "a certificate authority" if is_made(settings.home) else "no certificate authority yet"
    if mitmproxy.is_installed(settings.harness_cache):
        detail = f"mitmproxy {mitmproxy.default_version} installed, {authority}"
        return InstallCheck("interception", "ok", detail)
    return InstallCheck("interception", "note", f"mitmproxy is installed by the first `polar intercept`; {authority}")


async def _database(database: AbstractAsyncContextManager[Store]) -> InstallCheck:
    try:
        async with database as store:
            return InstallCheck("database", "ok", f"{store.display_url}, schema {await store.schema_revision()}")
    except PolarError as error:
        fix = "`polar db upgrade` creates it, and so do `polar run` and `polar serve`"
        return InstallCheck("database", "missing", str(error), fix)


def _price(settings: Settings, model: str) -> InstallCheck:
    """Return a check of the prices of a hosted model."""
    try:
        prices = PriceTable(settings.gateway.prices).find(model)
    except PolarError as error:
        return InstallCheck("price", "failed", str(error), "correct the setting gateway.prices")
    if prices is None:
        fix = "set gateway.prices to a price file that has this model"
        return InstallCheck("price", "note", f"no price of {model} is known: its calls are recorded without one", fix)
    per_token = f"{prices.input:g} USD for a million prompt tokens, {prices.output:g} for sampled ones"
    return InstallCheck("price", "ok", f"{per_token} ({prices.date}, {prices.source})")


async def _engine(settings: Settings) -> list[InstallCheck]:
    try:
        async with make_engine(settings.engine) as engine:
            info = engine.info
            capabilities = ", ".join(sorted(info.capabilities))
            detail = f"{info.engine} {info.version}, {info.model}, {info.logprob_mode}: {capabilities}"
            problem = engine.continue_problem
    except PolarError as error:
        return [InstallCheck("engine", "failed", str(error), "start the server, or correct --engine-url")]
    if "hosted" in info.capabilities:
        return [InstallCheck("engine", "ok", detail), _price(settings, info.model)]
    works = "turns begin with the exact tokens of the turn before"
    remedy = ""
    if info.engine == "vllm":
        remedy = "`polar doctor serve MODEL` prints the command that serves this model with parsers for its answers"
    continuation = InstallCheck("continue mode", "missing" if problem else "ok", problem or works, remedy)
    return [InstallCheck("engine", "ok", detail), continuation]

"""`polar doctor` checks the installation; `polar doctor drift` explains prompts that differ from the sampled tokens."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from polar_proxy.cli import conformance, options
from polar_proxy.cli.common import load_settings, open_database, run_async
from polar_proxy.cli.output import print_checks, print_result
from polar_proxy.config import Settings
from polar_proxy.conformance.preflight import PreflightCheck
from polar_proxy.errors import PolarError

app = typer.Typer(invoke_without_command=True)
app.command("drift")(conformance.drift)


@dataclass(frozen=True, slots=True)
class InstallCheck(PreflightCheck):
    """The result of one check of `polar doctor`."""

    needed: bool = False
    """The demo of Polar cannot run without it."""


@app.callback()
def doctor(
    context: typer.Context,
    engine_url: Annotated[str | None, typer.Option(help="Also check the vLLM server at this URL.")] = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what is installed, what is missing and how to get it. The exit code is 1 if a required part is missing."""
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(db, engine={"url": engine_url})
    checks = run_async(_checks(settings, engine_url))
    failed = [check for check in checks if check.needed and check.state != "ok"]
    found = {"ok": not failed, "checks": checks}
    print_result(found, lambda: print_checks(checks), as_json, good=not failed)


async def _checks(settings: Settings, engine_url: str | None) -> list[InstallCheck]:
    checks = [
        _python(),
        _program("git", "install git with your system's package manager", needed=True),
        _package("torch", "the local engine", "pip install 'polar-proxy[local]'"),
        _package("transformers", "the local engine", "pip install 'polar-proxy[local]'"),
        _package("aiodocker", "the docker sandbox", "pip install 'polar-proxy[docker]'"),
        _package("asyncpg", "PostgreSQL", "pip install 'polar-proxy[postgres]'"),
        _bundled_policy(),
        *_sandboxes(),
        *_harnesses(settings),
        await _database(settings),
    ]
    return checks + (await _engine(settings) if engine_url else [])


def _python() -> InstallCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    state: Literal["ok", "failed"] = "ok" if sys.version_info >= (3, 11) else "failed"
    return InstallCheck("python", state, version, "Polar needs Python 3.11 or newer", needed=True)


def _program(name: str, fix: str, *, needed: bool = False) -> InstallCheck:
    path = shutil.which(name)
    return InstallCheck(name, "ok" if path else "missing", path or "not on PATH", fix, needed)


def _package(name: str, purpose: str, fix: str) -> InstallCheck:
    try:
        return InstallCheck(name, "ok", f"{importlib.metadata.version(name)} (for {purpose})")
    except importlib.metadata.PackageNotFoundError:
        return InstallCheck(name, "missing", f"not installed (for {purpose})", fix)


def _bundled_policy() -> InstallCheck:
    from polar_proxy.engines.factory import POLAR_TINY

    weights = POLAR_TINY / "model.safetensors"
    if weights.is_file():
        return InstallCheck("polar-tiny", "ok", f"bundled policy, {weights.stat().st_size / 1e6:.1f} MB")
    return InstallCheck("polar-tiny", "missing", f"no weights in {POLAR_TINY}", "reinstall Polar")


def _sandboxes() -> list[InstallCheck]:
    from sandboxes.choice import available

    return [
        InstallCheck(
            f"sandbox {item.kind}", "ok" if item.ok else "missing", item.why_not or "usable", item.how_to_get or ""
        )
        for item in available()
    ]


def _harnesses(settings: Settings) -> list[InstallCheck]:
    from harness_adapters.base import get_adapter, list_adapters

    checks = []
    for name in list_adapters():
        adapter = get_adapter(name)
        ready = adapter.is_installed(settings.harness_cache)
        detail = f"{adapter.default_version} " + ("installed" if ready else "is installed at its first run")
        checks.append(
            InstallCheck(f"harness {name}", "ok" if ready else "missing", detail, "nothing to do: `polar run` does it")
        )
    return checks


async def _database(settings: Settings) -> InstallCheck:
    try:
        async with open_database(settings) as store:
            return InstallCheck("database", "ok", f"{store.display_url}, schema {await store.schema_revision()}")
    except PolarError as error:
        fix = "`polar db upgrade` creates it, and so do `polar run` and `polar serve`"
        return InstallCheck("database", "missing", str(error), fix)


async def _engine(settings: Settings) -> list[InstallCheck]:
    from polar_proxy.engines.factory import make_engine

    try:
        async with make_engine(settings.engine.model_copy(update={"kind": "vllm"})) as engine:
            info = engine.info
            capabilities = ", ".join(sorted(info.capabilities))
            detail = f"{info.engine} {info.version}, {info.model}, {info.logprob_mode}: {capabilities}"
            problem = engine.continue_problem
    except PolarError as error:
        return [InstallCheck("engine", "failed", str(error), "start the server, or correct --engine-url")]
    if problem is None:
        continuation = InstallCheck("continue mode", "ok", "turns begin with the exact tokens of the turn before")
    else:
        continuation = InstallCheck("continue mode", "missing", problem)
    return [InstallCheck("engine", "ok", detail), continuation]

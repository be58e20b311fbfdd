"""`polar harness`: the agents that can be run; installing them, and seeing whether they would start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from harness_adapters.base import (
    HarnessAdapter,
    HarnessError,
    Installation,
    LaunchContext,
    get_adapter,
    list_adapters,
    split_version,
)
from polar_proxy.cli import common
from polar_proxy.cli.common import JsonOption
from polar_proxy.errors import PolarError, UsageError
from polar_proxy.types import Json
from sandboxes import Mount, ResourceLimits, Sandbox, SandboxError, SandboxSpec, choose, open_sandbox
from sandboxes.base import SandboxKind

app = typer.Typer(help="The agents: what there is, installing, checking.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="NAME[@VERSION], module:Class, or shell:COMMAND.")]
VersionOption = Annotated[str | None, typer.Option(help="Instead of the adapter's own default.")]

_SECONDS = 120.0


class HarnessUnusableError(PolarError):
    """The harness would not run; the findings were printed."""


@dataclass(frozen=True, slots=True)
class HarnessFinding:
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "missing", "failed", "note"]
    detail: str
    fix: str = ""


@app.command("list")
def list_command(as_json: JsonOption = False) -> None:
    """List the harnesses."""
    cache = common.load_settings().harness_cache
    rows = [_summary(get_adapter(name), cache) for name in list_adapters()]
    if as_json:
        common.print_json({"harnesses": rows})
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ("harness", "version", "installed", "speaks", "runs on"):
        table.add_column(column, no_wrap=column in ("harness", "version"), overflow="fold")
    for row in rows:
        installed = "[green]yes[/]" if row["installed"] else "no"
        table.add_row(row["name"], row["version"], installed, ", ".join(row["wire_apis"]), escape(row["runtime"]))
    common.out.print(table)


@app.command("info")
def info(name: NameArgument, as_json: JsonOption = False) -> None:
    """Say all that is known of a harness before it is installed."""
    cache = common.load_settings().harness_cache
    adapter, _ = _adapter(name, None)
    found = _summary(adapter, cache)
    if as_json:
        common.print_json(found)
        return
    for key, value in found.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        common.out.print(f"[bold]{key}[/]: {escape(text)}", highlight=False, soft_wrap=True)


@app.command("install")
def install(name: NameArgument, version: VersionOption = None, as_json: JsonOption = False) -> None:
    """Install a harness into the cache, where it is not there yet."""
    cache = common.load_settings().harness_cache
    adapter, wanted = _adapter(name, version)
    already = adapter.is_installed(cache, wanted)
    started = time.monotonic()
    installed = _install(adapter, wanted, cache, quiet=as_json)
    seconds = round(time.monotonic() - started, 1)
    megabytes = _megabytes(installed.root)
    if as_json:
        found = {"name": installed.name, "version": installed.version, "already_there": already}
        common.print_json({**found, "seconds": seconds, "megabytes": megabytes, "path": str(installed.root)})
        return
    told = "was there already" if already else f"installed in {seconds:.0f} s"
    common.out.print(
        f"{installed.name} {escape(installed.version)}: {told}, {megabytes} MB in {escape(str(installed.root))}",
        highlight=False,
        soft_wrap=True,
    )


@app.command("check")
def check(
    name: NameArgument,
    version: VersionOption = None,
    sandbox: Annotated[str, typer.Option(help="auto, docker, bubblewrap or process.")] = "auto",
    no_install: Annotated[bool, typer.Option("--no-install", help="Only say how, when it is missing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """See whether a harness would start in the sandbox that runs would use, without asking a model anything.

    Exit code 0 when it would, 1 when something is missing.
    """
    if sandbox not in ("auto", "docker", "bubblewrap", "process"):
        raise UsageError(f"There is no sandbox {sandbox!r}: auto, docker, bubblewrap or process.")
    cache = common.load_settings().harness_cache
    adapter, wanted = _adapter(name, version)
    findings: list[HarnessFinding] = []
    installed = None
    if no_install and not adapter.is_installed(cache, wanted):
        findings.append(HarnessFinding("installed", "missing", "not in the cache", f"polar harness install {name}"))
    else:
        try:
            installed = _install(adapter, wanted, cache, quiet=as_json)
            findings.append(HarnessFinding("installed", "ok", f"{installed.version} in {installed.root}"))
            findings += _validated(adapter, installed)
        except PolarError as error:
            findings.append(HarnessFinding("installed", "failed", str(error)))
    if installed is not None:
        findings += common.run_async(_look(adapter, installed, sandbox))  # type: ignore[arg-type]
    good = all(finding.state in ("ok", "note") for finding in findings)
    if as_json:
        told = {"name": adapter.name, "version": installed.version if installed else wanted, "ok": good}
        common.print_json({**told, "checks": [asdict(finding) for finding in findings]})
    else:
        _print_findings(adapter.name, findings, good)
    if not good:
        raise typer.Exit(1)


@app.command("bake")
def bake(
    name: NameArgument,
    version: VersionOption = None,
    base: Annotated[
        str | None, typer.Option(help="The image to lay it upon; default: that of docker sandboxes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the docker image that holds a harness, where it is not there yet, and print its name.

    With `run.bake` on, rollouts in docker sandboxes do this by themselves.
    """
    from sandboxes import docker_engine
    from sandboxes.images.prebuilt import PrebuiltImage
    from sandboxes.images.prebuilt import prebuild as bake_image

    adapter, wanted = _adapter(name, version)
    installed = _install(adapter, wanted, common.load_settings().harness_cache, quiet=as_json)

    async def work() -> PrebuiltImage:
        async with docker_engine.docker_client() as engine:
            return await bake_image(engine, base, installed.mounts)

    try:
        with _progress(f"baking {adapter.name} {installed.version} into an image", quiet=as_json):
            baked = common.run_async(work())
    except SandboxError as error:
        raise HarnessUnusableError(str(error)) from error
    if as_json:
        told = {"name": installed.name, "version": installed.version, "image": baked.image, "base": baked.base}
        common.print_json({**told, "already_there": not baked.made, "seconds": round(baked.seconds, 1)})
        return
    did = f"made in {baked.seconds:.0f} s" if baked.made else "was there already"
    common.err.print(f"[dim]{installed.name} {escape(installed.version)} on {escape(baked.base)}: {did}[/]")
    typer.echo(baked.image)


@app.command("prune")
def prune(
    base: Annotated[str | None, typer.Option(help="Only those upon this image.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Those of installed agents, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove baked docker images that nobody uses any more: no installed agent would be baked into it again (its files,
    or the image below, have changed), and no container is made of it.
    """
    from sandboxes import docker_engine
    from sandboxes.images.prebuilt import StoredPrebuiltImage
    from sandboxes.images.prebuilt import prune_prebuilt as prune_images

    cache = common.load_settings().harness_cache
    # A command line is no installed agent: what it mounts is said by each run, and baked again for the next.
    known = [adapter for name in list_adapters() if (adapter := get_adapter(name)).info.package != "none"]
    adapters = [adapter for adapter in known if adapter.is_installed(cache)]
    agents = [] if everything else [adapter.install(cache).mounts for adapter in adapters]

    async def work() -> list[StoredPrebuiltImage]:
        async with docker_engine.docker_client() as engine:
            return await prune_images(engine, agents, base=base, everything=everything)

    try:
        found = common.run_async(work())
    except SandboxError as error:
        raise HarnessUnusableError(str(error)) from error
    freed = sum(one.bytes for one in found if one.removed)
    if as_json:
        removed, kept = ([asdict(one) for one in found if one.removed is which] for which in (True, False))
        common.print_json({"removed": removed, "kept": kept, "bytes": freed})
        return
    for one in found:
        did = "removed" if one.removed else "kept"
        line = f"{did} {one.image} on {one.base}, {one.bytes / 1e6:.0f} MB: {one.why}"
        common.out.print(escape(line), highlight=False, soft_wrap=True)
    common.out.print(f"{sum(one.removed for one in found)} removed, {freed / 1e6:.0f} MB", highlight=False)


async def _look(
    adapter: HarnessAdapter, installed: Installation, kind: SandboxKind | Literal["auto"]
) -> list[HarnessFinding]:
    """What can be seen from inside a sandbox."""
    try:
        choice = await asyncio.to_thread(choose, kind)
        spec = SandboxSpec(
            mounts=tuple(Mount(path, str(path)) for path in installed.mounts),
            limits=ResourceLimits(memory_mb=None if choice.kind == "process" else 4096),
        )
        async with await open_sandbox(choice.kind, spec) as sandbox:
            findings = [HarnessFinding("sandbox", "ok", choice.reason)]
            findings += [await _program(sandbox, program) for program in adapter.info.needs]
            findings += await _version(adapter, installed, sandbox)
            findings.append(await _dry_run(adapter, installed, sandbox))
            return findings
    except (SandboxError, OSError) as error:
        return [HarnessFinding("sandbox", "failed", str(error), "polar doctor")]


async def _program(sandbox: Sandbox, program: str) -> HarnessFinding:
    result = await sandbox.exec(["sh", "-c", 'command -v "$1"', "sh", program], timeout=_SECONDS)
    where = result.stdout.decode(errors="replace").strip()
    if result.exit_code == 0:
        return HarnessFinding(f"needs {program}", "ok", where)
    place = {"docker": "in the sandbox's image", "bubblewrap": "on this machine", "process": "on this machine"}
    fix = f"install {program} {place[sandbox.kind]} with its package manager (apt-get install {program})"
    return HarnessFinding(f"needs {program}", "missing", f"not on PATH in the {sandbox.kind} sandbox", fix)


async def _version(adapter: HarnessAdapter, installed: Installation, sandbox: Sandbox) -> list[HarnessFinding]:
    values = {"{program}": str(installed.program), "{root}": str(installed.root)}
    argv = []
    for word in adapter.info.version_command:
        for placeholder, value in values.items():
            word = word.replace(placeholder, value)
        argv.append(word)
    if not argv:
        return []
    result = await sandbox.exec(argv, env={"HOME": sandbox.home}, timeout=_SECONDS)
    said = (result.stdout + result.stderr).decode(errors="replace").strip()
    if result.timed_out or result.exit_code != 0:
        why = "did not end" if result.timed_out else f"exit code {result.exit_code}"
        return [HarnessFinding("starts", "failed", f"{' '.join(argv)}: {why}: {said[-400:]}")]
    line = next((line.strip() for line in said.splitlines() if installed.version in line), "")
    if not line:
        return [
            HarnessFinding(
                "starts", "failed", f"it says {said[-200:]!r}, not {installed.version}", "remove it and install"
            )
        ]
    return [HarnessFinding("starts", "ok", line[:200])]


async def _dry_run(adapter: HarnessAdapter, installed: Installation, sandbox: Sandbox) -> HarnessFinding:
    """Plan a run, write its files, look for its program; nothing is started."""
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
        return HarnessFinding("launch", "failed", str(error))
    if any(key in word for word in plan.argv):
        return HarnessFinding("launch", "failed", "the key stands in the argument list, where every user can read it")
    for name, text in plan.files.items():
        await sandbox.write(f"{sandbox.home}/{name}", text.encode(), 0o600)
    found = await sandbox.exec(["sh", "-c", 'command -v "$1"', "sh", plan.argv[0]], env=plan.env, timeout=_SECONDS)
    if found.exit_code != 0:
        return HarnessFinding("launch", "missing", f"{plan.argv[0]} is not there in the {sandbox.kind} sandbox")
    shown = " ".join(plan.argv[:3])
    return HarnessFinding("launch", "ok", f"{shown} ... ({len(plan.files)} files, {len(plan.env)} variables)")


def _validated(adapter: HarnessAdapter, installed: Installation) -> list[HarnessFinding]:
    low, high = adapter.info.tested_versions
    if low == high == "any" or _key(low) <= _key(installed.version) <= _key(high):
        return []
    return [
        HarnessFinding(
            "tested_versions", "note", f"this adapter was run with {low} to {high}, not with {installed.version}"
        )
    ]


def _key(version: str) -> list[int]:
    return [int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")]


def _adapter(name: str, version: str | None) -> tuple[HarnessAdapter, str | None]:
    bare, inline = split_version(name)
    if version is not None and inline is not None and version != inline:
        raise UsageError(f"Two versions: {name} and --version {version}.")
    try:
        return get_adapter(bare), version or inline
    except (HarnessError, TypeError) as error:
        raise UsageError(str(error)) from error


def _install(adapter: HarnessAdapter, version: str | None, cache: Path, *, quiet: bool) -> Installation:
    async def work() -> Installation:
        return await asyncio.to_thread(adapter.install, cache, version)

    try:
        if adapter.is_installed(cache, version):
            return adapter.install(cache, version)
        with _progress(f"installing {adapter.name} {version or adapter.default_version}", quiet=quiet):
            return common.run_async(work())
    except HarnessError as error:
        raise HarnessUnusableError(str(error)) from error


@contextlib.contextmanager
def _progress(text: str, *, quiet: bool) -> Iterator[None]:
    """A line that moves while something takes minutes; one plain line where nobody watches."""
    if quiet or not common.err.is_terminal:
        common.err.print(f"[dim]{escape(text)} (once; a minute or two)[/]", highlight=False)
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(escape(text)), TimeElapsedColumn())
    with Progress(*columns, console=common.err, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def _summary(adapter: HarnessAdapter, cache: Path) -> Json:
    info = adapter.info
    return {
        "name": adapter.name,
        "version": adapter.default_version,
        "installed": adapter.is_installed(cache),
        "wire_apis": list(info.wire_apis),
        "runtime": info.runtime,
        "needs": list(info.needs),
        "package": info.package,
        "tested_versions": list(info.tested_versions),
        "features": sorted(info.features),
        "homepage": info.homepage,
        "notes": info.notes,
    }


def _megabytes(root: Path) -> int:
    if root == Path("/"):  # nothing of its own
        return 0
    return round(sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir()) / 1e6)


def _print_findings(name: str, findings: list[HarnessFinding], good: bool) -> None:
    colours = {"ok": "green", "note": "cyan", "missing": "yellow", "failed": "red"}
    for finding in findings:
        mark = f"[{colours[finding.state]}]{finding.state:<7}[/]"
        common.out.print(f"{mark} {finding.name}: {escape(finding.detail)}", highlight=False, soft_wrap=True)
        if finding.fix and finding.state not in ("ok", "note"):
            common.out.print(f"          -> {escape(finding.fix)}", highlight=False, soft_wrap=True)
    verdict = "[green]OK[/]: it would run" if good else "[red]not OK[/]: see above"
    common.out.print(f"{name}: {verdict}", highlight=False)

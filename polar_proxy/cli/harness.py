"""`polar doctor` and `polar harness`: check the installation; list, install, check and prebuild agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.text import Text

from harness_adapters.base import (
    HarnessAdapter,
    HarnessError,
    Installation,
    check_version,
    get_adapter,
    list_adapters,
    split_version,
)
from polar_proxy.cli import options
from polar_proxy.cli.common import import_named_code, load_settings, open_database, run_async
from polar_proxy.cli.output import make_table, out, print_checks, print_note, print_result, spinner, styled
from polar_proxy.errors import UsageError
from polar_proxy.terminal import one_line
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.conformance.preflight import PreflightCheck

T = TypeVar("T")

doctor_app = typer.Typer(invoke_without_command=True)
app = typer.Typer(help="List, install and check agents.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="[acp:]NAME[@VERSION], module:Class, or shell:COMMAND.")]
VersionOption = Annotated[str | None, typer.Option(help="Version; overrides the adapter's default.")]


@doctor_app.callback()
def doctor(
    context: typer.Context,
    engine: Annotated[
        Literal["vllm", "llamacpp", "openai", "anthropic", "google"], typer.Option(help="Kind of the engine to check.")
    ] = "vllm",
    engine_url: Annotated[str | None, typer.Option(help="Also check the engine at this URL.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the engine's model. For a hosted provider, give this instead of --engine-url."),
    ] = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what is installed, what is missing and how to get it. The exit code is 1 if a required part is missing."""
    if context.invoked_subcommand is not None:
        return
    from polar_proxy.conformance.preflight import check_installation

    settings = load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})
    with_engine = engine_url is not None or model is not None
    checks = run_async(check_installation(settings, open_database(settings), engine=with_engine))
    failed = [check for check in checks if check.needed and check.state != "ok"]
    found = {"ok": not failed, "checks": checks}
    print_result(found, lambda: print_checks(checks), as_json, good=not failed)


@doctor_app.command("serve")
def serve_command(
    model: Annotated[str, typer.Argument(help="Folder of the model, or its name in the Hugging Face cache.")],
    as_json: options.AsJson = False,
) -> None:
    """Print a `vllm serve` command with the parsers that can read the model's answers. No server is started.

    The model's chat template writes answers with reasoning and tool calls, and all parsers of vLLM are tried on them.
    Needs vLLM on this machine (the `vllm` command, or the setting `engine.vllm_python`).
    """
    from polar_proxy.engines.vllm.serve_command import find_serve_command

    with spinner("trying vLLM's parsers", quiet=as_json):
        found = run_async(find_serve_command(model, load_settings().engine.vllm_python))
    print_result({"command": found.line, "vllm": found.vllm_version, "parsers": found.parsers}, found.line, as_json)
    if others := len(found.parsers) - 1:
        print_note(f"{others} other pairs of parsers read its answers in the same way (--json lists them)")


@app.command("list")
def list_harnesses(as_json: options.AsJson = False) -> None:
    """List Polar's harnesses and those that you have added."""
    cache = load_settings().harness_cache
    rows = [_describe(get_adapter(name, cache), cache) for name in list_adapters(cache)]
    table = make_table(
        ("harness", "version", "installed", "speaks", "runs on"),
        (
            (
                row["name"],
                row["version"],
                Text("yes", "green") if row["installed"] else "no",
                ", ".join(row["wire_apis"]),
                row["runtime"],
            )
            for row in rows
        ),
        wrap=("installed", "speaks", "runs on"),
    )
    print_result({"harnesses": rows}, table, as_json)


@app.command("info")
def show_info(name: NameArgument, as_json: options.AsJson = False) -> None:
    """Show what the adapter of a harness declares: versions, APIs, requirements, features."""
    adapter, _ = find_adapter(name)
    info = _describe(adapter, load_settings().harness_cache)
    lines: list[Text] = []
    for key, value in info.items():
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        lines.append(styled("[bold]{}[/]: {}", key, text))
    print_result(info, Text("\n").join(lines), as_json)


@app.command("add")
def add(
    file: Annotated[Path, typer.Argument(help="TOML file that describes an agent.")],
    as_json: options.AsJson = False,
) -> None:
    """Add an agent of your own. A TOML file describes how to install, connect and start it. Adding an agent again
    replaces it.

    The file is checked and copied to the folder of installed harnesses, where you can remove it. examples/harnesses has
    five files to begin with.
    """
    from harness_adapters.definitions.harness import load_harness

    try:
        adapter = load_harness(file)
    except HarnessError as error:
        raise UsageError(str(error)) from error
    if adapter.name in list_adapters():
        raise UsageError(f"{file}: name: {adapter.name!r} is a built-in harness; choose another name.")
    target = load_settings().harness_cache / f"{adapter.name}.toml"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(file.read_bytes())
    text = f"{adapter.name} was added ({target}); to check it: polar harness check {adapter.name}"
    print_result({"name": adapter.name, "path": str(target)}, one_line(text), as_json)


@app.command("install")
def install(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="NAME[@VERSION] or module:Class. Repeatable.")],
    version: VersionOption = None,
    as_json: options.AsJson = False,
) -> None:
    """Install harnesses into the cache, unless they are already there.

    If one installation fails, the other harnesses are still installed, and the exit code is 1.
    """
    if version is not None and len(names) > 1:
        raise UsageError("--version is for one harness; with several, write NAME@VERSION.")
    cache = load_settings().harness_cache
    adapters = [find_adapter(name, version) for name in names]
    installed: list[Json] = []
    failed: list[Json] = []
    for adapter, wanted in adapters:
        try:
            installed.append(_install_timed(adapter, wanted, cache, quiet=as_json))
        except HarnessError as error:
            failed.append({"name": adapter.name, "error": str(error)})
            if not as_json:
                print_note(f"{adapter.name} was not installed: {error}")
    print_result({"installed": installed, "failed": failed}, lambda: None, as_json, good=not failed)


def _install_timed(adapter: HarnessAdapter, version: str | None, cache: Path, *, quiet: bool) -> Json:
    """Install a harness, and print how long it took."""
    already = adapter.is_installed(cache, version)
    started = time.monotonic()
    installed = install_harness(adapter, version, cache, quiet=quiet)
    seconds = round(time.monotonic() - started, 1)
    megabytes = _megabytes(installed.root)
    if not quiet:
        did = "already installed" if already else f"installed in {seconds:.0f} s"
        text = f"{installed.name} {installed.version}: {did}, {megabytes} MB in {installed.root}"
        out.print(one_line(text), soft_wrap=True)
    return {
        "name": installed.name,
        "version": installed.version,
        "already_there": already,
        "seconds": seconds,
        "megabytes": megabytes,
        "path": str(installed.root),
    }


@app.command("check")
def check(
    name: NameArgument,
    version: VersionOption = None,
    sandbox: options.Sandbox = "auto",
    no_install: Annotated[
        bool, typer.Option("--no-install", help="If the harness is not installed, only print how to install it.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check that a harness starts in the sandbox that rollouts would use, without calling a model.

    The exit code is 1 if something is missing.
    """
    from polar_proxy.conformance.preflight import PreflightCheck, check_in_sandbox, check_tested_version

    cache = load_settings().harness_cache
    adapter, version = find_adapter(name, version)
    installed = None
    if no_install and not adapter.is_installed(cache, version):
        checks = [PreflightCheck("installed", "missing", "not in the cache", f"polar harness install {name}")]
    else:
        try:
            installed = install_harness(adapter, version, cache, quiet=as_json)
        except HarnessError as error:
            checks = [PreflightCheck("installed", "failed", str(error))]
        else:
            checks = [
                PreflightCheck("installed", "ok", f"{installed.version} in {installed.root}"),
                *check_tested_version(adapter, installed),
                *run_async(check_in_sandbox(adapter, installed, sandbox)),  # type: ignore[arg-type]
            ]
    good = all(one.state in ("ok", "note") for one in checks)
    found = {"name": adapter.name, "version": installed.version if installed else version, "ok": good, "checks": checks}
    print_result(found, lambda: _print_checks(adapter.name, checks, good), as_json, good=good)


def _print_checks(name: str, checks: list[PreflightCheck], good: bool) -> None:
    print_checks(checks)
    out.print(styled("{}: " + ("[green]OK[/]: it would run" if good else "[red]not OK[/]: see above"), name))


@app.command("prebuild")
def prebuild(
    name: NameArgument,
    version: VersionOption = None,
    base: Annotated[str | None, typer.Option(help="Image to build on. Default: the image of docker sandboxes.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Build the Docker image that contains a harness, unless it exists, and print its name.

    With the setting `run.prebuild`, rollouts in docker sandboxes build the image themselves.
    """
    from sandboxes.images.prebuilt import prebuild as build_image

    adapter, version = find_adapter(name, version)
    installed = install_harness(adapter, version, load_settings().harness_cache, quiet=as_json)
    with spinner(f"building an image with {adapter.name} {installed.version}", quiet=as_json):
        image = _with_docker(lambda engine: build_image(engine, base, installed.mounts))
    found = {
        "name": installed.name,
        "version": installed.version,
        "image": image.image,
        "base": image.base,
        "already_there": not image.made,
        "seconds": round(image.seconds, 1),
    }
    if not as_json:
        did = f"built in {image.seconds:.0f} s" if image.made else "already there"
        print_note(f"{installed.name} {installed.version} on {image.base}: {did}")
    print_result(found, image.image, as_json)


@app.command("prune")
def prune(
    base: Annotated[str | None, typer.Option(help="Remove only images that were built on this base image.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also remove images of installed agents.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Remove images of `polar harness prebuild` that are no longer needed.

    An image is kept if a container uses it, or if `polar harness prebuild` would build it again for an installed agent.
    """
    from sandboxes.images.prebuilt import prune_prebuilt

    cache = load_settings().harness_cache
    # `shell:COMMAND` is not an installed agent: its mounts depend on the run.
    every = [get_adapter(name, cache) for name in list_adapters(cache)]
    known = [adapter for adapter in every if adapter.info.package != "none"]
    adapters = [adapter for adapter in known if adapter.is_installed(cache)]
    agents = [] if everything else [adapter.install(cache).mounts for adapter in adapters]
    images = _with_docker(lambda engine: prune_prebuilt(engine, agents, base=base, everything=everything))
    freed = sum(image.bytes for image in images if image.removed)
    lines = []
    for image in images:
        did = "removed" if image.removed else "kept"
        lines.append(one_line(f"{did} {image.image} on {image.base}, {image.bytes / 1e6:.0f} MB: {image.why}"))
    removed, kept = ([image for image in images if image.removed is which] for which in (True, False))
    lines.append(f"{len(removed)} removed, {freed / 1e6:.0f} MB")
    print_result({"removed": removed, "kept": kept, "bytes": freed}, "\n".join(lines), as_json)


def find_adapter(name: str, version: str | None = None) -> tuple[HarnessAdapter, str | None]:
    """Return the adapter, and the requested version (None: the adapter's default version)."""
    try:
        bare, inline = split_version(name)
        if version is not None:
            check_version(version)
        if version is not None and inline is not None and version != inline:
            raise UsageError(f"Two versions are given: {name} and --version {version}.")
        import_named_code(bare)
        return get_adapter(bare, load_settings().harness_cache), version or inline
    except HarnessError as error:
        raise UsageError(str(error)) from error


def install_harness(adapter: HarnessAdapter, version: str | None, cache: Path, *, quiet: bool) -> Installation:
    if adapter.is_installed(cache, version):
        return adapter.install(cache, version)
    with spinner(f"installing {adapter.name} {version or adapter.default_version}", quiet=quiet):
        return run_async(asyncio.to_thread(adapter.install, cache, version))


def _with_docker(work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    from sandboxes import docker_engine

    async def main() -> T:
        async with docker_engine.docker_client() as engine:
            return await work(engine)

    return run_async(main())


def _describe(adapter: HarnessAdapter, cache: Path) -> Json:
    info = adapter.info
    return {
        "name": adapter.name,
        "version": adapter.default_version,
        "installed": adapter.is_installed(cache),
        "wire_apis": info.wire_apis,
        "runtime": info.runtime,
        "needs": info.needs,
        "intercepted": info.intercepted,
        "package": info.package,
        "tested_versions": info.tested_versions or (adapter.default_version, adapter.default_version),
        "features": sorted(info.features),
        "homepage": info.homepage,
        "notes": info.notes,
    }


def _megabytes(root: Path) -> int:
    if root == Path("/"):  # a harness without files
        return 0
    return round(sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir()) / 1e6)

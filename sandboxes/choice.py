"""Opens a sandbox of a kind that works on this machine."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandboxes import bubblewrap, docker, docker_engine, orphans
from sandboxes.base import Sandbox, SandboxError, SandboxKind, SandboxSpec, SandboxUnavailable
from sandboxes.docker_engine import ImageMissing
from sandboxes.docker_remedy import docker_remedy
from sandboxes.process import ProcessSandbox

log = logging.getLogger(__name__)

KINDS: dict[SandboxKind, type[Sandbox]] = {
    "docker": docker.DockerSandbox,
    "bubblewrap": bubblewrap.BubblewrapSandbox,
    "process": ProcessSandbox,
}
STRONGEST_FIRST: tuple[SandboxKind, ...] = ("docker", "bubblewrap", "process")
_HOW_TO_GET: dict[SandboxKind, str] = {
    "bubblewrap": "apt-get install bubblewrap (or your distribution's equivalent); user namespaces must be allowed",
    "process": "",
}


@dataclass(frozen=True)
class Availability:
    """Whether one kind of sandbox works on this machine; if not, the reason and how to install it."""

    kind: SandboxKind
    ok: bool
    why_not: str = ""
    how_to_get: str = ""


@dataclass(frozen=True)
class SandboxChoice:
    """The chosen kind of sandbox. `reason` is one readable line. It says that this kind was requested, or why stronger
    kinds do not work here."""

    kind: SandboxKind
    reason: str


def available() -> list[Availability]:
    """Return for each kind of sandbox, strongest first, whether it works here; if not, also why.

    Blocks for up to about 100 ms: call it in a thread if an event loop runs.
    """
    return [_availability(kind, None) for kind in STRONGEST_FIRST]


def choose(kind: SandboxKind | Literal["auto"] = "auto", image: str | None = None) -> SandboxChoice:
    """Return the requested kind, or the strongest that works here. Blocking.

    Raise `SandboxUnavailable` if the requested kind does not work here.
    """
    if kind != "auto":
        found = _availability(kind, image)
        if not found.ok:
            remedy = f". To get it: {found.how_to_get}" if found.how_to_get else ""
            raise SandboxUnavailable(f"no {kind} sandbox: {found.why_not}{remedy}")
        return SandboxChoice(kind, f"{kind}, as requested")
    passed_over: list[str] = []
    for candidate in STRONGEST_FIRST:
        found = _availability(candidate, image)
        if found.ok:
            break
        passed_over.append(f"no {candidate}: {found.why_not}")
    missing = f" ({'; '.join(passed_over)})" if passed_over else ""
    return SandboxChoice(candidate, f"{candidate}, the strongest sandbox here{missing}")


def _availability(kind: SandboxKind, image: str | None) -> Availability:
    try:
        # In a new event loop and thread, because the caller may already run in an event loop.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, _try(kind, image)).result()
    except SandboxError as error:
        if kind == "docker":
            engine_answers = isinstance(error, ImageMissing)
            # The error names the command that gets a task's own image.
            remedy = "" if engine_answers and image is not None else docker_remedy(engine_answers=engine_answers)
            return Availability(kind, False, str(error), remedy)
        return Availability(kind, False, str(error), _HOW_TO_GET[kind])
    return Availability(kind, True)


async def _try(kind: SandboxKind, image: str | None) -> None:
    """Raise `SandboxError` if this kind cannot be used here. Takes about 100 ms."""
    if kind == "docker":
        async with docker_engine.docker_client() as engine:
            await docker_engine.find_image(engine, image)
    elif kind == "bubblewrap":
        bubblewrap.require_bwrap()
        # A system may allow bwrap to make namespaces and not allow this process to enter them: only a trial shows it.
        with tempfile.TemporaryDirectory(prefix="polar-trial-") as folder:
            registry = orphans.SandboxRegistry(Path(folder))
            async with await bubblewrap.BubblewrapSandbox.open(SandboxSpec(), registry) as sandbox:
                await sandbox.exec(["true"], timeout=30)


async def open_sandbox(
    kind: SandboxKind | Literal["auto"] = "auto",
    spec: SandboxSpec | None = None,
    *,
    state_dir: Path | None = None,
) -> Sandbox:
    """Open a sandbox, ready for commands: `async with await open_sandbox("auto", spec) as sandbox: ...`.

    `state_dir` is the folder for the registry of open sandboxes and for the files of `process` and `bubblewrap`
    sandboxes; give the same folder to `orphans.sweep`. Raise `SandboxUnavailable` if this kind does not work on this
    machine, `SandboxError` if the sandbox does not start.
    """
    spec = spec or SandboxSpec()
    if kind == "auto" or (kind == "bubblewrap" and not bubblewrap.installed()):
        kind = (await asyncio.to_thread(choose, kind, spec.image)).kind
    if state_dir is None:
        state_dir = await asyncio.to_thread(orphans.default_state_dir)
    registry = orphans.SandboxRegistry(state_dir)
    sandbox = await KINDS[kind].open(spec, registry)
    for limit in sandbox.unenforced:
        log.info("the %s sandbox %s does not enforce %s", kind, sandbox.id, limit)
    return sandbox

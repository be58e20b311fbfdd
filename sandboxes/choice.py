"""Opening a sandbox of a kind that this machine has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandboxes import bubblewrap, docker, docker_engine, orphans
from sandboxes.base import Sandbox, SandboxKind, SandboxSpec, SandboxUnavailable
from sandboxes.process import ProcessSandbox

STRONGEST_FIRST: tuple[SandboxKind, ...] = ("docker", "bubblewrap", "process")
HOW_TO_GET: dict[SandboxKind, str] = {
    "docker": "install a Docker engine, then: python -m sandboxes.images.build",
    "bubblewrap": "apt-get install bubblewrap (or your distribution's equivalent); user namespaces must be allowed",
    "process": "",
}


@dataclass(frozen=True)
class Availability:
    """The availability of one kind; if it is missing, the reason and the way to get it."""

    kind: SandboxKind
    ok: bool
    why_not: str = ""
    how_to_get: str = ""


@dataclass(frozen=True)
class SandboxChoice:
    """The chosen kind. `reason` is one readable line: the stronger kinds that were not chosen, and why."""

    kind: SandboxKind
    reason: str


def available(image: str | None = None) -> list[Availability]:
    """Return all kinds, strongest first. Blocking (up to some 100 ms): call it in a thread if an event loop runs."""
    return [_availability(kind, image) for kind in STRONGEST_FIRST]


def choose(kind: SandboxKind | Literal["auto"] = "auto", image: str | None = None) -> SandboxChoice:
    """Return the requested kind, or the strongest that works here. Raise `SandboxUnavailable`. Blocking."""
    if kind != "auto":
        found = _availability(kind, image)
        if not found.ok:
            raise SandboxUnavailable(f"no {kind} sandbox: {found.why_not}. To get it: {found.how_to_get}")
        return SandboxChoice(kind, f"{kind}, as requested")
    passed_over: list[str] = []
    for candidate in STRONGEST_FIRST:
        found = _availability(candidate, image)
        if found.ok:
            missing = f" ({'; '.join(passed_over)})" if passed_over else ""
            return SandboxChoice(candidate, f"{candidate}, the strongest sandbox here{missing}")
        passed_over.append(f"no {candidate}: {found.why_not}")
    raise SandboxUnavailable("; ".join(passed_over))


async def open_sandbox(
    kind: SandboxKind | Literal["auto"] = "auto",
    spec: SandboxSpec | None = None,
    *,
    state_dir: Path | None = None,
) -> Sandbox:
    """Open a sandbox, ready for commands: `async with await open_sandbox("auto", spec) as sandbox: ...`.

    `state_dir` has the registry of open sandboxes and the files of `process` and `bubblewrap`; give the same folder to
    `orphans.sweep`. Raise `SandboxUnavailable` if this machine has no such kind, `SandboxError` if it does not start.
    """
    spec = spec or SandboxSpec()
    chosen = kind
    if chosen == "auto":
        chosen = (await asyncio.to_thread(choose, "auto", spec.image)).kind
    if state_dir is None:
        state_dir = await asyncio.to_thread(orphans.default_state_dir)
    registry = orphans.SandboxRegistry(state_dir)
    if chosen == "docker":
        return await docker.DockerSandbox.open(spec, registry)
    if chosen == "bubblewrap":
        if not await asyncio.to_thread(bubblewrap.installed):
            await asyncio.to_thread(choose, chosen)  # raises with the reason and the remedy
        return await bubblewrap.BubblewrapSandbox.open(spec, registry)
    return await ProcessSandbox.open(spec, registry)


def _availability(kind: SandboxKind, image: str | None) -> Availability:
    probes: dict[SandboxKind, Callable[[], str | None]] = {
        "docker": lambda: _docker_why_not(image),
        "bubblewrap": bubblewrap.why_not,
        "process": lambda: None,
    }
    why = probes[kind]()
    return Availability(kind, True) if why is None else Availability(kind, False, why, HOW_TO_GET[kind])


def _docker_why_not(image: str | None) -> str | None:
    async def probe() -> None:
        async with docker_engine.docker_client() as engine:
            await docker_engine.find_image(engine, image)

    try:
        # In a new event loop and thread, because the caller may already run in an event loop.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, probe()).result()
    except SandboxUnavailable as error:
        return str(error)
    return None

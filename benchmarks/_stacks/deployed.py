"""A rollout service in this process, with a folder of its own for everything that it leaves on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.rollouts import JobSpec, RolloutService, ServiceLimits, local_gateway, rollout_ids
from polar_proxy.store import RolloutRow, Store, open_store
from polar_proxy.tasks import Task
from sandboxes import available
from sandboxes.base import SandboxKind


def python_inside() -> str:
    """The words of a `shell:` harness that start this machine's Python in any kind of sandbox."""
    prefix = Path(sys.base_prefix)
    return "/usr/bin/python3" if prefix.is_relative_to("/usr") else f"{{mount:{prefix}}}/bin/python3"


def chosen(wanted: str | None) -> tuple[list[SandboxKind], dict[str, str]]:
    """The kinds of sandbox to use, and of the others why not. ValueError for one that was asked for and cannot be."""
    usable = {item.kind: item for item in available()}
    kinds: list[SandboxKind] = [kind for kind, item in usable.items() if item.ok]
    missing = {kind: item.why_not for kind, item in usable.items() if not item.ok}
    if wanted is None:
        return kinds, missing
    names = wanted.split(",")
    if unusable := [name for name in names if name not in kinds]:
        told = ", ".join(f"{name} ({missing.get(name, 'there is no such kind')})" for name in unusable)
        raise ValueError(f"cannot be used here: {told}")
    return [kind for kind in kinds if kind in names], missing


@contextlib.contextmanager
def own_folder(name: str) -> Iterator[Path]:
    """A temporary folder, in which all that is temporary in this process lies while the block lasts."""
    folder = Path(tempfile.mkdtemp(prefix=f"polar-{name}-"))
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    (folder / "tmp").mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))  # else torch makes a folder among ours
    try:
        yield folder
    finally:
        tempfile.tempdir = before[1]
        if before[0] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[0]
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def service(
    folder: Path, engine: Engine, limits: ServiceLimits, harnesses: Path | None = None
) -> AsyncIterator[tuple[RolloutService, Store]]:
    """On a new database in `folder`, with an engine that is open."""
    async with (
        open_store(str(folder / "polar.db"), artifacts=folder / "artifacts") as store,
        local_gateway(Settings(), engine, store) as gateway,
        RolloutService(store, gateway, engine, harnesses or folder / "harnesses", limits=limits) as running,
    ):
        yield running, store


async def finished(running: RolloutService, store: Store, tasks: Sequence[Task], spec: JobSpec) -> Sequence[RolloutRow]:
    """Run a job to its end and return its rollouts."""
    job, _ = await running.submit(tasks, spec)
    await running.until_done(job.job_id)
    return await store.rollouts.find(rollout_ids=await rollout_ids(store, job.job_id))


def containers_of(pid: int) -> list[str]:
    """Containers that name this process as their owner; none where there is no Docker."""
    form = '{{.ID}} {{.Status}} {{.Label "polar.owner"}}'
    command = ["docker", "ps", "--all", "--no-trunc", "--filter", "label=polar.sandbox", "--format", form]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return []
    return [f"container {line}" for line in done.stdout.splitlines() if f'"pid": {pid},' in line]


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float] | None:
    """Median, 90th percentile (nearest rank), least and most."""
    if not values:
        return None
    ranked = sorted(values)
    at = [ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.9)]
    named = {"median": at[0], "p90": at[1], "least": ranked[0], "most": ranked[-1]}
    return {name: round(value, digits) for name, value in named.items()}

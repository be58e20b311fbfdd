"""A rollout service in this process, with a separate folder for everything that it writes to disk."""

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
from polar_proxy.rollouts import JobSpec, RolloutService, ServiceLimits, local_gateway
from polar_proxy.store import RolloutRow, Store, open_store
from polar_proxy.tasks import Task
from sandboxes.base import SandboxKind
from sandboxes.choice import available


def python_inside() -> str:
    """Return the command of a `shell:` harness that runs this machine's Python in any kind of sandbox."""
    prefix = Path(sys.base_prefix)
    return "/usr/bin/python3" if prefix.is_relative_to("/usr") else f"{{mount:{prefix}}}/bin/python3"


def usable_sandboxes(names: str | None) -> tuple[list[SandboxKind], dict[str, str]]:
    """Return the kinds of sandbox to use, and for each kind that does not work here the reason.

    `names`: a comma-separated list; None: all that work. Raises ValueError for a name of a kind that does not work.
    """
    usable = {item.kind: item for item in available()}
    kinds: list[SandboxKind] = [kind for kind, item in usable.items() if item.ok]
    missing = {kind: item.why_not for kind, item in usable.items() if not item.ok}
    if names is None:
        return kinds, missing
    wanted = names.split(",")
    if unusable := [name for name in wanted if name not in kinds]:
        reasons = ", ".join(f"{name} ({missing.get(name, 'there is no such kind')})" for name in unusable)
        raise ValueError(f"cannot be used here: {reasons}")
    return [kind for kind in kinds if kind in wanted], missing


@contextlib.contextmanager
def own_folder(name: str) -> Iterator[Path]:
    """Make a temporary folder, and keep all temporary files of this process in it while the block lasts."""
    folder = Path(tempfile.mkdtemp(prefix=f"polar-{name}-"))
    previous = os.environ.get("TMPDIR"), tempfile.tempdir
    (folder / "tmp").mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", str(folder / "torch")
    )  # otherwise torch makes a folder next to those of sandboxes
    try:
        yield folder
    finally:
        tempfile.tempdir = previous[1]
        if previous[0] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = previous[0]
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def service(
    folder: Path, engine: Engine, limits: ServiceLimits, harnesses: Path | None = None
) -> AsyncIterator[tuple[RolloutService, Store]]:
    """Run a rollout service on a new database in `folder`, with an open engine."""
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
    return await store.rollouts.find(job_id=job.job_id)


def containers_of(pid: int) -> list[str]:
    """Return the containers that name this process as their owner; none without Docker."""
    form = '{{.ID}} {{.Status}} {{.Label "polar.owner"}}'
    command = ["docker", "ps", "--all", "--no-trunc", "--filter", "label=polar.sandbox", "--format", form]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return []
    return [f"container {line}" for line in done.stdout.splitlines() if f'"pid": {pid},' in line]


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float] | None:
    """Return median, 90th percentile (nearest rank), minimum and maximum."""
    if not values:
        return None
    ranked = sorted(values)
    at = [ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.9)]
    named = {"median": at[0], "p90": at[1], "least": ranked[0], "most": ranked[-1]}
    return {name: round(value, digits) for name, value in named.items()}

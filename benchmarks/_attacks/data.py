"""Attacks by data: forged archives, rows of tasks, Harbor folders, and requests to the HTTP API.

An attack by archive succeeds if the import runs, opens, delivers or changes something, or stores data that contradicts
its own id or description. An attack by row, folder or request succeeds if it runs a program of the host, imports a
module, reads a file that it may not read, or is accepted where it must be refused.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks._attacks.forged_archives import FORGERIES, Forgery, HonestArchives, archive_damage, make_honest_archives
from benchmarks._attacks.hostile_rows import ROWS, api_attacks, callback_attacks, folder_attacks, row_attacks
from benchmarks._attacks.outcome import AttackOptions, Outcome

MEMORY_MB = 1024
"""If the import of an archive of a few MiB needs more memory than this, the attack counts as successful."""


async def run(options: AttackOptions) -> list[Outcome]:
    marker = options.folder / "a-program-ran"
    modules = options.folder / "modules"
    modules.mkdir()
    program = f"""
        from pathlib import Path
        Path({str(marker)!r}).touch()
        def score(*given, **more): return 1.0
        def parse(log): return {{}}
        tasks = Agent = score
    """
    (modules / "polar_attack.py").write_text(textwrap.dedent(program))
    sys.path.insert(0, str(modules))
    try:
        return [*await _archives(options), *await _others(options, marker)]
    finally:
        sys.path.remove(str(modules))


async def _archives(options: AttackOptions) -> list[Outcome]:
    outcomes = []
    honest = await make_honest_archives(options.folder / "honest")
    for forgery in FORGERIES:
        if options.selected(forgery.name):
            options.report(forgery.name)
            folder = options.folder / "archives" / forgery.name
            folder.mkdir(parents=True)
            outcomes.append(await _archive(forgery, honest, folder))
    return outcomes


async def _archive(forgery: Forgery, honest: HonestArchives, folder: Path) -> Outcome:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    damage, got = await archive_damage(forgery, honest, folder)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > MEMORY_MB:
        damage = damage or f"{grown} MiB of memory"
    reached = damage is None and got == "imported" if forgery.control else damage is not None
    return Outcome(forgery.name, "data", "archive", reached, damage or got, control=forgery.control)


async def _others(options: AttackOptions, marker: Path) -> list[Outcome]:
    outcomes = []
    attacks: list[tuple[str, str, bool, Callable[[Path, Path], Awaitable[tuple[bool, str]]]]] = [
        *row_attacks(ROWS),
        *folder_attacks(),
        *api_attacks(),
        *callback_attacks(),
    ]
    for number, (name, where, control, attack) in enumerate(attacks):
        if not options.selected(name):
            continue
        options.report(name)
        folder = options.folder / "others" / f"{number}-{name}"
        folder.mkdir(parents=True)
        marker.unlink(missing_ok=True)
        sys.modules.pop("polar_attack", None)
        async with asyncio.timeout(120):
            reached, got = await attack(folder, marker)
        if marker.exists():
            reached, got = (got == "allowed") if control else True, f"a program of the host ran; {got}"
        outcomes.append(Outcome(name, "data", where, reached, got, control=control))
    return outcomes

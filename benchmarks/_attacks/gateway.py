"""What one client of a shared gateway can do to the others: exhaust it, confuse it, or pass for somebody else.

An attack is reached if an honest session meanwhile gets a wrong answer or a p99 of 250 ms or more, if the gateway's
memory grows by more than 1 GiB, or if the attacker gets an answer that it must not get.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from benchmarks._attacks.gateway_abuses import ABUSES, Abuse
from benchmarks._attacks.gateway_client import Attacker
from benchmarks._attacks.outcome import AttackOptions, Outcome
from benchmarks._stacks.shared_gateway import GatewayProcess, HonestSession, honest_session, quantile, shared_gateway

FAMILY = "gateway"
WHERE = "shared gateway"
P99_SECONDS = 0.25
MEMORY_MB = 1024
SECONDS = 2.5
"""Shortest time of an attack, so that the honest session sends enough requests for a p99."""


async def run(options: AttackOptions) -> list[Outcome]:
    outcomes: list[Outcome] = []
    keys = ["sk-honest", "sk-victim", "sk-attacker"]
    async with shared_gateway(options.folder, keys) as (gateway, sessions):
        with honest_session(gateway.port, keys[0]) as honest:
            attacker = Attacker(gateway.port, key=keys[2], victims_session=sessions[1])
            while not honest.requests:  # noqa: ASYNC110 (a thread reads them)
                await asyncio.sleep(0.1)
            quiet = await measure_quiet(honest)
            options.report(f"quiet: p99 {quiet * 1e3:.0f} ms")
            for abuse in ABUSES:
                if options.selected(abuse.name):
                    outcomes.append(await judge(abuse, attacker, gateway, honest, quiet))
                    options.report(f"{abuse.name}: {outcomes[-1].got}")
    return outcomes


async def measure_quiet(honest: HonestSession) -> float:
    """Return the honest session's p99 without an attack."""
    started = time.monotonic()
    await asyncio.sleep(SECONDS)
    return quantile([seconds for _, seconds, _ in honest.since(started)], 0.99)


async def judge(
    abuse: Abuse, attacker: Attacker, gateway: GatewayProcess, honest: HonestSession, quiet: float
) -> Outcome:
    before = gateway.rss_mb()
    started = time.monotonic()
    async with highest_memory(gateway) as memory:
        try:
            async with asyncio.timeout(60):
                fault, got = await abuse.run(attacker)
        except TimeoutError:
            fault, got = True, "no answer within 60 s"
        await asyncio.sleep(max(0.0, SECONDS - (time.monotonic() - started)))
    seen = honest.since(started)
    faults = [problem for _, _, problem in seen if problem]
    p99 = quantile([seconds for _, seconds, _ in seen], 0.99)
    slow = p99 >= max(P99_SECONDS, 2 * quiet)  # on a busy machine, honest requests are slow without an attack too
    grown = max(memory) - before
    line = f"{got}; others: p99 {p99 * 1e3:.0f} ms, {len(faults)} of {len(seen)} wrong; memory +{max(grown, 0):.0f} MB"
    if faults:
        line += f" ({faults[0]})"
    harm = slow or bool(faults) or not seen or grown > MEMORY_MB
    if abuse.control:
        return Outcome(abuse.name, FAMILY, WHERE, not fault, line, control=True)
    return Outcome(abuse.name, FAMILY, WHERE, fault or harm, line)


@asynccontextmanager
async def highest_memory(gateway: GatewayProcess) -> AsyncIterator[list[float]]:
    """Yield a list that is filled with the gateway's resident memory in MiB while the block lasts."""
    found = [gateway.rss_mb()]

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.1)
            found.append(gateway.rss_mb())

    task = asyncio.create_task(watch())
    try:
        yield found
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

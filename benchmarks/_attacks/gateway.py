"""What one client of a shared gateway can do to the others: exhaust it, confuse it, or pass for somebody else.

An attack succeeds if an honest session meanwhile gets a wrong answer or is slow, if the gateway's memory grows by more
than 1 GiB, or if the attacker gets an answer that it must not get. The session is slow from a p99 of 250 ms on, or of
twice its p99 without an attack if that is more.

Attacker, gateway, engine and honest session share the processors of one machine. So the longest stall of the gateway's
event loop is reported too. An attack with a slow honest session is repeated against a server that only reads and drops:
the p99 there shows how long the session waits because of the machine alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from benchmarks._attacks.gateway_abuses import ABUSES, Abuse
from benchmarks._attacks.gateway_client import Attacker
from benchmarks._attacks.outcome import AttackOptions, Outcome
from benchmarks._stacks.loop_stalls import Stall
from benchmarks._stacks.shared_gateway import (
    HONEST_KEY,
    BareServer,
    GatewayProcess,
    HonestSession,
    honest_session,
    quantile,
    shared_gateway,
)

FAMILY = "gateway"
WHERE = "shared gateway"
P99_SECONDS = 0.25
MEMORY_MB = 1024
SECONDS = 2.5
"""Shortest time of an attack, so that the honest session sends enough requests for a p99."""


@dataclass(frozen=True)
class Reaction:
    """The effects of one abuse: what the attacker got, and how the honest session and the gateway did meanwhile."""

    abuse: Abuse
    fault: bool
    got: str
    requests: int
    """Number of answers to the honest session."""
    faults: Sequence[str]
    """Descriptions of the wrong answers to the honest session."""
    p99: float
    """99th percentile of the honest session's latency, in seconds."""
    stall: Stall
    """The longest stall of the gateway's event loop."""
    grown_mb: float

    @property
    def harm(self) -> bool:
        return bool(self.faults) or not self.requests or self.grown_mb > MEMORY_MB


async def run(options: AttackOptions) -> list[Outcome]:
    keys = [HONEST_KEY, "sk-victim", "sk-attacker"]
    abuses = [abuse for abuse in ABUSES if options.selected(abuse.name)]
    reactions: list[Reaction] = []
    async with shared_gateway(options.folder, keys) as (gateway, sessions):
        with honest_session(gateway.port) as honest:
            attacker = Attacker(gateway.port, key=keys[2], victims_session=sessions[1])
            quiet = await measure_quiet(honest)
            options.report(f"quiet: p99 {quiet * 1e3:.0f} ms")
            for abuse in abuses:
                reactions.append(await attack(abuse, attacker, gateway, honest))
                options.report(f"{abuse.name}: {describe(reactions[-1], None)}")
    limit = max(P99_SECONDS, 2 * quiet)  # on a busy machine, honest requests are slow without an attack too
    again = [one.abuse for one in reactions if not one.abuse.control and one.p99 >= limit]
    bare = await measure_bare(options, again) if again else {}
    return [judge(one, limit, bare.get(one.abuse.name)) for one in reactions]


async def measure_quiet(honest: HonestSession) -> float:
    """Return the honest session's p99 without an attack."""
    while not honest.requests:  # noqa: ASYNC110 (a thread reads them)
        await asyncio.sleep(0.1)
    started = time.monotonic()
    await asyncio.sleep(SECONDS)
    return p99_of(await honest.begun_since(started))


async def attack(abuse: Abuse, attacker: Attacker, gateway: GatewayProcess, honest: HonestSession) -> Reaction:
    before = gateway.rss_mb()
    started = time.monotonic()
    async with highest_memory(gateway) as memory:
        fault, got = await run_abuse(abuse, attacker)
    seen = await honest.begun_since(started)
    return Reaction(
        abuse,
        fault,
        got,
        requests=len(seen),
        faults=[problem for _, _, problem in seen if problem],
        p99=p99_of(seen),
        stall=gateway.longest_stall(started),
        grown_mb=max(0.0, max(memory) - before),
    )


async def run_abuse(abuse: Abuse, attacker: Attacker) -> tuple[bool, str]:
    started = time.monotonic()
    try:
        async with asyncio.timeout(60):
            result = await abuse.run(attacker)
    except TimeoutError:
        result = True, "no answer within 60 s"
    await asyncio.sleep(max(0.0, SECONDS - (time.monotonic() - started)))
    return result


async def measure_bare(options: AttackOptions, abuses: Sequence[Abuse]) -> dict[str, float]:
    """Return the honest session's p99 during each abuse, by its name, at a server that only reads and drops."""
    found: dict[str, float] = {}
    server = BareServer(options.folder)
    await asyncio.to_thread(server.start)
    try:
        with honest_session(server.port) as honest:
            await measure_quiet(honest)
            for abuse in abuses:
                started = time.monotonic()
                await run_abuse(abuse, Attacker(server.port, key="sk-attacker", victims_session=""))
                found[abuse.name] = p99_of(await honest.begun_since(started))
                options.report(f"{abuse.name} at a bare server: p99 {found[abuse.name] * 1e3:.0f} ms")
    finally:
        await asyncio.to_thread(server.stop)
    return found


def p99_of(requests: Sequence[tuple[float, float, str | None]]) -> float:
    return quantile([seconds for _, seconds, _ in requests], 0.99)


def judge(reaction: Reaction, limit: float, bare: float | None) -> Outcome:
    """Return the outcome of an abuse. `limit`: p99 in seconds from which the honest session counts as slow. `bare`: p99
    in seconds at a bare server."""
    line = describe(reaction, bare)
    if reaction.abuse.control:
        return Outcome(reaction.abuse.name, FAMILY, WHERE, not reaction.fault, line, control=True)
    reached = reaction.fault or reaction.harm or reaction.p99 >= limit
    return Outcome(reaction.abuse.name, FAMILY, WHERE, reached, line)


def describe(reaction: Reaction, bare: float | None) -> str:
    stall, faults = reaction.stall, reaction.faults
    p99 = f"p99 {reaction.p99 * 1e3:.0f} ms" + ("" if bare is None else f" (bare server: {bare * 1e3:.0f})")
    line = f"{reaction.got}; others: {p99}, {len(faults)} of {reaction.requests} wrong; "
    line += f"loop stalled {stall.own * 1e3:.0f} ms (cpu {stall.cpu * 1e3:.0f}); memory +{reaction.grown_mb:.0f} MB"
    return line + (f" ({faults[0]})" if faults else "")


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

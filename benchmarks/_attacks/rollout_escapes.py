"""The part of the family `escapes` that an agent attempts in a real rollout, under a real `polar serve`.

It tries to reach other rollouts, Polar's keys and database, the host, and its own reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks._attacks.deployment import SECONDS, Deployment, deploy
from benchmarks._attacks.outcome import AttackOptions, Outcome
from benchmarks._stacks.kill_targets import descendants
from benchmarks._stacks.reconcile import processes_of
from polar_proxy.rollouts import cancel
from polar_proxy.store import RolloutRow
from polar_proxy.tasks import Task, get_source
from sandboxes.base import SandboxKind

FAMILY = "escapes"
PREFIX = "rollout_"
"""Prefix of these attacks' names, because `escapes` makes some of them in a bare sandbox, too."""
ATTACKS = (
    *("internet", "host_loopback", "names", "engine", "docker_socket", "past_its_recorder", "other_session"),
    *("other_key", "other_files", "other_processes", "database", "admin_api", "admin_key", "metrics", "hidden_tests"),
    *("later_commits", "reward_api", "write_outside", "plant_for_the_evaluator", "stay_behind"),
    *("forge_the_test_runner", "write_harbors_reward_file", "left_behind"),
)
ROOT = Path(__file__).parents[2]
AGENT = ROOT / "benchmarks" / "_stacks" / "attacker.py"
ROWS = ROOT / "examples" / "tasks" / "swebench" / "rows.jsonl"
HARBOR = ROOT / "examples" / "tasks" / "harbor"
SECRETS = ["class TestMostCommon", "-counts[item]"]
"""A line of the hidden tests, and one of the fix, which is also in later commits of the repository."""
IN_A_PROCESS = {
    *("internet", "host_loopback", "names", "engine", "other_key", "other_files", "other_processes", "database"),
    *("past_its_recorder", "admin_key", "metrics", "hidden_tests", "later_commits", "write_outside", "docker_socket"),
    "plant_for_the_evaluator",
}
"""Attacks that succeed in a `process` sandbox, which isolates nothing. They show that the attempts are real."""


def open_services(stack: ExitStack) -> dict[str, Any]:
    """Open services to reach from a sandbox: TCP and UDP on the host's own address, TCP on its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; determines the address that packets would come from
        host = probe.getsockname()[0]
    loop_tcp, tcp = (stack.enter_context(socket.create_server((name, 0))) for name in ("127.0.0.1", host))
    udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    udp.bind((host, 0))
    ports = {"port": tcp, "loopback_port": loop_tcp, "udp_port": udp}
    for listener in ports.values():
        listener.setblocking(False)
    return {"host": host, "sockets": ports} | {name: one.getsockname()[1] for name, one in ports.items()}


async def answer_connections(sockets: dict[str, socket.socket]) -> None:
    loop = asyncio.get_running_loop()

    async def tcp(listener: socket.socket) -> None:
        while True:
            link, _ = await loop.sock_accept(listener)
            with link, contextlib.suppress(OSError):
                await loop.sock_sendall(link, b"outside")

    async def udp(listener: socket.socket) -> None:
        while True:
            _, sender = await loop.sock_recvfrom(listener, 64)
            await loop.sock_sendto(listener, b"outside", sender)

    await asyncio.gather(tcp(sockets["port"]), tcp(sockets["loopback_port"]), udp(sockets["udp_port"]))


class AgentAttacks:
    """Makes all attempts in one kind of sandbox, and collects their outcomes."""

    def __init__(self, kind: SandboxKind, deployed: Deployment, known: dict[str, Any], unlisted: Path) -> None:
        self.kind, self.deployed, self.known, self.host_folder = kind, deployed, known, unlisted
        self.outcomes: dict[str, Outcome] = {}

    async def run(self) -> list[Outcome]:
        task = get_source(str(ROWS)).task(0)
        await self.explore(task)
        row = await self.rollout("planter", task)
        still_running = [line for pid, line in processes_of(self.known["run"]) if "time.sleep(0.02)" in line]
        ran = (self.host_folder / "by-git").exists()
        await self.judge("plant_for_the_evaluator", row, also=", its git filters wrote to the host" if ran else "")
        self.add("stay_behind", bool(still_running), f"{len(still_running)} of its programs still run")
        await self.judge("forge_the_test_runner", await self.rollout("forger", task))
        if self.kind == "bubblewrap":  # docker would build the example's image, which needs a registry
            harbor = get_source(str(HARBOR)).task(0)
            await self.judge("write_harbors_reward_file", await self.rollout("planter", harbor))
        return list(self.outcomes.values())

    async def explore(self, task: Task) -> None:
        async with self.neighbour(task) as other:
            row = await self.rollout("explorer", task, {"neighbour": other})
            for line in await self.deployed.logged(row):
                if "attempt" in line:
                    self.add(line["attempt"], line["reached"], line["got"])
            reached = [self.outcomes[name].reached for name in ("other_session", "other_key")]
            if (await self.deployed.row(other["rollout_id"])).calls != 1 and not any(reached):
                self.add("other_session", True, "a call in the other rollout's session")
        written = (self.host_folder / "written").exists()
        (self.host_folder / "written").unlink(missing_ok=True)
        self.add("write_outside", written, "a file on the host" if written else "no file on the host")

    def add(self, name: str, reached: bool, got: str) -> None:
        expected = self.kind == "process" and name in IN_A_PROCESS
        self.outcomes[name] = Outcome(PREFIX + name, FAMILY, self.kind, reached, got, expected=expected)

    async def judge(self, name: str, row: RolloutRow, also: str = "") -> None:
        self.add(name, bool(also) or bool(row.reward), await self.deployed.describe(row) + also)

    @contextlib.asynccontextmanager
    async def neighbour(self, task: Task) -> AsyncIterator[dict[str, Any]]:
        """Run another rollout in the same kind of sandbox while the block lasts."""
        job_id, rollout_id = await self.queue("neighbour", task)
        try:
            async with asyncio.timeout(SECONDS):
                while not (row := await self.deployed.row(rollout_id)).calls:  # noqa: ASYNC110 (another process calls)
                    await asyncio.sleep(0.1)
            pids = [pid for pid, line in processes_of("attacker.py") if "neighbour" in line]
            pids += [child for pid in pids for child in descendants(pid)]
            bases = sorted((self.deployed.folder / "tmp").glob("polar-sandboxes-*/polar-*"))
            paths = [str(base / name / "secret.txt") for base in bases for name in ("home", "workspace")]
            yield {"rollout_id": rollout_id, "session_id": row.session_id, "pids": pids, "paths": paths}
        finally:
            await cancel(self.deployed.store, job_id)
            await self.deployed.until_final(rollout_id)

    async def rollout(self, manner: str, task: Task, more: dict[str, Any] | None = None) -> RolloutRow:
        _, rollout_id = await self.queue(manner, task, more)
        return await self.deployed.until_final(rollout_id)

    async def queue(self, manner: str, task: Task, more: dict[str, Any] | None = None) -> tuple[str, str]:
        known = self.known | {"tests": [*task.fail_to_pass, *task.pass_to_pass]} | (more or {})
        return await self.deployed.queue(
            self.kind, task, AGENT, manner, self.deployed.mount("known.json", json.dumps(known))
        )


async def run(options: AttackOptions) -> list[Outcome]:
    if not any(options.selected(PREFIX + name) for name in ATTACKS):
        return []
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        reachable = open_services(stack)
        listening = asyncio.create_task(answer_connections(reachable.pop("sockets")))
        unlisted = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-attacks-host-")))
        async with deploy(options.folder) as deployed:
            known = {
                "run": options.folder.name,
                "outside": reachable,
                "engine_url": deployed.engine.url,
                "gateway_url": deployed.service.url,
                "db": deployed.service.db,
                "host_folder": str(unlisted),
                "repository": str(ROWS.with_name("tally.bundle")),
                "secrets": SECRETS,
                "places": [str(options.folder / "tmp"), str(options.folder / "home")],
            }
            for kind in options.sandboxes:
                options.report(f"{kind}, in a rollout ...")
                outcomes += await AgentAttacks(kind, deployed, known, unlisted).run()
            remains = await deployed.stop()
        listening.cancel()
    outcomes.append(Outcome(f"{PREFIX}left_behind", FAMILY, "host", bool(remains), "; ".join(remains) or "nothing"))
    return [one for one in outcomes if options.selected(one.attack)]

"""A cluster of several nodes with real parts: Ray, PostgreSQL, the `polar` command, process sandboxes, the small agent.

Only the engine is scripted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from polar_proxy.allowed_code import AllowedCode
from polar_proxy.rollouts import JobSpec, submit
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import FINAL_STATUSES, RolloutRow, Store, open_store
from polar_proxy.tasks import get_source
from tests.fakes.tiny_agent import TINY_AGENTS
from tests.rollouts.cluster.conftest import Machines
from tests.rollouts.cluster.machines import Serving, command, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


def nodes_work(served: Serving, count: int) -> list[str]:
    wait_for(lambda: len(served.gateways()) >= count, 240, served.log.read_text)
    return served.gateways()


async def submitted(store: Store, samples: int, agent: str = "TinyAgent") -> list[str]:
    harness = f"tests.fakes.tiny_agent:{agent}"
    spec = JobSpec(harness=harness, sandbox="process", timeout=900.0, samples=samples, for_training=True)
    job, _ = await submit(store, [get_source("swe-task").task(3)], spec, code=AllowedCode(TINY_AGENTS))
    return [row.rollout_id for row in await store.rollouts.find(job_id=job.job_id)]


async def until(store: Store, ids: list[str], what: Callable[[list[RolloutRow]], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what(rows := await store.rollouts.find(rollout_ids=ids)):
        assert time.monotonic() < deadline, [(row.status, row.attempt, row.calls, row.error) for row in rows]
        await asyncio.sleep(0.2)


def ended(rows: list[RolloutRow]) -> bool:
    return all(row.status in FINAL_STATUSES for row in rows)


async def worker_of(store: Store, rollout_id: str) -> list[int]:
    """Return the processes that claimed its attempts, in order."""
    pids: dict[int, int] = {}
    for stage in await store.rollouts.stages(rollout_id):
        assert stage.worker is not None
        pids[stage.attempt] = int(stage.worker.split(":")[1])
    return [pid for _, pid in sorted(pids.items())]


async def recorded(store: Store, ids: list[str]) -> set[str]:
    """Return the ids of all calls of all attempts."""
    sessions = [session for one in ids for session in await store.sessions.ids_of_rollout(one)]
    return {call.call_id for session in sessions for call in await store.calls.summaries(session)}


async def check_calls(store: Store, row: RolloutRow, home: Path) -> None:
    """Check that every call is trained or excluded, and that the agent received each recorded answer once."""
    for session_id in await store.sessions.ids_of_rollout(row.rollout_id):
        calls = {call.call_id for call in await store.calls.summaries(session_id)}
        traces = await store.traces.find(session_id=session_id)
        trained = [call_id for trace in traces for call_id in trace.call_ids]
        excluded = await store.traces.exclusions(session_id)
        assert sorted([*trained, *excluded]) == sorted(calls)
        if session_id == row.session_id:
            assert set(trained) == calls
        else:
            assert set(excluded.values()) <= {"superseded_attempt"}
    (log,) = [item for item in await store.artifacts.of_rollout(row.rollout_id) if item.name == "agent.log"][-1:]
    text = (home / "artifacts" / log.sha256[:2] / log.sha256).read_text()
    heard = [orjson.loads(line) for line in text.splitlines() if line.startswith('{"role"')]
    assert len(heard) == row.calls


def strays(machines: Machines) -> list[str]:
    """Return living agents and sandboxes of this test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environ = path.read_bytes()
        except OSError:
            continue
        if b"POLAR_SANDBOX_ID=" in environ and str(machines.folder).encode() in environ:
            found.append(command(int(path.parent.name)))
    return found


def left_behind(machines: Machines) -> list[str]:
    folders = (machines.folder / "tmp").glob("polar-sandboxes-*/polar-*")
    return [*map(str, folders), *strays(machines)]


async def test_rollouts_of_a_killed_node_run_elsewhere(machines: Machines, url: str) -> None:
    """Nothing is left of it and no recorded call is lost. Before that, any gateway serves any session."""
    first, second = machines.add(2), machines.add(2)
    async with open_store(url, artifacts=machines.home / "artifacts") as store:
        served = machines.serve(url)
        gateways = nodes_work(served, 2)
        await one_session_everywhere(store, gateways)
        ids = await submitted(store, 6, "HeldAgent")
        await until(store, ids, lambda rows: sum(row.calls > 0 for row in rows) == 4, 180)
        (dying,) = first.workers()
        before = await recorded(store, ids)
        rows = [row for row in await store.rollouts.find(rollout_ids=ids) if row.status not in FINAL_STATUSES]
        had = [row.rollout_id for row in rows if dying in await worker_of(store, row.rollout_id)]
        first.kill()
        killed = time.monotonic()
        assert had, "the node that was killed worked on nothing"
        await until(store, had, lambda rows: all(row.attempt > 1 for row in rows), 240)
        seconds = time.monotonic() - killed
        machines.release()
        await until(store, ids, ended, 400)
        (living,) = second.workers()
        for row in await store.rollouts.find(rollout_ids=ids):
            assert (row.status, row.reward, row.error) == ("done", 1.0, None)
            await check_calls(store, row, machines.home)
            pids = await worker_of(store, row.rollout_id)
            assert pids == ([dying, living] if row.rollout_id in had else pids[:1])
            if row.rollout_id in had:
                stages = await store.rollouts.stages(row.rollout_id)
                assert [stage.cause for stage in stages if stage.cause] == ["worker_lost"]
        assert before <= await recorded(store, ids)
        assert await store.feed.depth() == {"waiting": 1}
        wait_for(lambda: "is gone" in served.log.read_text(), 120, served.log.read_text)
        assert served.stop() == 130, served.log.read_text()
    assert left_behind(machines) == []
    assert second.workers() == []
    print(f"taken back after {seconds:.1f} s")


async def one_session_everywhere(store: Store, gateways: list[str]) -> None:
    row = await store.sessions.create(key_hash=hash_key("k"), label=None, policy=None, origin="key")
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    async with httpx.AsyncClient(headers={"authorization": "Bearer k"}, timeout=60) as http:

        async def ask(gateway: str) -> httpx.Response:
            return await http.post(f"{gateway}/v1/chat/completions", json={"model": "m", "messages": messages})

        for turn in range(6):
            answer = await ask(gateways[turn % len(gateways)])
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]
        calls = await store.calls.summaries(row.session_id)
        assert [call.edge for call in calls] == ["root", *["continues"] * 5]
        await store.sessions.close(row.session_id)
        assert [(await ask(gateway)).status_code for gateway in gateways] == [401] * len(gateways)
        assert len(await store.calls.summaries(row.session_id)) == 6


async def test_nodes_survive_a_killed_head_and_a_killed_actor(machines: Machines, url: str) -> None:
    """Nodes continue without a head, and the next head finds them. Ray restarts a killed actor, whose rollouts are
    queued again and end."""
    node = machines.add(2)
    async with open_store(url, artifacts=machines.home / "artifacts") as store:
        first = machines.serve(url)
        nodes_work(first, 1)
        ids = await submitted(store, 2)
        await until(store, ids, lambda rows: any(row.calls for row in rows), 180)
        first.process.kill()
        first.process.wait()
        await until(store, ids, ended, 240)
        (working,) = node.workers()
        for row in await store.rollouts.find(rollout_ids=ids):
            assert (row.status, row.reward, row.error) == ("done", 1.0, None)
            assert await worker_of(store, row.rollout_id) == [working]

        second = machines.serve(url)
        nodes_work(second, 1)
        assert node.workers() == [working], "the same actor"
        ids = await submitted(store, 2, "HeldAgent")
        await until(store, ids, lambda rows: all(row.calls for row in rows), 180)
        before = await recorded(store, ids)
        os.kill(working, signal.SIGKILL)
        machines.release()
        await until(store, ids, ended, 300)
        for row in await store.rollouts.find(rollout_ids=ids):
            assert (row.status, row.reward, row.attempt) == ("done", 1.0, 2)
            await check_calls(store, row, machines.home)
        assert before <= await recorded(store, ids)
        ids = await submitted(store, 2, "SleepyAgent")
        await until(store, ids, lambda rows: all(row.calls for row in rows), 180)
        assert second.stop() == 130
        rows = await store.rollouts.find(rollout_ids=ids)
        assert [(row.status, row.attempt) for row in rows] == [("queued", 2)] * 2, "handed back"
    assert left_behind(machines) == []
    assert node.workers() == []
    assert node.stop() == 130


async def test_scores_where_there_is_capacity(machines: Machines) -> None:
    machines.add(1)
    script = [sys.executable, "-m", "tests.rollouts.cluster.remote_scoring_program", machines.head.address]
    done = await asyncio.to_thread(
        subprocess.run, script, env=machines.env, cwd=machines.folder, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    found = orjson.loads(done.stdout.splitlines()[-1])
    assert found.pop("seconds") < 120  # the command sleeps for twenty minutes
    assert found.pop("failure").startswith("evaluator: the task's repository cannot be read")
    assert found == {
        "solved": 1.0,
        "log": "seen\n",
        "unsolved": 0.0,
        "cancelled": True,
        "left": 0,
    }
    assert left_behind(machines) == []


async def test_a_stopped_node_leaves_nothing_behind(machines: Machines, url: str) -> None:
    """Stops `polar node` while agents run: nothing is left on its machine, and its rollouts wait for another node."""
    node = machines.add(2)
    async with open_store(url, artifacts=machines.home / "artifacts") as store:
        served = machines.serve(url)
        nodes_work(served, 1)
        ids = await submitted(store, 2, "SleepyAgent")
        await until(store, ids, lambda rows: all(row.calls for row in rows), 180)
        began = time.monotonic()
        assert await asyncio.to_thread(node.stop, signal.SIGTERM, 180) == 130
        print(f"left after {time.monotonic() - began:.1f} s")
        assert left_behind(machines) == []
        await until(store, ids, lambda rows: all((row.status, row.attempt) == ("queued", 2) for row in rows), 120)
        assert len(await recorded(store, ids)) == 2
        wait_for(lambda: "the cluster has no node that takes work" in served.log.read_text(), 120, served.log.read_text)
        assert served.stop() == 130


async def test_reports_a_node_that_cannot_start(machines: Machines, url: str) -> None:
    """The node's environment names an engine that does not exist: the head says why, and tries again."""
    machines.add(1, POLAR_ENGINE__KIND="nowhere:Engine")
    async with open_store(url):
        served = machines.serve(url)
        words = "cannot start: Cannot load engine 'nowhere:Engine'"
        wait_for(lambda: served.log.read_text().count(words) >= 2, 240, served.log.read_text)
        assert "Traceback" not in served.log.read_text()
        assert served.stop() == 130

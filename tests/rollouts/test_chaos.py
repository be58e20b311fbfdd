"""`benchmarks/chaos.py`: ten rounds, and the reconciliation that finds lost or doubled calls."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks._stacks.reconcile import left_behind, logged_answers, reconcile
from benchmarks.chaos import BAD
from polar_proxy.rollouts import JobSpec, submit
from polar_proxy.store import Store
from polar_proxy.tasks import get_source
from polar_proxy.traces.operations import build_traces
from polar_proxy.types import CallRecord
from tests.factories import call_record, random_answer

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("db", "targets", "rounds"),
    [
        ("sqlite", "service,sandbox,engine,disk", 4),
        ("postgresql", "service,sandbox,engine,postgresql,away", 6),
    ],
)
def test_ten_rounds_lose_nothing(db: str, targets: str, rounds: int) -> None:
    if os.geteuid() != 0:  # a small disk needs the right to mount
        targets = targets.removesuffix(",disk")
    command = [sys.executable, "benchmarks/chaos.py", "--rounds", str(rounds), "--db", db, "--targets", targets]
    small = ["--samples", "2", "--turns", "4", "--concurrency", "2", "--seed", "3", "--away", "10", "--json"]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if "server programs are not installed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in BAD} == dict.fromkeys(BAD, 0), (found["cases"], done.stderr)
    assert sum(found["rollouts"]["statuses"].values()) >= 2 * rounds
    assert found["acknowledged"] >= 4 * found["rollouts"]["statuses"]["done"]
    assert sum(found["killed"][name]["kills"] for name in targets.split(",")) == rounds
    assert done.returncode == 0


def make_call(session_id: str, word: str) -> CallRecord:
    return call_record(
        session_id, messages=(json.dumps({"role": "user", "content": f"Your word is {word}."}).encode(),)
    )


def log_line(call: CallRecord, word: str, **changes: object) -> str:
    tokens = len(call.choices[0].token_ids)
    line = {"nonce": word, "attempts": 1, "call_id": call.call_id, "text": word, "tokens": tokens}
    return json.dumps(line | changes) + "\n"


async def ended_rollout(store: Store, calls: list[str], sessions: int = 1) -> tuple[str, list[CallRecord]]:
    job, _ = await submit(store, [get_source("swe-task").task(1)], JobSpec(harness="shell:true"))
    (claim,) = await store.queue.claim("me", 1, 60, job_id=None)
    made = []
    for number in range(sessions):
        session = await store.sessions.create(key_hash=None, label=None, rollout_id=claim.rollout_id, origin="rollout")
        await store.rollouts.enter_stage(
            claim, "preparing" if number == 0 else "running", session_id=session.session_id
        )
        for position, word in enumerate(calls):
            one = replace(make_call(session.session_id, word), started_at=1000.0 + position)
            await store.calls.commit(one)
            made.append(one)
        await build_traces(store, session.session_id, claim.rollout_id, reward=1.0, incomplete=False)
    await store.rollouts.end(claim, "done")
    assert job.job_id
    return claim.rollout_id, made


async def test_reconciles_logged_and_recorded_calls(store: Store, tmp_path: Path) -> None:
    words = ["nonce-00000000000a-0", "nonce-00000000000a-1"]
    rollout_id, calls = await ended_rollout(store, words)
    log = "".join(log_line(one, word) for one, word in zip(calls, words, strict=True))
    (tmp_path / "a.jsonl").write_text(log + '{"nonce": "cut sho')
    account = await reconcile(store, tmp_path, [rollout_id], echoes=True)
    assert (account.acknowledged, account.recorded, account.trained) == (2, 2, 2)
    assert account.lost + account.doubled + account.wrong + account.unaccounted == []


async def test_reports_each_fault(store: Store, tmp_path: Path) -> None:
    word = "nonce-00000000000b-0"
    rollout_id, (first, second) = await ended_rollout(store, [word, word])
    other = make_call("sess_x", word)
    lines = [
        log_line(other, word),
        log_line(first, "nonce-00000000000c-0"),
        log_line(second, word, tokens=len(random_answer().token_ids) + 1),
        log_line(first, word, text="another's answer"),
    ]
    (tmp_path / "b.jsonl").write_text("".join(lines))
    account = await reconcile(store, tmp_path, [rollout_id], echoes=True)
    assert len(logged_answers(tmp_path)) == account.acknowledged == 4
    assert [line.split(": ")[1] for line in account.lost] == [f"{other.call_id} is missing"]
    assert len(account.wrong) == 3
    (twice,) = account.doubled
    assert first.call_id in twice
    assert second.call_id in twice


async def test_reports_a_rollout_trained_from_two_attempts(store: Store, tmp_path: Path) -> None:
    rollout_id, _ = await ended_rollout(store, ["nonce-00000000000d-0"], sessions=2)
    account = await reconcile(store, tmp_path, [rollout_id], echoes=True)
    assert f"{rollout_id} is trained from 2 attempts" in account.doubled


async def test_reports_remains(tmp_path: Path) -> None:
    register = tmp_path / "tmp" / "polar-sandboxes-0"
    (register / "records").mkdir(parents=True)
    assert left_behind(tmp_path) == []
    (register / "polar-1").mkdir()
    (register / "polar-1" / "home").mkdir()
    (register / "records" / "polar-1.json").write_text("{}")
    stray = await asyncio.create_subprocess_exec("sleep", "60", env={"HOME": str(register)})
    try:
        while not Path(f"/proc/{stray.pid}/cmdline").read_bytes().startswith(b"sleep"):  # until it has been executed
            await asyncio.sleep(0.01)
        found = left_behind(tmp_path)
    finally:
        stray.kill()
        await stray.wait()
    assert sorted(line.rpartition("/")[2] for line in found if not line.startswith("process")) == [
        "polar-1",
        "polar-1.json",
    ]
    assert [line for line in found if line.startswith(f"process {stray.pid}: sleep")]

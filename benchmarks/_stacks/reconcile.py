"""The reckoning of `benchmarks/chaos.py`: what agents say that they were answered against what the store holds, and
what of the run still exists on the machine."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks._stacks.echo_engine import NONCE
from benchmarks._stacks.kill_targets import alive
from polar_proxy.store import Store


@dataclass
class Reconciliation:
    """Lists hold one line for people per case."""

    acknowledged: int = 0
    asked_again: int = 0
    """Answers that an agent got only after it had asked more than once."""
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Answers that were another's, or are stored with other text or another number of tokens."""
    unaccounted: list[str] = field(default_factory=list)
    """Recorded calls of ended rollouts that are neither trained nor excluded, or both."""
    statuses: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    recorded: int = 0
    trained: int = 0

    def __add__(self, other: Reconciliation) -> Reconciliation:
        return Reconciliation(
            **{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        )


def logged_answers(folder: Path) -> list[dict[str, Any]]:
    """What agents wrote down. A last line that a kill cut short was not acknowledged: it was never synced."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


async def reconcile(store: Store, folder: Path, rollout_ids: list[str], *, echoes: bool) -> Reconciliation:
    """Of these rollouts, all of which have ended. `echoes`: the engine says the word that it is told."""
    account = Reconciliation()
    calls: dict[str, Any] = {}
    trained_of: dict[str, list[str]] = {}
    for row in await store.rollouts.find(rollout_ids=rollout_ids):
        account.statuses[row.status] += 1
        account.attempts[row.attempt] += 1
        account.causes[row.cause or "none"] += 1
        trained_by: list[str] = []
        for session_id in await store.sessions.ids_of_rollout(row.rollout_id):
            recorded = {call.call_id: call for call in await store.calls.of_session(session_id)}
            excluded = await store.traces.exclusions(session_id)
            trained = {call for trace in await store.traces.find(session_id=session_id) for call in trace.call_ids}
            calls |= recorded
            account.recorded += len(recorded)
            account.trained += len(trained)
            account.excluded.update(excluded.values())
            for call_id in recorded:
                if (call_id in trained) == (call_id in excluded):
                    both = "trained and excluded" if call_id in trained else "neither trained nor excluded"
                    account.unaccounted.append(f"{call_id} of {row.rollout_id} ({row.status}) is {both}")
            trained_by += [session_id] if trained else []
            for call_id in trained:
                words = NONCE.findall(recorded[call_id].messages[-1].decode(errors="replace"))
                trained_of.setdefault(words[-1] if words else call_id, []).append(call_id)
        if len(trained_by) > 1:
            account.doubled.append(f"{row.rollout_id} is trained from {len(trained_by)} attempts")
    account.doubled += [f"{word}: {', '.join(ids)}" for word, ids in trained_of.items() if len(ids) > 1]
    for said in logged_answers(folder):
        account.acknowledged += 1
        account.asked_again += said["asked"] > 1
        call = calls.get(said["call_id"])
        if call is None or call.status != "ok" or not call.choices:
            account.lost.append(f"{said['nonce']}: {said['call_id']} {'is not there' if call is None else call.status}")
            continue
        (choice,) = call.choices
        heard = json.dumps(said["nonce"])[1:-1] in call.messages[-1].decode()
        if not heard or len(choice.token_ids) != said["tokens"] or (echoes and said["nonce"] not in said["text"]):
            account.wrong.append(f"{said['nonce']}: {said['call_id']} holds {len(choice.token_ids)} tokens, {said}")
    return account


def left_behind(folder: Path) -> list[str]:
    """Of this run: processes that name its folder, sandboxes, their records and temporary files."""
    found = [f"process {pid}: {line}" for pid, line in processes_of(str(folder))]
    for root, folders, files in os.walk(folder / "tmp"):
        # The register of sandboxes itself, and the packed repositories of tasks, are kept on purpose.
        kept = ("records", "repositories")
        inside = [name for name in (*folders, *files) if not name.startswith("polar-sandboxes-") and name not in kept]
        found += [os.path.join(root, name) for name in inside]
        folders[:] = [name for name in folders if name not in inside and name != "repositories"]
    return found


def processes_of(word: str) -> list[tuple[int, str]]:
    """Living processes with this word in their command or environment, this one apart."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if word.encode() in command + environment and alive(int(entry)):
            found.append((int(entry), command.replace(b"\0", b" ").decode(errors="replace")[:200]))
    return found

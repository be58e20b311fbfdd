"""Reconciliation for `benchmarks/chaos.py`: compares the answers that agents logged with the store, and finds remains
of the run on the machine."""

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
    """Counts, and lists with one readable line per case."""

    acknowledged: int = 0
    repeated: int = 0
    """Number of answers that an agent got only after several attempts."""
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Logged answers that belong to another request, or whose stored call has another number of tokens."""
    unaccounted: list[str] = field(default_factory=list)
    """Recorded calls of finished rollouts that are neither in a trace nor excluded, or that are both."""
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
    """Return the lines that agents logged, without lines that a kill cut short, because those were never synced."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
    return lines


async def reconcile(store: Store, folder: Path, rollout_ids: list[str], *, echoes: bool) -> Reconciliation:
    """Compare the agents' logs of these finished rollouts with the store. `echoes`: the engine's answers repeat the
    word of the request."""
    result = Reconciliation()
    calls: dict[str, Any] = {}
    trained_of: dict[str, list[str]] = {}
    for row in await store.rollouts.find(rollout_ids=rollout_ids):
        result.statuses[row.status] += 1
        result.attempts[row.attempt] += 1
        result.causes[row.cause or "none"] += 1
        trained_by: list[str] = []
        for session_id in await store.sessions.ids_of_rollout(row.rollout_id):
            recorded = {call.call_id: call for call in await store.calls.of_session(session_id)}
            excluded = await store.traces.exclusions(session_id)
            trained = {call for trace in await store.traces.find(session_id=session_id) for call in trace.call_ids}
            calls |= recorded
            result.recorded += len(recorded)
            result.trained += len(trained)
            result.excluded.update(excluded.values())
            for call_id in recorded:
                if (call_id in trained) == (call_id in excluded):
                    both = "trained and excluded" if call_id in trained else "neither trained nor excluded"
                    result.unaccounted.append(f"{call_id} of {row.rollout_id} ({row.status}) is {both}")
            trained_by += [session_id] if trained else []
            for call_id in trained:
                words = NONCE.findall(recorded[call_id].messages[-1].decode(errors="replace"))
                trained_of.setdefault(words[-1] if words else call_id, []).append(call_id)
        if len(trained_by) > 1:
            result.doubled.append(f"{row.rollout_id} is trained from {len(trained_by)} attempts")
    result.doubled += [f"{word}: {', '.join(ids)}" for word, ids in trained_of.items() if len(ids) > 1]
    for logged in logged_answers(folder):
        result.acknowledged += 1
        result.repeated += logged["attempts"] > 1
        call = calls.get(logged["call_id"])
        if call is None or call.status != "ok" or not call.choices:
            result.lost.append(
                f"{logged['nonce']}: {logged['call_id']} {'is missing' if call is None else call.status}"
            )
            continue
        (choice,) = call.choices
        same_request = json.dumps(logged["nonce"])[1:-1] in call.messages[-1].decode()
        if (
            not same_request
            or len(choice.token_ids) != logged["tokens"]
            or (echoes and logged["nonce"] not in logged["text"])
        ):
            result.wrong.append(
                f"{logged['nonce']}: {logged['call_id']} holds {len(choice.token_ids)} tokens, {logged}"
            )
    return result


def left_behind(folder: Path) -> list[str]:
    """Return the remains of the run: processes that name its folder, sandboxes, their records and temporary files."""
    found = [f"process {pid}: {line}" for pid, line in processes_of(str(folder))]
    for root, folders, files in os.walk(folder / "tmp"):
        # The registry of sandboxes and the packed repositories of tasks are kept on purpose.
        kept = ("records", "repositories")
        inside = [name for name in (*folders, *files) if not name.startswith("polar-sandboxes-") and name not in kept]
        found += [os.path.join(root, name) for name in inside]
        folders[:] = [name for name in folders if name not in inside and name != "repositories"]
    return found


def processes_of(word: str) -> list[tuple[int, str]]:
    """Return running processes other than this one with the word in their command or environment."""
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

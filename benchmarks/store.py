"""How small a recorded run is, how fast it is joined, and whether a million calls can be looked through.

    python benchmarks/store.py [--json] [--rollouts N] [--no-million]

The same calls go into Polar's SQLite store and into rllm-model-gateway's. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks._stacks import million  # noqa: E402
from benchmarks._stacks.rollout import Turn, conversation, records, tools  # noqa: E402
from benchmarks._stacks.stacks import StackError, environment_for  # noqa: E402
from polar_proxy.store import open_store  # noqa: E402
from polar_proxy.traces import build  # noqa: E402

CACHE = Path("~/.cache/polar/benchmarks").expanduser()


def per_call_json(turns: list[Turn]) -> list[dict[str, Any]]:
    """What a store of one JSON document a call keeps: the request, all prompt ids, the answer with its tokens."""
    return [
        {
            "trace_id": f"trace-{number}",
            "session_id": "session-1",
            "model": "polar-tiny",
            "messages": list(turn.messages),
            "prompt_token_ids": turn.prompt_ids.tolist(),
            "response_message": turn.answer,
            "completion_token_ids": turn.token_ids.tolist(),
            "logprobs": turn.logprobs.tolist(),
            "finish_reason": "tool_calls",
            "timestamp": turn.started_at,
        }
        for number, turn in enumerate(turns)
    ]


async def store_sizes(folder: Path, runs: list[list[Turn]]) -> dict[str, Any]:
    """Bytes of the file: empty, and what each run adds. The store is closed after each: nothing waits in the log."""
    file = folder / "polar.db"
    async with open_store(str(file)):
        pass
    sizes = [file.stat().st_size]
    for number, turns in enumerate(runs):
        async with open_store(str(file)) as store:
            session = await store.sessions.create(key_hash=None, label=None, origin="key")
            for record in records(session.session_id, turns, step=number * 1e5):
                await store.calls.commit(record)
        sizes.append(file.stat().st_size)
    added = [after - before for before, after in pairwise(sizes)]
    query = """SELECT (SELECT SUM(LENGTH(data)) FROM nodes WHERE kind = 'message'),
        (SELECT SUM(LENGTH(data)) FROM nodes WHERE kind = 'tokens'), SUM(LENGTH(message)), SUM(LENGTH(token_ids)),
        SUM(LENGTH(logprobs)), (SELECT SUM(LENGTH(fingerprint)) FROM calls), SUM(tokens) FROM completions"""
    with closing(sqlite3.connect(file)) as connection:
        *parts, sampled = connection.execute(query).fetchone()
    names = ("messages", "prompt_tokens", "answers", "sampled_tokens", "logprobs", "fingerprint")
    cells = {name: part // len(runs) for name, part in zip(names, parts, strict=True)}
    return {
        "rollout_bytes": round(statistics.mean(added)),
        "rollout_bytes_each": added,
        "empty_bytes": sizes[0],
        "cells_bytes": cells,
        "sampled_tokens": sampled // len(runs),
        "logprob_bytes_per_token": round(parts[4] / sampled, 2),
    }


def peer(folder: Path, turns: list[Turn]) -> dict[str, Any]:
    """The same run in the peer's store."""
    try:
        python, version = environment_for("rllm-model-gateway", CACHE)
    except StackError as error:
        return {"peer_bytes": None, "peer_missing": str(error)}
    file = folder / "peer.db"
    lines = "\n".join(json.dumps(call) for call in per_call_json(turns))
    script = ROOT / "benchmarks" / "_stacks" / "rllm_store.py"
    done = subprocess.run([str(python), str(script), str(file)], input=lines, capture_output=True, text=True)
    if done.returncode:
        return {"peer_bytes": None, "peer_missing": done.stderr.strip()[-300:]}
    told = json.loads(done.stdout)
    return {"peer_bytes": file.stat().st_size, "peer_version": version, "peer_load_ms": told["load_ms"]}


async def joining(folder: Path, turns: list[Turn]) -> dict[str, Any]:
    """The best of five: reading the session's tokens, and building `merged` from them, as a rollout's end does."""
    whole: list[float] = []
    load: list[float] = []
    build_: list[float] = []
    async with open_store(str(folder / "long.db")) as store:
        session = await store.sessions.create(key_hash=None, label=None, origin="key")
        for record in records(session.session_id, turns):
            await store.calls.commit(record)
        for _ in range(5):
            begun = time.perf_counter()
            await store.calls.of_session(session.session_id)
            whole.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            calls = await store.calls.of_session(session.session_id, text=False)
            load.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            built = build(calls, "merged")
            build_.append(time.perf_counter() - begun)
    (trace,) = built.traces
    assert trace.loss_mask.sum() == sum(turn.token_ids.size for turn in turns)
    return {
        "join_ms": round((min(load) + min(build_)) * 1000, 1),
        "load_ms": round(min(load) * 1000, 1),
        "load_with_text_ms": round(min(whole) * 1000, 1),
        "build_ms": round(min(build_) * 1000, 1),
        "join_tokens": int(trace.token_ids.size),
        "join_calls": len(turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rollouts", type=int, default=5, help="runs that are stored; the mean is told (5)")
    parser.add_argument("--no-million", action="store_true", help="without the database of a million calls")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polar-store-") as name:
        folder = Path(name)
        runs = [conversation(60, 60_000, seed=seed) for seed in range(1, given.rollouts + 1)]
        document: dict[str, Any] = asyncio.run(store_sizes(folder, runs))
        document["rollout_tokens"] = round(statistics.mean(t[-1].prompt_ids.size + t[-1].token_ids.size for t in runs))
        text = sum(len(json.dumps(message)) for message in runs[0][-1].messages) + len(json.dumps(tools()))
        document |= {"text_bytes": text, "json_bytes": sum(len(json.dumps(call)) for call in per_call_json(runs[0]))}
        document |= peer(folder, runs[0])
        document |= asyncio.run(joining(folder, conversation(200, 100_000, seed=9)))
        if not given.no_million:
            million.fill(folder / "million.db", 1_000_000)
            document["million"] = million.measure(folder / "million.db", 1_000_000)
    if given.json:
        print(json.dumps(document, indent=2))
        return
    for key, value in document.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()

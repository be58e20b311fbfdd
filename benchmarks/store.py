"""Size of a recorded run, time to join it, and time of listings in a database of a million calls.

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
from benchmarks._stacks.rollout import CallData, conversation, records, tools  # noqa: E402
from benchmarks._stacks.stacks import StackError, environment_for  # noqa: E402
from polar_proxy.store import open_store  # noqa: E402
from polar_proxy.traces.builders import build  # noqa: E402

CACHE = Path("~/.cache/polar/benchmarks").expanduser()


def per_call_json(turns: list[CallData]) -> list[dict[str, Any]]:
    """Return one JSON document per call: the request, all prompt ids, and the answer with its tokens."""
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


async def store_sizes(folder: Path, runs: list[list[CallData]]) -> dict[str, Any]:
    """Return the size of the empty file and the bytes that each run adds. Closing the store empties its log."""
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


def peer_size(folder: Path, turns: list[CallData]) -> dict[str, Any]:
    """Return size in bytes and loading time of the same run in rllm-model-gateway's store, or why they are missing."""
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
    report = json.loads(done.stdout)
    return {"peer_bytes": file.stat().st_size, "peer_version": version, "peer_load_ms": report["load_ms"]}


async def join_times(folder: Path, turns: list[CallData]) -> dict[str, Any]:
    """Return the times to read a session's tokens, and to build `merged` from them: the fastest of five."""
    load_all: list[float] = []
    load: list[float] = []
    build_times: list[float] = []
    async with open_store(str(folder / "long.db")) as store:
        session = await store.sessions.create(key_hash=None, label=None, origin="key")
        for record in records(session.session_id, turns):
            await store.calls.commit(record)
        for _ in range(5):
            started = time.perf_counter()
            await store.calls.of_session(session.session_id)
            load_all.append(time.perf_counter() - started)
            started = time.perf_counter()
            calls = await store.calls.of_session(session.session_id, text=False)
            load.append(time.perf_counter() - started)
            started = time.perf_counter()
            built = build(calls, "merged")
            build_times.append(time.perf_counter() - started)
    (trace,) = built.traces
    assert trace.loss_mask.sum() == sum(turn.token_ids.size for turn in turns)
    return {
        "join_ms": round((min(load) + min(build_times)) * 1000, 1),
        "load_ms": round(min(load) * 1000, 1),
        "load_with_text_ms": round(min(load_all) * 1000, 1),
        "build_ms": round(min(build_times) * 1000, 1),
        "join_tokens": int(trace.token_ids.size),
        "join_calls": len(turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rollouts", type=int, default=5, help="number of stored runs; the mean is reported (5)")
    parser.add_argument("--no-million", action="store_true", help="skip the database of a million calls")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polar-store-") as name:
        folder = Path(name)
        runs = [conversation(60, 60_000, seed=seed) for seed in range(1, arguments.rollouts + 1)]
        document: dict[str, Any] = asyncio.run(store_sizes(folder, runs))
        document["rollout_tokens"] = round(statistics.mean(t[-1].prompt_ids.size + t[-1].token_ids.size for t in runs))
        text = sum(len(json.dumps(message)) for message in runs[0][-1].messages) + len(json.dumps(tools()))
        document |= {"text_bytes": text, "json_bytes": sum(len(json.dumps(call)) for call in per_call_json(runs[0]))}
        document |= peer_size(folder, runs[0])
        document |= asyncio.run(join_times(folder, conversation(200, 100_000, seed=9)))
        if not arguments.no_million:
            million.fill(folder / "million.db", 1_000_000)
            document["million"] = million.measure(folder / "million.db", 1_000_000)
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    for key, value in document.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()

"""Time to join the calls of a long session into traces, from calls in memory and from the store.

    python benchmarks/joining.py --turns 200 --tokens 100000 --json

`join_ms` is the time of the builder alone, with its validation, as at the end of a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from polar_proxy.store import open_store
from polar_proxy.traces.builders import build
from polar_proxy.traces.certificate import certify
from polar_proxy.types import CallRecord, Choice, EngineInfo, Message
from tests.factories import call_record

_END = 151_645
_INFO = EngineInfo(
    engine="vllm",
    version="0",
    model="m",
    context_length=1 << 20,
    template_hash=None,
    logprob_mode="processed",
    capabilities=frozenset({"token_ids", "logprobs"}),
    eos_token_ids=(_END,),
)


def join_ms(calls: Sequence[CallRecord], *, builder: str = "merged", on_drift: str = "split", repeat: int = 5) -> float:
    """Return the milliseconds of building a session's traces, the fastest of `repeat` builds."""
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        build(calls, builder, on_drift=on_drift)
        seconds.append(time.perf_counter() - started)
    return min(seconds) * 1000


def long_session(turns: int, tokens: int, *, drift_every: int = 0, session_id: str = "sess_1") -> list[CallRecord]:
    """Return a session that grows to `tokens` tokens in `turns` turns of random ids.

    With `drift_every` k, one token of the history is changed in every k-th turn, and later turns continue from that.
    """
    random = np.random.default_rng(7)
    new = max(4, tokens // turns)
    answer, context = new // 3, new - new // 3
    calls: list[CallRecord] = []
    texts: list[bytes] = []
    prompt = np.empty(0, np.int32)
    for number in range(turns):
        prompt = np.concatenate([prompt, random.integers(0, 150_000, context, dtype=np.int32)])
        prompt[-2] = _END
        drifted = drift_every and number and number % drift_every == 0
        if drifted:
            prompt[len(prompt) - new - 1] ^= 1
        texts.append(b'{"role":"user","content":"%s"}' % random.bytes(2 * context).hex().encode())
        sampled = random.integers(0, 150_000, answer, dtype=np.int32)
        sampled[-1] = _END
        logprobs = -random.exponential(1, answer).astype(np.float32)
        choice = Choice(0, Message("assistant", f"turn {number}"), "stop", sampled, logprobs)
        parent = calls[-1].call_id if calls else None
        calls.append(
            call_record(
                session_id,
                engine=_INFO,
                logprob_mode=_INFO.logprob_mode,
                edge="continues" if calls else "root",
                parent_call_id=parent,
                base_call_id=parent,
                base_choice=None if parent is None else 0,
                messages=tuple(texts),
                prompt_ids=prompt.copy(),
                choices=(choice,),
                started_at=float(number),
            )
        )
        prompt = np.concatenate([prompt, sampled])
        texts.append(b'{"role":"assistant","content":"turn %d"}' % number)
    return calls


async def _from_store(calls: Sequence[CallRecord]) -> tuple[list[CallRecord], float]:
    """Return the calls, read from a store without text, and the milliseconds of the faster of two readings."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_store(str(Path(folder) / "polar.db")) as store:
            row = await store.sessions.create(key_hash=None, label=None, origin="open")
            for call in calls:
                await store.calls.commit(replace(call, session_id=row.session_id))
            seconds = []
            for _ in range(2):
                started = time.perf_counter()
                loaded = await store.calls.of_session(row.session_id, text=False)
                seconds.append(time.perf_counter() - started)
            return loaded, min(seconds) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--drift-every", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    calls = long_session(arguments.turns, arguments.tokens, drift_every=arguments.drift_every)
    loaded, load_ms = asyncio.run(_from_store(calls))
    built = build(loaded, "merged")
    started = time.perf_counter()
    certify(loaded, built)
    certify_ms = (time.perf_counter() - started) * 1000
    report = {
        "turns": arguments.turns,
        "join_tokens": sum(len(trace.token_ids) for trace in built.traces),
        "traces": len(built.traces),
        "join_ms": round(join_ms(loaded), 2),
        "join_in_memory_ms": round(join_ms(calls), 2),
        "tree_ms": round(join_ms(loaded, builder="tree"), 2),
        "canonical_ms": round(join_ms(loaded, on_drift="canonical"), 2),
        "per_call_ms": round(join_ms(loaded, builder="per_call"), 2),
        "certify_ms": round(certify_ms, 2),
        "load_ms": round(load_ms, 2),
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:>18}: {value}")


if __name__ == "__main__":
    main()

"""`on_drift = rescore` with the real local engine and the bundled policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polar_proxy.config import EngineSettings
from polar_proxy.traces import merged, validate
from polar_proxy.traces.scoring import rescore
from polar_proxy.types import CallRecord, ChatRequest, Choice, Message, Sampling
from tests.factories import call

pytest.importorskip("torch")


async def _asked(engine: Any, name: str, at: float, prompt: list[int], **changes: Any) -> CallRecord:
    """A call whose answer the engine sampled behind exactly these ids."""
    request = ChatRequest("polar-tiny", (Message("user", "-"),), Sampling(temperature=1.0, max_tokens=24, seed=int(at)))
    ids: list[int] = []
    logprobs: list[float] = []
    async for event in engine.sample(request, prompt=np.array(prompt, dtype=np.int32)):
        ids += event.token_ids
        logprobs += event.logprobs
    made = Choice(0, {}, "stop", np.array(ids, np.int32), np.array(logprobs, np.float32))
    return replace(call(name, at, prompt), choices=(made,), engine=engine.info, **changes)


async def test_what_stands_behind_the_same_tokens_gets_the_same_numbers() -> None:
    from polar_proxy.engines.factory import make_engine

    async with make_engine(EngineSettings()) as engine:
        end = engine.info.eos_token_ids[0]
        opening = await engine.render(ChatRequest("polar-tiny", (Message("user", "List the files."),)))
        first = await _asked(engine, "a", 1, opening)
        said = first.choices[0].token_ids.tolist()
        anew = [*opening, *said[:-1][::-1], end]  # the same turn in other tokens
        more = await engine.render(ChatRequest("polar-tiny", (Message("user", "Go on."),)))
        place = {"base_call_id": "a", "base_choice": 0, "prompt_reason": "off"}
        second = await _asked(engine, "b", 2, [*anew, *more], **place)
        calls = [first, second]
        before = merged(calls, on_drift="rescore")
        assert [found.outcome for found in before.drift_events] == ["canonical"]
        built = await rescore(before, engine)
    validate(calls, built)
    (trace,) = built.traces
    answer = slice(len(opening), len(opening) + len(said))
    np.testing.assert_allclose(trace.logprobs[answer], first.choices[0].logprobs, atol=1e-3)
    assert (trace.grade, trace.rescored) == ("approximate", True)
    assert np.isfinite(trace.logprobs[trace.loss_mask == 1]).all()

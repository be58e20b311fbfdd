"""`on_drift = rescore` with the real local engine and the bundled policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polar_proxy.config import EngineSettings
from polar_proxy.traces.builders import build
from polar_proxy.traces.scoring import rescore
from polar_proxy.traces.validation import validate
from polar_proxy.types import CallRecord, ChatRequest, Message, Sampling
from tests.factories import answer, call

pytest.importorskip("torch")


async def _sampled_call(engine: Any, name: str, at: float, prompt: list[int], **changes: Any) -> CallRecord:
    """Return a call whose answer the engine sampled after exactly these ids."""
    request = ChatRequest("polar-tiny", (Message("user", "-"),), Sampling(temperature=1.0, max_tokens=24, seed=int(at)))
    accepted = await engine.accept_prompt(request, np.array(prompt, dtype=np.int32))
    ids: list[int] = []
    logprobs: list[float] = []
    async for event in engine.sample(request, prompt=accepted):
        ids += event.token_ids
        logprobs += event.logprobs
    return replace(call(name, at, prompt), choices=(answer(ids, 0, logprobs),), engine=engine.info, **changes)


async def test_same_context_gives_same_logprobs() -> None:
    from polar_proxy.engines.factory import make_engine

    async with make_engine(EngineSettings()) as engine:
        end = engine.info.eos_token_ids[0]
        opening = await engine.render(ChatRequest("polar-tiny", (Message("user", "List the files."),)))
        first = await _sampled_call(engine, "a", 1, opening)
        sampled = first.choices[0].token_ids.tolist()
        drifted = [*opening, *sampled[:-1][::-1], end]  # the same turn in other tokens
        more = await engine.render(ChatRequest("polar-tiny", (Message("user", "Go on."),)))
        lineage = {"base_call_id": "a", "base_choice": 0, "prompt_reason": "off"}
        second = await _sampled_call(engine, "b", 2, [*drifted, *more], **lineage)
        calls = [first, second]
        before = build(calls, on_drift="rescore")
        assert [event.outcome for event in before.drift_events] == ["canonical"]
        built = await rescore(before, engine)
    validate(calls, built)
    (trace,) = built.traces
    first_answer = slice(len(opening), len(opening) + len(sampled))
    np.testing.assert_allclose(trace.logprobs[first_answer], first.choices[0].logprobs, atol=1e-3)
    assert (trace.grade, trace.rescored) == ("approximate", True)
    assert np.isfinite(trace.logprobs[trace.loss_mask == 1]).all()

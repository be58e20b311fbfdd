"""Agents that ask for another distribution: what is said about their traces, and the setting that overrides them."""

from __future__ import annotations

import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway.answering import apply_policy
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.store import Store
from polar_proxy.traces.builders import build
from polar_proxy.traces.grades import DistributionNotes, off_distribution_note
from polar_proxy.types import Json, Sampling
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client, recorded_calls

# aider 0.86.2, Gemini CLI 0.61.0 in the form of Chat Completions, and an agent with a penalty
ASKED: list[tuple[Json, str]] = [
    ({"temperature": 0}, "temperature 0"),
    ({"temperature": 1, "top_p": 0.95}, "top_p 0.95"),
    ({"frequency_penalty": 0.5}, "frequency_penalty 0.5"),
    ({"logit_bias": {"5": 10}}, "logit_bias {'5': 10}"),
]


@pytest.mark.parametrize(("asked", "named"), ASKED)
async def test_the_first_call_of_another_distribution_is_noted(
    serve: Serve, store: Store, asked: Json, named: str
) -> None:
    notes: list[str] = []
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        gateway.observe(DistributionNotes(notes.append))
        await http.post("/chat/completions", json=CHAT)
        assert notes == []
        for _ in range(2):
            await http.post("/chat/completions", json={**CHAT, **asked})
    (note,) = notes
    assert f"sampled with {named}, so their traces are approximate" in note
    assert "--temperature 1, polar serve" in note
    calls = await recorded_calls(store, 3)
    assert [off_distribution_note(call) for call in calls] == [None, note, note]


@pytest.mark.parametrize(("asked", "named"), ASKED)
async def test_the_setting_overrides_the_agent(serve: Serve, store: Store, asked: Json, named: str) -> None:
    notes: list[str] = []
    async with serve(ScriptedEngine(), temperature=1.0) as gateway, client(gateway.url) as http:
        gateway.observe(DistributionNotes(notes.append))
        await http.post("/chat/completions", json={**CHAT, **asked})
    assert notes == []
    (trace,) = build(await recorded_calls(store, 1)).traces
    assert trace.grade == "exact"
    (sampling,) = trace.sampling
    assert (sampling.temperature, sampling.changes) == (1.0, {})


def test_a_rollouts_policy_replaces_all_that_changes_the_distribution() -> None:
    asked = Sampling(0.0, 0.9, 5, 0.1, 100, 7, (), 1, 0.5, 0.5, 1.2, {"5": 10.0})
    sent = apply_policy(asked, RolloutSpec().session_policy())
    assert sent == Sampling(1.0, 1.0, 0, 0.0, 100, 7, (), 1, 0.0, 0.0, 1.0)

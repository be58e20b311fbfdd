"""Importance ratios, alternatives and entropy of recorded tokens, computed by the server's engine."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from polar_proxy.api import ApiContext
from polar_proxy.config import EngineSettings, Settings
from polar_proxy.engines.base import Engine
from polar_proxy.engines.bundled import POLAR_TINY_NAME
from polar_proxy.engines.factory import make_engine
from polar_proxy.engines.scripted import INFO, ScriptedEngine, logprob
from polar_proxy.gateway.http.routes import add_router
from polar_proxy.store import Store
from polar_proxy.types import Choice, Message, SampleEvent, TopLogprob
from polar_proxy.view.engine_values import least_entropy
from polar_proxy.view.router import create_view_router
from tests.factories import call_record, new_session
from tests.view import recorded

TOP = (TopLogprob(5, "<b>", math.log(0.5)), TopLogprob(6, "\x1b", math.log(0.25)))


class EngineWithAlternatives(ScriptedEngine):
    """A scripted engine that serves the recorded model and reports the alternatives `TOP`."""

    def __init__(self) -> None:
        super().__init__(info=replace(INFO, model=POLAR_TINY_NAME))

    async def sample(self, request: Any, **options: Any) -> AsyncGenerator[SampleEvent, None]:
        async for event in super().sample(request, **options):
            yield replace(event, top=(TOP,) * len(event.token_ids))


def connect_engine(store: Store, folder: Path, engine: Engine) -> httpx.AsyncClient:
    """Return a client of pages whose server has an engine."""
    app = FastAPI()
    context = ApiContext(store, Settings(home=folder), engine=engine)
    add_router(app, create_view_router(context, open_on_loopback=True, writable=False))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8123")


async def test_ratios_compare_present_and_recorded_probabilities(store: Store, tmp_path: Path) -> None:
    session_id = await recorded.long_session(store, turns=2, tokens=40)
    (trace,) = await store.traces.find(session_id=session_id)
    async with connect_engine(store, tmp_path, EngineWithAlternatives()) as http:
        assert "importance ratio" in (await http.get(f"/view/traces/{trace.trace_id}")).text
        found = (await http.get(f"/view/traces/{trace.trace_id}/ratios")).json()["ratios"]
    for token, mask, before, ratio in zip(trace.token_ids, trace.loss_mask, trace.logprobs, found, strict=True):
        expected = math.exp(logprob(int(token)) - float(before)) if mask else None
        assert ratio == (None if expected is None else pytest.approx(expected, abs=1e-3))


async def test_a_cut_distribution_has_no_ratio(store: Store, tmp_path: Path) -> None:
    call = call_record(
        await new_session(store),
        engine=recorded.TINY,
        logprob_mode="processed",
        sampling={"temperature": 1, "top_p": 0.5},
    )
    await recorded.commit(store, call)
    async with connect_engine(store, tmp_path, EngineWithAlternatives()) as http:
        found = (await http.get(f"/view/calls/{call.call_id}/sequence/ratios")).json()["ratios"]
    assert set(found) == {None}


async def test_alternatives_are_sampled_after_the_tokens_before_the_position(store: Store, tmp_path: Path) -> None:
    session_id = await recorded.long_session(store, turns=2, tokens=40)
    (trace,) = await store.traces.find(session_id=session_id)
    engine = EngineWithAlternatives()
    async with connect_engine(store, tmp_path, engine) as http:
        path = f"/view/traces/{trace.trace_id}/alternatives"
        found = (await http.get(path, params={"at": 25})).json()
        assert found["alternatives"] == [[5, "<b>", -0.6931], [6, "\\x1b", -1.3863]]
        assert engine.requests[-1].prompt == tuple(trace.token_ids[:25].tolist())
        assert engine.requests[-1].sampling.max_tokens == 1
        for position in (0, len(trace.token_ids), -1):
            assert (await http.get(path, params={"at": position})).status_code == 400


async def test_pages_without_the_engine_say_so(pages: httpx.AsyncClient, store: Store, tmp_path: Path) -> None:
    session_id = await recorded.long_session(store, turns=2, tokens=40)
    (trace,) = await store.traces.find(session_id=session_id)
    path = f"/view/traces/{trace.trace_id}"
    page = (await pages.get(path)).text
    assert "cannot be computed here: this server has no engine" in page
    assert '<option value="ratio"' not in page
    assert (await pages.get(f"{path}/ratios")).status_code == 400
    async with connect_engine(store, tmp_path, ScriptedEngine()) as http:
        assert "they need an engine that serves polar-tiny and scores given tokens" in (await http.get(path)).text


def test_the_entropy_is_bounded_from_below() -> None:
    assert least_entropy([TopLogprob(1, "", math.log(0.5)), TopLogprob(2, "", math.log(0.5))]) == pytest.approx(
        math.log(2)
    )
    # The rest of 0.25 is spread over tokens of at most 0.25 each: at best one more token like the last.
    assert least_entropy(TOP) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert least_entropy([TopLogprob(1, "", 0.0)]) == 0.0


@pytest.mark.slow
async def test_the_local_engine_agrees_with_what_it_sampled(store: Store, tmp_path: Path) -> None:
    ids = recorded.text_ids("The bug is in line 42.\n    return total / count\n")
    async with make_engine(EngineSettings(kind="local")) as engine:
        values = np.array(await engine.score(ids.tolist()), np.float32)
        choice = Choice(0, Message("assistant", "x"), "stop", ids[8:], values[7:])
        call = call_record(await new_session(store), engine=engine.info, prompt_ids=ids[:8], choices=(choice,))
        await recorded.commit(store, call)
        async with connect_engine(store, tmp_path, engine) as http:
            path = f"/view/calls/{call.call_id}/sequence"
            ratios = (await http.get(f"{path}/ratios")).json()["ratios"]
            found = (await http.get(f"{path}/alternatives", params={"at": 9})).json()
    assert ratios[:8] == [None] * 8
    assert ratios[8:] == pytest.approx([1.0] * (len(ids) - 8), abs=1e-3)
    logprobs = [value for _, _, value in found["alternatives"]]
    assert logprobs == sorted(logprobs, reverse=True)
    assert len(logprobs) == 10
    by_id = {token: value for token, _, value in found["alternatives"]}
    assert by_id.get(int(ids[9]), values[8]) == pytest.approx(float(values[8]), abs=1e-3)
    assert 0 <= found["least_entropy"] < math.log(len(by_id) * 1000)

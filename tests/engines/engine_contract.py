"""Tests of the promises of `Engine`. An engine's test file subclasses `EngineContract` and defines two fixtures:

* `engine`: an entered engine that serves the model in `model_dir`.
* `model_dir`: the model folder (its tokenizer knows which tokens are special).

Set `tail_may_be_lost` for servers that never send text that ends in unfinished UTF-8.

Engines of servers that have a fake also subclass `AbortContract`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from polar_proxy.engines.base import Engine
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, EngineRequest, Json, Message, SampleEvent, Sampling, TextRequest, ToolCall
from tests.fakes.engine_server import FakeServer
from tests.until import until

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=24)
"""Every setting is explicit, so that raw and processed log-probabilities are the same."""

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass
class Answer:
    """The joined events of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    arguments: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_sequence: str | None = None


@dataclass
class Result:
    events: list[SampleEvent]
    prompt_ids: tuple[int, ...]
    choices: list[Answer]


def gather(events: Sequence[SampleEvent]) -> Result:
    """Join the events of a call, and assert what holds for every event."""
    assert events, "a call has at least one event"
    assert events[0].prompt_ids is not None, "the first event carries the prompt's ids"
    choices: dict[int, Answer] = {}
    for event in events:
        assert len(event.token_ids) == len(event.logprobs)
        assert all(logprob <= 1e-6 for logprob in event.logprobs)
        assert event.tokens == () or len(event.tokens) == len(event.token_ids)
        assert event.top == () or len(event.top) == len(event.token_ids)
        answer = choices.setdefault(event.index, Answer())
        assert answer.finish_reason is None, "nothing follows a choice's finish_reason"
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs
        answer.text += event.text
        answer.reasoning += event.reasoning
        answer.finish_reason = event.finish_reason
        answer.stop_sequence = event.stop_sequence
        for delta in event.tool_calls:
            answer.arguments[delta.index] = answer.arguments.get(delta.index, "") + delta.arguments
            if delta.name is not None:
                answer.names[delta.index] = delta.name
    assert sorted(choices) == list(range(len(choices)))
    assert all(answer.finish_reason is not None for answer in choices.values())
    return Result(list(events), tuple(events[0].prompt_ids), [choices[index] for index in sorted(choices)])


async def run(
    engine: Engine, request: EngineRequest, *, prompt: Sequence[int] | None = None, stream: bool = True
) -> Result:
    exact = None
    if prompt is not None:
        assert isinstance(request, ChatRequest)
        exact = await engine.accept_prompt(request, np.array(prompt, dtype=np.int32))
    return gather([event async for event in engine.sample(request, stream=stream, prompt=exact)])


def read(answer: Answer) -> tuple[object, ...]:
    """Return what an agent sees of an answer, without the white space around text and reasoning."""
    calls = [(answer.names[index], answer.arguments.get(index, "")) for index in sorted(answer.names)]
    return answer.text.strip(), answer.reasoning.strip(), calls, answer.finish_reason


async def assert_scored(engine: Engine, result: Result) -> None:
    """Assert that the log-probabilities of every choice equal those of a fresh pass over its whole sequence."""
    for answer in result.choices:
        fresh = (await engine.score([*result.prompt_ids, *answer.token_ids]))[len(result.prompt_ids) - 1 :]
        assert answer.logprobs == pytest.approx(fresh, abs=1e-3)
        assert answer.token_ids


def chat(text: str = "def main(): return 1", *, sampling: Sampling = PLAIN, **more: Any) -> ChatRequest:
    messages = (Message("system", "You are terse."), Message("user", text))
    return ChatRequest(model="", messages=messages, sampling=sampling, **more)


class EngineContract:
    """Subclass it as `class TestX(EngineContract)`."""

    tail_may_be_lost = False

    @pytest.fixture(name="special_ids")
    def _special_ids(self, model_dir: Path) -> frozenset[int]:
        return frozenset(AutoTokenizer.from_pretrained(model_dir).all_special_ids)

    async def test_info_has_what_recording_needs(self, engine: Engine) -> None:
        assert {"token_ids", "logprobs"} <= engine.info.capabilities
        assert engine.info.context_length > 0
        assert engine.info.logprob_mode in ("raw", "processed")
        assert await engine.health() is None

    async def test_every_id_has_a_logprob(self, engine: Engine) -> None:
        answer = (await run(engine, chat())).choices[0]
        assert len(answer.token_ids) == len(answer.logprobs) > 0

    async def test_prompt_ids_equal_the_rendering(self, engine: Engine) -> None:
        request = chat("What is 漢字?")
        rendered = await engine.render(request)
        assert list((await run(engine, request)).prompt_ids) == rendered
        assert await engine.count_tokens(request) == len(rendered)

    async def test_logprobs_equal_those_of_a_fresh_pass(self, engine: Engine) -> None:
        for request in (chat(), chat("import os", tools=(WEATHER,))):
            result = await run(engine, replace(request, sampling=replace(PLAIN, max_tokens=60)))
            answer = result.choices[0]
            fresh = (await engine.score([*result.prompt_ids, *answer.token_ids]))[len(result.prompt_ids) - 1 :]
            assert len(fresh) == len(answer.logprobs)
            assert max(abs(one - two) for one, two in zip(fresh, answer.logprobs, strict=True)) < 1e-3

    async def test_text_is_the_decoding_of_the_ids(self, engine: Engine, special_ids: frozenset[int]) -> None:
        for seed in range(3):
            sampling = replace(PLAIN, seed=seed, max_tokens=40)
            answer = (await run(engine, TextRequest("", "def main():", sampling))).choices[0]
            text = await engine.decode([token for token in answer.token_ids if token not in special_ids])
            if self.tail_may_be_lost:
                assert text.startswith(answer.text.rstrip("\ufffd"))
            else:
                assert answer.text == text

    async def test_two_choices(self, engine: Engine) -> None:
        result = await run(engine, chat(sampling=replace(PLAIN, n=2, seed=5, max_tokens=12)))
        assert len(result.choices) == 2
        assert result.choices[0].token_ids != result.choices[1].token_ids
        for answer in result.choices:
            fresh = (await engine.score([*result.prompt_ids, *answer.token_ids]))[len(result.prompt_ids) - 1 :]
            assert answer.logprobs == pytest.approx(fresh, abs=1e-3)

    async def test_seed_makes_sampling_repeatable(self, engine: Engine) -> None:
        one = await run(engine, chat(sampling=replace(PLAIN, seed=7)))
        two = await run(engine, chat(sampling=replace(PLAIN, seed=7)))
        assert one.choices[0].token_ids == two.choices[0].token_ids

    async def test_temperature_zero_takes_the_most_likely_token(self, engine: Engine) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=8, top_logprobs=2)
        result = await run(engine, chat(sampling=sampling))
        again = await run(engine, chat(sampling=sampling))
        assert result.choices[0].token_ids == again.choices[0].token_ids
        top = [entry for event in result.events for entry in event.top]
        assert len(top) == len(result.choices[0].token_ids)
        for token, alternatives in zip(result.choices[0].token_ids, top, strict=True):
            assert max(alternatives, key=lambda entry: entry.logprob).token_id == token

    async def test_top_logprobs(self, engine: Engine) -> None:
        result = await run(engine, chat(sampling=replace(PLAIN, top_logprobs=3, max_tokens=6)))
        for event in result.events:
            assert len(event.top) == len(event.tokens) == len(event.token_ids)
            for token, logprob, alternatives in zip(event.token_ids, event.logprobs, event.top, strict=True):
                assert len(alternatives) >= 3
                for entry in alternatives:
                    assert entry.token_id != token or entry.logprob == pytest.approx(logprob, abs=1e-4)

    async def test_max_tokens_beyond_the_context_is_reduced(self, engine: Engine) -> None:
        ends_at_once = {str(engine.info.eos_token_ids[0]): 100.0}
        limit = engine.info.context_length
        answer = (await run(engine, chat(sampling=replace(PLAIN, max_tokens=limit, logit_bias=ends_at_once)))).choices[
            0
        ]
        assert (answer.token_ids, answer.finish_reason) == ([engine.info.eos_token_ids[0]], "stop")

    async def test_max_tokens_ends_with_length(self, engine: Engine, special_ids: frozenset[int]) -> None:
        bias = {str(token): -100.0 for token in special_ids}
        sampling = replace(PLAIN, max_tokens=5, logit_bias=bias)
        answer = (await run(engine, chat(sampling=sampling))).choices[0]
        assert len(answer.token_ids) == 5
        assert answer.finish_reason == "length"

    async def test_ids_include_the_end_of_turn_token(self, engine: Engine) -> None:
        eos = engine.info.eos_token_ids[0]
        sampling = replace(PLAIN, logit_bias={str(eos): 100.0})
        answer = (await run(engine, chat(sampling=sampling))).choices[0]
        assert answer.token_ids == [eos]
        assert (answer.text, answer.finish_reason) == ("", "stop")

    async def test_stop_string_cuts_text_but_not_ids(self, engine: Engine) -> None:
        free = (await run(engine, chat(sampling=Sampling(temperature=0.0, max_tokens=24)))).choices[0]
        visible = [char for char in free.text[2:] if char.isalnum() and char.isascii()]
        if not visible:
            pytest.skip("this model's greedy answer has no character to stop at")
        stop = visible[0]
        cut = (await run(engine, chat(sampling=Sampling(temperature=0.0, max_tokens=24, stop=(stop,))))).choices[0]
        assert (cut.finish_reason, cut.stop_sequence) == ("stop", stop)
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
        assert stop in await engine.decode(cut.token_ids)

    async def test_samples_from_a_prompt_of_token_ids(self, engine: Engine) -> None:
        ids = tuple(await engine.render(chat()))
        result = await run(engine, TextRequest("", ids, replace(PLAIN, max_tokens=6)))
        assert result.prompt_ids == ids
        assert len(result.choices[0].token_ids) > 0

    async def test_renders_tools(self, engine: Engine) -> None:
        bare, tooled = chat(), chat(tools=(WEATHER,))
        assert "get_weather" in await engine.decode(await engine.render(tooled))
        assert "get_weather" not in await engine.decode(await engine.render(bare))

    async def test_renders_a_conversation_with_tool_calls(self, engine: Engine) -> None:
        request = ChatRequest(
            model="",
            messages=(
                Message("user", [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Paris?"}]),
                Message("assistant", None, tool_calls=(ToolCall("call_1", "get_weather", '{"city":"Paris"}'),)),
                Message("tool", "Sunny", tool_call_id="call_1"),
            ),
            sampling=replace(PLAIN, max_tokens=4),
            tools=(WEATHER,),
        )
        text = await engine.decode(await engine.render(request))
        assert '"arguments": {"city": "Paris"}' in text
        assert "Weather\nin Paris?" in text
        assert list((await run(engine, request)).prompt_ids) == await engine.render(request)

    async def test_rejects_prompt_beyond_the_context(self, engine: Engine) -> None:
        token = (await engine.render(chat()))[-1]
        request = TextRequest("", (token,) * (engine.info.context_length + 1), PLAIN)
        with pytest.raises(RequestError) as caught:
            await run(engine, request)
        assert caught.value.status == 400
        assert caught.value.code == "context_length_exceeded"

    async def test_closing_stops_the_generation(self, engine: Engine, special_ids: frozenset[int]) -> None:
        bias = {str(token): -100.0 for token in special_ids}
        endless = replace(PLAIN, max_tokens=3000, logit_bias=bias)
        async with aclosing(engine.sample(TextRequest("", "a", endless))) as events:
            async for event in events:
                if event.token_ids:
                    break
        # The engine serves others, and reports that it is healthy.
        result = await asyncio.wait_for(run(engine, chat(sampling=replace(PLAIN, max_tokens=3))), timeout=60)
        assert result.choices[0].token_ids
        assert await engine.health() is None

    async def test_engine_works_after_a_cancelled_reader(self, engine: Engine) -> None:
        reader = asyncio.create_task(run(engine, chat(sampling=replace(PLAIN, max_tokens=3000))))
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert (await run(engine, chat(sampling=replace(PLAIN, max_tokens=3)))).choices[0].token_ids

    async def test_concurrent_calls_do_not_mix(self, engine: Engine) -> None:
        requests = [
            chat("x = 1\n" * (1 + 7 * number), sampling=Sampling(temperature=0.0, max_tokens=10 + number))
            for number in range(6)
        ]
        together = await asyncio.gather(*(run(engine, request) for request in requests))
        for request, result in zip(requests, together, strict=True):
            assert list(result.prompt_ids) == await engine.render(request)
            answer = result.choices[0]
            fresh = (await engine.score([*result.prompt_ids, *answer.token_ids]))[len(result.prompt_ids) - 1 :]
            assert answer.logprobs == pytest.approx(fresh, abs=1e-3)


class AbortContract:
    """Subclass it with a fixture `generating`: a fake server whose next answer takes 25 seconds, and its engine."""

    @pytest.mark.parametrize("how", ["close", "cancel"])
    async def test_leaving_a_stream_aborts_the_generation(
        self, generating: tuple[FakeServer, Engine], how: str
    ) -> None:
        fake, engine = generating
        fake.bodies.clear()
        if how == "close":
            async with aclosing(engine.sample(chat())) as events:
                await anext(events)
        else:
            task = asyncio.create_task(run(engine, chat()))
            await until(lambda: fake.bodies)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: fake.aborted)
        assert fake.aborted == 1

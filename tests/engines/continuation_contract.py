"""Tests of the promises of `Engine.sample(..., prompt=...)`; fixtures as for `EngineContract`."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from polar_proxy.engines.base import CannotContinueError, Engine
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Sampling
from tests.engines.engine_contract import PLAIN, WEATHER, Answer, assert_scored, chat, read, run


def _well_formed(answer: Answer) -> bool:
    """Return whether an answer has calls and all are whole. (Servers report cut or malformed calls differently.)"""
    try:
        arguments = [json.loads(text) for text in answer.arguments.values()]
    except ValueError:
        return False
    return answer.finish_reason == "tool_calls" and all(isinstance(value, dict) for value in arguments)


async def _refusal(engine: Engine, request: ChatRequest, prompt: list[int]) -> str | None:
    """Return why the engine does not accept a prompt; None if it does."""
    try:
        await engine.accept_prompt(request, np.array(prompt, dtype=np.int32))
    except CannotContinueError as error:
        return str(error)
    return None


class ContinuationContract:
    """Subclass it for an engine with the capability `continue`."""

    @pytest.fixture(name="special_ids")
    def _special_ids(self, model_dir: Path) -> frozenset[int]:
        return frozenset(AutoTokenizer.from_pretrained(model_dir).all_special_ids)

    async def test_accepts_rendered_prompts(self, engine: Engine) -> None:
        assert "continue" in engine.info.capabilities
        for request in (chat(), chat(tools=(WEATHER,))):
            prompt = np.array(await engine.render(request), dtype=np.int32)
            await engine.accept_prompt(request, prompt)

    async def test_samples_from_exactly_the_given_ids(self, engine: Engine) -> None:
        """The ids are not the tokenizer's own, and the request contains another conversation."""
        request = chat("something else")
        first = await run(engine, chat(sampling=replace(PLAIN, seed=1)))
        suffix = (await engine.render(request))[-9:]
        letters = [token for char in "abc" for token in (await engine.render(chat(char)))[-12:-6]]
        prompt = [*first.prompt_ids, *first.choices[0].token_ids, *letters, *suffix]
        result = await run(engine, request, prompt=prompt)
        assert list(result.prompt_ids) == prompt
        await assert_scored(engine, result)

    async def test_renders_without_the_opening_of_the_answer(self, engine: Engine) -> None:
        for request in (chat(), chat(tools=(WEATHER,))):
            whole, closed = await engine.render(request), await engine.render(request, generation=False)
            assert whole[: len(closed)] == closed
            assert len(whole) > len(closed)

    async def test_confirms_the_end_of_a_rendering(self, engine: Engine) -> None:
        ids = await engine.render(chat())
        for end in ([], ids[-3:], ids):
            assert await engine.confirm_rendering(chat(), end)

    @pytest.mark.parametrize("more", [{}, {"tools": (WEATHER,)}, {"tools": (WEATHER,), "tool_choice": "none"}])
    async def test_answers_parse_as_in_a_chat(self, engine: Engine, more: dict[str, Any]) -> None:
        for text in ("def main(): return 1", "What is the weather in Paris? Use the tool."):
            request = chat(text, sampling=replace(PLAIN, temperature=0.0, max_tokens=60), **more)
            rendered, exact = (
                await run(engine, request),
                await run(engine, request, prompt=await engine.render(request)),
            )
            assert exact.prompt_ids == rendered.prompt_ids
            one, two = rendered.choices[0], exact.choices[0]
            assert one.token_ids == two.token_ids
            assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)
            if "<tool_call>" not in await engine.decode(one.token_ids) or _well_formed(one):
                assert read(one) == read(two)

    async def test_streamed_and_whole_answers_to_ids_are_equal(self, engine: Engine) -> None:
        request = chat(tools=(WEATHER,), sampling=replace(PLAIN, seed=11, max_tokens=40, n=2))
        prompt = await engine.render(request)
        streamed = await run(engine, request, prompt=prompt, stream=True)
        whole = await run(engine, request, prompt=prompt, stream=False)
        assert len(streamed.choices) == len(whole.choices) == 2
        for one, two in zip(streamed.choices, whole.choices, strict=True):
            assert one.token_ids == two.token_ids
            assert read(one) == read(two)
        await assert_scored(engine, streamed)

    async def test_top_logprobs_of_an_exact_prompt(self, engine: Engine) -> None:
        request = chat(sampling=replace(PLAIN, top_logprobs=3, max_tokens=6))
        result = await run(engine, request, prompt=await engine.render(request))
        rows = [row for event in result.events for row in event.top]
        names = [name for event in result.events for name in event.tokens]
        assert len(rows) == len(names) == len(result.choices[0].token_ids)
        assert all(len(row) >= 3 for row in rows)

    async def test_end_of_turn_token_has_no_text(self, engine: Engine) -> None:
        eos = engine.info.eos_token_ids[0]
        for more in ({}, {"tools": (WEATHER,)}):
            request = chat(sampling=replace(PLAIN, logit_bias={str(eos): 100.0}), **more)
            answer = (await run(engine, request, prompt=await engine.render(request))).choices[0]
            assert answer.token_ids == [eos]
            assert (answer.text, answer.reasoning, answer.finish_reason) == ("", "", "stop")

    async def test_special_tokens_are_shown_as_in_a_chat(self, engine: Engine, special_ids: frozenset[int]) -> None:
        """A special token other than the end of turn, sampled by mistake."""
        others = sorted(special_ids - set(engine.info.eos_token_ids))
        for more in ({}, {"tools": (WEATHER,)}):
            bias = {str(token): 100.0 for token in others}
            request = chat(sampling=Sampling(temperature=0.0, max_tokens=3, logit_bias=bias), **more)
            rendered, exact = (
                await run(engine, request),
                await run(engine, request, prompt=await engine.render(request)),
            )
            assert rendered.choices[0].token_ids == exact.choices[0].token_ids
            assert read(rendered.choices[0]) == read(exact.choices[0])

    async def test_stop_string_ends_the_answer_to_ids(self, engine: Engine) -> None:
        request = chat(sampling=Sampling(temperature=0.0, max_tokens=24))
        prompt = await engine.render(request)
        free = (await run(engine, request, prompt=prompt)).choices[0]
        visible_text = free.text + free.reasoning
        visible = [char for char in visible_text[2:] if char.isalnum() and char.isascii()]
        if not visible:
            pytest.skip("this model's greedy answer has no character to stop at")
        stopped = replace(request, sampling=replace(request.sampling, stop=(visible[0],)))
        if (refusal := await _refusal(engine, stopped, prompt)) is not None:
            assert "stop string" in refusal  # a server's parser that is given tokens
            return
        cut = (await run(engine, stopped, prompt=prompt)).choices[0]
        assert (cut.finish_reason, cut.stop_sequence) == ("stop", visible[0])
        assert cut.text + cut.reasoning == visible_text[: visible_text.index(visible[0])]
        assert cut.token_ids == free.token_ids[: len(cut.token_ids)]

    async def test_answer_without_max_tokens_may_fill_the_context(
        self, engine: Engine, special_ids: frozenset[int]
    ) -> None:
        """Without `max_tokens` it continues (a raw completion would end after 16 tokens); closing aborts it."""
        bias = {str(token): -100.0 for token in special_ids}
        request = chat(sampling=replace(PLAIN, max_tokens=None, logit_bias=bias))
        count = 0
        prompt = np.array(await engine.render(request), dtype=np.int32)
        accepted = await engine.accept_prompt(request, prompt)
        async with aclosing(engine.sample(request, prompt=accepted)) as events:
            async for event in events:
                assert event.finish_reason is None
                count += len(event.token_ids)
                if count > 40:
                    break
        result = await asyncio.wait_for(run(engine, chat(sampling=replace(PLAIN, max_tokens=3))), timeout=60)
        assert result.choices[0].token_ids

    async def test_rejects_exact_prompt_beyond_the_context(self, engine: Engine) -> None:
        rendered = await engine.render(chat())
        with pytest.raises(RequestError) as caught:
            await run(engine, chat(), prompt=[*rendered[:1] * engine.info.context_length, *rendered])
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")

    async def test_concurrent_exact_prompts_do_not_mix(self, engine: Engine) -> None:
        request = chat(sampling=Sampling(temperature=0.0, max_tokens=10))
        prompts = [await engine.render(chat("x = 1\n" * (1 + 5 * number))) for number in range(4)]
        together = await asyncio.gather(*(run(engine, request, prompt=prompt) for prompt in prompts))
        for prompt, result in zip(prompts, together, strict=True):
            assert list(result.prompt_ids) == prompt
            await assert_scored(engine, result)

"""The vLLM engine samples from exact ids of a fake server: requests, verification, parsing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polar_proxy.dialects.base import Answer as EncodedAnswer
from polar_proxy.engines.base import CannotContinueError, ExactPrompt
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.openai_stream import version_runs
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.engines.vllm.client import DERENDER, render_body
from polar_proxy.engines.vllm.forced_answers import ForcedAnswer, ParsedAnswer, matching_reasoning_mode
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, Message, SampleEvent, Sampling
from tests.engines.engine_contract import WEATHER, chat, read, run
from tests.fakes.vllm_server import CALL, END, Answer, FakeVllm, ids, text_of, tokenized
from tests.until import until

pytestmark = pytest.mark.slow

TOOLS: dict[str, Any] = {"tools": (WEATHER,)}
PARIS = ("get_weather", '{"city" : "Paris"}')
PROMPT = [*ids("odd"), END, *ids("tokens")]
LONG = Sampling(max_tokens=200)


async def accepted(engine: VllmEngine, request: ChatRequest) -> ExactPrompt:
    return await engine.accept_prompt(request, np.array(PROMPT, dtype=np.int32))


async def test_request_body_of_an_exact_prompt() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.bodies.clear()
        sampling = Sampling(temperature=0.5, seed=3, stop=("x",), n=2, top_logprobs=2, max_tokens=7)
        result = await run(engine, chat(sampling=sampling, **TOOLS), prompt=PROMPT)
        body = fake.bodies[0]
        assert (body["prompt"], body["max_tokens"], body["n"], body["stop"]) == (PROMPT, 7, 2, ["x"])
        assert body["logprobs"] == 2
        assert body["skip_special_tokens"] is False
        assert not {"messages", "tools", "return_weight_versions"} & set(body)
        assert list(result.prompt_ids) == PROMPT
        assert len(result.choices) == 2


@pytest.mark.parametrize(("wanted", "sent"), [(None, 4096 - len(PROMPT)), (5000, 4096 - len(PROMPT)), (9, 9)])
async def test_max_tokens_is_the_room_in_the_context(wanted: int | None, sent: int) -> None:
    """Completions would end after 16 tokens."""
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.bodies.clear()
        fake.script(Answer("a long answer of more than sixteen tokens"))
        answer = (await run(engine, chat(sampling=Sampling(max_tokens=wanted)), prompt=PROMPT)).choices[0]
        assert fake.bodies[0]["max_tokens"] == sent
        assert answer.finish_reason == ("stop" if wanted != 9 else "length")


async def test_rejects_a_full_context() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        with pytest.raises(RequestError) as caught:
            await run(engine, chat(), prompt=ids("x") * 4096)
        assert caught.value.code == "context_length_exceeded"


ANSWERS = [
    Answer("Hello."),
    Answer("", tool_calls=(PARIS,)),
    Answer("Looking. ", tool_calls=(PARIS, ("get_weather", "{}"))),
    Answer("Höre: 漢字", per_chunk=2),
    Answer("cut off in its midst", finish_reason="length"),
    Answer(token_ids=[*ids("a"), 1, *ids("b"), END], text="a<|im_start|>b"),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.text or "call")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("quirks", [{}, {"other_form"}], ids=["own parser", "derendered"])
async def test_exact_answers_parse_as_in_a_chat(answer: Answer, stream: bool, quirks: set[str]) -> None:
    if quirks:
        answer = replace(answer, token_ids=answer.token_ids or _other_form(answer))
    async with FakeVllm(quirks=frozenset(quirks), derenders=bool(quirks)) as fake, VllmEngine(fake.url) as engine:
        assert engine.continue_problem is None
        fake.script(answer, answer)
        request = chat(sampling=LONG, **TOOLS)
        rendered = (await run(engine, request)).choices[0]
        exact = (await run(engine, request, prompt=await engine.render(request), stream=stream)).choices[0]
        assert exact.token_ids == rendered.token_ids == answer.tokens()
        assert exact.logprobs == rendered.logprobs
        assert read(exact) == read(rendered)


def _other_form(answer: Answer) -> list[int]:
    calls = "".join(f"<tool_call>\n{name}({arguments})\n</tool_call>" for name, arguments in answer.tool_calls)
    return [*tokenized(answer.text + calls), END]


async def test_exact_answers_stream_text() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.script(Answer("abcdefgh", delay=0.02, tool_calls=(PARIS,)))
        request = chat(sampling=LONG, **TOOLS)
        events = [event async for event in engine.sample(request, prompt=await accepted(engine, request))]
        assert len([event for event in events if event.text]) > 4
        assert [event.tool_calls[0].name for event in events if event.tool_calls] == ["get_weather"]


async def test_derenderer_is_called_at_growing_distances() -> None:
    """Each of its calls parses the answer from the beginning, so calls become rarer as the answer grows."""
    calls: list[int] = []
    fake = FakeVllm(quirks=frozenset({"other_form"}), derenders=True)
    derender = fake.derender
    fake.derender = lambda body: (calls.append(len(body.get("stream_state") or ())), derender(body))[1]  # type: ignore[method-assign]
    async with fake, VllmEngine(fake.url) as engine:
        calls.clear()
        fake.script(Answer("x" * 600))
        answer = (await run(engine, chat(sampling=Sampling(max_tokens=700)), prompt=PROMPT)).choices[0]
        assert answer.text == "x" * 600
        assert len(calls) < 60


@pytest.mark.parametrize("stream", [True, False])
async def test_a_derenderer_that_loses_streamed_calls_parses_whole_answers(stream: bool) -> None:
    """As vLLM's parser deepseek_v31 does with a call that arrives in one piece."""
    fake = FakeVllm(quirks=frozenset({"other_form"}), derenders=True)
    derender = fake.derender

    def lossy(body: dict[str, Any]) -> dict[str, Any]:
        answer = derender(body)
        for choice in answer["chunk"]["choices"] if body["stream"] else ():
            choice["delta"].pop("tool_calls", None)
        return answer

    fake.derender = lossy  # type: ignore[method-assign]
    answer = Answer("Looking. ", tool_calls=(PARIS,))
    answer = replace(answer, token_ids=_other_form(answer))
    async with fake, VllmEngine(fake.url) as engine:
        assert engine.continue_problem is None
        fake.script(answer, answer)
        request = chat(sampling=LONG, **TOOLS)
        rendered = (await run(engine, request)).choices[0]
        exact = (await run(engine, request, prompt=await engine.render(request), stream=stream)).choices[0]
        assert read(exact) == read(rendered)
        assert exact.names == {0: "get_weather"}


async def test_rejects_a_server_that_reads_no_call_in_the_form_of_its_template() -> None:
    """Its parser for Hermes calls was started with a template that writes others; `/derender` agrees with it."""
    fake = FakeVllm(quirks=frozenset({"other_form"}), derenders=True)
    fake.read = lambda tokens, body: ("", text_of([token for token in tokens if token != END]), ())  # type: ignore[method-assign]
    async with fake, VllmEngine(fake.url) as engine:
        assert "did not recognise a tool call in the chat template's format" in str(engine.continue_problem)


async def test_shows_parallel_calls_that_are_off() -> None:
    """The gateway ends the answer at the second call (`one_call.py`): the server must neither hide nor forbid it."""
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        for prompt in (PROMPT, None):
            fake.script(Answer("", tool_calls=(PARIS, PARIS)))
            request = chat(sampling=LONG, parallel_tool_calls=False, **TOOLS)
            names = (await run(engine, request, prompt=prompt)).choices[0].names
            assert names == {0: "get_weather", 1: "get_weather"}


@pytest.mark.parametrize(("thinks", "reasoning", "text"), [(True, "hm", "Yes."), (False, "", "<think>hm</think>Yes.")])
async def test_parses_reasoning_only_if_the_server_does(thinks: bool, reasoning: str, text: str) -> None:
    async with FakeVllm(thinks=thinks) as fake, VllmEngine(fake.url) as engine:
        fake.script(Answer("Yes.", reasoning="hm"))
        answer = (await run(engine, chat(sampling=LONG), prompt=PROMPT)).choices[0]
        assert (answer.reasoning, answer.text) == (reasoning, text)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeVllm(quirks=frozenset({"no_tokenize"})), "`/tokenize` does not render"),
        (FakeVllm(quirks=frozenset({"no_choice"})), "could not be made to answer.*--enable-scale-out"),
        (FakeVllm(quirks=frozenset({"other_form"})), f"another format.*does not offer {DERENDER}.*--enable-scale-out"),
    ],
    ids=["no tokenize", "no structured outputs", "another form"],
)
async def test_does_not_claim_continue_without_proof(fake: FakeVllm, message: str) -> None:
    async with fake, VllmEngine(fake.url) as engine:
        assert "continue" not in engine.info.capabilities
        with pytest.raises(RequestError, match=message) as caught:
            await run(engine, chat(), prompt=PROMPT)
        assert caught.value.code == "cannot_continue"
        assert str(caught.value) == engine.continue_problem
        assert (await run(engine, chat())).choices[0].text == "Hello."  # still served by rendering


async def test_detects_a_server_that_reprints_arguments() -> None:
    """It parses and prints arguments, which changes the sampled text."""
    fake = FakeVllm()
    plain = fake.read
    fake.read = lambda tokens, body: _reprinted(plain(tokens, body))  # type: ignore[method-assign]
    async with fake, VllmEngine(fake.url) as engine:
        assert "the Hermes parser parse awkward JSON differently" in str(engine.continue_problem)


def _reprinted(answer: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    reasoning, text, calls = answer
    return reasoning, text, tuple((name, arguments.replace(" :", ":")) for name, arguments in calls)


async def test_template_options_are_verified_when_first_used() -> None:
    """This server does not parse calls if thinking is switched off."""
    fake = FakeVllm()
    plain = fake.read

    def reads(tokens: list[int], body: dict[str, Any]) -> Any:
        return plain(tokens, {**body, "tools": None} if body.get("chat_template_kwargs") else body)

    fake.read = reads  # type: ignore[method-assign]
    async with fake, VllmEngine(fake.url) as engine:
        assert engine.continue_problem is None
        request = chat(template_kwargs={"enable_thinking": False}, **TOOLS)
        for _ in range(2):
            fake.bodies.clear()
            with pytest.raises(RequestError, match="and the Hermes parser parse") as caught:
                await run(engine, request, prompt=PROMPT)
            assert caught.value.code == "cannot_continue"
        assert fake.bodies == []  # cached the second time
        assert (await run(engine, chat(**TOOLS), prompt=PROMPT)).choices[0].text == "Hello."


@pytest.mark.parametrize(
    "more", [{"tool_choice": "required", **TOOLS}, {"response_format": {"type": "json_object"}}], ids=["call", "json"]
)
async def test_rejects_exact_prompt_under_a_grammar(more: dict[str, Any]) -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        with pytest.raises(RequestError, match="a grammar constrains"):
            await run(engine, chat(**more), prompt=PROMPT)


@pytest.mark.parametrize("quirks", [frozenset(), frozenset({"no_tokenize"})], ids=["continues", "cannot continue"])
async def test_answers_with_a_strict_tool_count_as_constrained(quirks: frozenset[str]) -> None:
    """vLLM samples them under a grammar, which only its own parsers know."""
    (tool,) = TOOLS["tools"]
    strict = {**tool, "function": {**tool["function"], "strict": True}}
    async with FakeVllm(quirks=quirks) as fake, VllmEngine(fake.url) as engine:
        assert (engine.continue_problem is None) == (not quirks)
        assert not await engine.constrains(chat(**TOOLS))
        assert await engine.constrains(chat(tools=(tool, strict)))
        assert not await engine.constrains(chat(tools=(strict,), tool_choice="none"))
        if not quirks:
            with pytest.raises(CannotContinueError, match="a tool is strict"):
                await engine.accept_prompt(chat(tools=(strict,)), np.array(PROMPT, dtype=np.int32))


@pytest.mark.parametrize("quirks", [frozenset(), frozenset({"chat_library"})], ids=["continues", "cannot continue"])
async def test_a_server_that_adds_its_own_grammar_is_noticed(quirks: frozenset[str]) -> None:
    """vLLM with --tool-strict-level: its answers with tools are no free samples."""
    async with FakeVllm(quirks=quirks | {"strict_level"}) as fake, VllmEngine(fake.url) as engine:
        problem = str(engine.continue_problem)
        assert ("samples answers with tools under a grammar" in problem) == (not quirks)
        assert await engine.constrains(chat(**TOOLS))
        assert not await engine.constrains(chat(tools=TOOLS["tools"], tool_choice="none"))
        assert not await engine.constrains(chat())


@pytest.mark.parametrize("quirks", [frozenset(), frozenset({"one_call"})], ids=["two calls", "one call"])
async def test_notices_a_template_that_refuses_two_calls(quirks: frozenset[str]) -> None:
    async with FakeVllm(quirks=quirks) as fake, VllmEngine(fake.url) as engine:
        assert engine.continue_problem is None
        assert ("single_calls" in engine.info.capabilities) == bool(quirks)


async def test_rejects_prompt_that_ends_in_unproved_open_reasoning() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        with pytest.raises(RequestError, match="at the end of this prompt, reasoning is 'open'"):
            await run(engine, chat(), prompt=[*PROMPT, *ids("<think>")])
        # Reasoning in an earlier turn is not open.
        await run(engine, chat(), prompt=[*ids("<think>"), END, *ids("ab")])


async def test_rejects_a_server_that_changes_the_prompt() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.prompt = lambda path, body: [9, *body["prompt"]]  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="did not use the prompt tokens that it was given"):
            await run(engine, chat(), prompt=PROMPT)


async def test_renders_without_the_opening_only_with_tokenize() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        whole, closed = await engine.render(chat()), await engine.render(chat(), generation=False)
        assert text_of(whole[len(closed) :]) == "<|im_start|>assistant\n"
    async with FakeVllm(quirks=frozenset({"no_tokenize"})) as fake, VllmEngine(fake.url) as engine:
        with pytest.raises(RequestError, match="only with the tokens that open the next answer"):
            await engine.render(chat(), generation=False)


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_leaving_an_exact_answer_aborts_the_generation(how: str) -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.script(Answer("x" * 500, delay=0.05))
        request = chat(sampling=Sampling(max_tokens=600))
        sampled = engine.sample(request, prompt=await accepted(engine, request))
        if how == "close":
            async with aclosing(sampled) as events:
                await anext(events)
        else:
            fake.bodies.clear()
            task = asyncio.create_task(_all(sampled))
            await until(lambda: fake.bodies)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: fake.aborted)
        assert fake.aborted == 1


async def _all(events: Any) -> list[SampleEvent]:
    return [event async for event in events]


@pytest.mark.parametrize("prompt", [None, PROMPT], ids=["chat", "exact"])
@pytest.mark.parametrize("stream", [True, False])
async def test_reports_weight_versions_that_change_during_an_answer(prompt: list[int] | None, stream: bool) -> None:
    """The shape is the documented one of vLLM 0.33."""
    async with FakeVllm(reports_versions=True, weight_version="7") as fake, VllmEngine(fake.url) as engine:
        assert "weight_versions" in engine.info.capabilities
        fake.script(Answer("Hello.", versions=((0, "7"), (3, "8"))))
        request = chat(sampling=LONG)
        exact = None if prompt is None else await accepted(engine, request)
        events = await _all(engine.sample(request, stream=stream, prompt=exact))
        assert events[-1].versions == ((0, "7"), (3, "8"))
        answer = EncodedAnswer()
        for event in events:
            answer.add(event)
        assert answer.choices[0].versions == [(0, "7"), (3, "8")]


async def test_does_not_request_weight_versions_from_a_server_without_them() -> None:
    async with FakeVllm(weight_version="7") as fake, VllmEngine(fake.url) as engine:
        fake.bodies.clear()
        events = await _all(engine.sample(chat()))
        assert "return_weight_versions" not in fake.bodies[0]
        assert "weight_versions" not in engine.info.capabilities
        assert all(event.versions == () for event in events)


@pytest.mark.parametrize(
    ("spans", "runs"),
    [
        ([("a", 0, 4)], ((0, "a"),)),
        ([("a", 0, 4), ("b", 4, 9)], ((0, "a"), (4, "b"))),
        ([("a", 0, 0), ("b", 0, 9), ("b", 9, 12)], ((0, "b"),)),
        ([("a", 1, 4)], ()),
        ([("a", 0, 4), ("b", 5, 9)], ()),
        ([("a", 0, 4), ("b", 4, 3)], ()),
        ([], ()),
    ],
)
def test_version_runs(spans: list[tuple[str, int, int]], runs: tuple[tuple[int, str], ...]) -> None:
    assert version_runs([{"version": v, "start": start, "end": end} for v, start, end in spans]) == runs


async def test_finds_the_end_of_turn_after_other_tokens() -> None:
    """The end of turn is the token at which the server stops, not the first token after the content."""
    fake = FakeVllm()
    plain = fake.render

    def render(body: dict[str, Any]) -> list[int]:
        out = plain(body)
        if body.get("continue_final_message"):
            return out
        return [
            token for at, token in enumerate(out) for token in ([*ids("\n"), token] if token == END and at else [token])
        ]

    fake.render = render  # type: ignore[method-assign]
    async with fake, VllmEngine(fake.url) as engine:
        assert engine.info.eos_token_ids == (END,)


async def test_finds_an_end_of_turn_that_begins_the_next_message() -> None:
    """As in GLM's templates, in which nothing ends a message."""
    fake = FakeVllm()
    plain = fake.render

    def render(body: dict[str, Any]) -> list[int]:
        if body["messages"][-1]["role"] == "assistant":
            body = {**body, "continue_final_message": True}
        return plain(body)

    fake.render = render  # type: ignore[method-assign]
    async with fake, VllmEngine(fake.url) as engine:
        assert engine.info.eos_token_ids == (END,)


async def test_end_of_turn_must_stop_the_server() -> None:
    fake = FakeVllm()
    plain = fake.sampled

    def sampled(body: dict[str, Any], answer: Answer, prompt: list[int]) -> Any:
        continues = str(END) in (body.get("logit_bias") or {})
        return ([END, CALL], [-0.5, -0.5], "length") if continues else plain(body, answer, prompt)

    fake.sampled = sampled  # type: ignore[method-assign]
    async with fake, VllmEngine(fake.url) as engine:
        assert engine.info.eos_token_ids == ()
        assert "no token ends the turns" in str(engine.continue_problem)


# How vLLM 0.32 with its parser qwen3 parsed these texts.
IMPLIED = [
    ("Z</think>Hello.", ParsedAnswer("Hello.", "Z", (), "stop")),
    ("<think>Z</think>Hello.", ParsedAnswer("Hello.", "Z", (), "stop")),
    ("</think>Hello.", ParsedAnswer("Hello.", "", (), "stop")),
]


def forced(*rows: tuple[str, ParsedAnswer]) -> list[ForcedAnswer]:
    return [ForcedAnswer("it", text, (), parsed, text) for text, parsed in rows]


def test_matching_reasoning_mode() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ends = ("Z" + call, ParsedAnswer("", "Z", (("look", "{}"),), "tool_calls"))
    continues = ("Z" + call, ParsedAnswer("", "Z" + call, (), "stop"))
    assert matching_reasoning_mode(forced(*IMPLIED), tools=True) == ("implied", None)
    assert matching_reasoning_mode(forced(*IMPLIED, ends), tools=True) == ("implied_call", None)
    assert matching_reasoning_mode(forced(*IMPLIED, continues), tools=True) == ("implied", None)
    assert (
        matching_reasoning_mode(
            forced(("<think>Z</think>a", ParsedAnswer("<think>Z</think>a", "", (), "stop"))), tools=True
        )[0]
        == "off"
    )
    assert (
        matching_reasoning_mode(
            forced(("<think>Z</think>a", ParsedAnswer("a", "Z", (), "stop")), ("b", ParsedAnswer("b", "", (), "stop"))),
            tools=True,
        )[0]
        == "tags"
    )
    assert matching_reasoning_mode(forced(*IMPLIED, ("c", ParsedAnswer("else", "", (), "stop"))), tools=True)[0] is None


async def test_sends_reasoning_by_both_names() -> None:
    """vLLM 0.32 accepts `reasoning_content` for `reasoning` on its chat route, and drops it at `/tokenize`."""
    body = render_body(replace(chat(), messages=(Message("assistant", "a", reasoning="hm"),)))
    assert (body["messages"][0]["reasoning"], body["messages"][0]["reasoning_content"]) == ("hm", "hm")


async def test_detects_a_server_that_drops_reasoning_at_tokenize() -> None:
    fake = FakeVllm()
    plain = fake.prompt
    thought = {"role": "system", "content": "thought"}

    def prompt(path: str, body: dict[str, Any]) -> list[int]:
        thinks = path.endswith("chat/completions") and any("reasoning" in message for message in body["messages"])
        return plain(path, {**body, "messages": [*body["messages"], thought]} if thinks else body)

    fake.prompt = prompt  # type: ignore[method-assign]
    async with fake, VllmEngine(fake.url) as engine:
        assert "`/tokenize` does not render" in str(engine.continue_problem)
        request = replace(chat(), messages=(Message("user", "a"), Message("assistant", "b", reasoning="hm")))
        assert await engine.render(request) == list((await run(engine, request)).prompt_ids)


async def test_does_not_parse_calls_if_tools_are_off() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.script(Answer("", tool_calls=(PARIS,)))
        answer = (await run(engine, chat(sampling=LONG, tool_choice="none", **TOOLS), prompt=PROMPT)).choices[0]
        assert (answer.names, answer.finish_reason) == ({}, "stop")
        assert PARIS[1] in answer.text


async def test_says_that_the_models_folder_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    """Without it the server renders every conversation."""
    async with FakeVllm() as fake:
        async with VllmEngine(fake.url):
            assert "engine.model_folder" in caplog.text
        caplog.clear()
        async with VllmEngine(fake.url, model_folder=str(POLAR_TINY)) as engine:
            assert engine.continue_problem is None
        assert "engine.model_folder" not in caplog.text

"""Enforced answer formats and tool calls, from a model with random weights."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from polar_proxy.engines.local import LocalEngine, grammar
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import Json, Sampling
from tests.engines.engine_contract import WEATHER, chat, run

pytest.importorskip("llguidance", reason="needs llguidance (the `local` extra)")

CITY: Json = {"type": "string", "enum": ["Paris", "Zürich"]}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "set_city",
        "parameters": {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
                       "additionalProperties": False, "$defs": {"city": CITY}},
    },
}  # fmt: skip
SHORT = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=300, seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(random_model_dir: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(random_model_dir) as local:
        yield local


pytestmark = pytest.mark.asyncio(loop_scope="module")


def short(engine: LocalEngine, **bias: float) -> Sampling:
    """Return sampling with a bias towards the end of reasoning, which a random model would not find."""
    biases = {"</think>": 20.0, **bias}
    encode = engine.loaded.tokenizer.encode
    return replace(SHORT, logit_bias={str(encode(text)[0]): value for text, value in biases.items()})


async def test_info_lists_the_grammar_capabilities(engine: LocalEngine) -> None:
    assert {"json_schema", "tool_choice_required"} <= engine.info.capabilities


@pytest.mark.parametrize("thinking", [False, True])
async def test_required_tool_choice_makes_a_call(engine: LocalEngine, thinking: bool) -> None:
    request = chat(
        tools=(TOOL,),
        tool_choice="required",
        parallel_tool_calls=False,
        template_kwargs={"open_thinking": thinking},
        sampling=replace(short(engine), n=2),
    )
    for answer in (await run(engine, request)).choices:
        assert answer.finish_reason == "tool_calls"
        assert answer.names == {0: "set_city"}
        assert json.loads(answer.arguments[0])["city"] in CITY["enum"]
        assert answer.arguments[0].startswith('{"city": "')


async def test_named_tool_choice_calls_that_function(engine: LocalEngine) -> None:
    choice: Any = {"type": "function", "function": {"name": "set_city"}}
    answer = (await run(engine, chat(tools=(WEATHER, TOOL), tool_choice=choice, sampling=short(engine)))).choices[0]
    assert answer.names == {0: "set_city"}


async def test_answer_follows_its_json_schema(engine: LocalEngine) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "city": CITY}, "required": ["ok", "city"],
              "additionalProperties": False}  # fmt: skip
    form: Json = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    result = await run(engine, chat(response_format=form, sampling=short(engine)))
    value = json.loads(result.choices[0].text)
    assert isinstance(value["ok"], bool)
    assert value["city"] in CITY["enum"]
    assert result.choices[0].finish_reason == "stop"
    # The log-probabilities are those of the distribution without the forbidden tokens.
    assert any(logprob == pytest.approx(0.0, abs=1e-6) for logprob in result.choices[0].logprobs)


@pytest.mark.parametrize(("choice", "held"), [(None, False), ("auto", False), ("none", True)])
async def test_answer_is_free_while_tools_may_be_called(engine: LocalEngine, choice: str | None, held: bool) -> None:
    """A grammar over the whole answer would forbid the call."""
    form: Json = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    sampling = replace(short(engine), max_tokens=60 if held else 10)
    request = chat(tools=(TOOL,), tool_choice=choice, response_format=form, sampling=sampling)
    free = replace(request, response_format=None, tool_choice=None)
    (with_form,), (without,) = (await run(engine, request)).choices, (await run(engine, free)).choices
    assert (with_form.token_ids != without.token_ids) == held
    if held:
        assert json.loads(with_form.text) in CITY["enum"]


async def test_json_object_format(engine: LocalEngine) -> None:
    sampling = short(engine, **{"}": 30.0})
    answer = (await run(engine, chat(response_format={"type": "json_object"}, sampling=sampling))).choices[0]
    assert isinstance(json.loads(answer.text), dict)


async def test_rejects_formats_that_cannot_be_enforced(engine: LocalEngine) -> None:
    for request in (
        chat(tool_choice="required"),
        chat(tools=(TOOL,), tool_choice={"type": "function", "function": {"name": "other"}}),
        chat(response_format={"type": "json_schema"}),
        chat(response_format={"type": "grammar"}),
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}),
    ):
        with pytest.raises(RequestError):
            await run(engine, request)


async def test_failing_grammar_fails_only_its_own_call(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def compute_logit_bias(self) -> bytes:
            return bytes(engine.loaded.runner.vocab_size)

        def get_error(self) -> str:
            return "too deep"

    monkeypatch.setattr(engine.loaded.grammars, "for_request", lambda *_: lambda: grammar.GrammarMask(Broken()))
    with pytest.raises(EngineError, match="too deep"):
        await run(engine, chat())
    monkeypatch.undo()
    assert await engine.health() is None
    assert (await run(engine, chat())).choices[0].token_ids

"""Fuzz test: every JSON object on Google's routes is parsed or refused with RequestError."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic.alias_generators import to_snake

from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.errors import RequestError
from polar_proxy.sessions.state import SessionState
from polar_proxy.types import ChatRequest, Json
from tests.dialects.google_helpers import HI
from tests.dialects.hostile_json import DEEP, VALUES, parse_or_refuse

pytestmark = pytest.mark.slow


def _objects(**likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """Generate objects with some of these keys, in either spelling, whose values are valid or arbitrary."""
    optional = {}
    for key, value in likely.items():
        optional[key] = optional[to_snake(key)] = value | VALUES
    return st.fixed_dictionaries({}, optional=optional)


_blob = _objects(mimeType=st.just("image/png"), data=st.just("AA=="), fileUri=st.just("gs://x"))
_part = _objects(
    text=st.just("x"),
    thought=st.booleans(),
    thoughtSignature=st.just("cG9sYXIxLg=="),
    inlineData=_blob,
    fileData=_blob,
    functionCall=_objects(name=st.just("bash"), id=st.just("c1"), args=st.just({})),
    functionResponse=_objects(
        name=st.just("bash"),
        id=st.just("c1"),
        response=st.just({"output": "x"}),
        parts=st.lists(_objects(inlineData=_blob)),
    ),
    executableCode=_objects(language=st.just("PYTHON"), code=st.just("1")),
)
_content = _objects(role=st.sampled_from(["user", "model", "function"]), parts=st.lists(_part, max_size=3) | _part)
_schema: st.SearchStrategy[Any] = st.deferred(
    lambda: _objects(
        type=st.sampled_from(["STRING", "OBJECT", "ARRAY"]),
        properties=st.dictionaries(st.text(max_size=3), _schema, max_size=2),
        items=_schema,
        anyOf=st.lists(_schema, max_size=2),
        nullable=st.booleans(),
        enum=st.lists(st.text(max_size=2), max_size=2),
        minItems=st.just("1"),
    )
)
_declaration = _objects(
    name=st.just("bash"), description=st.just("d"), parameters=_schema, parametersJsonSchema=st.just({"type": "object"})
)
_config = _objects(
    temperature=st.just(1),
    topP=st.just(1),
    topK=st.just(64),
    maxOutputTokens=st.just("8"),
    candidateCount=st.just(2),
    stopSequences=st.just(["x"]),
    responseMimeType=st.sampled_from(["application/json", "text/plain"]),
    responseSchema=_schema,
    responseJsonSchema=_schema,
    responseLogprobs=st.booleans(),
    logprobs=st.just(1),
    responseModalities=st.just(["TEXT"]),
    thinkingConfig=_objects(includeThoughts=st.booleans(), thinkingBudget=st.just(0), thinkingLevel=st.just("HIGH")),
)
_body = _objects(
    systemInstruction=_content,
    tools=st.lists(_objects(functionDeclarations=st.lists(_declaration, max_size=2)), max_size=2),
    toolConfig=_objects(
        functionCallingConfig=_objects(
            mode=st.sampled_from(["AUTO", "ANY", "NONE"]), allowedFunctionNames=st.just(["bash"])
        )
    ),
    generationConfig=_config,
    cachedContent=st.none(),
    safetySettings=st.just([]),
)


def _mostly_valid(wrong: Json, contents: list[Json]) -> Json:
    return {"contents": [HI, *contents], **dict(list(wrong.items())[:1])}


bodies = st.builds(_mostly_valid, _body, st.lists(_content, max_size=2)) | st.dictionaries(st.text(max_size=8), VALUES)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(body=bodies)
def test_parse_raises_only_request_errors(body: Json) -> None:
    dialect = GoogleGenerateContent("m")
    parsed = parse_or_refuse(dialect, body)
    if parsed is None:
        return
    (request,) = parsed.requests
    assert isinstance(request, ChatRequest)
    assert all(isinstance(orjson.loads(message), dict) for message in parsed.messages[0])
    SessionState("session", {}).place("call_1", request, now=0.0)
    orjson.dumps([message.to_openai() for message in request.messages])
    assert isinstance(orjson.loads(orjson.dumps(parsed.params)), dict)


def _with(**fields: Any) -> Json:
    return {"contents": [HI], **fields}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_with(tools=[{"functionDeclarations": [{"name": "x", "parameters": DEEP}]}]), id="deep schema"),
        pytest.param(_with(generationConfig={"responseSchema": {"items": DEEP}}), id="deep response schema"),
        pytest.param(_with(contents=[{"role": "user", "parts": [{"text": "x", "deep": DEEP}]}]), id="deep part"),
        pytest.param(
            _with(contents=[{"role": "model", "parts": [{"functionCall": {"name": "x", "args": {"a": DEEP}}}]}]),
            id="deep args",
        ),
        pytest.param(_with(contents=[{"role": "user", "parts": [{"text": "\ud800"}]}]), id="lone surrogate"),
        pytest.param(_with(generationConfig={"temperature": 10**400}), id="integer too large for a float"),
        pytest.param(_with(generationConfig={"maxOutputTokens": "9" * 30}), id="integer of many digits in a string"),
        pytest.param(_with(labels={"a": 2**64}), id="integer of 65 bits in an unknown field"),
        pytest.param(_with(contents=[{"role": ["user"], "parts": []}]), id="role is a list"),
        pytest.param(_with(toolConfig={"functionCallingConfig": {"mode": {}}}), id="mode is an object"),
        pytest.param(
            _with(toolConfig={"functionCallingConfig": {"allowedFunctionNames": [[]]}}), id="allowed name is a list"
        ),
    ],
)
def test_rejects_hostile_bodies(body: Json) -> None:
    for parse in (GoogleGenerateContent("m").parse, GoogleGenerateContent("m").parse_count):
        with pytest.raises(RequestError):
            parse(body)

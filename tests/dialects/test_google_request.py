"""Tools, tool choice, sampling and structured output of a GenerateContentRequest; routes, errors, side routes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.google.dialect import GoogleGenerateContent, google_model_card, google_route
from polar_proxy.dialects.google.tools import json_schema
from polar_proxy.engines.scripted import INFO
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json
from tests.dialects.google_helpers import DECLARED, HI, parse


def asked(**fields: Any) -> ChatRequest:
    return parse({"contents": [HI], **fields})


def configured(**fields: Any) -> ChatRequest:
    return asked(generationConfig=fields)


def test_sampling() -> None:
    sampling = configured(
        temperature=1,
        topP=0.95,
        topK=64.0,
        maxOutputTokens="8",
        stopSequences=["a", ""],
        candidateCount=2,
        seed=7,
        presencePenalty=0.5,
        frequencyPenalty=-0.5,
        responseLogprobs=True,
        logprobs=3,
    ).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 0.95, 64, 8)
    assert (sampling.stop, sampling.n, sampling.seed) == (("a",), 2, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 3)


def test_both_spellings_and_null() -> None:
    camel = configured(maxOutputTokens=3, topP=0.5)
    assert asked(generation_config={"max_output_tokens": 3, "top_p": 0.5, "temperature": None}) == camel


def test_budget_of_zero_turns_thinking_off() -> None:
    assert configured(thinkingConfig={"thinkingBudget": 0}).template_kwargs == {"enable_thinking": False}
    assert configured(thinkingConfig={"thinkingBudget": -1, "thinkingLevel": "HIGH"}).template_kwargs == {}


def test_structured_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
    google = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
    assert configured(responseMimeType="application/json", responseJsonSchema=schema).response_format == wanted
    assert configured(responseMimeType="application/json", responseSchema=google).response_format == wanted
    assert configured(responseSchema=google).response_format == wanted
    assert configured(responseMimeType="application/json").response_format == {"type": "json_object"}
    assert configured(responseMimeType="text/plain").response_format is None


def test_function_declarations() -> None:
    as_is = {"type": "object", "properties": {"A": {"type": "string"}}, "additionalProperties": False}
    tools = asked(
        tools=[
            {"googleSearch": {}},
            {"function_declarations": [{"name": "a", "description": "d", "parameters_json_schema": as_is}]},
            {"functionDeclarations": [{"name": "b", "parameters": {"type": "OBJECT"}}, {"name": "c"}]},
        ]
    ).tools
    assert [tool["function"] for tool in tools] == [
        {"name": "a", "description": "d", "parameters": as_is},
        {"name": "b", "parameters": {"type": "object"}},
        {"name": "c", "parameters": {"type": "object", "properties": {}}},
    ]


def test_schemas() -> None:
    assert json_schema(
        {
            "type": "OBJECT",
            "properties": {
                "type": {"type": "STRING", "enum": ["STRING", "x"], "nullable": True},
                "any_of": {"any_of": [{"type": "INTEGER"}, {"type": "NUMBER"}], "nullable": True},
                "list": {"type": "ARRAY", "items": {"type": "BOOLEAN"}, "minItems": "1", "max_items": 3},
                "dict": {"type": "OBJECT", "additionalProperties": {"type": "STRING"}},
                "ref": {"ref": "#/$defs/x"},
            },
            "defs": {"x": {"type": "STRING", "default": {"type": "STRING"}}},
            "propertyOrdering": ["type"],
            "required": ["type"],
            "title": None,
        }
    ) == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["STRING", "x", None]},
            "any_of": {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
            "dict": {"type": "object", "additionalProperties": {"type": "string"}},
            "ref": {"$ref": "#/$defs/x"},
        },
        "$defs": {"x": {"type": "string", "default": {"type": "STRING"}}},
        "required": ["type"],
    }


@pytest.mark.parametrize(
    ("calling", "choice", "offered"),
    [
        (None, None, ["bash", "python"]),
        ({}, None, ["bash", "python"]),
        ({"mode": "AUTO"}, "auto", ["bash", "python"]),
        ({"mode": "auto"}, "auto", ["bash", "python"]),
        ({"mode": "NONE"}, "none", ["bash", "python"]),
        ({"mode": "ANY"}, "required", ["bash", "python"]),
        (
            {"mode": "ANY", "allowedFunctionNames": ["python"]},
            {"type": "function", "function": {"name": "python"}},
            ["python"],
        ),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["bash"]}, "auto", ["bash"]),
        ({"mode": "AUTO", "allowed_function_names": ["bash"]}, "auto", ["bash", "python"]),
    ],
)
def test_function_calling_modes(calling: Json | None, choice: object, offered: list[str]) -> None:
    request = asked(tools=[DECLARED], toolConfig={"functionCallingConfig": calling})
    assert request.tool_choice == choice
    assert [tool["function"]["name"] for tool in request.tools] == offered


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"cached_content": "cachedContents/1"}, "cachedContent"),
        ({"generationConfig": []}, "generationConfig"),
        ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
        ({"generation_config": {"max_output_tokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"stopSequences": "x"}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"logprobs": 2}}, "generationConfig.logprobs"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        (
            {"generationConfig": {"responseMimeType": "text/plain", "responseSchema": {}}},
            "generationConfig.responseMimeType",
        ),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"thinkingConfig": 1}}, "generationConfig.thinkingConfig"),
        (
            {"generationConfig": {"thinkingConfig": {"thinkingBudget": "much"}}},
            "generationConfig.thinkingConfig.thinkingBudget",
        ),
        (
            {"generationConfig": {"thinkingConfig": {"includeThoughts": 1}}},
            "generationConfig.thinkingConfig.includeThoughts",
        ),
        ({"tools": {"functionDeclarations": [{}]}}, "tools[0].functionDeclarations[0].name"),
        ({"tools": [1]}, "tools[0]"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}}, "toolConfig.functionCallingConfig.mode"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        ({"systemInstruction": 1}, "systemInstruction"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction.parts[0]"),
    ],
)
def test_error_names_the_wrong_field(fields: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "prefix", ["", "/v1beta", "/v1", "/v1alpha", "/v1beta1/projects/p/locations/l/publishers/google"]
)
@pytest.mark.parametrize("model", ["gemini-2.5-pro", "Qwen/Qwen3-8B", "a:b"])
def test_routes(prefix: str, model: str) -> None:
    where = f"{prefix}/models/{model}"
    for verb, query, expected in (
        ("generateContent", "", (False, "application/json")),
        ("generateContent", "alt=sse", (False, "application/json")),
        ("streamGenerateContent", "key=k&alt=sse", (True, "text/event-stream")),
        ("streamGenerateContent", "%24alt=sse", (True, "text/event-stream")),
        ("streamGenerateContent", "alt=json", (True, "application/json")),
        ("streamGenerateContent", "", (True, "application/json")),
    ):
        route = google_route(f"{where}:{verb}", query)
        assert route is not None
        dialect, counts_tokens = route
        assert not counts_tokens
        assert (dialect.stream, dialect.stream_media_type) == expected
        assert dialect.model == model
        assert dialect.heartbeat is None
        assert isinstance(dialect, Dialect)
    route = google_route(f"{where}:countTokens", "")
    assert route is not None
    assert route[1]


def test_route_of_tuned_models() -> None:
    route = google_route("/v1beta/tunedModels/mine:generateContent", "")
    assert route is not None
    assert route[0].model == "mine"


@pytest.mark.parametrize(
    "path",
    [
        "/v1beta/models",
        "/v1beta/models/m",
        "/v1beta/models/m:embedContent",
        "/v1/chat/completions",
        "/models/:generateContent",
    ],
)
def test_other_paths_are_not_routes(path: str) -> None:
    assert google_route(path, "") is None


def test_count_tokens() -> None:
    dialect = GoogleGenerateContent("m")
    plain = dialect.parse_count({"contents": [HI]})
    assert plain == parse({"contents": [HI]})
    inner: Json = {"model": "models/m", "contents": [HI], "tools": [DECLARED]}
    assert dialect.parse_count({"generateContentRequest": inner}).tools == parse(inner).tools != ()
    assert json.loads(dialect.count_body(7))["totalTokens"] == 7
    with pytest.raises(RequestError):
        dialect.parse_count({})


def test_model_card() -> None:
    card = google_model_card("a/b", INFO)
    assert (card["name"], card["inputTokenLimit"], card["outputTokenLimit"]) == ("models/a/b", 4_000_000, 4_000_000)
    card = google_model_card("a/b", replace(INFO, max_answer=256))
    assert (card["inputTokenLimit"], card["outputTokenLimit"]) == (4_000_000, 256)


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (405, "UNIMPLEMENTED"),
        (413, "INVALID_ARGUMENT"),
        (418, "INVALID_ARGUMENT"),
        (422, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (499, "CANCELLED"),
        (500, "INTERNAL"),
        (502, "UNAVAILABLE"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
        (507, "INTERNAL"),
        (529, "UNAVAILABLE"),
    ],
)
def test_error_status(status: int, name: str) -> None:
    error = json.loads(GoogleGenerateContent("m").error_body(RequestError("why", status=status), "req_1"))["error"]
    assert (error["code"], error["status"], error["message"]) == (status, name, "why")


def test_error_details() -> None:
    def details(status: int, param: str | None = None) -> Any:
        error = RequestError("why", status=status, param=param)
        return json.loads(GoogleGenerateContent("m").error_body(error, "req_1"))["error"]["details"]

    assert details(400, "contents")[0]["fieldViolations"] == [{"field": "contents", "description": "why"}]
    assert details(401)[0]["reason"] == "API_KEY_INVALID"
    for status in (429, 503):
        (retry,) = details(status)
        assert retry == {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "1s"}


@pytest.mark.parametrize("schema", [{"type": "STRING", "enum": ["a", "b"]}, {"enum": ["a", "b"]}])
@pytest.mark.parametrize("name", ["responseSchema", "responseJsonSchema"])
def test_an_enumeration_is_constrained_to_its_values(name: str, schema: Json) -> None:
    wanted = {"name": "response", "schema": {"type": "string", "enum": ["a", "b"]}}
    request = asked(generationConfig={"responseMimeType": "text/x.enum", name: schema})
    assert request.response_format == {"type": "json_schema", "json_schema": wanted}


@pytest.mark.parametrize("schema", [{}, {"enum": []}, {"enum": [1]}, {"type": "STRING"}])
def test_an_enumeration_without_values_is_refused(schema: Json) -> None:
    with pytest.raises(RequestError, match="needs a response schema") as caught:
        asked(generationConfig={"responseMimeType": "text/x.enum", "responseSchema": schema})
    assert caught.value.param == "generationConfig.responseMimeType"

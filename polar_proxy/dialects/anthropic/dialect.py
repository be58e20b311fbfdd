"""Anthropic Messages. Source: https://docs.anthropic.com/en/api/messages

`content` parses messages, `tools` parses tools, and `encoder` writes the answer. Fields that only steer Anthropic's
own servers (`metadata`, `service_tier`, `container`, `mcp_servers`, `output_config.effort`, ...) are tolerated and
recorded. Every `anthropic-beta` header is tolerated. `context_management` is recorded but not carried out: clearing old
tool results would rewrite the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import Field

from polar_proxy.dialects.anthropic.content import parse_messages, parse_system
from polar_proxy.dialects.anthropic.encoder import AnthropicEncoder, error_object
from polar_proxy.dialects.anthropic.tools import AnthropicTools, parse_tool_choice, parse_tools
from polar_proxy.dialects.base import Dialect, ParsedRequest, provider_tools
from polar_proxy.dialects.fields import (
    Integer,
    Probability,
    RequestFields,
    Strings,
    Temperature,
    TopK,
    invalid,
    optional_string,
    other_fields,
)
from polar_proxy.dialects.wire import storable_params, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, ClientOptions, EngineInfo, EngineRequest, Json, Sampling

_THINKING = ("enabled", "adaptive")
"""Types of `thinking` with which a client requests thinking blocks."""


class PromptFields(RequestFields):
    """The fields that determine the prompt."""

    model: str
    messages: list[Any]
    system: Any = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Json | None = None
    thinking: Json = Field(default_factory=dict)


class MessagesFields(PromptFields):
    # The API takes 0 to warm a cache; here there would be nothing to sample.
    max_tokens: Annotated[Integer, Field(ge=1)]
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    stop_sequences: Strings = Field(default_factory=list)
    stream: bool = False
    output_config: Json = Field(default_factory=dict)


class AnthropicMessages(Dialect):
    """`POST /v1/messages`.

    Heartbeats are SSE comments, which any event-stream reader skips. The SDKs also accept `ping` events before
    `message_start`, but other readers may not.
    """

    name = "anthropic_messages"

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        fields = MessagesFields.read(body)
        prompt, tools = _parse_prompt(fields)
        if prompt.messages[-1].role == "assistant":
            raise RequestError(
                "This model does not support assistant message prefill. The conversation must end with a user message.",
                param="messages",
            )
        sampling = Sampling(
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            max_tokens=fields.max_tokens,
            stop=tuple(item for item in fields.stop_sequences if item),
        )
        response_format = _parse_response_format(fields.output_config.get("format"), body.get("output_format"))
        return ParsedRequest(
            requests=(replace(prompt, sampling=sampling, response_format=response_format),),
            stream=fields.stream,
            messages=(_stored_messages(fields),),
            tools=to_json(fields.tools, "tools") if fields.tools else None,
            params=storable_params(body, "messages", "system", "tools"),
            encoder=partial(
                AnthropicEncoder,
                model=fields.model,
                eager=tools.eager,
                send_thinking=fields.thinking.get("type") in _THINKING,
                omit_thinking=fields.thinking.get("display") == "omitted",
            ),
            provider_tools=provider_tools(tools.of_provider, body, "mcp_servers"),
        )

    def check_length(self, request: EngineRequest, engine: EngineInfo) -> None:
        # As Anthropic does. At an answer that ends early, Claude Code stops with an error that does not name the cause.
        requested, limit = request.sampling.max_tokens, engine.max_answer
        if limit is not None and requested is not None and requested > limit:
            raise RequestError(
                f"max_tokens: {requested} > {limit}, which is the maximum allowed number of output tokens for "
                f"{engine.model}. Request at most {limit}, or serve another model: polar serve --engine llamacpp "
                "--engine-url URL, or --engine vllm.",
                param="max_tokens",
            )

    def message_fields(self, stored: list[Json]) -> Json:
        # A client's own first message may have the role `system` too. It reads the same in the field `system`, unless
        # it is the only message or has no content.
        if len(stored) > 1 and stored[0]["role"] == "system" and stored[0].get("content"):
            return {"system": stored[0]["content"], "messages": stored[1:]}
        return {"messages": stored}

    def client_options(self, params: Json) -> ClientOptions:
        thinking, output = params.get("thinking") or {}, params.get("output_config") or {}
        kind, budget = thinking.get("type"), thinking.get("budget_tokens")
        tokens = {"disabled": 0, "enabled": budget if isinstance(budget, int) else -1, "adaptive": -1}.get(str(kind))
        return ClientOptions(
            self.name,
            effort=optional_string(output, "effort"),
            thinking_tokens=tokens,
            show_reasoning=kind in _THINKING and thinking.get("display") != "omitted",
            fields={
                **other_fields(params, MessagesFields, "output_format"),
                **({"thinking": thinking} if thinking and tokens is None else {}),  # a type that is not translated
            },
        )

    def error_body(self, error: RequestError, request_id: str) -> bytes:
        return orjson.dumps(error_object(str(error), error.status, request_id, error.code))

    def parse_count(self, body: Json) -> ChatRequest:
        return _parse_prompt(PromptFields.read(body))[0]

    def count_body(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})


def _parse_prompt(fields: PromptFields) -> tuple[ChatRequest, AnthropicTools]:
    if not fields.messages:
        raise invalid("messages", "at least one message is required")
    tools = parse_tools(fields.tools, fields.tool_choice)
    system = parse_system(fields.system, tools)
    messages = parse_messages(fields.messages, tools)
    tool_choice, parallel = parse_tool_choice(fields.tool_choice, tools)
    request = ChatRequest(
        model=fields.model,
        messages=tuple(messages if system is None else [system, *messages]),
        tools=tools.offered,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        template_kwargs=_template_kwargs(fields.thinking),
        tools_cache_control=_last_cache_mark(fields.tools),
    )
    return request, tools


def _last_cache_mark(tools: list[Any]) -> Json | None:
    marks = [tool["cache_control"] for tool in tools if isinstance(tool, dict) and tool.get("cache_control")]
    return marks[-1] if marks and isinstance(marks[-1], dict) else None


def _stored_messages(fields: PromptFields) -> tuple[bytes, ...]:
    """Return the messages to store; the system prompt is the first one."""
    head = () if not fields.system else (to_json({"role": "system", "content": fields.system}, "system"),)
    return (*head, *(to_json(item, f"messages[{i}]") for i, item in enumerate(fields.messages)))


def _parse_response_format(form: Any, beta_form: Any) -> Json | None:
    """Convert `output_config.format` (called `output_format` in the beta) to OpenAI's response_format."""
    path, value = ("output_format", beta_form) if form is None else ("output_config.format", form)
    if value is None:
        return None
    if isinstance(value, dict) and value.get("type") == "json_schema" and isinstance(value.get("schema"), dict):
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": value["schema"], "strict": True}}
    raise invalid(path, "expected type json_schema with a schema")


def _template_kwargs(thinking: Json) -> Json:
    kind = thinking.get("type")
    if kind in _THINKING:
        return {"enable_thinking": True}
    return {"enable_thinking": False} if kind == "disabled" else {}

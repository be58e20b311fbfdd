"""OpenAI Responses. Source: https://platform.openai.com/docs/api-reference/responses

Modules for the request: `tools` (offers the client's tools to the engine as functions), `references` (replaces ids by
items) and `input` (converts items to messages). Modules for the response: `items` (converts an answer to items with
ids), `encoder` (writes the response object and the event stream of a new answer) and `stored` (writes the object and
the stream of a recorded answer).

A body may refer to a response (`previous_response_id`) or to items by id. Before the body is parsed, `references`
replaces these ids by the items, so the new call is recorded with its whole input. Every call is recorded. A call with
`store: false` cannot be retrieved or referred to. `instructions` are stored as a first item of type `instructions`. A
later request that continues the conversation does not inherit them, as the API defines it.

A body may also refer to a `conversation` by its id. The conversation's items come before the body's own input, and the
call adds this input and the answer to the conversation.

Refused: `prompt` (a stored template that Polar does not have), and `stream` together with `background`. `store: false`
is refused together with `background`, because the answer could not be retrieved, and together with `conversation`,
because a conversation stores the items of its calls.
Accepted without effect: truncation, service_tier, prompt_cache_*, max_tool_calls, context_management, verbosity, and
reasoning options except the effort `none`, which turns thinking off if the chat template supports that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import Field

from polar_proxy.dialects.base import Answer, ParsedRequest, ReferencedCall, References, provider_tools
from polar_proxy.dialects.fields import (
    Integer,
    Strings,
    invalid,
    invalid_type,
    missing,
    optional_string,
    other_fields,
    unsupported,
)
from polar_proxy.dialects.openai_common import OpenAIDialect, SamplingFields, choice_mode
from polar_proxy.dialects.openai_responses.encoder import ResponsesEncoder
from polar_proxy.dialects.openai_responses.input import collect_tools, input_items, to_messages
from polar_proxy.dialects.openai_responses.items import AnswerPart, ItemId, input_item_id, parts_of_answer, stored_item
from polar_proxy.dialects.openai_responses.references import (
    find_references,
    referenced_conversation,
    write_out_references,
)
from polar_proxy.dialects.openai_responses.tools import ResponsesTools
from polar_proxy.dialects.wire import storable_params, to_json
from polar_proxy.types import ChatRequest, ClientOptions, ConversationItem, Json

_LOGPROBS = "message.output_text.logprobs"
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "store"),
    *("prompt_cache_key", "safety_identifier", "top_logprobs", "user"),
)
"""Fields of the request that every response object repeats unchanged."""
_PROVIDER_FIELDS = (
    *("max_tool_calls", "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "truncation", "user"),
)
"""Fields of `ResponsesFields` that have no effect on open models: the response repeats them, and hosted models get
them."""


class ResponsesFields(SamplingFields):
    model: str = ""
    input: Any = None
    instructions: str | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_tool_calls: Integer | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] = 0
    include: Strings = Field(default_factory=list)
    stream: bool = False
    store: bool = True
    background: bool = False
    text: Json = Field(default_factory=dict)
    reasoning: Json = Field(default_factory=dict)
    metadata: Json = Field(default_factory=dict)
    previous_response_id: str | None = None
    conversation: str | Json | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    truncation: str | None = None
    user: str | None = None
    chat_template_kwargs: Json = Field(default_factory=dict)


class OpenAIResponses(OpenAIDialect):
    name = "openai_responses"

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        fields, request, tools = _parse(body)
        stored = to_json(fields.tools, "tools") if fields.tools else None
        messages = [to_json(item, f"input[{i}]") for i, item in enumerate(input_items(fields.input))]
        if fields.instructions:
            item = {"type": "instructions", "role": "system", "content": fields.instructions}
            messages.insert(0, to_json(item, "instructions"))
        return ParsedRequest(
            requests=(request,),
            stream=fields.stream,
            messages=(tuple(messages),),
            tools=stored,
            params=storable_params(body, "input", "tools", "instructions"),
            encoder=partial(
                ResponsesEncoder,
                tools=tools,
                echo=_echoed_fields(fields),
                logprobs=request.sampling.logprobs,
                sampled=request,
            ),
            background=fields.background,
            provider_tools=provider_tools(tools.of_provider, body),
        )

    def message_fields(self, stored: list[Json]) -> Json:
        # A client never sends such an item with content: `parse` refuses it.
        if stored and stored[0].get("type") == "instructions" and stored[0].get("content"):
            return {"instructions": stored[0]["content"], "input": stored[1:]}
        return {"input": stored}

    def client_options(self, params: Json) -> ClientOptions:
        reasoning, text = params.get("reasoning") or {}, params.get("text") or {}
        nested = {"text.verbosity": text.get("verbosity")}
        provider = {name: params.get(name) for name in _PROVIDER_FIELDS}
        return ClientOptions(
            self.name,
            effort=optional_string(reasoning, "effort"),
            show_reasoning=bool(reasoning.get("summary")),
            fields={
                **other_fields(params, ResponsesFields),
                **{key: value for key, value in {**provider, **nested}.items() if value is not None},
            },
        )

    def references(self, body: Json) -> References:
        return find_references(body)

    def referenced_conversation(self, body: Json) -> str | None:
        return referenced_conversation(body)

    def write_out_references(
        self, body: Json, calls: Mapping[str, ReferencedCall], conversation: Sequence[ConversationItem] = ()
    ) -> Json:
        return write_out_references(body, calls, conversation)

    def turn_items(
        self, parsed: ParsedRequest, known: int, call_id: str, answer: Answer
    ) -> tuple[ConversationItem, ...]:
        messages = [orjson.loads(message) for message in parsed.messages[0]]
        first = known + (messages[0].get("type") == "instructions")
        own = [
            stored_item(item, input_item_id(call_id, first + number)) for number, item in enumerate(messages[first:])
        ]
        exact = parts_of_answer(answer.first.message, call_id)
        shown = orjson.loads(parsed.encoder(call_id, 0, logprobs=False).respond([answer]))["output"]
        return *own, *(_answered_item(item, exact) for item in shown)

    def parse_count(self, body: Json) -> ChatRequest:
        return _parse(body)[1]

    def count_body(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})


def _answered_item(shown: Json, exact: Mapping[AnswerPart, Json]) -> ConversationItem:
    """Return one item of an answer in the form in which a conversation stores it.

    `shown`: the item as the client gets it. `exact`: all items of the answer by `ItemId.part`; their tool calls have
    the arguments that the model sampled.
    """
    identity = ItemId.read(shown["id"])
    assert identity is not None
    item = exact[identity.part]
    if item["type"] == shown["type"]:
        return ConversationItem(shown["id"], shown)
    return ConversationItem(shown["id"], item, shown)


def _parse(body: Json) -> tuple[ResponsesFields, ChatRequest, ResponsesTools]:
    if body.get("prompt") is not None:
        raise unsupported("prompt", "send the conversation in 'input'")
    fields = ResponsesFields.read({**body, "n": None})
    if fields.conversation is not None and not fields.store:
        raise invalid("store", "it must be true, because the call's items are added to 'conversation'")
    if fields.background:
        if fields.stream:
            raise unsupported("stream", "a response in the background is not streamed; retrieve it by its id")
        if not fields.store:
            raise invalid("background", "it needs 'store' to be true, because the answer is retrieved later")
    items = input_items(fields.input)
    tools = ResponsesTools()
    for position, tool in enumerate(fields.tools):
        tools.add(tool, f"tools[{position}]")
    collect_tools(tools, items)
    messages = to_messages(items, fields.instructions, tools)
    if not items or not messages:
        raise missing("input")
    tool_choice, functions = tools.choose(fields.tool_choice)
    request = ChatRequest(
        model=fields.model,
        messages=messages,
        sampling=fields.sampling(
            max_tokens=fields.max_output_tokens,
            logprobs=_LOGPROBS in fields.include,
            top_logprobs=fields.top_logprobs,
        ),
        tools=functions,
        tool_choice=tool_choice,
        parallel_tool_calls=fields.parallel_tool_calls,
        response_format=_parse_response_format(fields.text.get("format")),
        template_kwargs=_template_kwargs(fields),
    )
    return fields, request, tools


def _parse_response_format(form: Any) -> Json | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema" and isinstance(form.get("schema"), dict):
        keys = ("name", "description", "schema", "strict")
        schema = {key: form[key] for key in keys if form.get(key) is not None}
        return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
    raise invalid("text.format", "expected text, json_object, or json_schema with a schema")


def _template_kwargs(fields: ResponsesFields) -> Json:
    effort = fields.reasoning.get("effort")
    if not isinstance(effort, str | None):
        raise invalid_type("reasoning.effort", "a string")
    kwargs = fields.chat_template_kwargs
    return {"enable_thinking": False, **kwargs} if effort == "none" else kwargs


def _echoed_fields(fields: ResponsesFields) -> Json:
    """Return the request's fields that every response object repeats, with the API's defaults."""
    form = fields.text.get("format") or {"type": "text"}
    conversation = referenced_conversation({"conversation": fields.conversation})
    return {
        **{name: getattr(fields, name) for name in _ECHOED},
        **({} if conversation is None else {"conversation": {"id": conversation}}),
        "background": fields.background,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None, **fields.reasoning},
        "service_tier": fields.service_tier or "default",
        "text": {**fields.text, "format": {"name": "answer", **form} if form["type"] == "json_schema" else form},
        "tool_choice": choice_mode(fields.tool_choice) or fields.tool_choice or "auto",
        "tools": orjson.Fragment(to_json([_echoed_tool(tool) for tool in fields.tools], "tools")),
        "truncation": fields.truncation or "disabled",
    }


def _echoed_tool(tool: Json) -> Json:
    """Return a tool as a response object shows it: a function in the form of this API, with the default for each
    missing field."""
    if tool["type"] != "function":
        return tool
    if isinstance(tool.get("function"), dict) and tool.get("name") is None:  # the form of Chat Completions
        tool = {"type": "function", **tool["function"]}
    return {"description": None, "parameters": None, **tool, "strict": tool.get("strict") is True}

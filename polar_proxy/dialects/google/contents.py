"""Google's contents as Polar's messages. Source: https://ai.google.dev/api/caching#Content

* `systemInstruction` becomes the system message.
* Consecutive `model` contents become one assistant message, because SDKs keep each chunk of a streamed answer as a
  content. Text parts are joined without a separator. Reasoning is restored from Polar's thought signatures, or from
  thought text if the client kept it; signatures of other providers are ignored.
* A `functionResponse` becomes a tool message. The `functionResponse` answers the tool call that has the same id.
  Without an id, it answers a call of the model's last turn: the first call of the same name that has no result yet. The
  text of the tool message is the string in `output` or `result` if `response` has no other field, else the JSON of
  `response` (an `error` keeps its key, so that the model sees the failure).
* A `functionResponse` inside a `model` content ends an assistant message. Another assistant message begins after it.
* The tool results of a content come first, directly after the tool calls; its other parts (images, text) follow as a
  user message.
* A repeated result is dropped (Gemini CLI repeats results when it resumes). A second result for one id with different
  text is kept, because Polar cannot decide which result is right.
* Tool calls have the ids that the engine gave them, without the prefix `{name}__` that Gemini CLI adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_proxy.dialects.fields import as_content, invalid, invalid_type, missing, text_part
from polar_proxy.dialects.google.schema import Content, FunctionCall, FunctionResponse, Part
from polar_proxy.dialects.wire import seal, to_json, unseal
from polar_proxy.types import Json, Message, ToolCall

_ROLES = {"user", "model", "function", "tool"}
_IGNORED_FIELDS = {
    *("videoMetadata", "mediaResolution", "partMetadata", "callIndex", "toolCall", "toolResponse", "mediaProcessing"),
    *("audioTranscription", "speechMetadata", "documentMetadata", "spreadsheetMetadata", "audioMetadata"),
}
"""Fields of a part that are ignored, because no model here can read them: metadata (of a video, for example), and calls
and results of tools that Google's servers run."""


@dataclass(frozen=True, slots=True)
class SignedReasoning:
    """The content of a part's `thoughtSignature`: reasoning and, if the part shows a tool call as text, this tool
    call."""

    start: int = 0
    """Position in the turn's reasoning, in characters, at which `reasoning` begins."""
    reasoning: str = ""
    call: ToolCall | None = None
    """The tool call that the part shows as text (`call_as_text`); None if the part shows no call."""


def encode_signature(signed: SignedReasoning) -> str:
    """Return the string for a part's `thoughtSignature`."""
    call = None if signed.call is None else [signed.call.id, signed.call.name, signed.call.arguments]
    sealed = seal(orjson.dumps([signed.start, signed.reasoning, call]).decode())
    return sealed + "=" * (-len(sealed) % 4)  # the field's type is bytes, whose base64 is padded


def decode_signature(signature: str) -> SignedReasoning | None:
    """Return the content of a string that `encode_signature` made; None for any other string."""
    try:
        content = orjson.loads(unseal(signature) or "null")
    except orjson.JSONDecodeError:
        return None
    match content:
        case [int(start), str(reasoning), None] if start >= 0:
            return SignedReasoning(start, reasoning)
        case [int(start), str(reasoning), [str(call_id), str(name), str(arguments)]] if start >= 0:
            return SignedReasoning(start, reasoning, ToolCall(call_id, name, arguments))
    return None


def extend_reasoning(known: str, signed: SignedReasoning) -> str:
    """Return the reasoning of a turn: `known`, extended by the piece `signed`.

    Return `known` alone if it already contains the piece, or if text is missing between `known` and the piece.
    """
    end = signed.start + len(signed.reasoning)
    if signed.start <= len(known) < end:
        return known[: signed.start] + signed.reasoning
    return known


def call_as_text(call: ToolCall) -> str:
    """Return a tool call as text for the client. Used if the arguments are not a JSON object, so that `args` cannot
    hold them."""
    return f"{call.name}({call.arguments})"


def parse_system(value: Any) -> Message | None:
    """Return `systemInstruction` as a message. Its value is a content; a string is tolerated."""
    path = "systemInstruction"
    if value is None or isinstance(value, str):
        return None if value is None else Message("system", value)
    if not isinstance(value, dict):
        raise invalid_type(path, "an object")
    texts = []
    for number, part in enumerate(Content.read(value, path).parts):
        if part.text is None:
            raise invalid(f"{path}.parts[{number}]", "a system instruction holds text only")
        texts.append(text_part(part.text))
    return Message("system", _content(texts)) if texts else None


def parse_contents(contents: list[Content]) -> list[Message]:
    reader = _ContentReader()
    for position, content in enumerate(contents):
        reader.add(content, f"contents[{position}]", position)
    return reader.finish()


@dataclass(slots=True)
class _ModelTurn:
    content: list[Json] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    signed_reasoning: str = ""
    """Reasoning restored from signatures."""
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        content: str | list[Json] | None = self.content
        if all(part["type"] == "text" for part in self.content):
            content = "".join(part["text"] for part in self.content)
            if not content and self.calls:
                content = None
        reasoning = self.signed_reasoning or "".join(self.thoughts)
        return Message("assistant", content, reasoning=reasoning or None, tool_calls=tuple(self.calls))


@dataclass(slots=True)
class _ContentReader:
    messages: list[Message] = field(default_factory=list)
    turn: _ModelTurn | None = None
    open_calls: list[ToolCall] = field(default_factory=list)
    """Tool calls of the model's last turn that have no result yet."""
    generated_ids: set[str] = field(default_factory=set)
    """Ids generated here for tool calls that came without an id."""
    results: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (tool call id, text), one for each result."""
    results_of_turn: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (name, text), one for each result since the model's last turn."""

    def add(self, content: Content, path: str, position: int) -> None:
        parts = content.parts
        role = content.role or ("model" if any(part.function_call is not None for part in parts) else "user")
        if role not in _ROLES:
            raise invalid(f"{path}.role", "expected user or model")
        if role == "model":
            self._model(parts, path, position)
            return
        self._close_turn()
        if not parts:
            raise invalid(f"{path}.parts", "it must not be empty", code="empty_array")
        data: list[Json] = []
        for number, part in enumerate(parts):
            part_path = f"{path}.parts[{number}]"
            if part.function_response is not None:
                response_path = f"{part_path}.functionResponse"
                self._result(part.function_response, response_path, f"call_{position}_{number}")
            elif part.function_call is not None:
                raise invalid(f"{part_path}.functionCall", "only the role 'model' may call functions")
            else:
                data += _data(part, part_path)
        if data:
            self.messages.append(Message("user", _content(data)))

    def finish(self) -> list[Message]:
        self._close_turn()
        return self.messages

    def _close_turn(self) -> None:
        if self.turn is not None:
            self.messages.append(self.turn.message())
            self.turn = None

    def _model(self, parts: list[Part], path: str, position: int) -> None:
        if not parts:  # the empty end of a stream, or an answer that the client never received
            return
        for number, part in enumerate(parts):
            part_path, generated_id = f"{path}.parts[{number}]", f"call_{position}_{number}"
            if part.function_response is not None:
                self._close_turn()
                self._result(part.function_response, f"{part_path}.functionResponse", generated_id)
            else:
                self._model_part(self._open_turn(), part, part_path, generated_id)

    def _open_turn(self) -> _ModelTurn:
        """Return the model's open turn; begin one if none is open."""
        if self.turn is None:
            self.turn = _ModelTurn()
            self.open_calls = []
            self.results_of_turn.clear()
        return self.turn

    def _model_part(self, turn: _ModelTurn, part: Part, path: str, generated_id: str) -> None:
        signed = None if part.thought_signature is None else decode_signature(part.thought_signature)
        if signed is not None:
            turn.signed_reasoning = extend_reasoning(turn.signed_reasoning, signed)
        if part.function_call is not None:
            self._call(turn, part.function_call, f"{path}.functionCall", generated_id)
        elif part.thought:
            turn.thoughts.append(part.text or "")
        elif signed is not None and signed.call is not None and part.text == call_as_text(signed.call):
            turn.calls.append(signed.call)
        else:
            turn.content += _data(part, path)

    def _call(self, turn: _ModelTurn, call: FunctionCall, path: str, generated_id: str) -> None:
        if not call.name:
            raise missing(f"{path}.name")
        call_id = call.id.removeprefix(call.name + "__")
        if not call_id:
            call_id = generated_id
            self.generated_ids.add(generated_id)
        made = ToolCall(call_id, call.name, to_json(call.args, f"{path}.args").decode())
        turn.calls.append(made)
        self.open_calls.append(made)

    def _result(self, response: FunctionResponse, path: str, generated_id: str) -> None:
        content = _result_content(response, path)
        text = content if isinstance(content, str) else to_json(content, path).decode()
        call_id = response.id.removeprefix(response.name + "__")
        call = self._answered_call(call_id, response.name)
        if call is not None:
            self.open_calls.remove(call)
            call_id = call.id
        elif (call_id, text) in self.results if call_id else (response.name, text) in self.results_of_turn:
            return
        call_id = call_id or generated_id
        self.results.add((call_id, text))
        self.results_of_turn.add((response.name, text))
        self.messages.append(Message("tool", content, tool_call_id=call_id, name=response.name or None))

    def _answered_call(self, call_id: str, name: str) -> ToolCall | None:
        """Return the open tool call that a result answers: the one with the result's id, else the first with its name.

        The name decides only if the client gave no id to the result or to the call.
        """
        for call in self.open_calls:
            if call_id and call.id == call_id:
                return call
        for call in self.open_calls:
            if call.name == name and (not call_id or call.id in self.generated_ids):
                return call
        return None


def _result_content(response: FunctionResponse, path: str) -> str | list[Json]:
    value = response.response
    if value is None:
        text = ""
    elif len(value) == 1 and set(value) <= {"output", "result"} and isinstance(next(iter(value.values())), str):
        (text,) = value.values()
    else:
        text = to_json(value, f"{path}.response").decode()
    media: list[Json] = []
    for number, part in enumerate(response.parts):
        media += _data(part, f"{path}.parts[{number}]")
    return _content([text_part(text), *media])


def _data(part: Part, path: str) -> list[Json]:
    """Convert a part to OpenAI content parts. The part must be neither a tool call nor a tool result."""
    if part.text is not None:
        return [text_part(part.text)]
    if (blob := part.inline_data) is not None:
        mime = blob.mime_type or "application/octet-stream"
        # SDKs write bytes in the URL-safe alphabet; data URLs allow only the standard one.
        return [_media(f"data:{mime};base64,{blob.data.replace('-', '+').replace('_', '/')}", mime)]
    if (file := part.file_data) is not None:
        return [_media(file.file_uri, file.mime_type)]
    if (code := part.executable_code) is not None:
        return [text_part(f"```{code.language.lower()}\n{code.code}\n```")]
    if (result := part.code_execution_result) is not None:
        return [text_part(f"```\n{result.output}\n```")]
    unknown = [key for key in part.model_extra or () if key not in _IGNORED_FIELDS]
    if unknown:
        raise invalid(path, f"parts with {unknown[0]!r:.80} are not supported")
    return []


def _media(url: str, mime: str) -> Json:
    """Return the content part of OpenAI's chat format for data of the MIME type `mime` at `url`."""
    kind = mime.partition("/")[0]
    if kind in ("image", "audio", "video"):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    return {"type": "file", "file": {"file_data" if url.startswith("data:") else "file_url": url}}


def _content(parts: list[Json]) -> str | list[Json]:
    return as_content([part for part in parts if part["type"] != "text" or part["text"]])

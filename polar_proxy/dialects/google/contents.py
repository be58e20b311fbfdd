"""Google's contents as a conversation. Source: https://ai.google.dev/api/caching#Content

What a model reads:

* `systemInstruction` is the system message.
* Neighbouring `model` contents are one assistant message: SDKs keep a streamed answer as one content a chunk. Its
  text parts are joined without anything between. Reasoning is restored from our thought signatures (google_signature),
  else from thought text where the client kept it; foreign signatures are ignored.
* A `functionResponse` is a tool message that answers the call with its id; without an id, the first open call of that
  name in the model's last turn. Its text is the string in `output` or `result` where that is all there is, else the
  JSON of `response` (an `error` keeps its name, so that the model sees that it is one).
* Results come right behind the calls; what else is in the same content (images, text) follows as a user message.
* A result that says again what was said (Gemini CLI repeats them when it resumes) is heard once. A second result for
  one id that says something else is kept: which is right is not ours to tell.
* Gemini CLI writes `{name}__` in front of each call id; the id is read without it, as the engine gave it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polar_proxy.dialects.base import to_json
from polar_proxy.dialects.google import fields as read
from polar_proxy.dialects.google.signature import extend_reasoning, unpack
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, Message, ToolCall

_ROLES = {"user", "model", "function", "tool"}
_SILENT = {
    *("thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata", "callIndex"),
    *("toolCall", "toolResponse", "mediaProcessing", "audioTranscription", "speechMetadata", "documentMetadata"),
    *("spreadsheetMetadata", "audioMetadata"),
}
"""Keys of a part that say nothing a model here could read: marks on other data, and Google's own server-side tools."""
_SILENT_KEYS = _SILENT | {read.snake(name) for name in _SILENT}


def call_as_text(call: ToolCall) -> str:
    """A call whose arguments are no JSON object, as the agent gets it: `args` cannot hold them (see google_answer)."""
    return f"{call.name}({call.arguments})"


def parse_system(value: Any) -> Message | None:
    """`systemInstruction`: a content, or (tolerated) a string."""
    where = "systemInstruction"
    if value is None or isinstance(value, str):
        return None if value is None else Message("system", value)
    if not isinstance(value, dict):
        raise RequestError(f"Invalid type for '{where}': expected an object.", param=where, code="invalid_type")
    texts = []
    for number, part in enumerate(read.objects(value, "parts", where)):
        text = read.field(part, "text", str, f"{where}.parts[{number}]")
        if text is None:
            path = f"{where}.parts[{number}]"
            raise RequestError(f"Invalid '{path}': a system instruction holds text only.", param=path)
        texts.append(text)
    return Message("system", _content([_text(text) for text in texts])) if texts else None


def parse_contents(contents: list[Json]) -> list[Message]:
    conversation = _ContentReader()
    for position, content in enumerate(contents):
        conversation.add(content, f"contents[{position}]", position)
    return conversation.finish()


@dataclass(slots=True)
class _ModelTurn:
    """An assistant message in the making."""

    content: list[Json] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    signed: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        text = self.content
        content: str | list[Json] | None
        if all(part["type"] == "text" for part in text):
            content = "".join(part["text"] for part in text)
            if not content and self.calls:
                content = None
        else:
            content = text
        reasoning = self.signed or "".join(self.thoughts)
        return Message("assistant", content, reasoning=reasoning or None, tool_calls=tuple(self.calls))


@dataclass(slots=True)
class _ContentReader:
    messages: list[Message] = field(default_factory=list)
    turn: _ModelTurn | None = None
    open: list[ToolCall] = field(default_factory=list)
    """Calls of the model's last turn that have no result yet."""
    named: set[str] = field(default_factory=set)
    """Ids that were made up here, for calls that came without."""
    heard: set[tuple[str, str]] = field(default_factory=set)
    """(call id, text) of each result."""
    heard_now: set[tuple[str, str]] = field(default_factory=set)
    """(name, text) of each result since the model's last turn."""

    def add(self, content: Json, where: str, position: int) -> None:
        parts = read.objects(content, "parts", where)
        role = read.field(content, "role", str, where)
        if not role:
            role = "model" if any(read.raw_field(part, "functionCall") is not None for part in parts) else "user"
        if role not in _ROLES:
            raise RequestError(
                f"Invalid value for '{where}.role': expected user or model.",
                param=f"{where}.role",
                code="invalid_value",
            )
        if role == "model":
            self._model(parts, where, position)
            return
        self._close_turn()
        if not parts:
            raise RequestError(f"'{where}.parts' must not be empty.", param=f"{where}.parts", code="empty_array")
        said: list[Json] = []
        for number, part in enumerate(parts):
            path = f"{where}.parts[{number}]"
            response = read.field(part, "functionResponse", dict, path)
            if response is not None:
                self._result(response, f"{path}.functionResponse", f"call_{position}_{number}")
            elif read.raw_field(part, "functionCall") is not None:
                raise RequestError(f"Invalid '{path}.functionCall': only the role 'model' calls.", param=path)
            else:
                said += _data(part, path)
        if said:
            self.messages.append(Message("user", _content(said)))

    def finish(self) -> list[Message]:
        self._close_turn()
        return self.messages

    def _close_turn(self) -> None:
        if self.turn is not None:
            self.messages.append(self.turn.message())
            self.turn = None

    def _model(self, parts: list[Json], where: str, position: int) -> None:
        if not parts:  # the empty end of a stream, or an answer that a client never got
            return
        if self.turn is None:
            self.turn = _ModelTurn()
            self.open = []
            self.heard_now.clear()
        for number, part in enumerate(parts):
            self._model_part(self.turn, part, f"{where}.parts[{number}]", f"call_{position}_{number}")

    def _model_part(self, turn: _ModelTurn, part: Json, where: str, made_up: str) -> None:
        signature = read.field(part, "thoughtSignature", str, where)
        signed = None if signature is None else unpack(signature)
        if signed is not None:
            turn.signed = extend_reasoning(turn.signed, signed)
        call = read.field(part, "functionCall", dict, where)
        if call is not None:
            self._call(turn, call, f"{where}.functionCall", made_up)
        elif read.field(part, "thought", bool, where):
            turn.thoughts.append(read.field(part, "text", str, where) or "")
        elif signed is not None and signed.call is not None and part.get("text") == call_as_text(signed.call):
            turn.calls.append(signed.call)
        elif read.raw_field(part, "functionResponse") is not None:
            raise RequestError(f"Invalid '{where}.functionResponse': the role 'model' answers no calls.", param=where)
        else:
            turn.content += _data(part, where)

    def _call(self, turn: _ModelTurn, call: Json, where: str, made_up: str) -> None:
        name = read.field(call, "name", str, where)
        if not name:
            raise RequestError(f"Missing '{where}.name'.", param=f"{where}.name")
        arguments = to_json(read.field(call, "args", dict, where) or {}, f"{where}.args").decode()
        call_id = (read.field(call, "id", str, where) or "").removeprefix(name + "__")
        if not call_id:
            call_id = made_up
            self.named.add(made_up)
        made = ToolCall(call_id, name, arguments)
        turn.calls.append(made)
        self.open.append(made)

    def _result(self, response: Json, where: str, made_up: str) -> None:
        name = read.field(response, "name", str, where) or ""
        content = _result_content(response, where)
        said = content if isinstance(content, str) else to_json(content, where).decode()
        call_id = (read.field(response, "id", str, where) or "").removeprefix(name + "__")
        call = self._answered(call_id, name)
        if call is not None:
            self.open.remove(call)
            call_id = call.id
        elif (call_id, said) in self.heard if call_id else (name, said) in self.heard_now:
            return
        call_id = call_id or made_up
        self.heard.add((call_id, said))
        self.heard_now.add((name, said))
        self.messages.append(Message("tool", content, tool_call_id=call_id, name=name or None))

    def _answered(self, call_id: str, name: str) -> ToolCall | None:
        """The open call that a result with this id (may be empty) and name answers."""
        for call in self.open:
            if call_id and call.id == call_id:
                return call
        for call in self.open:
            if call.name == name and (not call_id or call.id in self.named):
                return call
        return None


def _result_content(response: Json, where: str) -> str | list[Json]:
    value = read.field(response, "response", dict, where)
    if value is None:
        text = ""
    elif (
        len(value) == 1 and isinstance(alone := next(iter(value.values())), str) and set(value) <= {"output", "result"}
    ):
        text = alone
    else:
        text = to_json(value, f"{where}.response").decode()
    media: list[Json] = []
    for number, part in enumerate(read.objects(response, "parts", where)):
        media += _data(part, f"{where}.parts[{number}]")
    if not media:
        return text
    return [_text(text), *media] if text else media


def _data(part: Json, where: str) -> list[Json]:
    """A part that is neither call nor result as OpenAI content parts."""
    text = read.field(part, "text", str, where)
    if text is not None:
        return [_text(text)]
    blob = read.field(part, "inlineData", dict, where)
    if blob is not None:
        path = f"{where}.inlineData"
        mime = read.field(blob, "mimeType", str, path) or "application/octet-stream"
        data = read.field(blob, "data", str, path) or ""
        # SDKs write bytes in the URL-safe alphabet; data URLs know only the plain one.
        return [_media(f"data:{mime};base64,{data.replace('-', '+').replace('_', '/')}", mime)]
    file = read.field(part, "fileData", dict, where)
    if file is not None:
        path = f"{where}.fileData"
        return [_media(read.field(file, "fileUri", str, path) or "", read.field(file, "mimeType", str, path) or "")]
    code = read.field(part, "executableCode", dict, where)
    if code is not None:
        language = (read.field(code, "language", str, f"{where}.executableCode") or "").lower()
        return [_text(f"```{language}\n{read.field(code, 'code', str, f'{where}.executableCode') or ''}\n```")]
    ran = read.field(part, "codeExecutionResult", dict, where)
    if ran is not None:
        return [_text(f"```\n{read.field(ran, 'output', str, f'{where}.codeExecutionResult') or ''}\n```")]
    unknown = [key for key, value in part.items() if value is not None and key not in _SILENT_KEYS]
    if unknown:
        raise RequestError(f"Invalid '{where}': parts with {unknown[0]!r:.80} are not known here.", param=where)
    return []


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _media(url: str, mime: str) -> Json:
    """The content part by which OpenAI-compatible engines take this kind of data; an engine without it refuses."""
    kind = mime.partition("/")[0]
    if kind in ("image", "audio", "video"):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    return {"type": "file", "file": {"file_data" if url.startswith("data:") else "file_url": url}}


def _content(parts: list[Json]) -> str | list[Json]:
    """One text is a string; otherwise the list, without texts that say nothing."""
    kept = [part for part in parts if part["type"] != "text" or part["text"]]
    if not kept:
        return ""
    if len(kept) == 1 and kept[0]["type"] == "text":
        text: str = kept[0]["text"]
        return text
    return kept

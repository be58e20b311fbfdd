"""Render a model's chat template in this process, as Transformers and vLLM do.

`ModelFiles` are the template, special tokens and tokenizer of a model's folder. A server may use other files.
To notice this, `local_rendering.py` compares renderings made here with the server's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message

_TOOL_FIELDS = ("name", "description", "parameters")
_BILLING_LINE = "x-anthropic-billing-header"
_KEPT_ATTRIBUTES = 1024
_DICT_ATTRIBUTES = frozenset(dir(dict))


class _GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks what a model writes. Its content is rendered, without the tags."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja sandbox of Transformers and vLLM, made faster: fields of messages are looked up directly, and the
    safety check of an attribute runs only once for each type."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._allowed: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = self._allowed.get((type(obj), attr))
        if allowed is None:
            allowed = super().is_safe_attribute(obj, attr, value)
            if len(self._allowed) < _KEPT_ATTRIBUTES:
                self._allowed[type(obj), attr] = allowed
        return allowed


ToolForm = Literal["sent", "vllm", "llamacpp"]
"""How a tool is shown to the template. `sent`: as the client sent it. `vllm`: name, description and parameters come
first, in this order; if one is missing, it is null. `llamacpp`: only these three fields; if one is missing, it is
empty."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a server prepares messages and tools for the template."""

    content_parts: bool = False
    """True if the content of a message is a list of parts, False if it is one string."""
    tools: ToolForm = "vllm"
    drops_billing_line: bool = False
    """True if Claude Code's billing line is left out of system messages, as vLLM 0.32 does."""


class ModelTemplate:
    """A compiled chat template with the settings of Transformers."""

    def __init__(self, source: str, special_tokens: Json | None = None) -> None:
        environment = _TemplateEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens or {}

    def render(self, request: ChatRequest, form: MessageForm, *, generation: bool = True) -> str:
        """Return the prompt as text. Raises RequestError if the template refuses the conversation."""
        tools = [_shown_tool(tool, form.tools) for tool in request.tools]
        options = {**self._special_tokens, **request.template_kwargs, "add_generation_prompt": generation}
        messages = map(_without_billing_line, request.messages) if form.drops_billing_line else request.messages
        rendered = [template_message(message, content_parts=form.content_parts) for message in messages]
        try:
            return self._template.render(messages=rendered, tools=tools or None, documents=None, **options)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"The model's chat template cannot render this conversation: {error}", param="messages"
            ) from error


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The data in a model's folder that determine its prompts. `tokenizer` is a `tokenizers.Tokenizer`."""

    template: ModelTemplate
    tokenizer: Any
    stop_ids: tuple[int, ...]
    """`eos_token_id` of generation_config.json."""

    @classmethod
    def load(cls, folder: Path) -> ModelFiles | None:
        """Return the files of a model's folder.

        Returns None if the folder has no chat template or no tokenizer.json, or if the `tokenizers` library is not
        installed.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return None
        config = _read_json(folder / "tokenizer_config.json")
        source = folder / "chat_template.jinja"
        template = source.read_text() if source.is_file() else config.get("chat_template")
        if not isinstance(template, str) or not (folder / "tokenizer.json").is_file():
            return None
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        stops = _read_json(folder / "generation_config.json").get("eos_token_id", [])
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        stop_ids = tuple(map(int, stops if isinstance(stops, list) else [stops]))
        return cls(ModelTemplate(template, special), tokenizer, stop_ids)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def find_model_folder(name: str) -> Path | None:
    """Return the folder of a model from its path or its name on the Hugging Face Hub; None if it is not on disk."""
    if (folder := Path(name)).is_dir():
        return folder
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    cached = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    revision = cached / "refs" / "main"
    snapshot = cached / "snapshots" / revision.read_text().strip() if revision.is_file() else None
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def template_message(message: Message, *, content_parts: bool = False) -> Json:
    """Return a message as templates expect it, with tool-call arguments as an object.

    The content becomes one string; with `content_parts`, a list with one text part.
    """
    out = message.to_openai()
    content = flat_text(message.content)
    out["content"] = [{"type": "text", "text": content}] if content_parts and content else content
    if message.reasoning is not None:
        out["reasoning"] = message.reasoning
    for call in out.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return out


def _without_billing_line(message: Message) -> Message:
    """Remove Claude Code's billing line from a system message. Drop content parts that have only this line."""
    if message.role != "system" or not message.content:
        return message
    if isinstance(message.content, str):
        return replace(message, content=_after_billing_line(message.content))
    parts = [(part, _after_billing_line(part.get("text"))) for part in message.content]
    kept = [
        part if text == part.get("text") else {**part, "text": text}
        for part, text in parts
        if text or text == part.get("text")
    ]
    return replace(message, content=kept)


def _after_billing_line(text: Any) -> Any:
    return text.partition("\n")[2] if isinstance(text, str) and text.startswith(_BILLING_LINE) else text


def _arguments(text: str) -> Any:
    """Parse a tool call's arguments. If they are not JSON, return the text itself: a model may sample any text."""
    try:
        return json.loads(text.strip() or "{}")
    except json.JSONDecodeError:
        return text


def flat_text(content: str | list[Json] | None) -> str:
    """Join content parts with line breaks, as vLLM does. Raises RequestError for anything but text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        kind = part.get("type", "text")
        text = part.get("text", part.get("refusal"))
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise RequestError(
                f"This model reads text only, not a content part of type {kind!r}.", param="messages", code="no_images"
            )
        texts.append(text)
    return "\n".join(texts)


def _shown_tool(tool: Json, form: ToolForm) -> Json:
    function = tool.get("function")
    if form == "sent" or not isinstance(function, dict):
        return tool
    if form == "llamacpp":
        defaults: Json = {"name": "", "description": "", "parameters": {}}
        return {"type": "function", "function": {name: function.get(name, defaults[name]) for name in _TOOL_FIELDS}}
    known = {name: function.get(name) for name in _TOOL_FIELDS}
    return {"type": tool.get("type", "function"), "function": {**known, **function}}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _read_json(path: Path) -> Json:
    value = json.loads(path.read_text()) if path.is_file() else {}
    return value if isinstance(value, dict) else {}

"""From a conversation to token ids, through the tokenizer's chat template, with messages prepared as vLLM does."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from typing import Any

from jinja2.exceptions import TemplateError

from polar_proxy.engines.hermes import CALL, THINK, Reasoning
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message

_CACHED_PIECES = 4096


class ChatTemplate:
    """Rendering and tokenising; thread-safe. `tokenizer` is a fast tokenizer of Transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        template = tokenizer.chat_template
        self.source: str | None = template if isinstance(template, str) or template is None else json.dumps(template)
        self.tools = self.source is not None and "tools" in self.source and CALL in self.source
        self._thinks = self.source is not None and THINK in self.source
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._cut = self._safe_cut()

    @property
    def hash(self) -> str | None:
        return hashlib.sha256(self.source.encode()).hexdigest() if self.source is not None else None

    def render(self, request: ChatRequest, *, generation: bool = True) -> str:
        """The prompt as text, with the opening of the answer. RequestError when the template refuses."""
        if self.source is None:
            raise RequestError("This model has no chat template; use the completions endpoint.", code="no_template")
        options: Json = {"add_generation_prompt": True, **request.template_kwargs}
        if not generation:
            options["add_generation_prompt"] = False
        try:
            text = self._tokenizer.apply_chat_template(
                [template_message(message) for message in request.messages],
                tools=list(request.tools) if uses_tools(request) else None,
                tokenize=False,
                **options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"The model's chat template cannot render this conversation: {error}", param="messages"
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text. Pieces between end-of-turn tokens are cached: of a conversation that grows,
        only the new turn is tokenised."""
        if self._cut is None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for piece in filter(None, self._cut.split(text)):
            ids += self._encode_piece(piece)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with whatever the tokenizer puts around it (a BOS token)."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def reasoning(self, prompt: str) -> Reasoning:
        """Whether answers to this rendered prompt may begin with reasoning, or stand in it already."""
        if not self._thinks:
            return "off"
        return "open" if prompt.rstrip().endswith(THINK) else "tags"

    def _encode_piece(self, piece: str) -> list[int]:
        with self._lock:
            known = self._pieces.get(piece)
            if known is not None:
                self._pieces.move_to_end(piece)
                return known
        ids = list(self._backend.encode(piece, add_special_tokens=False).ids)
        with self._lock:
            self._pieces[piece] = ids
            if len(self._pieces) > _CACHED_PIECES:
                self._pieces.popitem(last=False)
        return ids

    def _safe_cut(self) -> re.Pattern[str] | None:
        """Where text may be cut without changing its tokens: behind the end-of-turn token, if cutting there is
        without effect for this tokenizer."""
        mark = self._tokenizer.eos_token
        if not mark or not re.fullmatch(r"<\S+>", mark):
            return None
        probe = f"a b{mark}\n c{mark}{mark} d\n\n e {mark}f"
        cut = re.compile(f"(?<={re.escape(mark)})")
        whole = list(self._backend.encode(probe, add_special_tokens=False).ids)
        parts: list[int] = []
        for piece in filter(None, cut.split(probe)):
            parts += self._backend.encode(piece, add_special_tokens=False).ids
        return cut if parts == whole else None


def uses_tools(request: ChatRequest) -> bool:
    """Whether the model is shown the tools, and its answer is searched for calls."""
    return bool(request.tools) and request.tool_choice != "none"


def template_message(message: Message) -> Json:
    """A message as templates expect it: content as one string, tool-call arguments as an object."""
    out = message.to_openai()
    out["content"] = flat_text(message.content)
    if message.reasoning is not None:
        out["reasoning"] = message.reasoning
    for call in out.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return out


def _arguments(text: str) -> Any:
    """The object behind the string. What is not JSON stays the string: the agent shall not fail on its own history."""
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def flat_text(content: str | list[Json] | None) -> str:
    """Content parts as one text, joined by line breaks as vLLM does. Raises RequestError for anything but text."""
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

"""An engine without a model: it renders a chat template with Transformers, as vLLM does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks._families.families import Family
from polar_proxy.engines.base import Engine, ExactPrompt, uses_tools
from polar_proxy.engines.chat_template import template_message
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Message, SampleEvent


def make_tokenizer(family: Family) -> Tokenizer:
    """Return the bundled policy's tokenizer with the control tokens and tags of a family."""
    tokenizer = Tokenizer.from_file(str(Path(POLAR_TINY) / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in family.control_tokens])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.tags])
    return tokenizer


class TemplateEngine(Engine):
    """An engine that renders and encodes conversations, but samples nothing."""

    def __init__(self, family: Family, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer`: by default that of `make_tokenizer`."""
        self.family = family
        self.tokenizer = tokenizer or make_tokenizer(family)
        self.stop_ids = tuple(self.tokenizer.token_to_id(stop) for stop in family.stops)

    @property
    def info(self) -> EngineInfo:
        capabilities = frozenset({"token_ids", "logprobs", "tools", "token_prompt", "continue"})
        return EngineInfo(
            "templates", "1", self.family.name, 1_000_000, None, "processed", capabilities, eos_token_ids=self.stop_ids
        )

    def text(self, request: ChatRequest, *, generation: bool = True) -> str:
        """Return the rendered text. Raises RequestError if the template refuses the conversation."""
        messages = self._developer_as_vllm(request.messages)
        try:
            rendered, _ = render_jinja_template(
                [[template_message(message) for message in messages]],
                tools=list(request.tools) if uses_tools(request) else None,
                chat_template=self.family.template,
                **{
                    "add_generation_prompt": generation,
                    "bos_token": self.family.bos,
                    "eos_token": self.family.stops[0],
                    **self.family.options,
                    **request.template_kwargs,
                },
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"The chat template refuses: {error}") from error
        return str(rendered[0])

    def _developer_as_vllm(self, messages: Sequence[Message]) -> list[Message]:
        """Move developer messages to the front for a template without that role, as vLLM 0.32 does."""
        developers = [message for message in messages if message.role == "developer"]
        if not developers or "developer" in self.family.template:
            return list(messages)
        others = [message for message in messages if message.role != "developer"]
        system, rest = (others[:1], others[1:]) if others and others[0].role == "system" else ([], others)
        text = "\n".join(str(message.content) for message in [*system, *developers])
        return [Message("system", text), *rest]

    def encode_text(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        return self.encode_text(self.text(request, generation=generation))

    async def render_texts(self, requests: Sequence[ChatRequest], *, generation: bool = True) -> list[str]:
        return [self.text(request, generation=generation) for request in requests]

    async def encode(self, text: str) -> list[int]:
        return self.encode_text(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        raise EngineError("This engine samples nothing.")
        yield

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        raise EngineError("This engine scores nothing.")

    async def health(self) -> str | None:
        return None


def with_single_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages in which every answer calls at most one tool."""
    kept = {call.id for message in messages for call in message.tool_calls[:1]}
    return tuple(
        replace(message, tool_calls=message.tool_calls[:1])
        for message in messages
        if message.tool_call_id is None or message.tool_call_id in kept
    )

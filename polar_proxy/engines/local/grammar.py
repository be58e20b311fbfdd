"""Answers that must have a form: response_format, and tool_choice that demands a call. Needs the package llguidance.

A `response_format` holds only where no tools are offered, see `enforced_format`.

A required tool call is sampled in the model's own Hermes form, so that it parses and renders back like any other. The
log-probabilities are those of the distribution with the forbidden tokens taken out: such tokens are not free samples of
the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from polar_proxy.engines.base import enforced_format
from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK, Reasoning
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as json.dumps prints it, which is what templates show to the model."""


def available() -> bool:
    return find_spec("llguidance") is not None


class GrammarMask:
    """One choice's place in the grammar. `error` is set when the matcher gave up."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.error: str | None = None

    def apply(self, logits: torch.Tensor) -> None:
        """Set logits [V] of forbidden tokens to -inf, in place."""
        if self.error is not None:
            return
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) > 0
        if not allowed.any():
            self.error = self._matcher.get_error() or "no token can follow"
            return
        mask = np.zeros(len(logits), dtype=bool)
        mask[: len(allowed)] = allowed[: len(logits)]
        logits.masked_fill_(torch.from_numpy(~mask).to(logits.device), float("-inf"))

    def accept(self, token_id: int) -> None:
        if self.error is None and not self._matcher.consume_token(token_id):
            self.error = self._matcher.get_error() or "the grammar does not allow the sampled token"


class GrammarCompiler:
    """Makes masks for one tokenizer; reading its vocabulary takes a moment and happens at first use."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._ll_tokenizer: Any = None

    def for_request(self, request: ChatRequest, reasoning: Reasoning) -> Callable[[], GrammarMask] | None:
        """A maker of masks, one for each choice, or None where the answer is free. Raises RequestError."""
        body = self._body(request)
        if body is None:
            return None
        if not available():
            raise RequestError(
                "response_format and a required tool_choice need the package llguidance: pip install llguidance.",
                param="response_format" if request.response_format else "tool_choice",
            )
        from llguidance import LLMatcher, hf

        if self._ll_tokenizer is None:
            self._ll_tokenizer = hf.from_tokenizer(self._tokenizer, self._vocab_size, self._eos_ids)
        tokenizer = self._ll_tokenizer
        grammar = LLMatcher.grammar_from_lark(self._prefix(reasoning) + body)
        problem = LLMatcher.validate_grammar(grammar, tokenizer)
        if problem and not problem.startswith("WARNING"):
            raise RequestError(f"This schema cannot be enforced: {problem}", param="response_format")
        return lambda: GrammarMask(LLMatcher(tokenizer, grammar, log_level=0))

    def _body(self, request: ChatRequest) -> str | None:
        """The rule `body`, in llguidance's Lark."""
        if (tools := demanded_tools(request)) is not None:
            rules = " | ".join(f"tool_{place}" for place in range(len(tools)))
            more = "" if request.parallel_tool_calls is False or len(tools) < len(request.tools) else ' ("\\n" call)*'
            lines = [
                f"body: call{more}",
                f'call: {self._tag(CALL)} "\\n" ({rules}) "\\n" {self._tag(END_CALL)}',
                *(f"tool_{place}: %json {_schema(call_schema(tool))}" for place, tool in enumerate(tools)),
            ]
            return "\n".join(lines)
        schema = answer_schema(enforced_format(request))
        return None if schema is None else f"body: %json {_schema(schema)}"

    def _prefix(self, reasoning: Reasoning) -> str:
        """The rule `start`: reasoning stays free."""
        if reasoning == "off":
            return "start: body\n"
        # A tag that is one token has no text inside a regular expression; one that is not must end it.
        if END_THINK in self._tokens:
            thought = f"thought: /(.|\\n)*/ {END_THINK}\ngap: /\\n*/\n"
        else:
            thought = f'thought[suffix="{END_THINK}"]: /(.|\\n)*/\ngap: /\\n*/\n'
        if reasoning == "open":
            return f"start: thought gap body\n{thought}"
        return f"start: ({self._tag(THINK)} thought gap)? body\n{thought}"

    def _tag(self, text: str) -> str:
        """Tokens are named bare in the grammar, the rest is quoted text."""
        return text if text in self._tokens else json.dumps(text)


def _schema(schema: Json) -> str:
    return json.dumps({**schema, "x-guidance": SPACING})


def demanded_tools(request: ChatRequest) -> list[Json] | None:
    """The functions of which one must be called; None when a call is the model's choice. Raises RequestError."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    functions: list[Json] = [tool.get("function", tool) for tool in request.tools]
    if choice == "required":
        wanted = functions
    else:
        name = choice.get("function", choice).get("name") if isinstance(choice, dict) else choice
        wanted = [function for function in functions if function.get("name") == name]
    if not wanted:
        raise RequestError(f"tool_choice {choice!r} names none of the tools.", param="tool_choice")
    return wanted


def call_schema(function: Json) -> Json:
    """JSON schema of a call of this function, name first, as the templates show it."""
    parameters = function.get("parameters") or {"type": "object"}
    # References inside the parameters are relative to the root of the document.
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        **definitions,
    }


def answer_schema(response_format: Json | None) -> Json | None:
    """The JSON schema an answer must follow; None for plain text. Raises RequestError."""
    kind = "text" if response_format is None else response_format.get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = response_format.get("json_schema", {}).get("schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise RequestError(
            f"response_format of type {kind!r} is not supported, or lacks its schema.", param="response_format"
        )
    return schema

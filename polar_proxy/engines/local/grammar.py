"""Sample answers under a grammar, which comes from a `response_format` or from a `tool_choice` that requires a call.

A `response_format` is enforced only while the model may not call tools, see `base.enforced_format`. A required tool
call is sampled in the Hermes format, so that it is parsed and rendered like any other. Log-probabilities are those of
the distribution without the forbidden tokens. This is not the policy's own distribution, so calls sampled under a
grammar are not trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from llguidance import LLMatcher, hf

from polar_proxy.engines.base import enforced_format
from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK, Reasoning
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The separators of json.dumps. Chat templates write JSON with these separators, too, so the model is used to them."""


class GrammarMask:
    """Mask of the tokens that the grammar allows next in one choice. `error` is set if the matcher cannot continue."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.error: str | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [V] with -inf for forbidden tokens."""
        if self.error is not None:
            return logits
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[: len(logits)] > 0
        if not allowed.any():
            self.error = self._matcher.get_error() or "no token can follow"
            return logits
        masked = torch.full_like(logits, float("-inf"))
        masked[: len(allowed)][allowed] = logits[: len(allowed)][allowed]
        return masked

    def accept(self, token_id: int) -> None:
        if self.error is None and not self._matcher.consume_token(token_id):
            self.error = self._matcher.get_error() or "the grammar does not allow the sampled token"


class GrammarCompiler:
    """Compiler of grammars for one tokenizer. The first grammar loads the vocabulary, which takes a moment."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}

    @cached_property
    def _compiled_tokenizer(self) -> Any:
        return hf.from_tokenizer(self._tokenizer, self._vocab_size, self._end_ids)

    def for_request(self, request: ChatRequest, reasoning: Reasoning) -> Callable[[], GrammarMask] | None:
        """Return a factory of masks, to be called once per choice; None if the request needs no grammar.

        Raises RequestError for a format or tool choice that cannot be enforced.
        """
        body = self._body(request)
        if body is None:
            return None
        tokenizer = self._compiled_tokenizer
        grammar = LLMatcher.grammar_from_lark(self._prefix(reasoning) + body)
        problem = LLMatcher.validate_grammar(grammar, tokenizer)
        if problem and not problem.startswith("WARNING"):
            raise RequestError(f"This schema cannot be enforced: {problem}", param="response_format")
        return lambda: GrammarMask(LLMatcher(tokenizer, grammar, log_level=0))

    def _body(self, request: ChatRequest) -> str | None:
        """Return the grammar rule `body` in llguidance's Lark: the required tool calls, or the schema of the answer.

        None if the request asks for neither.
        """
        if (tools := demanded_tools(request)) is not None:
            names = " | ".join(f"tool_{place}" for place in range(len(tools)))
            more = "" if request.parallel_tool_calls is False or len(tools) < len(request.tools) else ' ("\\n" call)*'
            lines = [
                f"body: call{more}",
                f'call: {self._tag(CALL)} "\\n" ({names}) "\\n" {self._tag(END_CALL)}',
                *(f"tool_{place}: %json {_schema(call_schema(tool))}" for place, tool in enumerate(tools)),
            ]
            return "\n".join(lines)
        schema = answer_schema(enforced_format(request))
        return None if schema is None else f"body: %json {_schema(schema)}"

    def _prefix(self, reasoning: Reasoning) -> str:
        """Return the grammar rule `start`: free reasoning, if the model reasons, followed by the rule `body`."""
        if reasoning == "off":
            return "start: body\n"
        # A single-token tag cannot match inside a regular expression; a tag of several tokens must be its suffix.
        if END_THINK in self._tokens:
            thought = f"thought: /(.|\\n)*/ {END_THINK}\ngap: /\\n*/\n"
        else:
            thought = f'thought[suffix="{END_THINK}"]: /(.|\\n)*/\ngap: /\\n*/\n'
        if reasoning == "open":
            return f"start: thought gap body\n{thought}"
        return f"start: ({self._tag(THINK)} thought gap)? body\n{thought}"

    def _tag(self, text: str) -> str:
        """Return a tag in the grammar's notation: unquoted if it is a single token, else quoted as text."""
        return text if text in self._tokens else json.dumps(text)


def _schema(schema: Json) -> str:
    return json.dumps({**schema, "x-guidance": SPACING})


def demanded_tools(request: ChatRequest) -> list[Json] | None:
    """Return the functions from which the model must choose one to call; None if no call is required.

    Raises RequestError if `tool_choice` matches no tool of the request.
    """
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    functions: list[Json] = [tool.get("function", tool) for tool in request.tools]
    if choice == "required":
        demanded = functions
    else:
        name = choice.get("function", choice).get("name") if isinstance(choice, dict) else choice
        demanded = [function for function in functions if function.get("name") == name]
    if not demanded:
        raise RequestError(f"tool_choice {choice!r} matches none of the request's tools.", param="tool_choice")
    return demanded


def call_schema(function: Json) -> Json:
    """Return the JSON schema of a call of this function. The name comes before the arguments, as in chat templates."""
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
    """Return the JSON schema that an answer must follow; None for plain text. Raises RequestError."""
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

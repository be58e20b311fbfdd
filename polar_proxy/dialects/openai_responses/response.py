"""The response object: for a whole answer, and as the first and last event of a stream.

The log-probabilities of a message are those of the tokens that spell it, or of all tokens of the answer if those
cannot be identified. Reasoning tokens are counted as 0: engines do not say which tokens are reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from polar_proxy.dialects.answer import Answer, AnswerChoice
from polar_proxy.dialects.openai_common import token_logprobs
from polar_proxy.dialects.openai_responses.items import response_id
from polar_proxy.types import Json

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The constant fields of every object of one response."""

    call_id: str
    created: int
    echo: Json
    """The request's fields that each object repeats."""
    logprobs: bool
    """True if the client asked for log-probabilities."""

    def with_status(
        self,
        status: str,
        output: list[Json],
        *,
        usage: Json | None = None,
        error: Json | None = None,
        incomplete: Json | None = None,
    ) -> Json:
        return {
            "id": response_id(self.call_id),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "output": output,
            "usage": usage,
            **self.echo,
        }

    def finished(self, answer: Answer, choice: AnswerChoice, items: list[Json]) -> Json:
        reason = _INCOMPLETE.get(choice.finish_reason or "")
        return self.with_status(
            "incomplete" if reason else "completed",
            items,
            incomplete={"reason": reason} if reason else None,
            usage={
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0, "cache_write_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        )

    def message_logprobs(self, choice: AnswerChoice, text: str) -> list[Json]:
        """Return the log-probabilities of a message's text; an empty list if the client did not ask for them."""
        if not self.logprobs:
            return []
        joined, reasoning = "".join(choice.tokens), "".join(choice.reasoning)
        start = joined.find(text, max(0, joined.find(reasoning)) + len(reasoning) if reasoning else 0)
        if start < 0 or not text:
            return token_logprobs(choice.tokens, choice.logprobs, choice.top)
        first = last = at = 0
        for position, token in enumerate(choice.tokens):
            if at <= start:
                first = position
            at += len(token)
            last = position
            if at >= start + len(text):
                break
        keep = slice(first, last + 1)
        return token_logprobs(choice.tokens[keep], choice.logprobs[keep], choice.top[keep])


def last_status(choice: AnswerChoice) -> str:
    """Return the status of an answer's last item."""
    return "incomplete" if choice.finish_reason in _INCOMPLETE else "completed"

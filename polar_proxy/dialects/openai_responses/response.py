"""The response object: an answer in one piece, and what the events of a stream begin and end with.

Log-probabilities of a message are those of the tokens found to spell it, or of all tokens of the answer where they
cannot be told apart. Reasoning tokens are counted as 0: engines do not say which tokens were reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from polar_proxy.dialects.base import Answer, AnswerChoice
from polar_proxy.dialects.openai_common import chat_logprobs
from polar_proxy.dialects.openai_responses.items import call_item, item_id, message_item, reasoning_item, response_id
from polar_proxy.dialects.openai_responses.tools import Toolbox
from polar_proxy.types import Json, TopLogprob

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """What is the same in every object of one response."""

    call_id: str
    created: int
    tools: Toolbox
    echo: Json
    """The fields of the request that are repeated."""
    logprobs: bool
    """Whether the client asked for log-probabilities."""

    def of(
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

    def finished(self, answer: Answer, state: AnswerChoice, items: list[Json]) -> Json:
        reason = _INCOMPLETE.get(state.finish_reason or "")
        return self.of(
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

    def items(self, state: AnswerChoice) -> list[Json]:
        """The output of a whole answer: reasoning, message, calls; the last one incomplete if the answer was cut. An
        answer of nothing is an empty message, so that its place in the history is not lost."""
        ending = last_status(state)
        text, reasoning, calls = "".join(state.text), "".join(state.reasoning), state.tool_calls
        says = bool(text) or not (calls or reasoning)
        out: list[Json] = []
        if reasoning:
            status = "completed" if says or calls else ending
            out.append(reasoning_item(item_id("rs", self.call_id, 0), reasoning, status))
        if says:
            status = "completed" if calls else ending
            identity = item_id("msg", self.call_id, len(out))
            out.append(message_item(identity, text, status, self.logprobs_of(state, text)))
        for number, call in enumerate(calls, 1):
            status = ending if number == len(calls) else "completed"
            out.append(call_item(self.tools, call, self.call_id, len(out), status))
        return out

    def logprobs_of(self, state: AnswerChoice, text: str) -> list[Json]:
        """Those of a message; none when the client did not ask."""
        if not self.logprobs:
            return []
        joined, reasoning = "".join(state.tokens), "".join(state.reasoning)
        start = joined.find(text, max(0, joined.find(reasoning)) + len(reasoning) if reasoning else 0)
        if start < 0 or not text:
            return tokens(state.tokens, state.logprobs, state.top)
        first = last = at = 0
        for position, token in enumerate(state.tokens):
            if at <= start:
                first = position
            at += len(token)
            last = position
            if at >= start + len(text):
                break
        keep = slice(first, last + 1)
        return tokens(state.tokens[keep], state.logprobs[keep], state.top[keep])


def last_status(state: AnswerChoice) -> str:
    """The status of an answer's last item."""
    return "incomplete" if state.finish_reason in _INCOMPLETE else "completed"


def tokens(said: list[str], logprobs: list[float], top: list[tuple[TopLogprob, ...]]) -> list[Json]:
    """Tokens with their log-probabilities as this API shows them."""
    content: list[Json] = chat_logprobs(said, logprobs, top)["content"]
    return content

"""Answers as a model family writes them: the text that its chat template itself shows for them.

A template is rendered with and without an answer; what it adds is the answer's text, up to the token at which the model
stops. Some templates write no such token after an answer (GLM: the next message begins with one); it is then taken from
a rendering with a message after the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks._families.template_engine import TemplateEngine
from polar_proxy.conformance.awkward_answers import split_randomly
from polar_proxy.engines.scripted import ScriptedReply
from polar_proxy.errors import RequestError
from polar_proxy.sequences import first_difference
from polar_proxy.types import ChatRequest, Message

CUT_EVERY = 8
"""Average number of characters between the random splits of an answer, which make its tokens differ from those of the
tokenizer."""
_NEXT = "polarnextmessage"


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    reply: ScriptedReply
    """The part of the planned reply that the template can show."""
    text: str
    """The answer as the template writes it, with the stop token."""
    ids: tuple[int, ...]


class AnswerWriter:
    """Writes replies in the form of one template."""

    def __init__(self, engine: TemplateEngine, *, left_out: str = "", always_reasons: bool = False) -> None:
        """`left_out`: pattern of text that is left out of answers. `always_reasons`: every reply gets reasoning."""
        self._engine = engine
        self._left_out = left_out
        self._always_reasons = always_reasons

    def write(self, request: ChatRequest, reply: ScriptedReply) -> OwnAnswer:
        """Return the answer that a model of the family samples for a reply.

        What the template does not show is left out of the reply: reasoning, text beside calls, calls after the first.
        If the template opens every answer with reasoning, a reply without reasoning gets some.
        """
        opened = self._engine.text(request)
        for exact in (True, False):  # some templates close the reasoning of the next answer and not that of past ones
            for shown in _forms(reply):
                if self._always_reasons and not shown.reasoning:
                    continue
                answer = self._written(request, shown, opened)
                if answer is not None and (answer[1] == len(opened) or not (exact or shown.reasoning)):
                    text = _with_white_space(re.sub(self._left_out, "", answer[0]), shown)
                    return OwnAnswer(shown, text, self._ids(text))
        raise RequestError(f"The template of {self._engine.family.name} shows no answer like {reply}.")

    def _written(self, request: ChatRequest, reply: ScriptedReply, opened: str) -> tuple[str, int] | None:
        """Return the answer as the template writes it, and the position at which it begins; None if the template leaves
        out a part of the reply."""
        try:
            whole = self._engine.text(_followed(request, _message(reply)), generation=False)
        except RequestError:
            return None
        start = self._difference(opened, whole)
        places = [whole.find(stop, start) for stop in self._engine.family.stops]
        stop = min((place for place in places if place >= 0), default=None)
        text = whole[start:stop]
        places = [text.find(said) for said in (reply.reasoning.strip(), reply.text.strip(), *_names(reply)) if said]
        if places != sorted(places) or -1 in places:
            return None
        return text + self._stop(request, reply, whole, stop), start

    def _difference(self, opened: str, whole: str) -> int:
        """Return the position from which the texts differ: the start of a control token if they differ inside one."""
        end = first_difference(opened, whole)
        for found in self._engine.family.whole.finditer(whole):
            if found.start() < end < found.end():
                return found.start()
        return end

    def _stop(self, request: ChatRequest, reply: ScriptedReply, whole: str, place: int | None) -> str:
        """Return the stop token that the template writes after an answer, here or before the next message."""
        if place is not None:
            return next(stop for stop in self._engine.family.stops if whole.startswith(stop, place))
        results = [Message("tool", _NEXT, tool_call_id=call.id, name=call.name) for call in reply.calls]
        after = results or [Message("user", _NEXT)]
        rendered = self._engine.text(_followed(request, _message(reply), *after))
        before = rendered[: rendered.index(_NEXT)]
        return max(self._engine.family.stops, key=before.rfind)

    def _ids(self, text: str) -> tuple[int, ...]:
        """Return token ids of the text, cut into other tokens than the tokenizer's."""
        pieces = split_randomly(text, every=CUT_EVERY, whole=self._engine.family.whole)
        ids = [token for piece in pieces for token in self._engine.encode_text(piece)]
        assert self._engine.tokenizer.decode(ids, skip_special_tokens=False) == text
        return tuple(ids)


def _forms(reply: ScriptedReply) -> list[ScriptedReply]:
    """Return the reply and variants that templates may show instead: with and without reasoning, without text beside
    the calls, with the first call only."""
    out = [reply, replace(reply, reasoning=reply.reasoning or "Hm."), replace(reply, reasoning="")]
    if reply.calls:
        out += [replace(each, text="") for each in out]
        out += [replace(each, calls=each.calls[:1]) for each in out]
    return list(dict.fromkeys(out))


def _names(reply: ScriptedReply) -> list[str]:
    return [call.name for call in reply.calls[:1]]


def _message(reply: ScriptedReply) -> Message:
    return Message("assistant", reply.text, tool_calls=reply.calls, reasoning=reply.reasoning or None)


def _followed(request: ChatRequest, *messages: Message) -> ChatRequest:
    return replace(request, messages=(*request.messages, *messages))


def _with_white_space(text: str, reply: ScriptedReply) -> str:
    """Return the text with the white space around the reply's texts, which many templates trim."""
    for said in (reply.reasoning, reply.text):
        if said and said not in text:
            text = text.replace(said.strip(), said)
    return text

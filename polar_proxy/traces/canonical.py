"""`on_drift = canonical`: joining a drifted call to the trace of its base all the same.

The sampled tokens of the trace so far are kept; what comes between them and the drifted call's answer is taken from the
call's own prompt. Where it begins there is found by counting: an engine's end-of-turn tokens are special tokens, so
text that was tokenised anew on one side of them does not move them. With k of them in the trace so far, what follows
the k-th in the prompt is new; where the last answer was cut before its end of turn, the next one closes it.

As in Polar's paper, a sampled token may then stand behind other tokens than those that the model was given: such
traces are marked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polar_proxy.traces.drift import base_choice
from polar_proxy.traces.tokens import begins_with, is_any
from polar_proxy.types import CallRecord, Span, TokenIds


def find_context_start(
    before: TokenIds, spans: Sequence[Span], call: CallRecord, base: CallRecord, *, drifted: bool
) -> int | str:
    """Where in the call's prompt the context begins that comes behind `before`; text: why that cannot be told.

    `before` int32 [n] with its spans: the trace so far, which ends with the base's answer. A call that did not drift is
    cut behind its base's tokens; that matters where the trace before it has other ones.
    """
    prompt, choice = call.prompt_ids, base_choice(call, base)
    if prompt is None or base.prompt_ids is None or choice is None:
        return "no_tokens"
    if not drifted:
        own = np.concatenate([base.prompt_ids, choice.token_ids])
        return len(own) if begins_with(prompt, own) else "not_drift"
    ends = call.engine.eos_token_ids if call.engine is not None else ()
    if not ends:
        return "no_end_of_turn_ids"
    turns = is_any(before, ends)
    if _within_answers(turns, spans):
        return "end_of_turn_within_answer"
    count = int(turns.sum())
    places = np.flatnonzero(is_any(prompt, ends))
    closed = bool(turns[-1])
    if len(places) < count + (not closed):
        return "too_few_turns"
    if closed:
        start = int(places[count - 1]) + 1
        return start if start < len(prompt) else "nothing_new"
    return int(places[count])


def _within_answers(turns: np.ndarray, spans: Sequence[Span]) -> bool:
    """Whether an answer goes on behind an end of turn: rendered as text, it would not be one."""
    position = 0
    for span in spans:
        size = span.end - span.start
        if span.kind == "sampled" and turns[position : position + size - 1].any():
            return True
        position += size
    return False

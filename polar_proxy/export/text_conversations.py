"""Conversations with hosted models, for SFT and preference data. Their calls were recorded as text, without tokens.

A conversation ends with an answer that no other call of the session continues. Side calls (titles), failed calls and
attempts that the agent sent again are in no conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polar_proxy.types import ANSWERED, CallRecord


@dataclass(frozen=True, slots=True)
class TextConversation:
    """One conversation: a chain of calls, each of which continues the one before."""

    calls: tuple[CallRecord, ...]
    """The calls of the conversation in order; at least one."""

    @property
    def last(self) -> CallRecord:
        """The call whose request and answer hold the whole conversation."""
        return self.calls[-1]


def text_conversations(calls: Sequence[CallRecord], excluded: Mapping[str, str]) -> list[TextConversation]:
    """Return a session's text conversations. They consist of the calls that have no tokens.

    Conversations are ordered by the start of their last calls. `excluded`: call id -> why the call is in no trace.
    """
    usable = {
        call.call_id: call
        for call in calls
        if call.status in ANSWERED and excluded.get(call.call_id) == "no_tokens" and call.edge != "side_call"
    }
    continued = {call.base_call_id for call in usable.values()}
    repeated = {call.parent_call_id for call in usable.values() if call.edge == "retries"}
    ends = [call for name, call in usable.items() if call.choices and name not in continued and name not in repeated]
    return [TextConversation(_chain(call, usable)) for call in ends]


def _chain(last: CallRecord, calls: Mapping[str, CallRecord]) -> tuple[CallRecord, ...]:
    chain: list[CallRecord] = [last]
    while (base := calls.get(chain[-1].base_call_id or "")) is not None and base not in chain:
        chain.append(base)
    return tuple(reversed(chain))

"""The base of a call: the recorded answer whose conversation it goes on with, whatever its edge.

An edge says how a call relates to its session; a base says whose exact tokens its prompt may begin with. A rewind to an
earlier turn has a parent whose answer was taken back, and a base: the turn before, which still stands.
"""

from __future__ import annotations

from dataclasses import dataclass

from polar_proxy.sessions.call_index import CallIndex
from polar_proxy.sessions.lineage import PlacementQuery, choose_parent


@dataclass(frozen=True, slots=True)
class Base:
    """The first `messages` messages of a request mean what call `call_id` was asked and answered (choice `choice`)."""

    call_id: str
    choice: int
    messages: int


def find_base(memory: CallIndex, asking: PlacementQuery) -> Base | None:
    """The deepest complete answer that the request extends by meaning; None where it extends none."""
    keys = asking.chain.keys
    for end in range(len(keys) - 1, 0, -1):
        if asking.messages[end - 1].role != "assistant":
            continue  # a result that is told twice has the key of the first
        found = [pair for pair in memory.ends.get(keys[end], ()) if pair[0].state == "ok"]
        if found:
            known, _ = choose_parent(found, asking, end)
            heard = next(answer for owner, answer in found if owner is known)
            return Base(known.call_id, known.answers.index(heard), end)
    return None

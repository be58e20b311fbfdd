"""Random conversations whose turns end in end-of-turn tokens, with their bases, as the gateway records them: turns that
continue, drift, rewind, branch, answers that were cut, parallel choices, sub-agents."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from polar_proxy.types import CallRecord, EngineInfo
from tests.traces.calls import call

END = 9
INFO = EngineInfo(
    engine="scripted",
    version="1",
    model="m",
    context_length=4096,
    template_hash="t",
    logprob_mode="processed",
    capabilities=frozenset(),
    eos_token_ids=(END,),
)
_words = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn, **changes: Any) -> list[CallRecord]:
    """The calls of a session, in order of time."""
    calls: list[CallRecord] = []
    for number in range(draw(st.integers(1, 8))):
        answers = [
            words + ([END] if draw(st.integers(0, 4)) else [])  # one of five was cut
            for words in draw(st.lists(_words, min_size=1, max_size=2))
        ]
        prompt, more = _asked(draw, calls)
        if more.get("base_call_id") and not draw(st.integers(0, 7)):
            more["status"] = "client_gone"
        calls.append(call(f"call_{number}", float(number), prompt, *answers, engine=INFO, **more, **changes))
    return calls


def _asked(draw: st.DrawFn, calls: list[CallRecord]) -> tuple[list[int], dict[str, Any]]:
    """A prompt, and what history says of it."""
    opening = [*draw(_words), END, 7]
    if not calls or not draw(st.integers(0, 5)):
        return opening, {}
    base = calls[-1] if draw(st.integers(0, 2)) else draw(st.sampled_from(calls))
    choice = draw(st.sampled_from(base.choices))
    assert base.prompt_ids is not None
    before, said = base.prompt_ids.tolist(), choice.token_ids.tolist()
    kind = draw(st.sampled_from(("exact", "exact", "drifted", "drifted", "subagent", "rewinds", "tools")))
    if kind == "subagent":
        return [*before[: before.index(END) + 1], *draw(_words), END, 7], {"edge": "subagent"}
    if kind == "rewinds":
        return [*before[: draw(st.integers(0, len(before)))], *draw(_words), END, 7], {"edge": "rewinds"}
    closed = said if said[-1] == END else [*said, END]
    suffix = [*draw(_words), END, 7]
    place: dict[str, Any] = {"edge": "continues", "parent_call_id": base.call_id}
    place |= {"base_call_id": base.call_id, "base_choice": choice.index}
    if kind == "exact":
        return before + closed + suffix, place | {"prompt_mode": "continue"}
    if kind == "tools":
        return [6, *before, *closed, *suffix], place | {"prompt_reason": "tools_changed"}
    return _rendered_anew(draw, before + closed) + suffix, place | {"prompt_reason": "off"}


def _rendered_anew(draw: st.DrawFn, ids: list[int]) -> list[int]:
    """The same turns with other words in some: what no end-of-turn token takes part in."""
    turns: list[list[int]] = [[]]
    for token in ids:
        turns[-1].append(token)
        if token == END:
            turns.append([])
    place = draw(st.integers(0, len(turns) - 2))
    turns[place] = [*draw(_words), END]
    return [token for turn in turns for token in turn]

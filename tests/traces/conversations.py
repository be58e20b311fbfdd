"""Random conversations with end-of-turn tokens and bases, as the gateway records them.

Turns continue, drift, rewind and branch; some answers are cut, some calls have parallel choices or are those of
sub-agents.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from polar_proxy.types import CallRecord
from tests.factories import call, engine_info

END = 9
INFO = engine_info(
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
    """Draw the calls of a session, in order of time."""
    calls: list[CallRecord] = []
    for number in range(draw(st.integers(1, 8))):
        answers = [
            words + ([END] if draw(st.integers(0, 4)) else [])  # one answer in five is cut
            for words in draw(st.lists(_words, min_size=1, max_size=2))
        ]
        prompt, lineage = _request(draw, calls)
        if lineage.get("base_call_id") and not draw(st.integers(0, 7)):
            lineage["status"] = "client_gone"
        calls.append(call(f"call_{number}", float(number), prompt, *answers, engine=INFO, **lineage, **changes))
    return calls


def _request(draw: st.DrawFn, calls: list[CallRecord]) -> tuple[list[int], dict[str, Any]]:
    """Draw a prompt, and the fields of the call that its lineage sets."""
    opening = [*draw(_words), END, 7]
    if not calls or not draw(st.integers(0, 5)):
        return opening, {}
    base = calls[-1] if draw(st.integers(0, 2)) else draw(st.sampled_from(calls))
    choice = draw(st.sampled_from(base.choices))
    assert base.prompt_ids is not None
    prompt, answer = base.prompt_ids.tolist(), choice.token_ids.tolist()
    kind = draw(st.sampled_from(("exact", "exact", "drifted", "drifted", "subagent", "rewinds", "tools")))
    if kind == "subagent":
        return [*prompt[: prompt.index(END) + 1], *draw(_words), END, 7], {"edge": "subagent"}
    if kind == "rewinds":
        return [*prompt[: draw(st.integers(0, len(prompt)))], *draw(_words), END, 7], {"edge": "rewinds"}
    closed = answer if answer[-1] == END else [*answer, END]
    suffix = [*draw(_words), END, 7]
    lineage: dict[str, Any] = {"edge": "continues", "parent_call_id": base.call_id}
    lineage |= {"base_call_id": base.call_id, "base_choice": choice.index}
    if kind == "exact":
        return prompt + closed + suffix, lineage | {"prompt_mode": "continue"}
    if kind == "tools":
        return [6, *prompt, *closed, *suffix], lineage | {"prompt_reason": "tools_changed"}
    return _drifted(draw, prompt + closed) + suffix, lineage | {"prompt_reason": "off"}


def _drifted(draw: st.DrawFn, ids: list[int]) -> list[int]:
    """Return the same turns with other words in one of them; end-of-turn tokens stay."""
    turns: list[list[int]] = [[]]
    for token in ids:
        turns[-1].append(token)
        if token == END:
            turns.append([])
    changed = draw(st.integers(0, len(turns) - 2))
    turns[changed] = [*draw(_words), END]
    return [token for turn in turns for token in turn]

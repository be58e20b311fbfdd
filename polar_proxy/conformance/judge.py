"""From what was seen of the runs to one cell for each check.

A cell is `ok`, `failed`, `n/a` (the harness cannot have it: the detail says why), `gives up` (measured: the harness
itself ends its run there, and Polar recorded it rightly) or `not run` (it could not be measured: the detail says why).
Judges look at the store, at the front's exchanges and at what reached the engine, and never guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness_adapters.base import Facts
from polar_proxy.conformance import count
from polar_proxy.conformance.bench import Run
from polar_proxy.conformance.director import Asked
from polar_proxy.conformance.profiles import Profile
from polar_proxy.conformance.scenario import FaultKind
from polar_proxy.types import Message

Status = Literal["ok", "failed", "n/a", "gives up", "not run"]


@dataclass(frozen=True, slots=True)
class Cell:
    status: Status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What a judge gets."""

    profile: Profile
    facts: Facts
    run: Run

    def asked(self, kind: str = "main") -> list[Asked]:
        return [asked for asked in self.run.director.asked if asked.kind == kind]

    def at(self, step: int, kind: str = "main") -> Asked | None:
        """The last request that asks for this step."""
        return next((asked for asked in reversed(self.asked(kind)) if asked.step == step), None)


Judge = Callable[[Case], Cell]


def _texts(asked: Asked, role: str) -> list[str]:
    return [_text(message) for message in asked.request.messages if message.role == role]


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(str(part.get("text", "")) for part in message.content or ())


def _went_wrong(run: Run) -> str:
    if not run.starts:
        return "the program was not started"
    if not run.director.asked:
        return f"the model was never asked; {run.last.detail}"
    return f"{len(run.director.asked)} requests, then: {run.last.detail}"


def tool_round_trip(case: Case) -> Cell:
    after = case.at(1)
    if after is None:
        return Cell("failed", _went_wrong(case.run))
    said = "\n".join(_texts(after, "tool") or _texts(after, "user"))
    wanted = f"{case.run.director.tag(0)} ran-42"
    return (
        Cell("ok")
        if wanted in said
        else Cell("failed", f"the next request does not hold what the command printed: {said[-300:]!r}")
    )


def parallel_calls(case: Case) -> Cell:
    after = case.at(2)
    if after is None:
        return Cell("failed", _went_wrong(case.run))
    said = "\n".join(_texts(after, "tool"))
    tag = case.run.director.tag(1)
    found = [f"{tag} ran-{number}" in said for number in (42, 43)]
    turns = [message for message in after.request.messages if message.role == "assistant" and message.tool_calls]
    calls = max((len(turn.tool_calls) for turn in turns), default=0)
    if all(found):
        return Cell("ok", "" if calls == 2 else f"sent back as {calls} call a message")
    back = _texts(after, "tool")[-2:]
    return Cell("failed", f"{sum(found)} of 2 outputs came back: {[text[-200:] for text in back]}")


def reasoning(case: Case) -> Cell:
    after = case.at(1)
    if after is None and case.run.director.scenario.second:
        after = next((asked for asked in case.asked() if asked.step > 0), None)
    if after is None:
        return Cell("failed", _went_wrong(case.run))
    thought = f"thought-{case.run.director.tag(0)}"
    kept = any(thought in (message.reasoning or "") for message in after.request.messages)
    shown = any(thought in _text(message) for message in after.request.messages)
    if kept:
        return Cell("ok", "comes back")
    return Cell("ok", "comes back as text" if shown else "the harness drops it")


def second_turn(case: Case) -> Cell:
    run = case.run
    if len(run.starts) < 2:
        return Cell("failed", _went_wrong(run))
    if run.last.outcome != "ok":
        return Cell("failed", run.last.detail)
    begun = next((asked for asked in case.asked() if "part 2" in "\n".join(_texts(asked, "user"))), None)
    if begun is None:
        return Cell("failed", "no request carries what the user said second")
    held = f"main-{run.director.nonce}, part 1" in "\n".join(_texts(begun, "user"))
    calls = [call for call in run.calls if any(b"part 2)" in message for message in call.messages)]
    edge = calls[0].edge if calls else "none"
    named = edge + (f" ({calls[0].rule})" if calls and calls[0].rule not in (None, "extends") else "")
    if not held:
        return Cell("ok" if edge == "root" else "failed", f"the first turn is not told again: {named}")
    if edge == "root" and case.profile.rebuilds:
        return Cell("ok", f"root: {case.profile.rebuilds}")
    return Cell("ok" if edge in ("continues", "rewinds", "compacts") else "failed", named)


def long_run(case: Case) -> Cell:
    run = case.run
    edges = count.edges(call for call in run.calls if call.edge != "side_call")
    wanted = len(run.director.scenario.steps)
    found = ", ".join(f"{number} {edge}" for edge, number in edges.most_common())
    whole = run.starts and run.last.outcome == "ok" and case.at(wanted - 1) is not None
    if not whole:
        return Cell("failed", f"{_went_wrong(run)} ({found})")
    masked = [call for call in run.calls if call.edge == "compacts"]
    rules = sorted({call.rule or "" for call in masked})
    good = edges["root"] == 1 and edges["root"] + edges["continues"] + len(masked) == sum(edges.values()) >= wanted
    ambiguous = sum(call.ambiguous for call in run.calls)
    told = (
        found + (f"; masked: {', '.join(rules)}" if rules else "") + (f"; {ambiguous} ambiguous" if ambiguous else "")
    )
    return Cell("ok" if good and not ambiguous else "failed", told)


def subagent(case: Case) -> Cell:
    run = case.run
    children = case.asked("child")
    if not children:
        return Cell("failed", f"no request of a sub-agent; {_went_wrong(run)}")
    named = [call for call in run.calls if call.edge == "subagent"]
    how = ", ".join(sorted({call.rule or "?" for call in named}))
    told = f"{len(children)} calls of the child; found by {how}" if named else f"{len(children)} calls of the child"
    if not named:
        return Cell("failed", f"{told}; no call has the edge `subagent`")
    return Cell("ok", told) if named[0].parent_call_id else Cell("failed", f"{told}; no parent")


def compaction(case: Case) -> Cell:
    run = case.run
    asked = case.asked("compaction")
    named = [call for call in run.calls if call.edge == "compacts"]
    how = ", ".join(sorted({call.rule or "?" for call in named}))
    if named:
        return Cell("ok", f"{len(asked)} requests for a summary; found by {how}")
    if asked:
        return Cell("failed", f"{len(asked)} requests for a summary, but no call has the edge `compacts`")
    return Cell("not run", f"a full context did not make it ask for a summary; {_went_wrong(run)}")


def fault(kind: FaultKind) -> Judge:
    """Judge of one fault of the faults scenario."""

    def judge(case: Case) -> Cell:
        run = case.run
        hit = next((asked for asked in case.asked() if asked.fault == kind), None)
        if hit is None:
            return Cell("not run", f"it did not come so far: {_went_wrong(run)}")
        same = [asked for asked in case.asked() if asked.step == hit.step]
        others = [asked for asked in case.asked() if asked.step > hit.step]
        # A retry that Polar joins to the first never reaches the engine.
        joined = count.joined(run)
        if others or run.last.outcome == "ok":
            if kind == "slow":
                more = f", asked {len(same) - 1} times more" if len(same) > 1 else ""
                return Cell("ok", f"waited {run.director.slow:g} s{more}")
            if len(same) > 1:
                return Cell("ok", f"asked again after {same[1].at - same[0].at:.1f} s")
            if joined:
                return Cell("ok", "asked again, got the recorded answer")
            return Cell("ok", "went on with what it had of the answer" if others else "ended as if all were well")
        if run.last.outcome == "timed_out":
            return Cell("not run", f"no end within {run.last.seconds:.0f} s")
        return Cell("gives up", f"ends its run: {run.last.detail}"[:200])

    return judge


def client_killed(case: Case) -> Cell:
    run = case.run
    if not run.killed:
        return Cell("not run", f"it ended before it could be killed: {_went_wrong(run)}")
    gone = [call for call in run.calls if call.status == "client_gone"]
    sampled = sum(len(choice.token_ids) for call in gone for choice in call.choices)
    if not gone:
        return Cell("failed", f"no call is recorded as client_gone: {[call.status for call in run.calls]}")
    if not sampled:
        return Cell("failed", "nothing of what was sampled is recorded")
    return Cell("ok", f"recorded as client_gone with the {sampled} tokens sampled until then")


def exit_ok(case: Case) -> Cell:
    bad = [start for start in case.run.starts if start.outcome != "ok"]
    if not case.run.starts or bad:
        return Cell("failed", bad[0].detail if bad else _went_wrong(case.run))
    return Cell("ok", f"exit {case.run.starts[0].exit_code}")


def exit_failed(case: Case) -> Cell:
    run = case.run
    tried = sum(exchange.model_call for exchange in run.exchanges)
    if not tried:
        return Cell("not run", _went_wrong(run))
    told = f"{case.profile.refusal} for ever: {tried} tries, exit {run.last.exit_code}"
    if run.last.outcome == "timed_out":
        return Cell("not run", f"{told}: still trying after {run.last.seconds:.0f} s")
    if run.last.outcome != "failed":
        return Cell("failed", f"{told}, read as {run.last.outcome}")
    return Cell("ok", told + (", read from its output" if run.last.exit_code == 0 else ""))


JUDGES: Mapping[str, tuple[str, Judge]] = {
    "tool_round_trip": ("basic", tool_round_trip),
    "parallel_calls": ("basic", parallel_calls),
    "reasoning": ("basic", reasoning),
    "second_turn": ("basic", second_turn),
    "exit_ok": ("basic", exit_ok),
    "long_run": ("long", long_run),
    "subagent": ("subagent", subagent),
    "compaction": ("compaction", compaction),
    "retry_429": ("faults", fault("429")),
    "retry_500": ("faults", fault("500")),
    "slow_first_byte": ("faults", fault("slow")),
    "dropped_stream": ("faults", fault("drop")),
    "client_killed": ("killed", client_killed),
    "exit_failed": ("refused", exit_failed),
}
"""Check -> the scenario that it is judged by, and the judge."""

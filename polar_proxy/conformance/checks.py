"""From what was seen of the runs to one cell for each check.

A cell is `ok`, `failed`, `n/a` (the harness cannot have it: the detail says why), `gives up` (measured: the harness
itself ends its run there, and Polar recorded it rightly) or `not run` (it could not be measured: the detail says why).
Judges look at the store, at the front's exchanges and at what reached the engine, and never guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness_adapters.base import HarnessInfo
from polar_proxy.conformance import count
from polar_proxy.conformance.profiles import HarnessProfile
from polar_proxy.conformance.runner import ScenarioRun
from polar_proxy.conformance.scenarios import FaultKind
from polar_proxy.conformance.scripted_model import ReceivedRequest
from polar_proxy.types import Message

Status = Literal["ok", "failed", "n/a", "gives up", "not run"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    status: Status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CheckInput:
    """What a judge gets."""

    profile: HarnessProfile
    info: HarnessInfo
    run: ScenarioRun

    def asked(self, kind: str = "main") -> list[ReceivedRequest]:
        return [asked for asked in self.run.director.asked if asked.kind == kind]

    def at(self, step: int, kind: str = "main") -> ReceivedRequest | None:
        """The last request that asks for this step."""
        return next((asked for asked in reversed(self.asked(kind)) if asked.step == step), None)


CheckFunction = Callable[[CheckInput], CheckResult]


def _texts(asked: ReceivedRequest, role: str) -> list[str]:
    return [_text(message) for message in asked.request.messages if message.role == role]


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(str(part.get("text", "")) for part in message.content or ())


def _went_wrong(run: ScenarioRun) -> str:
    if not run.starts:
        return "the program was not started"
    if not run.director.asked:
        return f"the model was never asked; {run.last.detail}"
    return f"{len(run.director.asked)} requests, then: {run.last.detail}"


def tool_round_trip(case: CheckInput) -> CheckResult:
    after = case.at(1)
    if after is None:
        return CheckResult("failed", _went_wrong(case.run))
    said = "\n".join(_texts(after, "tool") or _texts(after, "user"))
    wanted = f"{case.run.director.tag(0)} ran-42"
    return (
        CheckResult("ok")
        if wanted in said
        else CheckResult("failed", f"the next request does not hold what the command printed: {said[-300:]!r}")
    )


def parallel_calls(case: CheckInput) -> CheckResult:
    after = case.at(2)
    if after is None:
        return CheckResult("failed", _went_wrong(case.run))
    said = "\n".join(_texts(after, "tool"))
    tag = case.run.director.tag(1)
    found = [f"{tag} ran-{number}" in said for number in (42, 43)]
    turns = [message for message in after.request.messages if message.role == "assistant" and message.tool_calls]
    calls = max((len(turn.tool_calls) for turn in turns), default=0)
    if all(found):
        return CheckResult("ok", "" if calls == 2 else f"sent back as {calls} call a message")
    back = _texts(after, "tool")[-2:]
    return CheckResult("failed", f"{sum(found)} of 2 outputs came back: {[text[-200:] for text in back]}")


def reasoning(case: CheckInput) -> CheckResult:
    after = case.at(1)
    if after is None and case.run.director.scenario.second:
        after = next((asked for asked in case.asked() if asked.step > 0), None)
    if after is None:
        return CheckResult("failed", _went_wrong(case.run))
    thought = f"thought-{case.run.director.tag(0)}"
    kept = any(thought in (message.reasoning or "") for message in after.request.messages)
    shown = any(thought in _text(message) for message in after.request.messages)
    if kept:
        return CheckResult("ok", "comes back")
    return CheckResult("ok", "comes back as text" if shown else "the harness drops it")


def second_turn(case: CheckInput) -> CheckResult:
    run = case.run
    if len(run.starts) < 2:
        return CheckResult("failed", _went_wrong(run))
    if run.last.outcome != "ok":
        return CheckResult("failed", run.last.detail)
    begun = next((asked for asked in case.asked() if "part 2" in "\n".join(_texts(asked, "user"))), None)
    if begun is None:
        return CheckResult("failed", "no request carries what the user said second")
    held = f"main-{run.director.nonce}, part 1" in "\n".join(_texts(begun, "user"))
    calls = [call for call in run.calls if any(b"part 2)" in message for message in call.messages)]
    edge = calls[0].edge if calls else "none"
    named = edge + (f" ({calls[0].rule})" if calls and calls[0].rule not in (None, "extends") else "")
    if not held:
        return CheckResult("ok" if edge == "root" else "failed", f"the first turn is not told again: {named}")
    if edge == "root" and case.profile.rebuilds:
        return CheckResult("ok", f"root: {case.profile.rebuilds}")
    return CheckResult("ok" if edge in ("continues", "rewinds", "compacts") else "failed", named)


def long_run(case: CheckInput) -> CheckResult:
    run = case.run
    edges = count.edges(call for call in run.calls if call.edge != "side_call")
    wanted = len(run.director.scenario.steps)
    found = ", ".join(f"{number} {edge}" for edge, number in edges.most_common())
    whole = run.starts and run.last.outcome == "ok" and case.at(wanted - 1) is not None
    if not whole:
        return CheckResult("failed", f"{_went_wrong(run)} ({found})")
    masked = [call for call in run.calls if call.edge == "compacts"]
    rules = sorted({call.rule or "" for call in masked})
    good = edges["root"] == 1 and edges["root"] + edges["continues"] + len(masked) == sum(edges.values()) >= wanted
    ambiguous = sum(call.ambiguous for call in run.calls)
    told = (
        found + (f"; masked: {', '.join(rules)}" if rules else "") + (f"; {ambiguous} ambiguous" if ambiguous else "")
    )
    return CheckResult("ok" if good and not ambiguous else "failed", told)


def subagent(case: CheckInput) -> CheckResult:
    run = case.run
    children = case.asked("child")
    if not children:
        return CheckResult("failed", f"no request of a sub-agent; {_went_wrong(run)}")
    named = [call for call in run.calls if call.edge == "subagent"]
    how = ", ".join(sorted({call.rule or "?" for call in named}))
    told = f"{len(children)} calls of the child; found by {how}" if named else f"{len(children)} calls of the child"
    if not named:
        return CheckResult("failed", f"{told}; no call has the edge `subagent`")
    return CheckResult("ok", told) if named[0].parent_call_id else CheckResult("failed", f"{told}; no parent")


def compaction(case: CheckInput) -> CheckResult:
    run = case.run
    asked = case.asked("compaction")
    named = [call for call in run.calls if call.edge == "compacts"]
    how = ", ".join(sorted({call.rule or "?" for call in named}))
    if named:
        return CheckResult("ok", f"{len(asked)} requests for a summary; found by {how}")
    if asked:
        return CheckResult("failed", f"{len(asked)} requests for a summary, but no call has the edge `compacts`")
    return CheckResult("not run", f"a full context did not make it ask for a summary; {_went_wrong(run)}")


def fault(kind: FaultKind) -> CheckFunction:
    """Judge of one fault of the faults scenario."""

    def judge(case: CheckInput) -> CheckResult:
        run = case.run
        hit = next((asked for asked in case.asked() if asked.fault == kind), None)
        if hit is None:
            return CheckResult("not run", f"it did not come so far: {_went_wrong(run)}")
        same = [asked for asked in case.asked() if asked.step == hit.step]
        others = [asked for asked in case.asked() if asked.step > hit.step]
        # A retry that Polar joins to the first never reaches the engine.
        joined = count.joined(run)
        if others or run.last.outcome == "ok":
            if kind == "slow":
                more = f", asked {len(same) - 1} times more" if len(same) > 1 else ""
                return CheckResult("ok", f"waited {run.director.slow:g} s{more}")
            if len(same) > 1:
                return CheckResult("ok", f"asked again after {same[1].at - same[0].at:.1f} s")
            if joined:
                return CheckResult("ok", "asked again, got the recorded answer")
            return CheckResult(
                "ok", "went on with what it had of the answer" if others else "ended as if all were well"
            )
        if run.last.outcome == "timed_out":
            return CheckResult("not run", f"no end within {run.last.seconds:.0f} s")
        return CheckResult("gives up", f"ends its run: {run.last.detail}"[:200])

    return judge


def client_killed(case: CheckInput) -> CheckResult:
    run = case.run
    if not run.killed:
        return CheckResult("not run", f"it ended before it could be killed: {_went_wrong(run)}")
    gone = [call for call in run.calls if call.status == "client_gone"]
    sampled = sum(len(choice.token_ids) for call in gone for choice in call.choices)
    if not gone:
        return CheckResult("failed", f"no call is recorded as client_gone: {[call.status for call in run.calls]}")
    if not sampled:
        return CheckResult("failed", "nothing of what was sampled is recorded")
    return CheckResult("ok", f"recorded as client_gone with the {sampled} tokens sampled until then")


def exit_ok(case: CheckInput) -> CheckResult:
    bad = [start for start in case.run.starts if start.outcome != "ok"]
    if not case.run.starts or bad:
        return CheckResult("failed", bad[0].detail if bad else _went_wrong(case.run))
    return CheckResult("ok", f"exit {case.run.starts[0].exit_code}")


def exit_failed(case: CheckInput) -> CheckResult:
    run = case.run
    tried = sum(exchange.model_call for exchange in run.exchanges)
    if not tried:
        return CheckResult("not run", _went_wrong(run))
    told = f"{case.profile.refusal} for ever: {tried} tries, exit {run.last.exit_code}"
    if run.last.outcome == "timed_out":
        return CheckResult("not run", f"{told}: still trying after {run.last.seconds:.0f} s")
    if run.last.outcome != "failed":
        return CheckResult("failed", f"{told}, read as {run.last.outcome}")
    return CheckResult("ok", told + (", read from its output" if run.last.exit_code == 0 else ""))


SCENARIO_CHECKS: Mapping[str, tuple[str, CheckFunction]] = {
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

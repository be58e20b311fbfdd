"""The checks: one result for each, computed from the runs of a harness.

A result is `ok`, `failed`, `n/a` (it does not apply to the harness; the detail says why), `gives up` (measured: the
harness itself ends its run there, and Polar recorded that correctly) or `not run` (it could not be measured; the detail
says why). Checks use the store, the exchanges of the recording proxy and the requests that reached the engine, and
never guess.

Two counts run over all scenarios:

* *lost*: a model answer with status 200 whose last byte was handed to the agent's socket, and whose call is not in the
  store. Both halves are seen from outside the pipeline: the answer at the proxy's sockets, the call in the database.
* *doubled*: an answered call (`ok`, `no_tokens`) with the same canonical request as an earlier one of its session,
  unless its edge is `retries`. Requests are the same if they have the same messages and tools, as JSON with sorted keys
  and without cache marks, or the same stored fingerprint. (A retry that was joined to the first call is not recorded as
  a separate call.)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from polar_proxy.conformance.profiles import HarnessProfile
from polar_proxy.conformance.runner import ScenarioRun
from polar_proxy.conformance.scripted_model import FaultKind, ReceivedRequest
from polar_proxy.types import CallRecord, Message

CheckStatus = Literal["ok", "failed", "n/a", "gives up", "not run"]
_ANSWERED = ("ok", "no_tokens")


@dataclass(frozen=True, slots=True)
class CheckResult:
    status: CheckStatus
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CheckInput:
    """One run of a harness, and its profile."""

    profile: HarnessProfile
    run: ScenarioRun

    def requests(self, kind: str = "main") -> list[ReceivedRequest]:
        return [request for request in self.run.model.requests if request.kind == kind]

    def last_request(self, step: int) -> ReceivedRequest | None:
        """Return the last request of the main conversation that asks for this step."""
        return next((request for request in reversed(self.requests()) if request.step == step), None)


CheckFunction = Callable[[CheckInput], CheckResult]


def tool_round_trip(case: CheckInput) -> CheckResult:
    after = case.last_request(1)
    if after is None:
        return CheckResult("failed", _describe_end(case.run))
    results = "\n".join(_texts(after, "tool") or _texts(after, "user"))
    if f"{case.run.model.tag(0)} ran-42" in results:
        return CheckResult("ok")
    return CheckResult("failed", f"the next request does not contain what the command printed: {results[-300:]!r}")


def parallel_calls(case: CheckInput) -> CheckResult:
    after = case.last_request(2)
    if after is None:
        return CheckResult("failed", _describe_end(case.run))
    results = _texts(after, "tool")
    tag = case.run.model.tag(1)
    found = [f"{tag} ran-{number}" in "\n".join(results) for number in (42, 43)]
    turns = [message for message in after.request.messages if message.role == "assistant" and message.tool_calls]
    calls = max((len(turn.tool_calls) for turn in turns), default=0)
    if all(found):
        return CheckResult("ok", "" if calls == 2 else f"sent back as {calls} call a message")
    return CheckResult("failed", f"{sum(found)} of 2 outputs came back: {[text[-200:] for text in results[-2:]]}")


def reasoning(case: CheckInput) -> CheckResult:
    after = case.last_request(1)
    if after is None and case.run.model.scenario.second:
        after = next((request for request in case.requests() if request.step > 0), None)
    if after is None:
        return CheckResult("failed", _describe_end(case.run))
    thought = f"thought-{case.run.model.tag(0)}"
    kept = any(thought in (message.reasoning or "") for message in after.request.messages)
    shown = any(thought in _text(message) for message in after.request.messages)
    if kept:
        return CheckResult("ok", "comes back")
    return CheckResult("ok", "comes back as text" if shown else "the harness drops it")


def second_turn(case: CheckInput) -> CheckResult:
    run = case.run
    if len(run.starts) < 2:
        return CheckResult("failed", _describe_end(run))
    if run.last.outcome != "ok":
        return CheckResult("failed", run.last.detail)
    first = next((request for request in case.requests() if "part 2" in "\n".join(_texts(request, "user"))), None)
    if first is None:
        return CheckResult("failed", "no request carries the user's second text")
    has_first_turn = f"main-{run.model.nonce}, part 1" in "\n".join(_texts(first, "user"))
    calls = [call for call in run.calls if any(b"part 2)" in message for message in call.messages)]
    edge = calls[0].edge if calls else "none"
    found = edge + (f" ({calls[0].rule})" if calls and calls[0].rule not in (None, "extends") else "")
    if not has_first_turn:
        return CheckResult("ok" if edge == "root" else "failed", f"the first turn is not sent again: {found}")
    if edge == "root" and case.profile.rebuilds_history:
        return CheckResult("ok", f"root: {case.profile.rebuilds_history}")
    return CheckResult("ok" if edge in ("continues", "rewinds", "compacts") else "failed", found)


def long_run(case: CheckInput) -> CheckResult:
    run = case.run
    edges = edge_counts(call for call in run.calls if call.edge != "side_call")
    wanted = len(run.model.scenario.steps)
    found = ", ".join(f"{number} {edge}" for edge, number in edges.most_common())
    if not run.starts or run.last.outcome != "ok" or case.last_request(wanted - 1) is None:
        return CheckResult("failed", f"{_describe_end(run)} ({found})")
    masked = [call for call in run.calls if call.edge == "compacts"]
    rules = sorted({call.rule or "" for call in masked})
    joined = edges["root"] + edges["continues"] + len(masked)
    good = edges["root"] == 1 and joined == sum(edges.values()) >= wanted
    ambiguous = sum(call.ambiguous for call in run.calls)
    found += f"; masked: {', '.join(rules)}" if rules else ""
    found += f"; {ambiguous} ambiguous" if ambiguous else ""
    return CheckResult("ok" if good and not ambiguous else "failed", found)


def subagent(case: CheckInput) -> CheckResult:
    run = case.run
    requests = case.requests("subagent")
    if not requests:
        return CheckResult("failed", f"no request of a sub-agent; {_describe_end(run)}")
    calls = [call for call in run.calls if call.edge == "subagent"]
    count = f"{len(requests)} calls of the sub-agent"
    if not calls:
        return CheckResult("failed", f"{count}; no call has the edge `subagent`")
    found = f"{count}; found by {_rules(calls)}"
    return CheckResult("ok", found) if calls[0].parent_call_id else CheckResult("failed", f"{found}; no parent")


def compaction(case: CheckInput) -> CheckResult:
    requests = case.requests("compaction")
    calls = [call for call in case.run.calls if call.edge == "compacts"]
    if calls:
        return CheckResult("ok", f"{len(requests)} requests for a summary; found by {_rules(calls)}")
    if requests:
        return CheckResult("failed", f"{len(requests)} requests for a summary, but no call has the edge `compacts`")
    return CheckResult("not run", f"a full context did not make it ask for a summary; {_describe_end(case.run)}")


def fault(kind: FaultKind) -> CheckFunction:
    """Return the check of one fault of the faults scenario."""

    def check(case: CheckInput) -> CheckResult:
        run = case.run
        hit = next((request for request in case.requests() if request.fault == kind), None)
        if hit is None:
            return CheckResult("not run", f"the run ended before it: {_describe_end(run)}")
        same = [request for request in case.requests() if request.step == hit.step]
        later = [request for request in case.requests() if request.step > hit.step]
        if later or run.last.outcome == "ok":
            if kind == "slow":
                more = f", asked {len(same) - 1} times more" if len(same) > 1 else ""
                return CheckResult("ok", f"waited {run.model.slow:g} s{more}")
            if len(same) > 1:
                return CheckResult("ok", f"asked again after {same[1].at - same[0].at:.1f} s")
            if joined_retries(run):  # a retry that Polar joins to the first call does not reach the engine
                return CheckResult("ok", "asked again, got the recorded answer")
            return CheckResult("ok", "continued with the part it had" if later else "ended as after a good answer")
        if run.last.outcome == "timed_out":
            return CheckResult("not run", f"no end within {run.last.seconds:.0f} s")
        return CheckResult("gives up", f"ends its run: {run.last.detail}"[:200])

    return check


def client_killed(case: CheckInput) -> CheckResult:
    run = case.run
    if not run.killed:
        return CheckResult("not run", f"it ended before it could be killed: {_describe_end(run)}")
    gone = [call for call in run.calls if call.status == "client_gone"]
    sampled = sum(len(choice.token_ids) for call in gone for choice in call.choices)
    if not gone:
        return CheckResult("failed", f"no call is recorded as client_gone: {[call.status for call in run.calls]}")
    if not sampled:
        return CheckResult("failed", "none of the sampled tokens is recorded")
    return CheckResult("ok", f"recorded as client_gone with the {sampled} tokens sampled until then")


def exit_ok(case: CheckInput) -> CheckResult:
    bad = [start for start in case.run.starts if start.outcome != "ok"]
    if not case.run.starts or bad:
        return CheckResult("failed", bad[0].detail if bad else _describe_end(case.run))
    return CheckResult("ok", f"exit {case.run.starts[0].exit_code}")


def exit_failed(case: CheckInput) -> CheckResult:
    run = case.run
    attempts = sum(exchange.model_call for exchange in run.exchanges)
    if not attempts:
        return CheckResult("not run", _describe_end(run))
    found = f"{case.profile.refusal_status} every time: {attempts} attempts, exit {run.last.exit_code}"
    if run.last.outcome == "timed_out":
        return CheckResult("not run", f"{found}: still trying after {run.last.seconds:.0f} s")
    if run.last.outcome != "failed":
        return CheckResult("failed", f"{found}, read as {run.last.outcome}")
    return CheckResult("ok", found + (", read from its output" if run.last.exit_code == 0 else ""))


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
"""Name of a check -> the scenario that it needs, and its function."""


def lost(run: ScenarioRun) -> int:
    """Count the lost calls of a run."""
    stored = {call.call_id for call in run.calls}
    return sum(
        exchange.model_call and exchange.complete and exchange.status == 200 and exchange.call_id not in stored
        for exchange in run.exchanges
    )


def doubled(calls: Sequence[CallRecord]) -> int:
    """Count the doubled calls of one session."""
    found = 0
    seen: set[object] = set()
    for call in calls:
        if call.status not in _ANSWERED:
            continue
        tools = hashlib.sha256(call.tools or b"").digest()
        names: list[object] = [_request_hash(call)]
        if call.fingerprint and call.fingerprint.get("asked"):
            names.append(
                (call.fingerprint["asked"], call.fingerprint.get("ids"), call.fingerprint.get("thread"), tools)
            )
        if call.edge != "retries" and any(name in seen for name in names):
            found += 1
        seen.update(names)
    return found


def sent_before_recorded(run: ScenarioRun) -> int:
    """Count answers whose last byte was sent to the agent before their call was committed."""
    return sum(
        exchange.model_call and exchange.complete and exchange.status == 200 and not exchange.committed_first
        for exchange in run.exchanges
    )


def without_evidence(calls: Iterable[CallRecord]) -> int:
    """Count answered calls without prompt ids, or without one log-probability for each id of every answer."""
    return sum(
        call.status in _ANSWERED
        and (
            call.status == "no_tokens"
            or call.prompt_ids is None
            or not call.choices
            or any(not 0 < len(choice.token_ids) == len(choice.logprobs) for choice in call.choices)
        )
        for call in calls
    )


def refused(run: ScenarioRun) -> Counter[str]:
    """Count model requests that Polar itself answered with an error (so they have no call), by status and path."""
    return Counter(
        f"{exchange.status} {exchange.path.partition('?')[0]}"
        for exchange in run.exchanges
        if exchange.model_call and exchange.complete and exchange.status >= 400 and exchange.call_id is None
    )


def edge_counts(calls: Iterable[CallRecord]) -> Counter[str]:
    return Counter(call.edge for call in calls)


def joined_retries(run: ScenarioRun) -> int:
    """Count model requests that were answered with the call of an earlier request."""
    answered = [exchange.call_id for exchange in run.exchanges if exchange.model_call and exchange.call_id is not None]
    return len(answered) - len(set(answered))


def _request_hash(call: CallRecord) -> bytes:
    """Return a hash of a call's messages and tools."""
    digest = hashlib.sha256()
    for message in call.messages:
        digest.update(orjson.dumps(_without_cache_marks(orjson.loads(message)), option=orjson.OPT_SORT_KEYS))
    digest.update(call.tools or b"")
    return digest.digest()


def _without_cache_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_cache_marks(item) for key, item in value.items() if key != "cache_control"}
    return [_without_cache_marks(item) for item in value] if isinstance(value, list) else value


def _texts(received: ReceivedRequest, role: str) -> list[str]:
    return [_text(message) for message in received.request.messages if message.role == role]


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(str(part.get("text", "")) for part in message.content or ())


def _rules(calls: Sequence[CallRecord]) -> str:
    return ", ".join(sorted({call.rule or "?" for call in calls}))


def _describe_end(run: ScenarioRun) -> str:
    """Return how far a run came and how it ended."""
    if not run.starts:
        return "the program was not started"
    if not run.model.requests:
        return f"the model received no request; {run.last.detail}"
    return f"{len(run.model.requests)} requests, then: {run.last.detail}"

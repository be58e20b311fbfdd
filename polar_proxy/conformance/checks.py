"""The conformance checks. Each check computes one result from the runs of a harness.

A result is `ok`, `failed`, `n/a` (the check does not apply to the harness; the detail says why), `gives up` (after the
scenario's fault the harness ended its run by itself) or `not run` (nothing could be measured; the detail says why).
Checks use the store, the exchanges of the recording proxy and the requests that reached the engine, and never guess.

Two of the checks that count over all scenarios, in detail:

* *lost*: a model answer with status 200 whose last byte was handed to the agent's socket, and whose call is not in the
  store. Polar's own pipeline is not trusted for this: the answer is observed at the recording proxy's sockets, and the
  call is looked up in the database.
* *doubled*: an answered call (`types.ANSWERED`) with the same request as an earlier answered call of the same run. A
  call that is recorded as a retry (edge `retries`) does not count. Two requests are the same if they have the same
  tools, and also either the same messages (as JSON with sorted keys, without cache marks) or the same stored
  fingerprint. (A retry that was joined to the first call is not recorded as a separate call.)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import orjson

from polar_proxy.conformance.recording_proxy import Exchange
from polar_proxy.conformance.runner import ScenarioRun
from polar_proxy.conformance.scripted_model import FaultKind, ReceivedRequest
from polar_proxy.types import ANSWERED, CallRecord, Message

CheckStatus = Literal["ok", "failed", "n/a", "gives up", "not run"]
F = TypeVar("F", bound="Callable[..., CheckResult]")


@dataclass(frozen=True, slots=True)
class CheckResult:
    status: CheckStatus
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """A check. `function` takes one run of `scenario`. If `scenario` is None, `function` takes the runs of all
    scenarios."""

    scenario: str | None
    title: str
    meaning: str
    function: Callable[..., CheckResult]


CHECKS: dict[str, ConformanceCheck] = {}
"""All checks by name."""


def _check(scenario: str | None, title: str, meaning: str) -> Callable[[F], F]:
    """Add the decorated function to CHECKS, under the function's name."""

    def register(function: F) -> F:
        CHECKS[function.__name__] = ConformanceCheck(scenario, title, meaning, function)
        return function

    return register


@_check("basic", "tool call", "the next request contains the output of a command that was really run")
def tool_round_trip(run: ScenarioRun) -> CheckResult:
    after = run.last_request(1)
    if after is None:
        return CheckResult("failed", _describe_end(run))
    results = "\n".join(_texts(after, "tool") or _texts(after, "user"))
    if f"{run.model.tag(0)} ran-42" in results:
        return CheckResult("ok")
    return CheckResult("failed", f"the next request does not contain what the command printed: {results[-300:]!r}")


@_check(
    "basic",
    "parallel calls",
    "two tool calls of one answer are both run, and both outputs are in the next request",
)
def parallel_calls(run: ScenarioRun) -> CheckResult:
    after = run.last_request(2)
    if after is None:
        return CheckResult("failed", _describe_end(run))
    results = _texts(after, "tool")
    tag = run.model.tag(1)
    found = [f"{tag} ran-{number}" in "\n".join(results) for number in (42, 43)]
    turns = [message for message in after.request.messages if message.role == "assistant" and message.tool_calls]
    calls = max((len(turn.tool_calls) for turn in turns), default=0)
    if all(found):
        return CheckResult("ok", "" if calls == 2 else f"sent back as {calls} call a message")
    return CheckResult("failed", f"{sum(found)} of 2 outputs came back: {[text[-200:] for text in results[-2:]]}")


@_check("basic", "reasoning", "whether the reasoning of one answer is in the messages of the next request")
def reasoning(run: ScenarioRun) -> CheckResult:
    after = run.last_request(1)
    if after is None and run.model.scenario.second:
        after = next((request for request in run.requests() if request.step > 0), None)
    if after is None:
        return CheckResult("failed", _describe_end(run))
    thought = f"thought-{run.model.tag(0)}"
    kept = any(thought in (message.reasoning or "") for message in after.request.messages)
    shown = any(thought in _text(message) for message in after.request.messages)
    if kept:
        return CheckResult("ok", "comes back")
    return CheckResult("ok", "comes back as text" if shown else "the harness drops it")


@_check(
    "basic",
    "second turn",
    "the program is started again to continue; its first request is joined to the first turn",
)
def second_turn(run: ScenarioRun) -> CheckResult:
    if len(run.starts) < 2:
        return CheckResult("failed", _describe_end(run))
    if run.last.outcome != "ok":
        return CheckResult("failed", run.last.detail)
    first = next((request for request in run.requests() if "part 2" in "\n".join(_texts(request, "user"))), None)
    if first is None:
        return CheckResult("failed", "no request carries the user's second text")
    has_first_turn = f"main-{run.model.nonce}, part 1" in "\n".join(_texts(first, "user"))
    calls = [call for call in run.calls if any(b"part 2)" in message for message in call.messages)]
    edge = calls[0].edge if calls else "none"
    found = edge + (f" ({calls[0].rule})" if calls and calls[0].rule not in (None, "extends") else "")
    if not has_first_turn:
        return CheckResult("ok" if edge == "root" else "failed", f"the first turn is not sent again: {found}")
    if edge == "root" and run.model.profile.rebuilds_history:
        return CheckResult("ok", f"root: {run.model.profile.rebuilds_history}")
    return CheckResult("ok" if edge in ("continues", "rewinds", "compacts") else "failed", found)


@_check("basic", "exit, good run", "a run that succeeds counts as successful")
def exit_ok(run: ScenarioRun) -> CheckResult:
    bad = [start for start in run.starts if start.outcome != "ok"]
    if not run.starts or bad:
        return CheckResult("failed", bad[0].detail if bad else _describe_end(run))
    return CheckResult("ok", f"exit {run.starts[0].exit_code}")


@_check("long", "26 turns", "26 model calls in a row: one `root`, all others `continues`, none of them ambiguous")
def long_run(run: ScenarioRun) -> CheckResult:
    edges = edge_counts(call for call in run.calls if call.edge != "side_call")
    wanted = len(run.model.scenario.steps)
    found = ", ".join(f"{number} {edge}" for edge, number in edges.most_common())
    if not run.starts or run.last.outcome != "ok" or run.last_request(wanted - 1) is None:
        return CheckResult("failed", f"{_describe_end(run)} ({found})")
    masked = [call for call in run.calls if call.edge == "compacts"]
    rules = sorted({call.rule or "" for call in masked})
    joined = edges["root"] + edges["continues"] + len(masked)
    good = edges["root"] == 1 and joined == sum(edges.values()) >= wanted
    ambiguous = sum(call.ambiguous for call in run.calls)
    found += f"; masked: {', '.join(rules)}" if rules else ""
    found += f"; {ambiguous} ambiguous" if ambiguous else ""
    return CheckResult("ok" if good and not ambiguous else "failed", found)


@_check("subagent", "sub-agent", "the calls of a sub-agent have the edge `subagent` and a parent")
def subagent(run: ScenarioRun) -> CheckResult:
    requests = run.requests("subagent")
    if not requests:
        return CheckResult("failed", f"no request of a sub-agent; {_describe_end(run)}")
    calls = [call for call in run.calls if call.edge == "subagent"]
    count = f"{len(requests)} calls of the sub-agent"
    if not calls:
        return CheckResult("failed", f"{count}; no call has the edge `subagent`")
    found = f"{count}; found by {_rules(calls)}"
    return CheckResult("ok", found) if calls[0].parent_call_id else CheckResult("failed", f"{found}; no parent")


@_check(
    "compaction",
    "compaction",
    "the context is reported as full; the conversation after the summary has the edge `compacts`",
)
def compaction(run: ScenarioRun) -> CheckResult:
    requests = run.requests("compaction")
    calls = [call for call in run.calls if call.edge == "compacts"]
    if calls:
        return CheckResult("ok", f"{len(requests)} requests for a summary; found by {_rules(calls)}")
    if requests:
        return CheckResult("failed", f"{len(requests)} requests for a summary, but no call has the edge `compacts`")
    return CheckResult("not run", f"a full context did not make it ask for a summary; {_describe_end(run)}")


@_check("faults", "429", "one 429 (with `retry-after`)")
def retry_429(run: ScenarioRun) -> CheckResult:
    return _after_fault(run, "429")


@_check("faults", "500", "one 500")
def retry_500(run: ScenarioRun) -> CheckResult:
    return _after_fault(run, "500")


@_check("faults", "slow first byte", "the first token takes long")
def slow_first_byte(run: ScenarioRun) -> CheckResult:
    return _after_fault(run, "slow")


@_check("faults", "dropped stream", "the connection is reset after some bytes of the answer")
def dropped_stream(run: ScenarioRun) -> CheckResult:
    return _after_fault(run, "drop")


def _after_fault(run: ScenarioRun, kind: FaultKind) -> CheckResult:
    hit = next((request for request in run.requests() if request.fault == kind), None)
    if hit is None:
        return CheckResult("not run", f"the run ended before it: {_describe_end(run)}")
    same = [request for request in run.requests() if request.step == hit.step]
    later = any(request.step > hit.step for request in run.requests())
    if not later and run.last.outcome == "timed_out":
        return CheckResult("not run", f"no end within {run.last.seconds:.0f} s")
    if not later and run.last.outcome != "ok":
        return CheckResult("gives up", f"ends its run: {run.last.detail}"[:200])
    if kind == "slow":
        more = f", asked {len(same) - 1} times more" if len(same) > 1 else ""
        return CheckResult("ok", f"waited {run.model.slow:g} s{more}")
    if len(same) > 1:
        return CheckResult("ok", f"asked again after {same[1].at - same[0].at:.1f} s")
    if joined_retries(run):  # a retry that Polar joins to the first call does not reach the engine
        return CheckResult("ok", "asked again, got the recorded answer")
    return CheckResult("ok", "continued with the part it had" if later else "ended as after a good answer")


@_check(
    "killed",
    "client killed",
    "the program is killed in the middle of an answer; the sampled tokens are kept as `client_gone`",
)
def client_killed(run: ScenarioRun) -> CheckResult:
    if not run.killed:
        return CheckResult("not run", f"it ended before it could be killed: {_describe_end(run)}")
    gone = [call for call in run.calls if call.status == "client_gone"]
    sampled = sum(len(choice.token_ids) for call in gone for choice in call.choices)
    if not gone:
        return CheckResult("failed", f"no call is recorded as client_gone: {[call.status for call in run.calls]}")
    if not sampled:
        return CheckResult("failed", "none of the sampled tokens is recorded")
    return CheckResult("ok", f"recorded as client_gone with the {sampled} tokens sampled until then")


@_check(
    "refused",
    "exit, bad run",
    "a run whose every request is refused counts as failed, whatever its exit status is",
)
def exit_failed(run: ScenarioRun) -> CheckResult:
    attempts = sum(exchange.model_call for exchange in run.exchanges)
    if not attempts:
        return CheckResult("not run", _describe_end(run))
    found = f"{run.model.profile.refusal_status} every time: {attempts} attempts, exit {run.last.exit_code}"
    if run.last.outcome == "timed_out":
        return CheckResult("not run", f"{found}: still trying after {run.last.seconds:.0f} s")
    if run.last.outcome != "failed":
        return CheckResult("failed", f"{found}, read as {run.last.outcome}")
    return CheckResult("ok", found + (", read from its output" if run.last.exit_code == 0 else ""))


# Counted over all scenarios


@_check(
    None,
    "ids and log-probabilities",
    "every answered call has its prompt's ids, and an id and a log-probability for each sampled token",
)
def evidence(runs: Sequence[ScenarioRun]) -> CheckResult:
    found = sum(_without_evidence(call) for run in runs for call in run.calls)
    return _none_of(found, "answered calls without an id and a log-probability for every token")


@_check(None, "recorded before sent", "when the last byte of an answer was handed on, its call was committed")
def recorded_first(runs: Sequence[ScenarioRun]) -> CheckResult:
    found = sum(not exchange.committed_first for exchange in _answers(runs))
    return _none_of(found, "answers that were sent before they were recorded")


@_check(None, "refused requests", "no request of the program was refused by Polar itself (4xx without a call)")
def refused(runs: Sequence[ScenarioRun]) -> CheckResult:
    found = Counter(
        f"{exchange.status} {exchange.path.partition('?')[0]}"
        for run in runs
        for exchange in run.exchanges
        if exchange.model_call and exchange.complete and exchange.status >= 400 and exchange.call_id is None
    )
    return _none_of(found.total(), "; ".join(f"{number} x {what}" for what, number in found.items()))


@_check(None, "lost", "see above")
def lost(runs: Sequence[ScenarioRun]) -> CheckResult:
    answers = sum(exchange.model_call and exchange.complete for run in runs for exchange in run.exchanges)
    return _none_of(count_lost(runs), f"of {answers} whole answers")


@_check(None, "doubled", "see above")
def doubled(runs: Sequence[ScenarioRun]) -> CheckResult:
    return _none_of(count_doubled(runs), f"of {sum(len(run.calls) for run in runs)} calls")


def _none_of(found: int, what: str) -> CheckResult:
    return CheckResult("failed" if found else "ok", f"{found} {what}".strip())


def count_lost(runs: Sequence[ScenarioRun]) -> int:
    stored = {call.call_id for run in runs for call in run.calls}
    return sum(exchange.call_id not in stored for exchange in _answers(runs))


def count_doubled(runs: Sequence[ScenarioRun]) -> int:
    found = 0
    for run in runs:
        seen: set[object] = set()
        for call in run.calls:
            if call.status not in ANSWERED:
                continue
            names = _request_names(call)
            found += call.edge != "retries" and not seen.isdisjoint(names)
            seen.update(names)
    return found


def _answers(runs: Sequence[ScenarioRun]) -> list[Exchange]:
    """Return the model answers with status 200 that the proxy passed on to the agent completely."""
    exchanges = [exchange for run in runs for exchange in run.exchanges]
    return [one for one in exchanges if one.model_call and one.complete and one.status == 200]


def _without_evidence(call: CallRecord) -> bool:
    """Return whether an answered call lacks prompt ids, sampled ids, or the log-probability of a sampled id."""
    if call.status == "ok":
        uneven = any(not 0 < len(choice.token_ids) == len(choice.logprobs) for choice in call.choices)
        return call.prompt_ids is None or not call.choices or uneven
    return call.status == "no_tokens"


def edge_counts(calls: Iterable[CallRecord]) -> Counter[str]:
    return Counter(call.edge for call in calls)


def joined_retries(run: ScenarioRun) -> int:
    """Return how many model requests were retries that got the answer of an earlier request."""
    answered = [exchange.call_id for exchange in run.exchanges if exchange.model_call and exchange.call_id is not None]
    return len(answered) - len(set(answered))


def _request_names(call: CallRecord) -> list[object]:
    """Return one or two values that identify the call's request. If two calls share a value, their requests are the
    same. The first value is a hash of the call's messages and tools. If the call has a fingerprint, the second value
    is the fingerprint with the tools."""
    digest = hashlib.sha256()
    for message in call.messages:
        digest.update(orjson.dumps(_without_cache_marks(orjson.loads(message)), option=orjson.OPT_SORT_KEYS))
    digest.update(call.tools or b"")
    stored = call.fingerprint or {}
    if not stored.get("asked"):
        return [digest.digest()]
    return [digest.digest(), (stored["asked"], stored.get("ids"), stored.get("thread"), call.tools)]


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

"""Lost and doubled calls, and what else must hold for every call of every scenario.

*lost*: a model answer with status 200 whose last byte was handed to the agent's socket, and whose call is not in the
store. Both halves are seen from outside the pipeline: the answer at the front's sockets, the call in the database.

*doubled*: a call that answers one agent turn a second time without saying so. Two answered calls (`ok`, `no_tokens`) of
one session have the same canonical request: the same messages and the same tools, compared as JSON with sorted keys
after cache marks are taken out, or the same fingerprint, which is stored with a call and says what it means. The second
is doubled unless its edge is `retries`. (A retry that was joined to the first has no call of its own, so it is not
doubled either.)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from polar_proxy.conformance.runner import ScenarioRun
from polar_proxy.types import CallRecord

_ANSWERED = ("ok", "no_tokens")


def lost(run: ScenarioRun) -> int:
    """How many calls of this run were lost."""
    stored = {call.call_id for call in run.calls}
    return sum(
        exchange.model_call and exchange.complete and exchange.status == 200 and exchange.call_id not in stored
        for exchange in run.exchanges
    )


def doubled(calls: Sequence[CallRecord]) -> int:
    """How many of these calls of one session are doubled."""
    found = 0
    seen: set[object] = set()
    for call in calls:
        if call.status not in _ANSWERED:
            continue
        tools = hashlib.sha256(call.tools or b"").digest()
        names: list[object] = [canonical(call)]
        if call.fingerprint and call.fingerprint.get("asked"):
            names.append(
                (call.fingerprint["asked"], call.fingerprint.get("ids"), call.fingerprint.get("thread"), tools)
            )
        if call.edge != "retries" and any(name in seen for name in names):
            found += 1
        seen.update(names)
    return found


def canonical(call: CallRecord) -> bytes:
    """Digest of what a call asks for: messages and tools."""
    digest = hashlib.sha256()
    for message in call.messages:
        digest.update(orjson.dumps(_without_marks(orjson.loads(message)), option=orjson.OPT_SORT_KEYS))
    digest.update(call.tools or b"")
    return digest.digest()


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_marks(item) for key, item in value.items() if key != "cache_control"}
    return [_without_marks(item) for item in value] if isinstance(value, list) else value


def told_before_recorded(run: ScenarioRun) -> int:
    """Answers whose last byte was handed on before their call was committed."""
    return sum(
        exchange.model_call and exchange.complete and exchange.status == 200 and not exchange.committed_first
        for exchange in run.exchanges
    )


def without_evidence(calls: Iterable[CallRecord]) -> int:
    """Answered calls without prompt ids, or with an answer whose ids and log-probabilities are not one for each."""
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
    """Model requests that Polar itself answered with an error (no call was made of them), by status and path."""
    return Counter(
        f"{exchange.status} {exchange.path.partition('?')[0]}"
        for exchange in run.exchanges
        if exchange.model_call and exchange.complete and exchange.status >= 400 and exchange.call_id is None
    )


def edges(calls: Iterable[CallRecord]) -> Counter[str]:
    return Counter(call.edge for call in calls)


def joined(run: ScenarioRun) -> int:
    """Model requests that were answered with a call that had answered an earlier one."""
    answered = [exchange.call_id for exchange in run.exchanges if exchange.model_call and exchange.call_id is not None]
    return len(answered) - len(set(answered))

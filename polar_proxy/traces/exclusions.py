"""Which recorded calls cannot be trained on, each with one machine-readable reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polar_proxy.types import CallRecord, Logprobs

MISSING_LOGPROB = -9000.0
"""Engines write -9999 where they have no log-probability; nothing at or below this is evidence of a sample."""


def excluded_calls(calls: Sequence[CallRecord]) -> dict[str, str]:
    """call id -> why it cannot be trained on, for all calls of a session that cannot."""
    excluded = {call.call_id: reason for call in calls if (reason := exclusion_reason(call)) is not None}
    for call_id in _superseded(calls, excluded):
        excluded[call_id] = "retry_of"
    return excluded


def exclusion_reason(call: CallRecord) -> str | None:
    """Why this call by itself cannot be trained on, or None."""
    if call.status != "ok":
        return call.status
    if call.edge == "side_call":
        return "side_call"
    sampled = [(len(choice.token_ids), len(choice.logprobs)) for choice in call.choices]
    if call.prompt_ids is None or not sampled or any(tokens == 0 or tokens != values for tokens, values in sampled):
        return "no_tokens"
    if not all(_reported(choice.logprobs) for choice in call.choices):
        return "no_logprobs"
    if _constrained(call):
        return "constrained"
    return None


def in_start_order(calls: Sequence[CallRecord]) -> list[CallRecord]:
    """As they started."""
    return sorted(calls, key=lambda call: (call.started_at, call.call_id))


def _superseded(calls: Sequence[CallRecord], excluded: Mapping[str, str]) -> list[str]:
    """Answers to a request that was answered once more: of all attempts the agent went on from one.

    That one is the attempt that later calls refer to, or the last where none does."""
    first: dict[str, str] = {}
    attempts: dict[str, list[str]] = {}
    referred = {call.parent_call_id for call in calls if call.edge != "retries"}
    for call in in_start_order(calls):
        parent = call.parent_call_id if call.edge == "retries" else None
        origin = first.get(parent, parent) if parent is not None else call.call_id
        first[call.call_id] = origin
        attempts.setdefault(origin, []).append(call.call_id)
    superseded: list[str] = []
    for group in attempts.values():
        usable = [call_id for call_id in group if call_id not in excluded]
        kept = {call_id for call_id in usable if call_id in referred} or set(usable[-1:])
        superseded += [call_id for call_id in usable if call_id not in kept]
    return superseded


def _reported(logprobs: Logprobs) -> bool:
    """All are numbers that an engine means. float32 [n], n > 0."""
    return bool(logprobs.min() > MISSING_LOGPROB and logprobs.max() < np.inf)  # a NaN is in both, and passes neither


def _constrained(call: CallRecord) -> bool:
    """Sampled under a grammar: the tokens were not the policy's own choice."""
    if (recorded := call.sampling.get("constrained")) is not None:
        return bool(recorded)
    # What Chat Completions asked for, before it was recorded whether it was enforced.
    form = call.params.get("response_format")
    choice = call.params.get("tool_choice")
    forced = choice == "required" or isinstance(choice, dict)
    return forced or (isinstance(form, dict) and form.get("type") not in (None, "text"))

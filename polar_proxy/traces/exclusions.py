"""Exclusions: calls that cannot be trained on, each with one machine-readable reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polar_proxy.sequences import MISSING_LOGPROB
from polar_proxy.types import CallRecord, Logprobs


def excluded_calls(calls: Sequence[CallRecord]) -> dict[str, str]:
    """Return call id -> reason for all calls of a session that cannot be trained on."""
    excluded = {call.call_id: reason for call in calls if (reason := exclusion_reason(call)) is not None}
    for call_id in _superseded_attempts(calls, excluded):
        excluded[call_id] = "retry_of"
    return excluded


def exclusion_reason(call: CallRecord) -> str | None:
    """Return why this call by itself cannot be trained on, or None."""
    if call.status != "ok":
        return call.status
    if call.edge == "side_call":
        return "side_call"
    sampled = [(len(choice.token_ids), len(choice.logprobs)) for choice in call.choices]
    if call.prompt_ids is None or not sampled or any(tokens == 0 or tokens != values for tokens, values in sampled):
        return "no_tokens"
    if not all(_all_reported(choice.logprobs) for choice in call.choices):
        return "no_logprobs"
    if call.sampling.get("constrained"):
        return "constrained"  # a grammar limited the sampling: the tokens were not the policy's own choice
    return None


def in_start_order(calls: Sequence[CallRecord]) -> list[CallRecord]:
    return sorted(calls, key=lambda call: (call.started_at, call.call_id))


def _superseded_attempts(calls: Sequence[CallRecord], excluded: Mapping[str, str]) -> list[str]:
    """Return the answered attempts at a request that the agent did not continue.

    The agent used one attempt at each request: the attempt to which later calls refer, or else the last one.
    """
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


def _all_reported(logprobs: Logprobs) -> bool:
    """Return whether all values are real log-probabilities. float32 [n], n > 0."""
    # A NaN makes both the minimum and the maximum NaN, and fails both comparisons.
    return bool(logprobs.min() > MISSING_LOGPROB and logprobs.max() < np.inf)

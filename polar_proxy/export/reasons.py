"""Explanations of the reasons for which an export leaves out calls, traces and rows."""

from __future__ import annotations

from collections.abc import Mapping

CALLS: Mapping[str, str] = {
    "client_gone": "calls whose agent disconnected before the answer ended",
    "upstream_error": "calls that the engine failed to answer",
    "no_tokens": "calls whose engine returned no token ids; `polar rescore` gives them tokens of another engine",
    "budget": "calls that Polar answered itself, because the session's budget was spent",
    "no_logprobs": "calls with tokens whose log-probabilities the engine did not report",
    "images": "calls with images, which their token ids do not contain",
    "constrained": "calls whose answer a grammar limited, so that it is not a free sample of the model",
    "provider_tools": "calls within whose answer the provider may have run a tool",
    "missing_history": "calls that continue a conversation which only the provider has",
    "hook": "calls whose answer a hook of the server changed, or, for `polar rescore`, whose request it changed",
    "hidden_call": "calls with a further tool call that the agent was not shown",
    "side_call": "calls beside the conversation, such as the agent's requests for a title",
    "retry_of": "calls that the agent sent again, and whose answer it did not use",
    "incomplete": "calls of a session or rollout that lost a call, so that all its calls are excluded",
    "superseded_attempt": "calls of an earlier attempt at a rollout",
    "not_built_yet": "calls without traces: their rollout still runs, or, with --builder rescored, `polar rescore` has "
    "not been run",
    "certificate_broken": "calls of traces that do not match their certificate: the data is damaged, see "
    "`polar db verify`",
    # `polar rescore`
    "sampled_here": "calls that have recorded tokens, so that they need no rescoring: export with --builder merged",
    "not_rescored": "calls that `polar rescore` did not score",
    "raw_prompt": "calls with a raw prompt, which cannot be rescored",
    "unreadable": "calls whose stored request cannot be read",
    "template_refuses": "calls whose conversation the chat template of the scoring engine refuses",
    "prompt_not_kept": "calls whose rendered prompt changes when the chat template also renders the answer",
    "no_end_of_turn": "calls whose answer the chat template does not end with an end of turn",
    "answer_not_kept": "calls whose answer the chat template drops or changes",
    "cut_call": "calls whose answer was cut and calls tools",
    "empty": "calls with an empty answer",
    "unfinished": "calls whose answer did not end in the usual way, for example by a filter",
    "beyond_context": "calls that are longer than the scoring engine's context",
}
TRACES: Mapping[str, str] = {
    "grade_approximate": "traces of grade approximate, because their log-probabilities are not exactly those that a "
    "trainer computes (`polar show SESSION` says why); --all-grades exports them",
    "grade_rejected": "traces that an audit rejected, because their log-probabilities are wrong; --all-grades exports "
    "them",
    "parent_left_out": "branches of traces that are left out",
}
ROWS: Mapping[str, str] = {
    "no_group": "traces of sessions without a rollout, which belong to no group: this trainer's format needs groups; "
    "choose tokens-jsonl",
    "no_reward": "traces of rollouts without a reward: this trainer's format needs one (`polar reward`)",
    "no_advantage": "traces without an advantage, because their rollout or its whole group has no reward",
    "no_spread": "groups whose conversations all have the same reward, so that none is preferred",
    "masked": "traces of rollouts that count in the baseline but are not trained",
    "group_size": "traces of groups of another size than the trainer's",
    "several_traces": "traces of rollouts with several traces: this trainer's format holds one sequence for each "
    "rollout; choose another format or --builder",
    "branch": "branches of a tree: export with --builder merged or per_call",
    "rejected": "traces that an audit rejected",
    "nothing_sampled": "traces without a sampled token",
    "shorter_sequence": "shorter sequences of rollouts with several, because TRL takes one sequence for each rollout",
    "no_prompt": "traces without a prompt",
    "temperature": "traces that were sampled at another temperature than the trainer's",
    "temperatures": "traces whose answers were sampled at several or unknown temperatures: export with "
    "--builder per_call",
    "malformed": "traces whose parts contradict each other: the data is damaged, see `polar db verify`",
    "newer_schema": "traces that a newer Polar wrote",
}
_TEXTS = {**CALLS, **TRACES, **ROWS}


def explain(reason: str, count: int) -> str:
    """Return a line about what was left out for this reason, such as `3 left out as client_gone: calls whose ...`."""
    return f"{count} left out as {reason}: {_TEXTS.get(reason, 'calls or traces')}"

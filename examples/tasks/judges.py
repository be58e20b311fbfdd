"""Functions for the `python` evaluator of the examples."""

from __future__ import annotations

from polar_proxy.rewards import EvaluationInput, Score, Workspace


async def shortness(work: EvaluationInput, workspace: Workspace, path: str, limit: int) -> float:
    """Return 1 for an empty file, 0 for one of `limit` characters or more."""
    text = (await workspace.read(f"{workspace.workdir}/{path}")).decode()
    return max(0.0, 1 - len(text) / limit)


def brevity(work: EvaluationInput, limit: int = 200) -> Score:
    """Reward each call with 1 for an answer of up to `limit` tokens, else with 0; the rollout with their mean."""
    rewards = {
        call.call_id: 1.0 if sum(len(choice.token_ids) for choice in call.choices) <= limit else 0.0
        for call in work.calls
    }
    mean = sum(rewards.values()) / len(rewards) if rewards else None
    return Score(mean, {"calls": len(rewards)}, call_rewards=rewards)

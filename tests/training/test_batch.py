"""Training batches: baselines, the choice of rollouts to train, and counts of skipped data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_proxy.errors import TrainingError, UsageError
from polar_proxy.store.repositories.traces import TraceSummary
from polar_proxy.training.batch import GroupRollout, TrainingBatch, make_batch, plan_batch
from polar_proxy.training.config import GrpoConfig, changed_settings, make_config, read_assignments, read_toml
from polar_proxy.types import Trace
from tests.training.group_factories import group, rollout, trace

CONFIG = GrpoConfig(advantage="dr_grpo")


def counts_add_up(batch: TrainingBatch) -> bool:
    trained = sum(int(sequence.trained.sum()) for sequence in batch.sequences)
    skipped = sum(counts.tokens for counts in batch.plan.skipped.values())
    return trained + skipped == batch.plan.trained_tokens + skipped == batch.plan.sampled_tokens


def test_rollout_with_several_traces_counts_once_in_the_baseline() -> None:
    """Rewards 1 and 0: the mean over rollouts is 1/2; over traces it would be 3/4."""
    winner = GroupRollout(rollout(0, 1.0), tuple(trace(f"a{n}", [1, 2], [3, n]) for n in range(3)))
    loser = GroupRollout(rollout(1, 0.0), (trace("b", [1, 2], [4]),))
    batch = make_batch([group(winner, loser)], CONFIG)
    assert [(one.rollout, one.advantage) for one in batch.sequences] == [(0, 0.5)] * 3 + [(1, -0.5)]
    assert batch.plan.trained_rollouts == 2
    assert counts_add_up(batch)


def test_masked_rollouts_stay_in_the_baseline() -> None:
    members = [
        GroupRollout(rollout(0, 1.0), (trace("a", [1], [2, 3]),)),
        GroupRollout(rollout(1, 0.0, incomplete=True), (trace("b", [1], [2]),)),
        GroupRollout(rollout(2, 0.0, status="timed_out", masked=True), (trace("c", [1], [2, 2, 2]),)),
        GroupRollout(rollout(3, None, status="failed"), (trace("d", [1], [4]),)),
        GroupRollout(rollout(4, None), (trace("e", [1], [4]),)),
        GroupRollout(rollout(5, 1.0), ()),
        GroupRollout(rollout(6, None, status="cancelled"), ()),
    ]
    batch = make_batch([group(*members)], CONFIG)
    assert [(one.trace_id, one.advantage) for one in batch.sequences] == [("a", 0.5)]
    assert {reason: (counts.rollouts, counts.tokens) for reason, counts in batch.plan.skipped.items()} == {
        "incomplete": (1, 1),
        "masked": (1, 3),
        "failed": (1, 1),
        "no_reward": (1, 1),
        "no_traces": (1, 0),
        "cancelled": (1, 0),
    }
    assert batch.rewards == (1.0, 0.0, 0.0, 1.0)
    assert counts_add_up(batch)
    members[2] = GroupRollout(rollout(2, 0.0, status="timed_out"), members[2].traces)
    assert [one.trace_id for one in make_batch([group(*members)], CONFIG).sequences] == ["a", "c"]


def test_skips_traces_by_grade_length_and_missing_logprobs() -> None:
    traces = (
        trace("exact", [1], [2]),
        trace("continued", [1], [2], grade="continued"),
        trace("approximate", [1], [2], grade="approximate"),
        trace("rejected", [1], [2, 2], grade="rejected"),
        trace("long", [1] * 9, [2]),
        trace("lost", [1], [2], logprobs=[float("nan")]),
    )
    other = GroupRollout(rollout(1, 0.0), (trace("b", [1], [4]),))
    short = CONFIG.model_copy(update={"max_sequence_length": 8})
    batch = make_batch([group(GroupRollout(rollout(0, 1.0), traces), other)], short)
    assert [one.trace_id for one in batch.sequences] == ["exact", "continued", "b"]
    assert {reason: counts.tokens for reason, counts in batch.plan.skipped.items()} == {
        "grade_approximate": 1,
        "grade_rejected": 2,
        "too_long": 1,
        "no_logprobs": 1,
    }
    assert counts_add_up(batch)


def summary(one: Trace) -> TraceSummary:
    values = {name: getattr(one, name, None) for name in TraceSummary.__dataclass_fields__}
    return TraceSummary(**values | {"trace_index": one.index, "length": len(one.token_ids), "certificate": None})


@pytest.mark.parametrize("settings", [{}, {"max_sequence_length": 8}, {"echo_coef": 0.1}, {"shuffle_rewards": True}])
def test_summaries_of_traces_give_the_plan_of_the_batch(settings: dict[str, Any]) -> None:
    config = CONFIG.model_copy(update=settings)
    mixed = (
        trace("exact", [1], [2]),
        trace("branch", [], [3, 4], branch_at=2, parent="exact", grade="continued"),
        trace("approximate", [1], [2], grade="approximate"),
        trace("long", [1] * 9, [2]),
        trace("empty", [1], []),
    )
    group_of_members = group(
        GroupRollout(rollout(0, 1.0), mixed),
        GroupRollout(rollout(1, 0.0, incomplete=True), (trace("b", [1], [2]),)),
        GroupRollout(rollout(2, 0.0), (trace("c", [1], [2, 2]),)),
        GroupRollout(rollout(3, None), ()),
    )
    equal = group(*(GroupRollout(rollout(n, 1.0), (trace(f"e{n}", [1], [2]),)) for n in range(2)), name="group_1")
    groups = [group_of_members, equal]
    batch = make_batch(groups, config, 3)
    rows = [[(one.rollout, [summary(each) for each in one.traces]) for one in every.members] for every in groups]
    plan = plan_batch(rows, config, 3)
    assert (plan.skipped, plan.sampled_tokens) == (batch.plan.skipped, batch.plan.sampled_tokens)
    trained = [0] * 6
    for sequence in batch.sequences:
        trained[sequence.rollout] += int(sequence.trained.sum())
    assert [one.trained_tokens for one in plan.rollouts] == trained
    assert plan.trained_rollouts == sum(tokens > 0 for tokens in trained)


def test_refused_trace_leaves_the_others_of_its_rollout() -> None:
    """As in the bridges to other trainers."""
    traces = (trace("good", [1], [2]), trace("bad", [1], [2, 2], grade="approximate"))
    other = GroupRollout(rollout(1, 0.0), (trace("b", [1], [4]),))
    batch = make_batch([group(GroupRollout(rollout(0, 1.0), traces), other)], CONFIG)
    assert [one.trace_id for one in batch.sequences] == ["good", "b"]


def test_temperature_and_version_of_each_token_are_those_recorded() -> None:
    hot = trace("hot", [1, 1], [2, 3], temperature=0.7, version="4")
    other = GroupRollout(rollout(1, 0.0), (trace("b", [1], [4]),))
    first, second = make_batch([group(GroupRollout(rollout(0, 1.0), (hot,)), other)], CONFIG).sequences
    assert first.temperatures.tolist() == [1.0, 1.0, 0.7, 0.7]
    assert first.versions.tolist() == [None, None, "4", "4"]
    assert (second.temperatures.tolist(), second.group_size) == ([1.0, 1.0], 2)


def test_trace_without_a_temperature_is_refused() -> None:
    lost = replace(trace("a", [1], [2]), sampling=())
    other = GroupRollout(rollout(1, 0.0), (trace("b", [1], [4]),))
    batch = make_batch([group(GroupRollout(rollout(0, 1.0), (lost,)), other)], CONFIG)
    assert [one.trace_id for one in batch.sequences] == ["b"]
    assert batch.plan.skipped["no_temperature"].traces == 1


def with_observation(name: str, **changes: Any) -> Trace:
    """Return a trace of a prompt, two sampled tokens, an observed one and a sampled one."""
    one = trace(name, [1], [2, 3, 9, 4], logprobs=[-1.0, -1.0, float("nan"), -1.0])
    return replace(one, loss_mask=np.array([0, 1, 1, 0, 1], dtype=np.uint8), **changes)


def test_echo_trains_the_observed_tokens_of_all_rollouts() -> None:
    members = [
        GroupRollout(rollout(0, 1.0), (with_observation("trained"),)),
        GroupRollout(rollout(1, 1.0, status="timed_out", masked=True), (with_observation("masked"),)),
        GroupRollout(rollout(2, None), (with_observation("unscored"),)),
        GroupRollout(rollout(3, 0.0), (with_observation("approximate", grade="approximate"),)),
        GroupRollout(rollout(4, 0.0), (with_observation("rejected", grade="rejected"),)),
    ]
    no_spread = [GroupRollout(rollout(n, 1.0), (with_observation(f"equal{n}"),)) for n in range(2)]
    groups = [group(*members), group(*no_spread, name="group_1")]
    echo = make_batch(groups, CONFIG.model_copy(update={"echo_coef": 0.1}))
    plain = make_batch(groups, CONFIG)
    observed = {one.trace_id: int(one.observed.sum()) for one in echo.sequences}
    assert observed == dict.fromkeys(["trained", "masked", "unscored", "approximate", "equal0", "equal1"], 1)
    assert [one.trace_id for one in echo.sequences if one.trained.any()] == ["trained"]
    assert [one.trace_id for one in plain.sequences] == ["trained"]
    assert (echo.plan.trained_tokens, echo.plan.trained_rollouts, echo.plan.skipped) == (3, 1, plain.plan.skipped)
    assert counts_add_up(echo)
    with pytest.raises(UsageError, match="per_call have one answer"):
        make_config({"echo_coef": 0.1, "builder": "per_call"})


def test_echo_leaves_out_traces_that_are_too_long_whatever_their_grade() -> None:
    members = [
        GroupRollout(rollout(0, 1.0), (with_observation("approximate", grade="approximate"),)),
        GroupRollout(rollout(1, 0.0), (trace("short", [1], [2]),)),
    ]
    batch = make_batch([group(*members)], CONFIG.model_copy(update={"echo_coef": 0.1, "max_sequence_length": 4}))
    assert [one.trace_id for one in batch.sequences] == ["short"]
    assert batch.plan.skipped["grade_approximate"].traces == 1


def test_zero_variance_group_is_skipped_unless_kept() -> None:
    equal = group(*(GroupRollout(rollout(n, 1.0), (trace(f"t{n}", [1], [2]),)) for n in range(2)))
    batch = make_batch([equal], CONFIG)
    assert batch.sequences == ()
    assert batch.plan.skipped["no_spread"].rollouts == 2
    kept = make_batch([equal], CONFIG.model_copy(update={"keep_zero_variance_groups": True}))
    assert [one.advantage for one in kept.sequences] == [0.0, 0.0]


def test_pivot_of_mc_grpo_is_not_trained() -> None:
    members = [
        GroupRollout(rollout(n, reward), (trace(f"t{n}", [1], [2]),)) for n, reward in enumerate((0.0, 0.5, 1.0))
    ]
    batch = make_batch([group(*members)], CONFIG.model_copy(update={"advantage": "mc_grpo"}))
    assert [one.trace_id for one in batch.sequences] == ["t0", "t2"]
    assert batch.plan.skipped["no_advantage"].rollouts == 1


def test_raft_trains_all_rewarded_rollouts() -> None:
    mixed, solved, failed = (
        group(
            *(
                GroupRollout(rollout(n, reward), (trace(f"t{rewards}{n}", [1], [2]),))
                for n, reward in enumerate(rewards)
            )
        )
        for rewards in ((0.0, 1.0), (1.0, 0.5), (0.0, 0.0))
    )
    batch = make_batch([mixed, solved, failed], CONFIG.model_copy(update={"advantage": "raft"}))
    assert [one.advantage for one in batch.sequences] == [1.0, 1.0, 0.5]
    assert batch.plan.skipped["no_advantage"].rollouts == 3


def test_branch_is_trained_without_the_prefix_of_its_parent() -> None:
    """The parent's answer is context of the branch, and is trained once, with the parent."""
    parent = trace("parent", [1, 2], [3, 4])
    branch = trace("branch", [9], [5, 6], parent="parent", branch_at=3)
    other = GroupRollout(rollout(1, 0.0), (trace("b", [1], [4]),))
    batch = make_batch([group(GroupRollout(rollout(0, 1.0), (parent, branch)), other)], CONFIG)
    whole = batch.sequences[1]
    assert whole.token_ids.tolist() == [1, 2, 3, 9, 5, 6]
    assert whole.trained.tolist() == [False] * 4 + [True] * 2
    assert np.isnan(whole.old_logprobs[:4]).all()
    assert counts_add_up(batch)


def test_rejects_sampled_token_in_two_traces() -> None:
    twice = (trace("a", [1], [2], call="c"), trace("b", [1], [2], call="c"))
    other = GroupRollout(rollout(1, 0.0), (trace("x", [1], [4]),))
    with pytest.raises(TrainingError, match="two traces"):
        make_batch([group(GroupRollout(rollout(0, 1.0), twice), other)], CONFIG)


def test_group_weight_multiplies_the_advantages() -> None:
    members = [GroupRollout(rollout(n, float(n == 0)), (trace(f"t{n}", [1], [2]),)) for n in range(4)]
    batch = make_batch([group(*members)], CONFIG.model_copy(update={"group_weight": "focal"}))
    assert batch.sequences[0].advantage == pytest.approx(0.75 * 0.75)


def test_shuffled_rewards_are_the_same_rewards_at_other_rollouts() -> None:
    rewards = (1.0, 0.0, None, 0.25, 0.5)
    members = [GroupRollout(rollout(n, reward), (trace(f"t{n}", [1], [2]),)) for n, reward in enumerate(rewards)]
    plain = make_batch([group(*members)], CONFIG)
    control = make_batch([group(*members)], CONFIG.model_copy(update={"shuffle_rewards": True}))
    assert [one.trace_id for one in control.sequences] == ["t0", "t1", "t3", "t4"]
    advantages = [[one.advantage for one in batch.sequences] for batch in (plain, control)]
    assert advantages[0] != advantages[1]
    assert sorted(advantages[0]) == sorted(advantages[1])
    assert control.rewards == plain.rewards


def test_rewards_are_shuffled_across_groups() -> None:
    """One task is always solved, the other never: shuffled within groups, rewards would still tell which is which."""
    groups = [
        group(*(GroupRollout(rollout(n, reward), (trace(f"{name}{n}", [1], [2]),)) for n in range(2)), name=name)
        for name, reward in (("done", 1.0), ("failed", 0.0))
    ]
    raft = CONFIG.model_copy(update={"advantage": "raft"})
    assert [one.trace_id for one in make_batch(groups, raft).sequences] == ["done0", "done1"]
    rewarded = set()
    for seed in range(20):
        control = make_batch(groups, raft.model_copy(update={"shuffle_rewards": True, "seed": seed}))
        assert len(control.sequences) == 2
        rewarded |= {one.trace_id for one in control.sequences}
    assert rewarded == {"done0", "done1", "failed0", "failed1"}


def test_configuration_layers_and_errors(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('[grpo]\nloss = "cispo"\nsteps = 7\nlearning_rate = 1e-3\n[run]\nharness = "x"\n')
    grpo, others = read_toml(file)
    config = make_config(grpo, {"steps": 9, "seed": None})
    assert (config.loss, config.steps, others) == ("cispo", 9, {"run": {"harness": "x"}})
    with pytest.raises(UsageError, match="choose ppo_clip"):
        make_config({"loss": "nothing"})
    with pytest.raises(UsageError, match="learning_rat"):
        make_config({"learning_rat": 1.0})
    assert changed_settings(config.to_json(), config.model_copy(update={"steps": 90})) == {}
    assert changed_settings(config.to_json(), config.model_copy(update={"seed": 3})) == {"seed": (0, 3)}


def test_any_setting_can_be_assigned_by_flag() -> None:
    grpo = {"lora": {"rank": 4, "scale": 1.0}, "loss_settings": {"clip_low": 0.1}, "kl_coef": 0.5}
    flags = [
        "lora.rank=16",
        "lr_schedule = cosine",
        "kl_coef=0.01",
        "adam_betas=[0.8, 0.9]",
        "loss_settings={clip_high = 0.3}",
        "keep_zero_variance_groups=true",
        "weights=models/a b=c",
    ]
    config = make_config(grpo, read_assignments(flags))
    assert config.lora is not None
    assert (config.lora.rank, config.lora.scale) == (16, 1.0)
    assert config.loss_settings == {"clip_low": 0.1, "clip_high": 0.3}
    assert (config.lr_schedule, config.kl_coef, config.adam_betas, config.keep_zero_variance_groups) == (
        "cosine",
        0.01,
        (0.8, 0.9),
        True,
    )
    assert config.weights == "models/a b=c"
    for wrong in ("kl_coef", "=3", "k l=3", "kl.=1"):
        with pytest.raises(UsageError, match="--set"):
            read_assignments([wrong])
    with pytest.raises(UsageError, match="setting learning_rat:"):
        make_config(read_assignments(["learning_rat=1"]))


def test_learning_rates_by_hand() -> None:
    linear = GrpoConfig(learning_rate=1.0, lr_schedule="linear", warmup_steps=2, steps=6)
    assert [linear.learning_rate_at(step) for step in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = GrpoConfig(learning_rate=1.0, lr_schedule="cosine", steps=4)
    assert [cosine.learning_rate_at(step) for step in range(4)] == pytest.approx(
        [1.0, 0.853553, 0.5, 0.146447], abs=1e-6
    )

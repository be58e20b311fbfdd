"""Each record compared with values worked out by hand, without the trainers' libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polar_proxy.errors import UsageError
from polar_proxy.export.formats import (
    TRAINER_FORMATS,
    RecordConverter,
    RowError,
    nemo_rl,
    read_training_row,
    slime,
    tinker,
    trl,
    verl,
)
from polar_proxy.export.formats.training_rows import IdNumbers
from tests.export.formats.row_factory import SPANS, group, row, with_sampling

IDS = [11, 12, 13, 20, 21, 31, 32, 22, 23, 24]
LOGPROBS = [-0.5, -0.25, 0.0, 0.0, -1.5, -2.0, -0.125]
TRAINER = SimpleNamespace(accelerator=SimpleNamespace(num_processes=1), num_generations=4, temperature=1.0)


def raises_row_error(reason: str) -> Any:
    return pytest.raises(RowError, check=lambda error: error.reason == reason)


def test_trl_completions() -> None:
    made = trl.completions(group(), 4)
    assert made["prompt_ids"] == [[11, 12, 13]] * 4
    assert [ids[0] for ids in made["completion_ids"]] == [20, 30, 40, 50]
    assert made["logprobs"][1] == [-0.5 - 10 / 1024, -0.25, 0.0, 0.0, -1.5, -2.0, -0.125]
    assert made["env_mask"] == [[1, 1, 0, 0, 1, 1, 1]] * 4
    assert made["reward"] == [0.0, 1.0, 0.0, 1.0]
    assert trl.recorded_reward(prompts=[], completions=[], reward=made["reward"]) == made["reward"]


def test_trl_baseline_has_masked_rollouts_and_no_unscored_ones() -> None:
    rows = [row(0, 0, masked=True), row(0, 1, reward=None), *group()[2:]]
    made = trl.completions(rows, 4)
    assert made["env_mask"][0] == [0] * 7
    assert made["reward"] == [0.0, None, 0.0, 1.0]


def test_trl_refuses_other_group_sizes_and_several_sequences() -> None:
    with raises_row_error("group_size"):
        trl.completions(group(size=3), 4)
    with raises_row_error("several_traces"):
        trl.completions([*group(), row(0, 0, 1)], 4)


def test_trl_yields_one_group_after_the_other() -> None:
    rollouts = trl.RecordedRollouts([group(0), group(1), group(2)])
    found = rollouts(["any"] * 8, TRAINER)
    assert found["trace_id"] == [f"trace_{number}_{member}_0" for number in (0, 1) for member in range(4)]
    assert rollouts(["any"] * 4, TRAINER)["trace_id"][0] == "trace_2_0_0"
    with pytest.raises(UsageError, match="no recorded groups left"):
        rollouts(["any"] * 4, TRAINER)


def test_trl_skips_refused_groups_on_request() -> None:
    groups = [group(0, size=3), [*group(1), row(1, 0, 1)], group(2)]
    with raises_row_error("group_size"):
        trl.RecordedRollouts(groups)(["any"] * 4, TRAINER)
    rollouts = trl.RecordedRollouts(groups, on_refused="skip")
    assert rollouts(["any"] * 4, TRAINER)["trace_id"][0] == "trace_2_0_0"
    assert rollouts.left_out == {"group_size": 1, "several_traces": 1}


def test_trl_trains_the_longest_sequence_on_request() -> None:
    spans = [SPANS[0], {**SPANS[1], "end": 1}]
    shorter = row(0, 2, 1, response_ids=[70], loss_mask=[1], logprobs=[-0.5], spans=spans)
    rollouts = trl.RecordedRollouts([[shorter, *group(), row(0, 1, 1)]], several="longest")
    assert rollouts(["any"] * 4, TRAINER)["trace_id"] == ["trace_0_2_0", "trace_0_0_0", "trace_0_1_0", "trace_0_3_0"]
    assert rollouts.left_out == {"shorter_sequence": 2}


def test_trl_refuses_to_split_a_group() -> None:
    many = SimpleNamespace(accelerator=SimpleNamespace(num_processes=2), num_generations=4, temperature=1.0)
    with pytest.raises(UsageError, match="split recorded groups"):
        trl.RecordedRollouts([group()])(["any"] * 4, many)
    with pytest.raises(UsageError, match="not a whole number of groups"):
        trl.RecordedRollouts([group()])(["any"] * 6, TRAINER)


def test_trl_rollout_sample() -> None:
    made = trl.rollout_sample(read_training_row(row(advantage=0.75)), 3)
    np.testing.assert_array_equal(made["input_ids"], IDS)
    np.testing.assert_array_equal(made["completion_mask"], [0, 0, 0, 1, 1, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(made["old_log_probs"], np.array([0.0] * 3 + LOGPROBS, dtype=np.float32))
    assert (made["input_ids"].dtype, made["completion_mask"].dtype, made["old_log_probs"].dtype) == (
        np.int64,
        np.int64,
        np.float32,
    )
    assert (made["advantage"], made["group_id"], made["model_version"]) == (0.75, 3, 4)  # the oldest of 4 and 5
    unversioned = read_training_row(row(advantage=0.75, spans=with_sampling(versions=[[0, None]])))
    unknown = trl.rollout_sample(unversioned, 3, model_version=9)
    assert unknown["model_version"] == 9


@pytest.mark.parametrize(("changes", "reason"), [({}, "no_advantage"), ({"advantage": 1.0, "masked": True}, "masked")])
def test_advantage_is_required(changes: dict[str, Any], reason: str) -> None:
    for make in (tinker.datum, lambda one: trl.rollout_sample(one, 0)):
        with raises_row_error(reason):
            make(read_training_row(row(**changes)))


def test_verl_output_and_dataset() -> None:
    made = verl.agent_loop_output(read_training_row(row(0, 1)))
    assert (made["prompt_ids"], made["response_ids"]) == ([11, 12, 13], [30, 21, 31, 32, 22, 23, 24])
    assert made["response_mask"] == [1, 1, 0, 0, 1, 1, 1]
    assert made["response_logprobs"] == [-0.5 - 10 / 1024, -0.25, 0.0, 0.0, -1.5, -2.0, -0.125]
    assert (made["reward_score"], made["num_turns"]) == (1.0, 4)
    assert verl.agent_loop_output(read_training_row(row(masked=True)))["response_mask"] == [0] * 7
    with raises_row_error("no_reward"):
        verl.agent_loop_output(read_training_row(row(reward=None)))
    rows = verl.dataset([*group(0), *group(1)])
    assert [one["extra_info"]["group_id"] for one in rows] == ["group_0", "group_1"]
    assert [one["extra_info"]["rollouts"] for one in rows] == [4, 4]
    with raises_row_error("group_size"):
        verl.dataset([*group(0), *group(1, size=3)])


def test_verl_session_is_a_rollout_with_all_its_traces() -> None:
    recorded = verl.RecordedGroups([*group(0), row(0, 2, 1)])
    extra_info = {"group_id": "group_0"}
    assert [[one["extra_fields"]["trace_id"] for one in recorded.session(extra_info, i)] for i in range(4)] == [
        ["trace_0_0_0"],
        ["trace_0_1_0"],
        ["trace_0_2_0", "trace_0_2_1"],
        ["trace_0_3_0"],
    ]
    with pytest.raises(UsageError, match=r"set rollout\.n"):
        recorded.session(extra_info, 4)
    with pytest.raises(UsageError, match="no group"):
        recorded.session({"group_id": "other"}, 0)


def test_slime_samples() -> None:
    numbers = IdNumbers()
    made = [
        slime.sample(read_training_row(one), numbers)
        for one in (row(0, 0), row(0, 1), row(0, 1, 1), row(1, 0, masked=True))
    ]
    first = made[0]
    assert first["tokens"] == IDS
    assert (first["response_length"], first["loss_mask"]) == (7, [1, 1, 0, 0, 1, 1, 1])
    assert first["rollout_log_probs"] == LOGPROBS
    assert first["weight_versions"] == ["4", "5"]
    assert [one["index"] for one in made] == [0, 1, 2, 3]
    assert [one["rollout_id"] for one in made] == [0, 1, 1, 2]
    assert [one["group_index"] for one in made] == [0, 0, 0, 1]
    assert [one["remove_sample"] for one in made] == [False, False, False, True]
    assert slime.sample(read_training_row(row(0, 5, status="timed_out")), numbers)["status"] == "truncated"
    with raises_row_error("no_reward"):
        slime.sample(read_training_row(row(reward=None)), numbers)


def test_slime_advantages_count_a_rollout_once() -> None:
    """The rewards are 1, 0, 0, and the first rollout has two samples: mean 1/3, deviation sqrt(1/3)."""
    samples = [
        SimpleNamespace(
            group_index=0,
            rollout_id=rollout,
            metadata={"trace_id": "t", "temperature": 1.0},
            get_reward_value=lambda _, value=value: value,
        )
        for rollout, value in ((0, 1.0), (0, 1.0), (1, 0.0), (2, 0.0))
    ]

    def settings(*, scaled: bool, temperature: float = 1.0) -> SimpleNamespace:
        return SimpleNamespace(grpo_std_normalization=scaled, rollout_temperature=temperature)

    raw, made = slime.reward_post_process(settings(scaled=False), samples)
    assert raw == [1.0, 1.0, 0.0, 0.0]
    assert made == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])
    _, scaled = slime.reward_post_process(settings(scaled=True), samples)
    assert scaled == pytest.approx([value * 3**0.5 for value in made], rel=1e-5)
    with raises_row_error("temperature"):
        slime.reward_post_process(settings(scaled=True, temperature=0.7), samples)


def test_nemo_rl_message_begins_where_the_mask_changes() -> None:
    made = nemo_rl.datum_spec([read_training_row(row())], 7)
    assert [(one["role"], one["token_ids"], one.get("generation_logprobs")) for one in made["message_log"]] == [
        ("user", [11, 12, 13], None),
        ("assistant", [20, 21], [-0.5, -0.25]),
        ("environment", [31, 32], None),
        ("assistant", [22, 23, 24], [-1.5, -2.0, -0.125]),
    ]
    assert (made["length"], made["idx"], made["loss_multiplier"], made["total_reward"]) == (10, 7, 1.0, 0.0)
    assert nemo_rl.datum_spec([read_training_row(row(masked=True))])["loss_multiplier"] == 0.0
    with raises_row_error("several_traces"):
        nemo_rl.datum_spec([read_training_row(row()), read_training_row(row(trace=1))])


def test_tinker_datum_is_shifted_by_one() -> None:
    made = tinker.datum(read_training_row(row(advantage=-0.5)))
    inputs = {name: tensor["data"] for name, tensor in made["loss_fn_inputs"].items()}
    assert made["model_input"]["chunks"][0]["tokens"] == IDS[:-1]
    assert inputs["target_tokens"] == IDS[1:]
    assert inputs["advantages"] == [0.0, 0.0, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5]
    assert inputs["logprobs"] == [0.0, 0.0, *LOGPROBS]


@pytest.mark.parametrize("form", TRAINER_FORMATS)
def test_refused_row_leaves_the_others_of_its_rollout(form: str) -> None:
    records = RecordConverter(form)
    assert len(records([row(advantage=1.0)])) == 1
    assert len(records([row(0, 1, advantage=1.0), row(0, 1, 1, advantage=1.0, grade="rejected")])) == 1
    assert records.left_out == {"rejected": 1}
    assert records([]) == []


def test_trl_refuses_a_group_of_another_temperature() -> None:
    hot = [one | {"spans": with_sampling(temperature=0.7, logprob_mode="processed")} for one in group()]
    with raises_row_error("temperature"):
        trl.RecordedRollouts([hot])(["any"] * 4, TRAINER)
    at_07 = SimpleNamespace(accelerator=SimpleNamespace(num_processes=1), num_generations=4, temperature=0.7)
    assert len(trl.RecordedRollouts([hot])(["any"] * 4, at_07)["reward"]) == 4


def test_trl_records_number_groups() -> None:
    numbers = IdNumbers()
    made = [trl.record(read_training_row(row(number, advantage=1.0)), numbers) for number in (5, 3, 5)]
    assert [one["group_id"] for one in made] == [0, 1, 0]
    assert made[0]["input_ids"] == [11, 12, 13, 20, 21, 31, 32, 22, 23, 24]
    assert made[0]["labels"] == [-100, -100, -100, 20, 21, -100, -100, 22, 23, 24]

"""Rows for trainers: checked once, refused with a reason, and each rollout counted once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polar_proxy.export.formats import (
    TRAINER_FORMATS,
    RecordConverter,
    RowError,
    read_training_row,
    with_advantages,
)
from polar_proxy.export.formats.training_rows import (
    IdNumbers,
    advantages_by_rollout,
    group_by_rollout,
    require_temperature,
)
from polar_proxy.types import Json
from tests.export.formats.row_factory import SPANS, row, with_sampling

IDS = [11, 12, 13, 14]
CONTEXT = {"kind": "context", "call_id": "call_b", "choice": 0, "start": 3, "end": 4}
NO_RESPONSE: Json = {"response_ids": [], "loss_mask": [], "logprobs": []}


def test_reads_a_row() -> None:
    found = read_training_row(row(1, 2))
    assert found.token_ids == (11, 12, 13, 20 + 120 % 50, 21, 31, 32, 22, 23, 24)
    assert found.loss_mask == (1, 1, 0, 0, 1, 1, 1)
    assert found.logprobs == (-0.5 - 120 / 1024, -0.25, 0.0, 0.0, -1.5, -2.0, -0.125)
    assert found.runs() == [(True, 0, 2), (False, 2, 4), (True, 4, 7)]
    assert found.versions == ("4", "5")
    assert found.trained_mask() == [1, 1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("field", ["masked", "incomplete"])
def test_masked_or_incomplete_rollout_is_not_trained(field: str) -> None:
    assert read_training_row(row(**{field: True})).trained_mask() == [0] * 7


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 2}, "newer_schema"),
        ({"schema": None}, "newer_schema"),
        ({"parent_trace_id": "trace_x"}, "branch"),
        ({"grade": "rejected"}, "rejected"),
        ({"spans": [SPANS[0], CONTEXT], "prompt_ids": IDS, **NO_RESPONSE}, "nothing_sampled"),
        ({"spans": SPANS[1:], "prompt_ids": []}, "no_prompt"),
        ({"loss_mask": [0] * 7}, "malformed"),
        ({"prompt_ids": []}, "malformed"),
        ({"loss_mask": [1] * 7}, "malformed"),
        ({"loss_mask": [1] * 6}, "malformed"),
        ({"loss_mask": [2, 0, 0, 0, 0, 0, 0]}, "malformed"),
        ({"logprobs": [-1.0] * 8}, "malformed"),
        ({"logprobs": [math.nan, -1.0, None, None, -1.0, -1.0, -1.0]}, "malformed"),
        ({"logprobs": [None, -1.0, None, None, -1.0, -1.0, -1.0]}, "malformed"),
        ({"response_ids": None}, "malformed"),
    ],
)
def test_refuses_unusable_rows_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as caught:
        read_training_row(row(**changes))
    assert caught.value.reason == reason


def test_row_without_a_temperature_is_refused() -> None:
    spans = [{name: value for name, value in span.items() if name != "temperature"} for span in SPANS]
    with pytest.raises(RowError, match=r"spans\[1\]\.sampled\.temperature: Field required"):
        read_training_row(row(spans=spans))


def test_temperature_is_that_of_the_recorded_logprobs() -> None:
    assert read_training_row(row(spans=with_sampling(temperature=0.7, logprob_mode="processed"))).temperature == 0.7
    assert read_training_row(row(spans=with_sampling(temperature=0.7, logprob_mode="raw"))).temperature == 1.0
    cut = read_training_row(row(spans=with_sampling(changes={"top_p": 0.9})))
    assert (cut.temperature, cut.changes) == (1.0, {"top_p": 0.9})
    several = [*SPANS[:3], SPANS[3] | {"temperature": 0.7, "logprob_mode": "processed"}]
    with pytest.raises(RowError, match="several or unknown temperatures") as caught:
        read_training_row(row(spans=several))
    assert caught.value.reason == "temperatures"


def test_rows_of_another_temperature_than_the_trainers_are_refused() -> None:
    require_temperature(read_training_row(row()), 1.0)
    with pytest.raises(RowError, match=r"sampled at temperature 1, and the trainer .* at 0\.7") as caught:
        require_temperature(read_training_row(row()), 0.7)
    assert caught.value.reason == "temperature"


@pytest.mark.parametrize("form", sorted(set(TRAINER_FORMATS) - {"tinker"}))
def test_records_hand_the_temperature_on(form: str) -> None:
    hot = row(advantage=0.5, spans=with_sampling(temperature=0.7, logprob_mode="processed"))
    (record,) = RecordConverter(form)([hot])
    holders = [record, *(record.get(name, {}) for name in ("extra_fields", "metadata", "extra_env_info"))]
    assert [holder["temperature"] for holder in holders if "temperature" in holder] == [0.7]


def test_tinker_refuses_other_temperatures() -> None:
    convert = RecordConverter("tinker")
    assert len(convert([row(advantage=0.5)])) == 1
    assert convert([row(advantage=0.5, spans=with_sampling(temperature=0.7, logprob_mode="processed"))]) == []
    assert convert.left_out == {"temperature": 1}


def test_rollout_counts_once_however_many_traces_it_has() -> None:
    """The rewards are 0, 1, 1, 0, and the first rollout has three traces: the mean is still 1/2."""
    rows = [row(0, 0, 0), row(0, 0, 1), row(0, 0, 2), row(0, 1), row(0, 2, reward=1.0), row(0, 3, reward=0.0)]
    found = {one["trace_id"]: one["advantage"] for one in with_advantages(rows, "dr_grpo")}
    assert found == {
        "trace_0_0_0": -0.5,
        "trace_0_0_1": -0.5,
        "trace_0_0_2": -0.5,
        "trace_0_1_0": 0.5,
        "trace_0_2_0": 0.5,
        "trace_0_3_0": -0.5,
    }


def test_given_rewards_include_rollouts_without_a_trace() -> None:
    rows = [row(0, 0), row(0, 1)]
    rewards = {"group_0": {"roll_0_0": 0.0, "roll_0_1": 1.0, "lost": 1.0, "unscored": None}}
    found = [one["advantage"] for one in with_advantages(rows, "dr_grpo", rewards)]
    assert found == [pytest.approx(-2 / 3), pytest.approx(1 / 3)]


def test_advantages_are_computed_only_for_the_groups_of_the_rows() -> None:
    """An export converts one rollout after another, with the rewards of the whole database."""
    rewards = {"group_0": {"roll_0_0": 0.0, "roll_0_1": 1.0}, "another": {"a": float("inf"), "b": 0.0}}
    assert [one["advantage"] for one in with_advantages([row(0, 0)], "dr_grpo", rewards)] == [-0.5]


def test_row_without_a_group_has_no_advantage() -> None:
    assert with_advantages([row(group_id=None)])[0]["advantage"] is None
    with pytest.raises(RowError, match="belongs to no group"):
        group_by_rollout([read_training_row(row(group_id=None))])


def test_rollout_without_a_reward_has_no_advantage() -> None:
    assert advantages_by_rollout({"a": 1.0, "b": None, "c": 0.0}, "dr_grpo") == {"a": 0.5, "b": None, "c": -0.5}


def test_ids_are_numbered_in_order() -> None:
    numbers = IdNumbers().groups
    assert [numbers[name] for name in ("b", "a", "b", "c")] == [0, 1, 0, 2]

"""Which task instances a round trains on, and which are held out."""

from __future__ import annotations

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.tasks import get_source
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.run import TaskSampler

SWE = get_source("swe-task")


def test_a_family_has_new_instances_every_round_and_others_held_out() -> None:
    sampler = TaskSampler(SWE, GrpoConfig(groups=3, first_seed=1_000_000, eval_instances=2, eval_first_seed=5))
    assert [sampler.batch(number) for number in range(2)] == [
        [1_000_000, 1_000_001, 1_000_002],
        [1_000_003, 1_000_004, 1_000_005],
    ]
    assert list(sampler.held_out) == [5, 6]


def test_a_fixed_set_is_shuffled_by_the_seed_of_the_run() -> None:
    config = GrpoConfig(groups=2, instances=4, first_seed=100)
    first, second = (TaskSampler(SWE, config) for _ in range(2))
    rounds = [first.batch(number) for number in range(4)]
    assert rounds == [second.batch(number) for number in range(4)]
    epochs = [rounds[0] + rounds[1], rounds[2] + rounds[3]]
    assert [sorted(epoch) for epoch in epochs] == [[100, 101, 102, 103]] * 2
    assert epochs[0] != epochs[1]
    other = TaskSampler(SWE, config.model_copy(update={"seed": 1}))
    assert [other.batch(number) for number in range(4)] != rounds


@pytest.mark.parametrize(("first", "instances"), [(0, None), (10, 20), (30, None)])
def test_held_out_instances_are_never_trained_on(first: int, instances: int | None) -> None:
    config = GrpoConfig(first_seed=first, instances=instances, eval_first_seed=25, eval_instances=10)
    with pytest.raises(UsageError, match="overlap"):
        TaskSampler(SWE, config)
    TaskSampler(SWE, config.model_copy(update={"first_seed": 35}))

"""The training half of the family `swe-task` as a separate task source: instance n has seed 1,000,000 + n.

polar run examples.tiny_policy.demonstrations:TrainingTasks --instances 100 --engine ...
"""

from __future__ import annotations

from polar_proxy.tasks import Task, get_source
from polar_proxy.tasks.swe_task import TRAIN_SEEDS


class TrainingTasks:
    """Task source over the training seeds."""

    name = "swe-task-train"

    def task(self, seed: int) -> Task:
        return get_source("swe-task").task(TRAIN_SEEDS[seed])

"""TRL: recorded groups for GRPOTrainer (`rollout_func`), for AsyncGRPOTrainer (samples and worker), and for SFT.

`GRPOTrainer(rollout_func=RecordedRollouts(groups), reward_funcs=recorded_reward)` trains one sequence per rollout; the
baseline is TRL's own. `AsyncGRPOTrainer(rollout_worker=RecordedWorker(groups))` trains several sequences per rollout;
advantages are Polar's, each rollout counted once.

Source: TRL 1.16, `trainer/grpo_trainer.py` (`_generate`), `experimental/async_grpo/async_rollout_worker.py`
(`RolloutSample`).
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from polar_proxy.errors import UsageError
from polar_proxy.export.formats.training_rows import (
    IdNumbers,
    RewardsByGroup,
    TrainingRow,
    group_by_rollout,
    read_training_row,
    read_training_rows,
    require_advantage,
    require_temperature,
    with_advantages,
)
from polar_proxy.traces.rows import RowError
from polar_proxy.types import Json

SequencePolicy = Literal["refuse", "longest"]
"""Treatment of a rollout with several sequences by a trainer that takes one sequence per rollout.

refuse: raise RowError for the whole group. longest: train the sequence with the most sampled tokens, and
count the others as left out. If several sequences have the most tokens, train the first of these."""


def completions(
    rows: Sequence[Json], generations: int, several: SequencePolicy = "refuse", *, temperature: float = 1.0
) -> Json:
    """Return one group as `rollout_func` returns it: lists of `generations` entries, one for each rollout.

    The lists are `prompt_ids`, `completion_ids`, `logprobs` (as recorded), `env_mask` (1 = sampled and trained),
    `reward` (TRL leaves a reward of None out of the baseline) and `trace_id`. Raise RowError if a rollout has several
    sequences and `several` is "refuse", if the group does not have `generations` rollouts, or if a row was not
    sampled at the trainer's `temperature`.
    """
    read = [read_training_row(row) for row in rows]
    for row in read:
        require_temperature(row, temperature)
    members = group_by_rollout(read)
    if len(members) != generations:
        text = f"the group has {len(members)} rollouts with tokens, and num_generations is {generations}"
        raise RowError("group_size", text)
    for name, traces in members.items():
        if len(traces) > 1 and several == "refuse":
            raise RowError(
                "several_traces",
                f"the rollout {name} has {len(traces)} sequences and GRPOTrainer holds one per completion: use "
                'RecordedWorker with AsyncGRPOTrainer, which trains all of them, or several="longest"',
            )
    each = [max(traces, key=lambda row: sum(row.loss_mask)) for traces in members.values()]
    return {
        "prompt_ids": [list(row.prompt_ids) for row in each],
        "completion_ids": [list(row.response_ids) for row in each],
        "logprobs": [list(row.logprobs) for row in each],
        "env_mask": [row.trained_mask() for row in each],
        "reward": [row.reward for row in each],
        "trace_id": [row.trace_id for row in each],
    }


class RecordedRollouts:
    """A `rollout_func`: every `num_generations` prompts in a row get the next recorded group, whatever the prompts say.

    `groups` yields the rows of one group at a time, from a file or a feed. A group that GRPOTrainer cannot use raises
    RowError (see `completions`); with `on_refused = "skip"`, the group is counted in `left_out` and the next one is
    taken. Raise UsageError if the groups run out, if the trainer has several processes, or if the number of prompts is
    not a multiple of `num_generations`.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[Json]],
        *,
        several: SequencePolicy = "refuse",
        on_refused: Literal["raise", "skip"] = "raise",
    ) -> None:
        self._groups, self._several = iter(groups), several
        self._skip = on_refused == "skip"
        self.left_out: Counter[str] = Counter()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Json:
        if trainer.accelerator.num_processes > 1:
            raise UsageError("Several processes would split recorded groups. Start the trainer with one process.")
        generations = int(trainer.num_generations)
        if len(prompts) % generations:
            raise UsageError(f"{len(prompts)} prompts are not a whole number of groups of {generations}.")
        found: Json = {}
        for _ in range(len(prompts) // generations):
            for name, values in self._next(generations, float(trainer.temperature)).items():
                found.setdefault(name, []).extend(values)
        return found

    def _next(self, generations: int, temperature: float) -> Json:
        for rows in self._groups:
            try:
                found = completions(rows, generations, self._several, temperature=temperature)
            except RowError as error:
                if not self._skip:
                    raise
                self.left_out[error.reason] += 1
                continue
            if left := len(rows) - generations:
                self.left_out["shorter_sequence"] += left
            return found
        raise UsageError("There are no recorded groups left: record more, or lower max_steps.")


def recorded_reward(completions: Sequence[Any], reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The `reward_funcs` for `RecordedRollouts`: return the rewards of Polar's evaluators."""
    return list(reward)


def recorded_ratios(trainer: type[Any]) -> type[Any]:
    """Return a subclass of GRPOTrainer that computes importance ratios with the *recorded* log-probabilities.

    TRL itself computes the old log-probabilities with the trainer's weights before the step. So TRL treats all answers
    as if these weights had sampled them, although recorded answers may come from older weights. (TRL corrects the
    difference only in its vLLM mode, with an additional importance weight.)
    """

    class RecordedRatios(trainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
            return output

    return RecordedRatios


def rollout_sample(row: TrainingRow, group_number: int, *, model_version: int = 0) -> Json:
    """Return the fields of a `RolloutSample`. `input_ids`, `completion_mask` int64 [n], `old_log_probs` float32 [n].

    The sample's `model_version` is the lowest policy version of its tokens. Versions that are not numbers are ignored.
    If no version is a number, the argument `model_version` is used. Raise RowError for a row without an advantage.
    """
    prompt = len(row.prompt_ids)
    numbers = [int(version) for version in row.versions if version.isdecimal()]
    return {
        "prompt": [],
        "completion": [],
        "input_ids": np.array(row.token_ids, dtype=np.int64),
        "completion_mask": np.array([0] * prompt + list(row.loss_mask), dtype=np.int64),
        "old_log_probs": np.array([0.0] * prompt + list(row.logprobs), dtype=np.float32),
        "advantage": require_advantage(row),
        "model_version": min(numbers, default=model_version),
        "group_id": group_number,
        "metrics": {"reward": float("nan") if row.reward is None else float(row.reward)},
    }


def record(row: TrainingRow, numbers: IdNumbers) -> Json:
    """Return a `RolloutSample` as plain JSON.

    SFTTrainer reads `input_ids` and `labels` (-100 where nothing was sampled). Without `labels` it would use
    `completion_mask` only if `completion_only_loss` is set.
    """
    fields = rollout_sample(row, numbers.groups[row.group_id or row.session_id])
    fields["labels"] = np.where(fields["completion_mask"] == 1, fields["input_ids"], -100)
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}
    return {**plain, "trace_id": row.trace_id, "temperature": row.temperature}


class RecordedWorker:
    """A `rollout_worker` for AsyncGRPOTrainer (TRL's `RolloutWorkerProtocol`) that hands out recorded groups.

    It leaves out rollouts that only count in the baseline, and groups whose rewards are all equal. `left_out` counts
    the rows that were left out, by reason. If an error ends the worker's thread, such as an error of `groups`,
    `check_health` raises the error again. The trainer calls `check_health` while it waits.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[Json]],
        *,
        advantage: str = "grpo",
        rewards: RewardsByGroup | None = None,
        temperature: float = 1.0,
        ahead: int = 64,
    ) -> None:
        """`advantage` and `rewards` are those of `with_advantages`. `temperature`: the trainer's; rows that were
        sampled at another temperature are left out and counted. `ahead`: how many samples to prepare in advance."""
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.left_out: Counter[str] = Counter()
        self._groups, self._advantage, self._rewards = iter(groups), advantage, rewards
        self._temperature = temperature
        self._version = 0
        self._error: Exception | None = None
        self._numbers = IdNumbers()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="polar-recorded-groups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the thread, or UsageError if the groups have run out. `stale_after_s` is
        ignored."""
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive() and self.rollout_buffer.empty():
            raise UsageError("There are no recorded groups left: record more, or lower max_steps.")

    def _run(self) -> None:
        try:
            for rows in self._groups:
                for sample in self._samples(rows):
                    while not self._stopping.is_set():
                        try:
                            self.rollout_buffer.put(sample, timeout=0.2)
                            break
                        except queue.Full:
                            continue
                if self._stopping.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - check_health raises it in the trainer's thread
            self._error = error

    def _samples(self, rows: Sequence[Json]) -> Iterator[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        read = read_training_rows(with_advantages(rows, self._advantage, self._rewards), self.left_out)
        if not any(row.advantage for row in read):
            self.left_out["no_spread"] += len(read)
            return
        for members in group_by_rollout(read).values():
            for row in members:
                try:
                    require_temperature(row, self._temperature)
                    fields = rollout_sample(row, self._numbers.groups[str(row.group_id)], model_version=self._version)
                except RowError as error:
                    self.left_out[error.reason] += 1
                    continue
                yield RolloutSample(**fields)

"""Settings of a GRPO run: defaults < the `[grpo]` table of a TOML file < flags.

The tables `[engine]`, `[run]` and `[gateway]` of the same file are Polar's own settings (`polar_proxy.config`). A run
stores its settings in `config.json`. When a run is resumed, all settings except those in `MAY_CHANGE` must be the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polar_proxy.errors import UsageError
from polar_proxy.training.advantages import ADVANTAGES
from polar_proxy.training.loss_names import LOSS_NAMES, PROXIMAL_LOSSES, LossAggregation
from polar_proxy.types import Json

MAY_CHANGE = frozenset(
    {
        "steps",
        "checkpoint_every",
        "keep_checkpoints",
        "lease_seconds",
        "wait_seconds",
        "eval_every",
        "feed",
        "processes",
        "weight_transfer",
        "weight_transfer_host",
        "pause_mode",
        "report_to",
    }
)
"""Settings that may differ when a run is resumed. A change of another setting would make it a different run."""

BuilderName = Literal["merged", "per_call", "tree"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class LoraSettings(BaseModel):
    """`lora = {rank = 16}` in `[grpo]`: train an adapter and keep the model's weights (training/policy/lora.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1)
    scale: float = Field(2.0, gt=0)
    """alpha / rank. The product of the adapter's two matrices is multiplied by this number."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of modules, or `all-linear`: every linear layer except the head."""
    adapter_name: str | None = None
    """Name under which vLLM serves the adapter; each sync reloads the adapter. None: each sync reloads the merged
    weights, as without LoRA."""


class GrpoConfig(BaseModel):
    """Settings of a training run, from the file that `polar train grpo --config` names and from `--set NAME=VALUE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Rollouts
    feed: str | None = None
    """URL of a server: groups are leased from its feed over HTTP, and rollouts run there. None: rollouts run in this
    process."""
    submit_jobs: bool = False
    """With `feed`: submit the jobs of each round to the server. False: other clients submit jobs, with tasks and
    options of their choice, and the trainer leases the groups of these jobs."""
    task: str = "swe-task"
    """Task family, or a file or folder of tasks, as for `polar run`."""
    first_seed: int = Field(10_000_000, ge=0)
    """Seed of the first training instance if `task` is a task family. If `task` is a file or folder, this has no
    effect: all its tasks except the held-out ones are trained on."""
    instances: int | None = Field(None, ge=1)
    """Train on this many instances, repeatedly and in shuffled order. None: a task family gives a new instance every
    time, and a file or folder gives all its tasks repeatedly."""
    groups: int = Field(4, ge=1)
    """Number of groups per step."""
    samples: int = Field(8, ge=2)
    """Number of rollouts per group."""
    dynamic_sampling: bool = False
    """Replace groups without a signal (rewards all equal) by further groups, in at most three more rounds per step
    (DAPO, arXiv 2503.14476)."""
    max_async_steps: int = Field(0, ge=0)
    """0: synchronous. n: the rollouts of the next n steps run while the trainer works. A group
    that is more than n + sync_every - 1 steps old is dropped and counted."""
    eval_every: int = Field(0, ge=0)
    """Evaluate on held-out instances before the first step, every n steps and at the end. 0: never."""
    eval_instances: int = Field(8, ge=1)
    eval_samples: int = Field(1, ge=1)
    eval_first_seed: int = Field(0, ge=0)
    """Seed of the first held-out instance if `task` is a task family. If `task` is a file or folder, this has no
    effect: with `eval_every`, its last `eval_instances` tasks are held out."""

    # Data
    weights: str | None = None
    """Folder of the initial weights. None: the weights that the local engine serves."""
    builder: BuilderName = "merged"
    """Builder that makes training sequences from calls."""
    train_timed_out: bool = False
    """Train on rollouts that timed out. False: these rollouts are masked, and count only in the baseline."""
    keep_zero_variance_groups: bool = False
    """Also train groups whose advantages are all 0. They add no gradient of the policy loss, but their tokens count in
    the normalisation of the loss."""
    shuffle_rewards: bool = False
    """Shuffle the rewards of a step among its rollouts. This is a control run, in which the policy must not learn."""
    max_sequence_length: int = Field(32_768, ge=2)
    """Maximum number of tokens of a sequence. A longer sequence is not trained, and is counted as skipped."""

    # Advantage and loss
    advantage: str = "grpo"
    """Name of the advantage function (docs/reference/algorithms.md)."""
    group_weight: Literal["none", "focal", "variance"] = "none"
    """Factor for the advantages of a group (docs/reference/algorithms.md)."""
    loss: str = "dapo"
    """Name of the policy loss (docs/reference/algorithms.md)."""
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss, such as {clip_low = 0.2, clip_high = 0.28}."""
    loss_aggregation: LossAggregation = "rollout"
    """rollout: all rollouts weigh the same, and so do all tokens within a rollout. sequence: all rollouts weigh the
    same, and so do all traces within a rollout. token: all tokens weigh the same. constant: a token weighs 1 / (number
    of groups * rollouts of its group * max_rollout_tokens), however many tokens are trained. gspo ignores this setting:
    its aggregation is fixed."""
    max_rollout_tokens: int | None = Field(None, ge=1)
    """Needed by loss_aggregation = "constant": the largest number of tokens that one rollout may sample."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the rollouts that this run starts. The loss uses the temperature that was recorded for each
    token."""
    proximal: Literal["sampler", "start", "recorded", "interpolated"] = "sampler"
    """Source of the proximal log-probabilities, which the losses decoupled, tis and icepop use. sampler: the trainer
    computes them with the weights that sampled the token; older weights are read from the run's checkpoints (one more
    forward pass for each older version). start: the trainer computes them with the weights before the step. recorded:
    the engine reported them when it sampled the token. interpolated: a weighted mean of recorded and start. The weight
    of recorded is 1/n for a token that is n versions old, and 0 for a token of the newest version (A-3PO, arXiv
    2512.06547)."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL divergence from the reference model. 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_max_ratio: float = Field(5.0, gt=0)
    """Upper bound of the importance ratio in the KL term."""
    reference: str | None = None
    """Folder of the reference model. None: the initial weights."""
    echo_coef: float = Field(0.0, ge=0)
    """Coefficient of ECHO (0.05 in its paper), a loss by which the policy learns to predict the environment's answers.
    ECHO also uses rollouts whose sampled tokens are not trained. 0: off."""

    # Optimiser
    ppo_epochs: int = Field(1, ge=1)
    """Number of passes over the groups of a step."""
    num_minibatches: int = Field(1, ge=1)
    """Divide the groups of a step into this many parts, with one optimiser update for each part. A step makes
    ppo_epochs * num_minibatches updates."""
    max_tokens_per_microbatch: int = Field(32_768, ge=2)
    """Maximum number of tokens in one forward and backward pass; a shared prefix counts once. The gradients of
    all microbatches add up to the gradient of the update."""
    learning_rate: float = Field(1e-5, gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. constant: unchanged. linear, cosine: falls to 0 by the end of the run, along a
    line or along half a cosine wave."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps in which the learning rate rises from 0."""
    adam_betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    lora: LoraSettings | None = None
    """Train an adapter instead of the weights. A checkpoint contains the merged weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward passes. Weights and optimiser are always float32."""
    activation_checkpointing: bool = False
    """Compute the activations of each block of the model again in the backward pass, instead of keeping them. A step
    takes about a third longer and needs much less memory."""
    device: str = "cpu"
    processes: int = Field(1, ge=1)
    """Number of processes over which weights, gradients and optimiser are sharded (FSDP2, training/policy/fsdp.py).
    With `device = "cuda"`, each process uses its own GPU: the first n GPUs of this machine."""

    # The run
    steps: int = Field(100, ge=1)
    seed: int = 0
    report_to: tuple[TrackerName, ...] = ()
    """Experiment trackers that get the run's metrics, besides metrics.jsonl and the database. Each needs its own
    package: pip install 'polar-proxy[NAME]'."""
    sync_every: int = Field(1, ge=1)
    """Send new weights to the engine every n steps."""
    weight_transfer: Literal["disk", "nccl"] = "disk"
    """How new weights reach vLLM. disk: as files that the trainer writes and vLLM reads. nccl: from GPU to GPU."""
    weight_transfer_host: str = "127.0.0.1"
    """With nccl: the address at which vLLM's workers reach the trainer."""
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    """Treatment of the calls that are in flight when vLLM loads new weights. keep: freeze them, then continue them with
    the new weights. wait: let them finish first. abort: abort them."""
    probe_tolerance: float = Field(0.02, gt=0)
    """Largest difference, in nats, that log-probabilities of engine and trainer may have on a fixed prompt after a
    sync."""
    checkpoint_every: int = Field(1, ge=1)
    """Save a checkpoint every n steps. A group is acknowledged when the first checkpoint after its training is saved;
    its lease stays open until then."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of the newest checkpoints to keep. More are kept if `proximal` needs them."""
    lease_seconds: float = Field(120.0, gt=0)
    """Seconds after which the groups of a killed trainer are offered again. A living trainer extends its leases."""
    wait_seconds: float = Field(3600.0, gt=0)
    """Stop the run with an error if the rollouts deliver no group for this many seconds."""

    @model_validator(mode="after")
    def _check_combinations(self) -> GrpoConfig:
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"there is no advantage {self.advantage!r}: choose {', '.join(ADVANTAGES)}")
        if self.loss not in LOSS_NAMES:
            raise ValueError(f"there is no loss {self.loss!r}: choose {', '.join(LOSS_NAMES)}")
        if self.submit_jobs and self.feed is None:
            raise ValueError(
                "`submit_jobs` needs `feed`, the server that gets the jobs; without it, the trainer runs its rollouts"
            )
        if self.feed is not None and not self.submit_jobs and self.eval_every:
            raise ValueError("`eval_every` needs `submit_jobs`: evaluations are jobs that the trainer submits")
        if self.processes > 1 and self.lora is not None:
            raise ValueError("LoRA is trained by one process: leave out `lora`, or `processes`")
        if self.processes > 1 and self.loss == "bapo":
            raise ValueError(
                "the loss bapo works only with a single process, because it chooses its clip bounds from all tokens of "
                "an update: leave out `processes`"
            )
        if self.processes > 1 and self.num_minibatches > 1:
            raise ValueError(
                "with several `processes`, each step makes only one update: leave out `num_minibatches`, or `processes`"
            )
        if self.processes > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"with several `processes`, each process gets its own GPU (cuda:0, cuda:1, ...), so {self.device!r} "
                'cannot be used: set device = "cuda" (or "cpu")'
            )
        if self.weight_transfer == "nccl" and not self.device.startswith("cuda"):
            raise ValueError(
                f'NCCL sends from a GPU: set device = "cuda", not {self.device!r}, or weight_transfer = "disk"'
            )
        if self.weight_transfer == "nccl" and self.lora is not None and self.lora.adapter_name is not None:
            raise ValueError(
                "with `lora.adapter_name`, vLLM reloads the adapter from disk: leave out `lora.adapter_name`, or set "
                'weight_transfer = "disk"'
            )
        if self.echo_coef and self.builder == "per_call":
            raise ValueError(
                "ECHO trains the tokens between two answers of a trace, and the traces of per_call have one answer: "
                'leave out `echo_coef`, or set builder = "merged" or "tree"'
            )
        if self.recomputes_proximal and self.processes > 1:
            raise ValueError(
                'proximal = "sampler" works only with a single process, because it loads older weights: leave out '
                '`processes`, or set `proximal` to "start", "recorded" or "interpolated"'
            )
        if self.recomputes_proximal and self.sync_every % self.checkpoint_every:
            raise ValueError(
                'proximal = "sampler" needs a checkpoint of every version that samples: `sync_every` must be a '
                "multiple of `checkpoint_every`"
            )
        if self.loss_aggregation == "constant" and self.max_rollout_tokens is None:
            raise ValueError('loss_aggregation = "constant" needs `max_rollout_tokens`')
        if self.max_sequence_length > self.max_tokens_per_microbatch:
            raise ValueError(
                "a sequence must fit into a microbatch: lower max_sequence_length or raise max_tokens_per_microbatch"
            )
        return self

    @property
    def max_staleness(self) -> int | None:
        """Maximum staleness of a group, in steps; None: no limit.

        If a group would probably exceed the limit when it is delivered, it does not start yet. A group that exceeds the
        limit is dropped. The limit includes `sync_every - 1` steps, because the engine's weights may be that old when a
        rollout starts.
        """
        return self.max_async_steps + self.sync_every - 1 if self.max_async_steps else None

    @property
    def recomputes_proximal(self) -> bool:
        """True if the proximal log-probabilities of stale tokens are computed with the weights that sampled them."""
        stale = self.max_async_steps > 0 or self.sync_every > 1 or self.feed is not None
        return stale and self.loss in PROXIMAL_LOSSES and self.proximal == "sampler"

    @property
    def checkpoints_to_keep(self) -> int:
        """Number of newest checkpoints to keep.

        With `recomputes_proximal`, the checkpoints reach back to the oldest weights whose samples may still be trained.
        """
        if not self.recomputes_proximal:
            return self.keep_checkpoints
        oldest = self.max_staleness or self.sync_every - 1
        return max(self.keep_checkpoints, -(-oldest // self.checkpoint_every) + 1)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        left = max(0.0, 1.0 - (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        factor = left if self.lr_schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
        return self.learning_rate * factor

    def to_json(self) -> Json:
        return self.model_dump(mode="json")


def read_toml(path: Path) -> tuple[Json, Json]:
    """Return the `[grpo]` table of a TOML file, and the file's other tables. Raises UsageError for an invalid file."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"The configuration {path} cannot be read: {error}.") from error
    grpo = tables.pop("grpo", {})
    if not isinstance(grpo, dict):
        raise UsageError(f"[grpo] in {path} must be a table.")
    return grpo, tables


def read_assignments(lines: Sequence[str]) -> Json:
    """Parse the values of `--set`, each NAME=VALUE. VALUE is TOML or plain text; TABLE.NAME sets a value of a table.

    Raises UsageError for anything else.
    """
    settings: Json = {}
    for line in lines:
        name, equals, value = (part.strip() for part in line.partition("="))
        if not (name and equals):
            raise UsageError(f"--set takes NAME=VALUE, as in the [grpo] table of a file, not {line!r}.")
        for toml_value in (value, json.dumps(value)):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                settings = _merge(settings, tomllib.loads(f"{name} = {toml_value}"))
                break
        else:
            raise UsageError(f"--set cannot read the name in {line!r}: write NAME=VALUE or TABLE.NAME=VALUE.")
    return settings


def make_config(*layers: Json) -> GrpoConfig:
    """Merge layers of settings: later layers win, and None counts as not given. Raises UsageError for the
    first invalid setting."""
    settings: Json = {}
    for layer in layers:
        settings = _merge(settings, {name: value for name, value in layer.items() if value is not None})
    try:
        return GrpoConfig(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"Bad training setting{f' {where}' if where else ''}: {first['msg']}.") from error


def _merge(first: Json, second: Json) -> Json:
    """Merge two tables recursively. Where both have a value, the value from `second` is used."""
    merged = {**first, **second}
    for name in first.keys() & second.keys():
        if isinstance(first[name], dict) and isinstance(second[name], dict):
            merged[name] = _merge(first[name], second[name])
    return merged


def changed_settings(stored: Json, config: GrpoConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that prevent a run from being resumed: name -> (stored value, value now)."""
    current = config.to_json()
    names = sorted((stored.keys() | current.keys()) - MAY_CHANGE)
    return {name: (stored.get(name), current.get(name)) for name in names if stored.get(name) != current.get(name)}

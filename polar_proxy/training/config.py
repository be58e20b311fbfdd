"""What one run of GRPO is told: defaults < the `[grpo]` table of a TOML file < flags.

The tables `[engine]`, `[run]` and `[gateway]` of the same file are Polar's own settings (`polar_proxy.config`); here
stands only what training adds to them. A run keeps what it began with in `config.json`, and a resumed run must agree
with it in everything but `MAY_CHANGE`.
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
from polar_proxy.training.algorithms import ADVANTAGES, LOSSES
from polar_proxy.training.loss_terms import LossAggregation
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
        "transfer",
        "transfer_host",
        "pause",
    }
)
"""What a resumed run may be told anew; anything else would make it another run under the same name."""


BuilderName = Literal["merged", "per_call", "tree"]


class LoraSettings(BaseModel):
    """`lora = {rank = 16}` in `[grpo]`: an adapter is trained (training/lora.py), the model's weights stay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1)
    scale: float = Field(2.0, gt=0)
    """alpha / rank: what the product of the two small matrices is multiplied by."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of modules, or `all-linear`: every linear layer but the head."""
    reload: str | None = None
    """vLLM: the name of the adapter that it samples with (its model's name then), reloaded at each sync. None: the
    merged weights are reloaded, as without LoRA."""


class GrpoConfig(BaseModel):
    """Every field may stand in `[grpo]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # What is rolled out
    feed: str | None = None
    """Groups come from this server's feed, over HTTP, and rollouts run there. None: from a service of this process."""
    ask: bool = False
    """With `feed`: submit the jobs of each round there. If not, groups are leased that others submit; `task` and what
    says how rollouts are made is theirs then."""
    task: str = "swe-task"
    """Task family, or a file or folder of tasks, as `polar run` takes them."""
    first_seed: int = Field(10_000_000, ge=0)
    """Instances of a family are taken from here on; of a file or folder the first ones, up to the held-out."""
    instances: int | None = Field(None, ge=1)
    """Train on so many instances, over and over in shuffled order; None: a new instance every time."""
    groups: int = Field(4, ge=1)
    """Groups per step."""
    samples: int = Field(8, ge=2)
    """Rollouts per group."""
    refill: bool = False
    """Groups that teach nothing (rewards all alike) do not count towards `groups`: others are asked for in their place
    (the dynamic sampling of DAPO, arXiv 2503.14476). At most three rounds more a step."""
    ahead: int = Field(0, ge=0)
    """0: synchronous. n: rollouts of the next n steps run while the trainer works; the bound on staleness, in steps.
    A group that is staler when it is finished is dropped and counted."""
    eval_every: int = Field(0, ge=0)
    """Roll out the held-out instances before the first step, every so many steps, and at the end; 0: never."""
    eval_instances: int = Field(8, ge=1)
    eval_samples: int = Field(1, ge=1)
    eval_first_seed: int = Field(0, ge=0)
    """Held-out instances of a family are taken from here on; of a file or folder they are the last ones."""

    # What a step is
    weights: str | None = None
    """Folder of the weights to begin with; None: those that the local engine serves."""
    builder: BuilderName = "merged"
    advantage: str = "grpo"
    group_weight: Literal["none", "focal", "variance"] = "none"
    """What the advantages of a group are multiplied by (docs/algorithms.md)."""
    loss: str = "dapo"
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Handed to the loss by keyword, such as {clip_low = 0.2, clip_high = 0.28}."""
    normalise: LossAggregation = "token"
    length: int | None = Field(None, ge=1)
    """The constant of normalise = "constant": tokens that one rollout may sample."""
    train_timed_out: bool = False
    """Rollouts that ran out of time are trained. If not, they are masked and stay in the baseline."""
    keep_zero_variance_groups: bool = False
    """Compute groups whose rewards are all alike too. They add no gradient, but count in the normalisation."""
    shuffle_rewards: bool = False
    """A control that must not learn: the rewards of a step are dealt out anew among its rollouts."""
    max_sequence: int = Field(32_768, ge=2)
    """Longer sequences are left out and counted."""
    max_tokens_per_microbatch: int = Field(32_768, ge=2)
    """Nodes of one tree-packed forward and backward pass: gradients of the passes add up to the step's."""
    epochs: int = Field(1, ge=1)
    """How often a step goes through its groups."""
    minibatches: int = Field(1, ge=1)
    """Into so many parts of whole groups a step is dealt, with an update for each: epochs * minibatches in all."""
    temperature: float = Field(1.0, gt=0)
    """At which rollouts are sampled, and the trainer's log-probabilities are taken."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the KL to the reference; 0: no reference is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    reference: str | None = None
    """Folder of the reference's weights; None: the weights that training begins with."""
    echo: float = Field(0.0, ge=0)
    """Coefficient of ECHO, which learns to predict what the environment answers (its paper: 0.05); 0: not at all."""
    lora: LoraSettings | None = None
    """Train an adapter instead of the weights. A checkpoint holds the merged weights, and is served like any other."""
    learning_rate: float = Field(1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: as it is, or falling to 0 at the last step."""
    warmup: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward passes; weights and optimiser are always float32."""
    device: str = "cpu"
    processes: int = Field(1, ge=1)
    """Over which weights, gradients and optimiser are sharded (FSDP2, training/parallel.py): with `device = "cuda"`
    one for each GPU of this machine, from the first on."""

    # The run
    steps: int = Field(100, ge=1)
    seed: int = 0
    sync_every: int = Field(1, ge=1)
    transfer: Literal["disk", "nccl"] = "disk"
    """How new weights travel to vLLM: through files that both see, or from GPU to GPU (training/nccl.py)."""
    transfer_host: str = "127.0.0.1"
    """With nccl: the address at which vLLM's workers reach the trainer."""
    pause: Literal["keep", "wait", "abort"] = "keep"
    """vLLM: while it takes new weights, calls in flight wait and go on with these, or end first, or are ended."""
    probe_tolerance: float = Field(0.02, gt=0)
    """Largest difference in nats between engine and trainer on the probe, after a sync."""
    checkpoint_every: int = Field(1, ge=1)
    """Groups are acknowledged with the checkpoint that holds what they taught, so leases stay open for so long."""
    keep_checkpoints: int = Field(2, ge=1)
    lease_seconds: float = Field(120.0, gt=0)
    """A killed trainer's groups come back after so long; while it lives, its leases are extended."""
    wait_seconds: float = Field(3600.0, gt=0)
    """How long nothing may come from the rollouts before the run stops with the reason."""

    @model_validator(mode="after")
    def _names_exist(self) -> GrpoConfig:
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"there is no advantage {self.advantage!r}: choose {', '.join(ADVANTAGES)}")
        if self.loss not in LOSSES:
            raise ValueError(f"there is no loss {self.loss!r}: choose {', '.join(LOSSES)}")
        if self.ask and self.feed is None:
            raise ValueError("`ask` goes with `feed`: without a server the trainer runs its own rollouts")
        if self.feed is not None and not self.ask and self.eval_every:
            raise ValueError("held-out instances are jobs of the trainer's own: `eval_every` goes with `ask`")
        if self.processes > 1 and self.lora is not None:
            raise ValueError("an adapter is trained by one process: leave out `lora`, or `processes`")
        if self.processes > 1 and self.loss == "bapo":
            raise ValueError(
                "bapo chooses its bounds on a whole step, which one process must see: leave out `processes`"
            )
        if self.processes > 1 and self.minibatches > 1:
            raise ValueError(
                "several processes make one update of a whole step: leave out `minibatches`, or `processes`"
            )
        if self.processes > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(f'`processes` take the GPUs one by one: device = "cuda", not {self.device!r}')
        if self.transfer == "nccl" and not self.device.startswith("cuda"):
            raise ValueError(f'NCCL sends from a GPU: device = "cuda", not {self.device!r}, or transfer = "disk"')
        if self.transfer == "nccl" and self.lora is not None and self.lora.reload is not None:
            raise ValueError("an adapter is reloaded from disk: leave out `lora.reload`, or `transfer`")
        if self.normalise == "constant" and self.length is None:
            raise ValueError('normalise = "constant" needs `length`')
        if self.max_sequence > self.max_tokens_per_microbatch:
            raise ValueError(
                "a sequence may not be longer than a pass: lower max_sequence or raise max_tokens_per_microbatch"
            )
        return self

    @property
    def staleness_bound(self) -> int | None:
        """In steps: a group that is further behind is not begun, and not trained on. The weights that sample are up to
        `sync_every - 1` steps old when they begin."""
        return self.ahead + self.sync_every - 1 if self.ahead else None

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, from 0 on."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        left = max(0.0, 1.0 - (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.learning_rate * (left if self.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left)))

    def to_json(self) -> Json:
        return self.model_dump(mode="json")


def read_toml(path: Path) -> tuple[Json, Json]:
    """The `[grpo]` table of a file, and its other tables. Raises UsageError where it cannot be read."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"The configuration {path} cannot be read: {error}.") from error
    own = tables.pop("grpo", {})
    if not isinstance(own, dict):
        raise UsageError(f"[grpo] in {path} is not a table.")
    return own, tables


def read_assignments(lines: Sequence[str]) -> Json:
    """Of the flag `--set`: NAME=VALUE each, the value as in TOML, or plain words; a dot goes into a table.

    Raises UsageError for what is neither.
    """
    given: Json = {}
    for line in lines:
        name, equals, value = (part.strip() for part in line.partition("="))
        if not (name and equals):
            raise UsageError(f"--set takes NAME=VALUE, as in a file's [grpo], not {line!r}.")
        for written in (value, json.dumps(value)):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                given = _merged(given, tomllib.loads(f"{name} = {written}"))
                break
        else:
            raise UsageError(f"--set cannot be read: {line!r}.")
    return given


def make_config(*layers: Json) -> GrpoConfig:
    """Later layers win; what is None in one was not given. Raises UsageError with the first thing that is wrong."""
    given: Json = {}
    for layer in layers:
        given = _merged(given, {name: value for name, value in layer.items() if value is not None})
    try:
        return GrpoConfig(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"Bad training setting{f' {where}' if where else ''}: {first['msg']}.") from error


def _merged(first: Json, second: Json) -> Json:
    """The second wins, value by value, inside tables as well."""
    both = {**first, **second}
    for name in first.keys() & second.keys():
        if isinstance(first[name], dict) and isinstance(second[name], dict):
            both[name] = _merged(first[name], second[name])
    return both


def differences(began_with: Json, now: GrpoConfig) -> dict[str, tuple[Any, Any]]:
    """Settings in which a run that began otherwise may not be resumed: name -> (then, now)."""
    current = now.to_json()
    # A run of an older Polar knew fewer settings: it did what their defaults say.
    then = GrpoConfig().to_json() | began_with
    names = sorted((then.keys() | current.keys()) - MAY_CHANGE)
    return {name: (then.get(name), current.get(name)) for name in names if then.get(name) != current.get(name)}

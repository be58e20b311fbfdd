"""The policy in training: forward and backward passes over packed trees, and the optimiser's update.

Promises:

* The loss uses the log-probabilities that the engine recorded. The proximal ones are the trainer's own before the step;
  the difference of the two is reported as the mismatch of trainer and engine.
* The weight of each token is decided once for the whole update, so the gradients of any number of microbatches add up
  to the same update.
* A gradient that is not finite raises TrainingError and is not applied.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polar_proxy.errors import TrainingError
from polar_proxy.training import lora
from polar_proxy.training.batch import TrainingBatch, TrainingSequence
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.losses import LOSSES, LossInputs, LossStats, kl_to_reference, observation_loss
from polar_proxy.training.tree import (
    Ids,
    Microbatch,
    Pack,
    PrefixTree,
    Targets,
    build_tree,
    make_microbatches,
    pack_trees,
    register_tree_attention,
    split_into_segments,
)


def load_model(path: Path | str, device: str = "cpu") -> Any:
    """Load a causal language model in float32, with attention over packed trees and without dropout."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=register_tree_attention()
        )
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"Cannot load a model to train from {path}: {error}") from error
    return model.to(device).eval()


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of the last epoch of a step. The mismatch is measured with the weights before the step."""

    loss: float
    tokens: int
    """Trained tokens."""
    computed_tokens: int
    """Tokens put through the model, forward and backward, in one epoch; a shared prefix counts once."""
    flat_tokens: int
    """Number of tokens if every sequence were computed by itself."""
    microbatches: int
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    ratio_mean: float
    ratio_max: float
    clipped_share: float
    dropped_share: float
    approx_kl: float
    entropy: float
    mismatch_mean: float
    """Mean of |trainer's log-probability before the step - recorded one|, nats."""
    mismatch_max: float
    kl_reference: float | None
    observation_loss: float | None
    """Cross-entropy of the observed tokens, nats per token; None without ECHO."""
    seconds: float


@dataclass(slots=True)
class StepAccumulator:
    """Sums over the microbatches that one process computes in one epoch."""

    loss: float = 0.0
    losses: list[LossStats] = field(default_factory=list)
    kl_sums: list[float] = field(default_factory=list)
    """For each microbatch the KL to the reference, summed over tokens; empty without a reference."""
    observation_sum: float = 0.0
    """Cross-entropy of the observed tokens, summed."""
    observed: int = 0
    computed_tokens: int = 0


def step_stats(
    accumulators: Sequence[StepAccumulator],
    *,
    flat_tokens: int,
    learning_rate: float,
    grad_norm: float,
    seconds: float,
) -> StepStats:
    """Return the statistics of a step from the accumulators of all processes."""
    losses = [stats for each in accumulators for stats in each.losses]
    kl_sums = [kl_sum for each in accumulators for kl_sum in each.kl_sums]
    tokens = sum(stats.tokens for stats in losses)
    observed = sum(each.observed for each in accumulators)
    means = ("ratio_mean", "clipped_share", "dropped_share", "approx_kl", "entropy", "mismatch_mean")
    return StepStats(
        loss=sum(each.loss for each in accumulators),
        tokens=tokens,
        computed_tokens=sum(each.computed_tokens for each in accumulators),
        flat_tokens=flat_tokens,
        microbatches=len(losses),
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        ratio_max=max(stats.ratio_max for stats in losses),
        mismatch_max=max(stats.mismatch_max for stats in losses),
        kl_reference=sum(kl_sums) / tokens if kl_sums else None,
        observation_loss=sum(each.observation_sum for each in accumulators) / observed if observed else None,
        seconds=seconds,
        **{name: sum(getattr(stats, name) * stats.tokens for stats in losses) / tokens for name in means},
    )


class Learner:
    """The policy, its optimiser and its frozen reference model. Not thread-safe: run one method at a time."""

    def __init__(self, model: Any, config: GrpoConfig, reference: Any | None = None) -> None:
        if config.kl_coef > 0 and reference is None:
            raise TrainingError("a KL term (kl_coef > 0) needs a reference model")
        self.model = model if config.lora is None else lora.wrap(model, config.lora, config.seed)
        self._config = config
        self._reference = reference
        self._device = torch.device(config.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(
            trained, lr=config.learning_rate, betas=config.adam_betas, weight_decay=config.weight_decay
        )

    def update(self, batch: TrainingBatch, step: int) -> StepStats:
        """Train on a batch of at least one sequence. `step`, counted from 0, sets the learning rate."""
        started = time.perf_counter()
        config = self._config
        minibatches = [
            self._make_microbatches(sequences)
            for sequences in batch.minibatches(config.num_minibatches, f"{config.seed}/{step}")
        ]
        if config.loss == "bapo" and any(len(minibatch) > 1 for minibatch in minibatches):
            raise TrainingError(
                "bapo chooses its clip bounds on a whole update, which must fit into one microbatch: raise "
                "max_tokens_per_microbatch"
            )
        learning_rate = config.learning_rate_at(step)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        microbatches = [microbatch for minibatch in minibatches for microbatch in minibatch]
        if config.kl_coef > 0:
            for microbatch in microbatches:
                microbatch.reference_logprobs = self._logprobs_without_grad(self._reference, microbatch)
            self._join_other_processes(self._reference)
        if len(minibatches) > 1:  # with a single minibatch they come from its own forward pass
            for microbatch in microbatches:
                microbatch.proximal_logprobs = self._logprobs_without_grad(self.model, microbatch)
        for _ in range(config.ppo_epochs):
            totals = StepAccumulator()
            for minibatch in minibatches:
                grad_norm = self._optimise(minibatch, totals, share=1 / len(minibatches), step=step)
        totals.computed_tokens = sum(len(microbatch.tree) for microbatch in microbatches)
        return step_stats(
            self._gather(totals),
            flat_tokens=sum(len(sequence.token_ids) for sequence in batch.sequences),
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            seconds=time.perf_counter() - started,
        )

    def _optimise(self, minibatch: Sequence[Microbatch], totals: StepAccumulator, *, share: float, step: int) -> float:
        """Accumulate the gradients of the microbatches, clip them and update the weights.

        Returns the norm of the gradient before clipping. `share` times the loss is added to `totals`.
        """
        self.optimiser.zero_grad(set_to_none=True)
        for microbatch in minibatch:
            loss = self._loss(microbatch, totals)
            (loss * self._processes).backward()  # type: ignore[no-untyped-call, unused-ignore]
            totals.loss += float(loss.detach()) * share
        self._join_other_processes(self.model)
        grad_norm = self._clip_gradient()
        if not np.isfinite(grad_norm):
            raise TrainingError(
                f"the gradient of step {step} is not finite, so it was not applied. Lower the learning rate or "
                "train in float32; the last checkpoint is good"
            )
        self.optimiser.step()
        return grad_norm

    def _loss(self, microbatch: Microbatch, totals: StepAccumulator) -> Tensor:
        """Return policy loss + KL term + observation loss of a microbatch; add their statistics to `totals`."""
        config = self._config
        target_logprobs, target_entropy = self._logprobs_and_entropy(microbatch)
        logprobs = target_logprobs[microbatch.sampled]
        if microbatch.proximal_logprobs is None:
            microbatch.proximal_logprobs = logprobs.detach()
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=microbatch.old_logprobs,
            proximal_logprobs=microbatch.proximal_logprobs,
            advantages=microbatch.advantages,
            weights=microbatch.weights,
            sequences=microbatch.sequences,
            entropy=target_entropy[microbatch.sampled],
        )
        loss, stats = LOSSES[config.loss](inputs, **config.loss_settings)
        totals.losses.append(stats)
        if microbatch.reference_logprobs is not None:
            kl, kl_mean = kl_to_reference(
                logprobs,
                microbatch.reference_logprobs,
                microbatch.weights,
                estimator=config.kl_estimator,
                old_logprobs=microbatch.old_logprobs,
            )
            loss = loss + config.kl_coef * kl
            totals.kl_sums.append(kl_mean * stats.tokens)
        if config.echo_coef > 0:
            observed = target_logprobs[~microbatch.sampled]
            loss = loss + config.echo_coef * observation_loss(observed, microbatch.observations)
            totals.observation_sum -= float(observed.detach().sum())
            totals.observed += len(observed)
        return loss

    # Forward passes

    def _make_microbatches(self, sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        return make_microbatches(
            self._pack([sequence.token_ids for sequence in sequences]),
            sequences,
            aggregation=self._config.loss_aggregation,
            length=self._config.max_rollout_tokens,
            with_observations=self._config.echo_coef > 0,
            device=self._device,
        )

    def _forward(self, model: Any, tree: PrefixTree, rows: Tensor | None = None) -> Tensor:
        """Return logits [r, V] at the nodes `rows` of a tree (ascending), or at all nodes if None."""
        autocast = (
            torch.autocast(self._device.type, torch.bfloat16)
            if self._config.dtype == "bfloat16"
            else contextlib.nullcontext()
        )
        with autocast:
            output = model(
                input_ids=torch.from_numpy(tree.token_ids).to(self._device)[None],
                position_ids=torch.from_numpy(tree.positions).to(self._device)[None],
                attention_mask=None,
                use_cache=False,
                tree_segments=split_into_segments(tree, self._device),
                logits_to_keep=0 if rows is None else rows,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _logits_and_logprobs(self, model: Any, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return logits [r, V] of the rows of the targets, and log-probabilities of all targets [m]."""
        rows = torch.from_numpy(microbatch.targets.rows).to(self._device)
        logits = self._forward(model, microbatch.tree, rows)
        return logits, target_logprobs(logits, microbatch.targets, temperature=self._config.temperature)

    def _logprobs_and_entropy(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (with gradient) and entropies (without) of all targets [m]."""
        logits, logprobs = self._logits_and_logprobs(self.model, microbatch)
        with torch.no_grad():
            log_softmax = torch.log_softmax(logits.detach().float() / self._config.temperature, dim=-1)
            row_entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
            entropy = row_entropy[torch.from_numpy(microbatch.targets.row_of).to(self._device)]
        return logprobs, entropy

    def _logprobs_without_grad(self, model: Any, microbatch: Microbatch) -> Tensor:
        with torch.no_grad():
            _, logprobs = self._logits_and_logprobs(model, microbatch)
        return logprobs[microbatch.sampled]

    # Overridden by training/fsdp.py, where several processes train one policy

    _processes = 1
    """Number of processes. FSDP averages gradients over them, so the loss is multiplied by it to get the sum."""

    def _pack(self, sequences: Sequence[Ids]) -> list[Pack]:
        return pack_trees(sequences, self._config.max_tokens_per_microbatch)

    def _join_other_processes(self, model: Any) -> None:
        """Run empty passes until every process has done its own passes: FSDP computes only in all processes at once."""

    def _gather(self, own: StepAccumulator) -> list[StepAccumulator]:
        """Return the accumulators of all processes."""
        return [own]

    def _clip_gradient(self) -> float:
        """Clip the gradient and return its norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm))

    # Weights and optimiser state

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters by name, tied ones once, without copying. With LoRA: the merged weights."""
        if self._config.lora is not None:
            return lora.merge(self.model, self._config.lora)
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probabilities of token_ids[1:] at temperature 1, each given all tokens before it."""
        tree = build_tree([np.asarray(token_ids, dtype=np.int64)])
        with torch.no_grad():
            logits = self._forward(self.model, tree).float()
        log_softmax = torch.log_softmax(logits[:-1], dim=-1)
        ids = torch.tensor(list(token_ids[1:]), device=self._device)
        values: list[float] = log_softmax.gather(1, ids[:, None])[:, 0].tolist()
        return values

    def state(self) -> dict[str, Any]:
        """Return the optimiser's state for a checkpoint, with the adapter when LoRA is used."""
        state: dict[str, Any] = self.optimiser.state_dict()
        return state if self._config.lora is None else state | {"adapter": lora.adapter(self.model)}

    def restore(self, weights: Mapping[str, Tensor], optimiser: dict[str, Any]) -> None:
        """Load a checkpoint. Raises TrainingError when it belongs to another model."""
        if self._config.lora is not None:
            self._restore_adapter(weights, dict(optimiser))
            return
        own = dict(self.model.named_parameters())
        if own.keys() != weights.keys():
            raise TrainingError("the checkpoint holds the weights of another model")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self.optimiser.load_state_dict(copy.deepcopy(optimiser))  # the optimiser updates the given tensors in place

    def _restore_adapter(self, weights: Mapping[str, Tensor], state: dict[str, Any]) -> None:
        """Load the adapter. Raises TrainingError if base and adapter do not give the saved merged weights, because then
        the base is another model."""
        lora.load_adapter(self.model, state.pop("adapter"))
        merged = self.weights()
        if merged.keys() != weights.keys() or not all(
            torch.allclose(tensor.cpu(), weights[name], rtol=1e-4, atol=1e-6) for name, tensor in merged.items()
        ):
            raise TrainingError("the checkpoint's adapter was trained on other base weights than those loaded now")
        self.optimiser.load_state_dict(state)


def target_logprobs(logits: Tensor, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) at each target [m], at least float32, with gradient.

    `logits` [r, V] are those at `targets.rows`, as a Transformers model returns for `logits_to_keep=rows`. Each row is
    normalised once, however many targets it has.
    """
    if logits.shape[0] != len(targets.rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(targets.rows)} rows of targets")
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    row_of = torch.from_numpy(targets.row_of).to(logits.device)
    token_ids = torch.from_numpy(targets.token_ids).to(logits.device)
    return scores[row_of, token_ids] - torch.logsumexp(scores, dim=-1)[row_of]

"""The policy in training: forward and backward passes over packed trees, and the optimiser's update.

Promises:

* The loss uses the engine's recorded log-probabilities and the trainer's own. The trainer computes the log-probability
  of each token at the temperature at which the token was sampled. The difference between the recorded and the proximal
  log-probabilities (`proximal` in `[grpo]`) is reported as the mismatch of trainer and engine.
* The weight of each token is decided once for the whole update, so the gradients of any number of microbatches add up
  to the same update.
* A gradient that is not finite raises TrainingError and is not applied.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polar_proxy.errors import TrainingError
from polar_proxy.training.batch import TrainingBatch, TrainingSequence
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.loss_names import PROXIMAL_LOSSES
from polar_proxy.training.losses import (
    LOSSES,
    OWN_AGGREGATION,
    LossInputs,
    kl_to_reference,
    observation_loss,
)
from polar_proxy.training.policy import lora
from polar_proxy.training.policy.packing import Microbatch, Pack, make_microbatches, pack_trees
from polar_proxy.training.policy.tree import (
    Ids,
    PrefixTree,
    build_tree,
    by_temperature,
    entropy_of_rows,
    register_tree_attention,
    split_into_segments,
    target_logprobs,
)
from polar_proxy.training.step_stats import StepAccumulator, StepStats, step_stats

WeightsAfterStep = Callable[[int, Any], Mapping[str, Tensor]]
"""Function of a step and a model. It returns name -> parameter of the model after that step. Parameters that training
does not change may be missing. Raises TrainingError if the weights of that step are not kept."""


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


def blocks_of(model: Any) -> list[Any]:
    """Return the repeated blocks of a Transformers model: its decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    names |= {f"FSDP{name}" for name in names}  # the class of a block that FSDP2 has sharded
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_activations(model: Any) -> None:
    """Let each block of a model keep only its input. The backward pass then runs the block again.

    Raises TrainingError if the model does not name its blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise TrainingError(f"activation_checkpointing cannot be used: {type(model).__name__} does not name its blocks")
    for block in blocks:  # without dropout there are no random numbers to repeat
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


class Learner:
    """The policy, its optimiser and its frozen reference model. Not thread-safe: run one method at a time."""

    def __init__(self, model: Any, config: GrpoConfig, reference: Any | None = None) -> None:
        if config.kl_coef > 0 and reference is None:
            raise TrainingError("a KL term (kl_coef > 0) needs a reference model")
        self.model = model if config.lora is None else lora.wrap(model, config.lora, config.seed)
        self._config = config
        self._reference = reference
        self._device = torch.device(config.device)
        if config.activation_checkpointing:
            checkpoint_activations(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(
            trained, lr=config.learning_rate, betas=config.adam_betas, weight_decay=config.weight_decay
        )

    def update(self, batch: TrainingBatch, step: int, weights_after: WeightsAfterStep | None = None) -> StepStats:
        """Train on a batch of at least one sequence.

        `step`, counted from 0, sets the learning rate, and is the policy version of the weights before the update.
        `weights_after` returns the weights of an older version. It is needed if the batch has tokens of older versions
        and the configuration has `recomputes_proximal`.
        """
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
        proximal_started = time.perf_counter()
        if config.recomputes_proximal:
            self._recompute_older(microbatches, step, weights_after)
        proximal_seconds = time.perf_counter() - proximal_started
        if len(minibatches) > 1:  # with a single minibatch they come from its own forward pass
            for microbatch in microbatches:
                start = self._logprobs_without_grad(self.model, microbatch)
                microbatch.proximal_logprobs = self._proximal(microbatch, start, step)
        for _ in range(config.ppo_epochs):
            totals = StepAccumulator()
            for minibatch in minibatches:
                grad_norm = self._optimise(minibatch, totals, share=1 / len(minibatches), step=step)
        totals.computed_tokens = sum(len(microbatch.tree) for microbatch in microbatches)
        totals.microbatches = len(microbatches)
        return step_stats(
            self._gather(totals),
            flat_tokens=sum(len(sequence.token_ids) for sequence in batch.sequences),
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            proximal_seconds=proximal_seconds,
            seconds=time.perf_counter() - started,
        )

    def _optimise(self, minibatch: Sequence[Microbatch], totals: StepAccumulator, *, share: float, step: int) -> float:
        """Accumulate the gradients of the microbatches, clip them and update the weights.

        Returns the norm of the gradient before clipping. `share` is 1 / number of minibatches: the minibatch's loss is
        added to `totals` with this weight, so that `totals.loss` becomes the mean loss of all minibatches.
        """
        self.optimiser.zero_grad(set_to_none=True)
        for microbatch in minibatch:
            loss = self._loss(microbatch, totals, step)
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

    def _loss(self, microbatch: Microbatch, totals: StepAccumulator, step: int) -> Tensor:
        """Return policy loss + KL term + observation loss of a microbatch; add their statistics to `totals`."""
        config = self._config
        target_logprobs, target_entropy = self._logprobs_and_entropy(microbatch)
        loss = target_logprobs.sum() * 0.0
        if bool(microbatch.sampled.any()):
            entropy = target_entropy[microbatch.sampled]
            loss = self._policy_loss(microbatch, target_logprobs[microbatch.sampled], entropy, totals, step)
        if config.echo_coef > 0:
            observed = target_logprobs[~microbatch.sampled]
            loss = loss + config.echo_coef * observation_loss(observed, microbatch.observations)
            totals.observation_sum -= float(observed.detach().sum())
            totals.observed += len(observed)
        return loss

    def _policy_loss(
        self, microbatch: Microbatch, logprobs: Tensor, entropy: Tensor, totals: StepAccumulator, step: int
    ) -> Tensor:
        """Return policy loss + KL term of the sampled tokens [s]; add their statistics to `totals`."""
        config = self._config
        if microbatch.proximal_logprobs is None:
            microbatch.proximal_logprobs = self._proximal(microbatch, logprobs.detach(), step)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=microbatch.old_logprobs,
            proximal_logprobs=microbatch.proximal_logprobs,
            advantages=microbatch.advantages,
            weights=microbatch.weights,
            sequences=microbatch.sequences,
            entropy=entropy,
        )
        loss, stats = LOSSES[config.loss](inputs, **config.loss_settings)
        totals.losses.append(stats)
        if microbatch.reference_logprobs is not None:
            kl, kl_stats = kl_to_reference(
                logprobs,
                microbatch.reference_logprobs,
                microbatch.old_logprobs,
                microbatch.weights,
                estimator=config.kl_estimator,
                max_ratio=config.kl_max_ratio,
            )
            loss = loss + config.kl_coef * kl
            totals.kl.append((stats.tokens, kl_stats))
        return loss

    # The proximal policy

    def _proximal(self, microbatch: Microbatch, start: Tensor, step: int) -> Tensor:
        """Return log pi_prox of the sampled tokens [s]. `start`: log-probabilities by the weights before the step."""
        config = self._config
        if config.loss not in PROXIMAL_LOSSES or config.proximal == "start":
            return start
        if config.proximal == "recorded":
            return microbatch.old_logprobs
        if config.proximal == "interpolated":
            staleness = [step - number for number in self._version_numbers(microbatch, step)]
            recorded = torch.tensor([0.0 if age <= 0 else 1.0 / age for age in staleness], device=start.device)
            return recorded * microbatch.old_logprobs + (1.0 - recorded) * start
        if microbatch.older_logprobs is None:
            return start
        return torch.where(torch.isnan(microbatch.older_logprobs), start, microbatch.older_logprobs)

    def _recompute_older(
        self, microbatches: Sequence[Microbatch], step: int, weights_after: WeightsAfterStep | None
    ) -> None:
        """Set `older_logprobs` of the microbatches for the tokens that older policy versions sampled.

        The log-probability of such a token is computed with the weights that sampled the token. Raises TrainingError if
        the weights of a version are not kept.
        """
        numbers = [np.array(self._version_numbers(microbatch, step)) for microbatch in microbatches]
        for number in sorted({int(number) for each in numbers for number in each} - {step}):
            if weights_after is None:
                raise TrainingError(
                    f"the batch has tokens of policy version {number}, but the weights of older versions are not kept"
                )
            weights = {name: tensor.to(self._device) for name, tensor in weights_after(number, self.model).items()}
            older = partial(_call_with, self.model, weights)
            for microbatch, own in zip(microbatches, numbers, strict=True):
                here = torch.from_numpy(own == number).to(self._device)
                if not bool(here.any()):
                    continue
                if microbatch.older_logprobs is None:
                    microbatch.older_logprobs = torch.full_like(microbatch.old_logprobs, torch.nan)
                values = self._logprobs_without_grad(older, microbatch)
                microbatch.older_logprobs = torch.where(here, values, microbatch.older_logprobs)

    def _version_numbers(self, microbatch: Microbatch, step: int) -> list[int]:
        """Return the policy version of each sampled token [s] as a number.

        A version is the number of steps for which the weights were trained. `step`: the version of the current weights.
        In a synchronous run, tokens of an unknown version count as sampled by the current weights. Raises
        TrainingError if a token has a version outside 0 to `step`, or if the run is asynchronous and a version is
        unknown.
        """
        numbers = []
        for version in microbatch.versions:
            if version is None and not self._config.max_staleness and self._config.sync_every == 1:
                numbers.append(step)
            elif version is not None and version.isdecimal() and int(version) <= step:
                numbers.append(int(version))
            else:
                raise TrainingError(
                    f"a token was sampled by policy version {version!r}, which is not one of this run (0 to {step}): "
                    'let only this trainer update the engine, or set proximal = "start" or "recorded"'
                )
        return numbers

    # Forward passes

    def _make_microbatches(self, sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        return make_microbatches(
            self._pack([sequence.token_ids for sequence in sequences]),
            sequences,
            aggregation=OWN_AGGREGATION.get(self._config.loss, self._config.loss_aggregation),
            max_rollout_tokens=self._config.max_rollout_tokens,
            with_observations=self._config.echo_coef > 0,
            device=self._device,
        )

    def _forward(self, model: Any, tree: PrefixTree, rows: Tensor | None = None) -> Tensor:
        """Return logits [r, V] at the tree's nodes `rows` (ascending indices), or at all nodes if `rows` is None."""
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
        """Return logits [r, V] at the r nodes `targets.rows`, and log-probabilities [m] of the m targets."""
        rows = torch.from_numpy(microbatch.targets.rows).to(self._device)
        logits = self._forward(model, microbatch.tree, rows)
        return logits, target_logprobs(logits, microbatch.targets, microbatch.temperatures)

    def _logprobs_and_entropy(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (with gradient) and entropies (without) of all targets [m]."""
        logits, logprobs = self._logits_and_logprobs(self.model, microbatch)
        entropy = torch.zeros_like(logprobs, requires_grad=False)
        with torch.no_grad():
            for part in by_temperature(logits.detach(), microbatch.targets, microbatch.temperatures):
                entropy[part.targets] = entropy_of_rows(part.scores)[part.row_of]
        return logprobs, entropy

    def _logprobs_without_grad(self, model: Any, microbatch: Microbatch) -> Tensor:
        with torch.no_grad():
            _, logprobs = self._logits_and_logprobs(model, microbatch)
        return logprobs[microbatch.sampled]

    # Overridden by training/policy/fsdp.py, where several processes train one policy

    _processes = 1
    """Number of processes. FSDP averages the gradients of all processes. If the loss is multiplied by this number, FSDP
    gives the sum of the gradients instead."""

    def _pack(self, sequences: Sequence[Ids]) -> list[Pack]:
        return pack_trees(sequences, self._config.max_tokens_per_microbatch)

    def _join_other_processes(self, model: Any) -> None:
        """Run empty passes until the other processes have done their passes, too. With FSDP, a pass needs all
        processes at once."""

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
        """Return the parameters by name, not copied. Tied parameters appear once. With LoRA: the merged weights, in
        which the adapted matrices are copies."""
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


def _call_with(model: Any, weights: Mapping[str, Tensor], **inputs: Any) -> Any:
    """Call the model with `weights` instead of its parameters."""
    return torch.func.functional_call(model, dict(weights), (), inputs)

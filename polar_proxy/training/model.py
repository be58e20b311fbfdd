"""One step of the optimiser: forward and backward passes over packed trees, the update, and what there is to say of it.

Promises:

* The loss is made of the recorded log-probabilities; the trainer's own before the step are the proximal ones, and the
  gap between the two is reported as the mismatch of trainer and engine.
* What a token weighs is decided once for the whole update: gradients of any number of passes add up to the same update.
* Gradients that are not finite change nothing: TrainingError.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polar_proxy.training import auxiliary, lora
from polar_proxy.training.algorithms import LOSSES
from polar_proxy.training.attention import model_inputs, target_logprobs
from polar_proxy.training.batch import TrainingBatch, TrainingSequence
from polar_proxy.training.branches import register_tree_attention, tree_segments
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.failures import TrainingError
from polar_proxy.training.microbatch import Microbatch, make_microbatches
from polar_proxy.training.packing import Pack, pack_trees
from polar_proxy.training.tally import StepAccumulator, StepStats, step_stats
from polar_proxy.training.tokens import LossInputs, LossStats
from polar_proxy.training.tree import Ids, PrefixTree, pack_sequences


def load_model(path: Path | str, device: str = "cpu") -> Any:
    """A causal language model with float32 weights that attends over packed trees, without dropout."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=register_tree_attention()
        )
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"Cannot load a model to train from {path}: {error}") from error
    return model.to(device).eval()


class Learner:
    """The policy in training, its optimiser, and its frozen reference. Not thread-safe: one call at a time."""

    def __init__(self, model: Any, config: GrpoConfig, reference: Any | None = None) -> None:
        if config.kl > 0 and reference is None:
            raise TrainingError("a KL term needs a reference model")
        self.model = model if config.lora is None else lora.wrap(model, config.lora, config.seed)
        self._config = config
        self._reference = reference
        self._device = torch.device(config.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(
            trained, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return int(self.model.config.get_text_config().vocab_size)

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, shared ones once; not copies. With LoRA: of the base model, the adapter merged in."""
        if self._config.lora is not None:
            return lora.merged(self.model, self._config.lora)
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-probabilities of token_ids[1:] at temperature 1, each given all that stands before it."""
        tree = pack_sequences([np.asarray(token_ids, dtype=np.int64)])
        with torch.no_grad():
            logits = self._forward(self.model, tree, None).float()
        found = torch.log_softmax(logits[:-1], dim=-1)
        ids = torch.tensor(list(token_ids[1:]), device=self._device)
        values: list[float] = found.gather(1, ids[:, None])[:, 0].tolist()
        return values

    def update(self, batch: TrainingBatch, step: int) -> StepStats:
        """Train on a batch with at least one sequence. `step` (from 0) decides the learning rate."""
        began = time.perf_counter()
        config = self._config
        parts = [self._passes(part) for part in batch.minibatches(config.minibatches, f"{config.seed}/{step}")]
        passes = [one for part in parts for one in part]
        if config.loss == "bapo" and any(len(part) > 1 for part in parts):
            raise TrainingError(
                "bapo chooses its bounds on whole updates: raise max_tokens_per_microbatch until one pass holds one"
            )
        rate = config.rate(step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        if config.kl > 0:
            for one in passes:
                one.reference = self._no_grad_logprobs(self._reference, one)
        self._accompany(self._reference)
        if len(parts) > 1:  # of one update they come with its own forward pass
            for one in passes:
                one.proximal = self._no_grad_logprobs(self.model, one)
        for _ in range(config.epochs):
            tally = StepAccumulator()
            for part in parts:
                norm = self._one_update(part, tally, 1 / len(parts), step)
        tally.computed = sum(len(one.pack.tree) for one in passes)
        tally.gaps = [one.mismatch() for one in passes]
        return step_stats(
            self._tallies(tally),
            flat_tokens=sum(len(sequence.token_ids) for sequence in batch.sequences),
            learning_rate=rate,
            grad_norm=norm,
            with_reference=config.kl > 0,
            seconds=time.perf_counter() - began,
        )

    def _one_update(self, part: Sequence[Microbatch], tally: StepAccumulator, share: float, step: int) -> float:
        """Forward and backward over its passes, then the optimiser. The gradient's norm before clipping; `share` of the
        loss goes into the tally."""
        self.optimiser.zero_grad(set_to_none=True)
        for one in part:
            everything, entropies = self._logprobs_and_entropy(one)
            new, entropy = everything[one.sampled], entropies[one.sampled]
            if one.proximal is None:
                one.proximal = new.detach()
            loss, stats, kl = self._loss(one, new, entropy, one.proximal)
            if self._config.echo > 0:
                term, seen = auxiliary.observation_loss(everything, ~one.sampled, weights=one.observed)
                loss = loss + self._config.echo * term
                tally.observations.append(seen)
            (loss * self._processes).backward()  # type: ignore[no-untyped-call, unused-ignore]
            tally.loss += float(loss.detach()) * share
            tally.kls += kl * stats.tokens
            tally.found.append(stats)
        self._accompany(self.model)
        norm = self._clip()
        if not np.isfinite(norm):
            raise TrainingError(
                f"the gradient of step {step} is not finite: it changed nothing. A lower learning rate, or float32, "
                "helps; the last checkpoint is good"
            )
        self.optimiser.step()
        return norm

    # What several processes do otherwise (training/parallel.py)

    _processes = 1
    """The gradient is the mean over so many."""

    def _accompany(self, model: Any | None) -> None:
        """Behind one's own passes: take part in those that other processes still make."""

    def _tallies(self, own: StepAccumulator) -> list[StepAccumulator]:
        """Of all processes."""
        return [own]

    def _clip(self) -> float:
        """Clip the gradient; its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm))

    def state(self) -> dict[str, Any]:
        """The optimiser's, to be saved, with the adapter where one is trained."""
        state: dict[str, Any] = self.optimiser.state_dict()
        return state if self._config.lora is None else state | {"adapter": lora.adapter(self.model)}

    def restore(self, weights: Mapping[str, Tensor], optimiser: dict[str, Any]) -> None:
        """What a checkpoint holds. Raises TrainingError where it is another model's."""
        if self._config.lora is not None:
            self._restore_adapter(weights, dict(optimiser))
            return
        own = dict(self.model.named_parameters())
        if own.keys() != weights.keys():
            raise TrainingError("the checkpoint holds the weights of another model")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self.optimiser.load_state_dict(copy.deepcopy(optimiser))  # it would go on counting in tensors of the giver's

    def _restore_adapter(self, weights: Mapping[str, Tensor], state: dict[str, Any]) -> None:
        """The base was loaded afresh: with the adapter it must come to what was saved, or it is another base."""
        lora.load_adapter(self.model, state.pop("adapter"))
        now = self.weights()
        if now.keys() != weights.keys() or not all(
            torch.allclose(one.cpu(), weights[name], rtol=1e-4, atol=1e-6) for name, one in now.items()
        ):
            raise TrainingError("the checkpoint's adapter was trained on other weights than those loaded now")
        self.optimiser.load_state_dict(state)

    def _packs(self, sequences: Sequence[Ids]) -> list[Pack]:
        """Which sequences go through the model together, and what of them is computed once."""
        return pack_trees(sequences, self._config.max_tokens_per_microbatch)

    def _passes(self, sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        packs = self._packs([sequence.token_ids for sequence in sequences])
        how, length = self._config.normalise, self._config.length
        echo = self._config.echo > 0
        return make_microbatches(packs, sequences, how=how, length=length, observations=echo, device=self._device)

    def _forward(self, model: Any, tree: PrefixTree, rows: Tensor | None) -> Tensor:
        """Logits [r, V] at these nodes of a packed tree, ascending; None: at all."""
        inputs = model_inputs(tree, None, self._device)
        cast = (
            torch.autocast(self._device.type, torch.bfloat16)
            if self._config.dtype == "bfloat16"
            else contextlib.nullcontext()
        )
        with cast:
            out = model(
                **inputs, tree_segments=tree_segments(tree, self._device), logits_to_keep=0 if rows is None else rows
            )
        logits: Tensor = out.logits[0]
        return logits

    def _target_logits(self, model: Any, one: Microbatch) -> Tensor:
        return self._forward(model, one.pack.tree, torch.from_numpy(one.wanted.rows).to(self._device))

    def _logprobs_and_entropy(self, one: Microbatch) -> tuple[Tensor, Tensor]:
        logits = self._target_logits(self.model, one)
        new = target_logprobs(logits, one.wanted, temperature=self._config.temperature)
        with torch.no_grad():
            logs = torch.log_softmax(logits.detach().float() / self._config.temperature, dim=-1)
            entropy = -(logs.exp() * logs).sum(dim=-1)[torch.from_numpy(one.wanted.row_of).to(self._device)]
        return new, entropy

    def _no_grad_logprobs(self, model: Any, one: Microbatch) -> Tensor:
        with torch.no_grad():
            logits = self._target_logits(model, one)
        return target_logprobs(logits, one.wanted, temperature=self._config.temperature)[one.sampled]

    def _loss(self, one: Microbatch, new: Tensor, entropy: Tensor, proximal: Tensor) -> tuple[Tensor, LossStats, float]:
        mask = torch.ones(len(new), dtype=torch.bool, device=self._device)
        batch = LossInputs(
            new=new,
            recorded=one.recorded,
            advantages=one.advantages,
            mask=mask,
            sequences=one.sequences,
            proximal=proximal,
            weights=one.weights,
            entropy=entropy,
        )
        loss, stats = LOSSES[self._config.loss](batch, **self._config.loss_settings)
        if one.reference is None:
            return loss, stats, 0.0
        term, kl = auxiliary.kl_to_reference(
            new, one.reference, mask, kind=self._config.kl_estimator, recorded=one.recorded, weights=one.weights
        )
        return loss + self._config.kl * term, stats, kl.mean

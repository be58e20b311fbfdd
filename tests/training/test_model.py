"""One update of the policy: sums over microbatches, importance ratios, statistics, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polar_proxy.errors import TrainingError
from polar_proxy.training.batch import GroupRollout, TrainingBatch, make_batch
from polar_proxy.training.config import GrpoConfig, LoraSettings
from polar_proxy.training.policy.model import Learner, load_model
from tests.engines.conftest import make_random_model
from tests.training.group_factories import group, rollout, trace

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PROMPT = [11, 12, 13, 14]
ANSWERS = ([21, 22, 23], [21, 30], [40, 41, 42, 43], [50])
REWARDS = (1.0, 0.0, 1.0, 0.0)
CONFIG = GrpoConfig(learning_rate=1e-3, max_grad_norm=1e9, adam_betas=(0.0, 0.99))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("policy"), vocab_size=300)


def logprobs(model: Any, answer: list[int]) -> list[float]:
    """Return log-probabilities from a plain forward pass of this one sequence."""
    ids = torch.tensor([[*PROMPT, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float()
    values = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    return values[len(PROMPT) - 1 :].tolist()


def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def batch(folder: Path, shift: float = 0.0, **settings: Any) -> TrainingBatch:
    model = plain_model(folder)
    members = [
        GroupRollout(
            rollout(n, reward),
            (trace(f"t{n}", PROMPT, answer, logprobs=[value + shift for value in logprobs(model, answer)]),),
        )
        for n, (answer, reward) in enumerate(zip(ANSWERS, REWARDS, strict=True))
    ]
    return make_batch([group(*members)], CONFIG.model_copy(update=settings))


def learner(folder: Path, **settings: Any) -> Learner:
    config = CONFIG.model_copy(update=settings)
    reference = load_model(folder, config.device) if config.kl_coef else None
    return Learner(load_model(folder, config.device), config, reference)


@pytest.mark.parametrize(("loss", "loss_aggregation"), [("dapo", "token"), ("gspo", "sequence"), ("tis", "rollout")])
def test_gradients_of_microbatches_add_up(folder: Path, loss: str, loss_aggregation: str) -> None:
    step = batch(folder)
    one, many = (
        learner(folder, loss=loss, loss_aggregation=loss_aggregation, max_tokens_per_microbatch=limit)
        for limit in (1000, 8)
    )
    single, split = one.update(step, 0), many.update(step, 0)
    assert (single.microbatches, split.microbatches) == (1, 3)
    assert (single.computed_tokens, single.flat_tokens) == (13, 26)
    gradients = [{name: p.grad for name, p in each.model.named_parameters()} for each in (one, many)]
    largest = max(float(grad.abs().max()) for grad in gradients[0].values())
    for name, grad in gradients[0].items():
        assert float((grad - gradients[1][name]).abs().max()) < 1e-5 * largest, name
    assert split.loss == pytest.approx(single.loss, abs=1e-5)
    assert split.mismatch_max == pytest.approx(single.mismatch_max, abs=1e-5)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["weights", "lora"])
def test_checkpointed_activations_give_the_same_step_and_keep_less(folder: Path, lora: LoraSettings | None) -> None:
    step = batch(folder, shift=-0.05)
    kept, losses, weights = [], [], []
    for again in (False, True):
        policy = learner(folder, activation_checkpointing=again, lora=lora)
        saved: list[int] = []

        def save(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            losses.append(policy.update(step, 0).loss)
        kept.append(sum(saved))
        weights.append(policy.weights())
    assert losses[0] == losses[1]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert kept[1] < kept[0] / 3


def test_update_makes_rewarded_answers_likelier_and_reports_the_mismatch(folder: Path) -> None:
    step = batch(folder, shift=-0.05)
    policy = learner(folder)
    before = [sum(policy.logprobs([*PROMPT, *answer])[3:]) for answer in ANSWERS]
    assert before == pytest.approx([sum(logprobs(plain_model(folder), answer)) for answer in ANSWERS], abs=1e-4)
    stats = policy.update(step, 0)
    after = [sum(policy.logprobs([*PROMPT, *answer])[3:]) for answer in ANSWERS]
    assert [now > then for now, then in zip(after, before, strict=True)] == [True, False, True, False]
    assert stats.mismatch_mean == pytest.approx(0.05, abs=1e-4)
    assert stats.ratio_mean == pytest.approx(2.718281828**0.05, abs=1e-3)
    assert (stats.tokens, stats.clipped_share) == (10, 0.0)
    assert stats.entropy > 0


def test_proximal_logprobs_are_those_before_the_first_epoch(folder: Path) -> None:
    stats = learner(folder, ppo_epochs=2, loss="decoupled", learning_rate=1e-5).update(batch(folder, shift=0.3), 0)
    # The ratio is pi / pi_prox: the first epoch moves it a little, the shift of the recorded values does not.
    assert 1e-5 < abs(stats.ratio_max - 1.0) < 0.2
    assert stats.mismatch_mean == pytest.approx(0.3, abs=1e-4)


def test_each_minibatch_is_an_update(folder: Path) -> None:
    """Two groups in two minibatches equal two steps of one group each, in one of the two orders."""
    both = two_groups(folder)
    policy = learner(folder, num_minibatches=2)
    stats = policy.update(both, 0)
    names = sorted({sequence.group_id for sequence in both.sequences})
    assert (len(names), stats.tokens) == (2, 20)
    orders = []
    for order in (names, names[::-1]):
        alone = learner(folder)
        losses = [alone.update(only(both, name), 0).loss for name in order]
        orders.append((alone.weights(), sum(losses) / 2))
    same = [
        all(torch.allclose(tensor, policy.weights()[name], atol=1e-6) for name, tensor in weights.items())
        for weights, _ in orders
    ]
    assert sorted(same) == [False, True]
    assert stats.loss == pytest.approx(orders[same.index(True)][1], abs=1e-4)
    # The second minibatch is also compared with the weights before the step, although it follows an update.
    assert stats.mismatch_mean == pytest.approx(0.05, abs=1e-4)


def test_echo_adds_the_cross_entropy_of_observations(folder: Path) -> None:
    """The gradient is that of the cross-entropy of the tokens between sampled ones, each counted once."""
    model = plain_model(folder)
    turns = ([21, 22], [60, 61, 62], [23]), ([21, 22], [60, 61, 63], [24, 25])  # sampled, observed, sampled
    members = []
    for number, (first, seen, last) in enumerate(turns):
        answer = [*first, *seen, *last]
        values = logprobs(model, answer)
        mask = [1] * len(first) + [0] * len(seen) + [1] * len(last)
        kept = [value if own else float("nan") for value, own in zip(values, mask, strict=True)]
        one = trace(f"t{number}", PROMPT, answer, logprobs=kept)
        one = replace(one, loss_mask=np.array([0] * len(PROMPT) + mask, dtype=np.uint8))
        members.append(GroupRollout(rollout(number, 1.0 - number), (one,)))
    step = make_batch([group(*members)], CONFIG)
    assert [one.observed.tolist() for one in step.sequences] == [
        [False] * 6 + [True] * 3 + [False],
        [False] * 6 + [True] * 3 + [False] * 2,
    ]
    with_echo, without = learner(folder, echo_coef=0.5), learner(folder)
    stats, bare = with_echo.update(step, 0), without.update(step, 0)
    entropy = 0.0
    for first, seen, _ in turns:
        ids = torch.tensor([[*PROMPT, *first, *seen]])
        logs = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
        entropy = entropy - sum(logs[5 + place, token] for place, token in enumerate(seen)) / 6
    entropy.backward()
    assert stats.observation_loss == pytest.approx(float(entropy.detach()), abs=1e-4)
    assert stats.loss == pytest.approx(bare.loss + 0.5 * float(entropy.detach()), abs=1e-4)
    assert (stats.tokens, stats.mismatch_max < 1e-4, bare.observation_loss) == (bare.tokens, True, None)
    reference = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in without.model.named_parameters()}
    for name, parameter in with_echo.model.named_parameters():
        expected = gradients[name] + 0.5 * reference[name].grad
        assert torch.allclose(parameter.grad, expected, atol=2e-5 * float(expected.abs().max()) + 1e-7), name


def two_groups(folder: Path) -> TrainingBatch:
    """Return the same group twice under two names, the second with negated advantages."""
    first = batch(folder, shift=0.05)
    again = [
        replace(one, group_id="group_1", rollout=one.rollout + 4, advantage=-one.advantage) for one in first.sequences
    ]
    return replace(first, sequences=(*first.sequences, *again), group_ids=("group_0", "group_1"))


def only(step: TrainingBatch, name: str) -> TrainingBatch:
    return replace(step, sequences=tuple(one for one in step.sequences if one.group_id == name))


def test_kl_term_keeps_the_policy_near_the_reference(folder: Path) -> None:
    free, bound = learner(folder, ppo_epochs=4), learner(folder, ppo_epochs=4, kl_coef=10.0)
    distances = [each.update(batch(folder), 0).approx_kl for each in (free, bound)]
    assert distances[1] < distances[0]
    assert learner(folder, kl_coef=0.1).update(batch(folder), 0).kl_reference == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(TrainingError, match="reference"):
        Learner(load_model(folder), CONFIG.model_copy(update={"kl_coef": 0.1}))


def test_gradient_that_is_not_finite_changes_nothing(folder: Path) -> None:
    policy = learner(folder)
    parameter = next(policy.model.parameters())
    parameter.register_hook(lambda grad: grad * float("nan"))
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    with pytest.raises(TrainingError, match="not finite"):
        policy.update(batch(folder), 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights().items())


def test_bapo_needs_the_whole_update_in_one_microbatch(folder: Path) -> None:
    with pytest.raises(TrainingError, match="max_tokens_per_microbatch"):
        learner(folder, loss="bapo", max_tokens_per_microbatch=8).update(batch(folder), 0)


def test_loss_uses_the_temperature_at_which_each_token_was_sampled(folder: Path) -> None:
    """Recorded at 0.7 and at 1 in one batch, whatever `temperature` says: trainer and engine agree."""
    model = plain_model(folder)
    members = []
    for n, (answer, temperature) in enumerate(zip(ANSWERS, (0.7, 1.0, 0.7, 1.3), strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*PROMPT, *answer]])).logits[0].float() / temperature
        rows = torch.log_softmax(logits[len(PROMPT) - 1 : -1], -1)
        values = rows.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
        one = trace(f"t{n}", PROMPT, answer, logprobs=values, temperature=temperature)
        members.append(GroupRollout(rollout(n, REWARDS[n]), (one,)))
    stats = learner(folder).update(make_batch([group(*members)], CONFIG), 0)
    assert stats.mismatch_max < 1e-4
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)


def test_echo_learns_from_a_step_without_a_sampled_token_to_train(folder: Path) -> None:
    values = [-1.0, float("nan"), -1.0]
    mask = np.array([0] * len(PROMPT) + [1, 0, 1], dtype=np.uint8)
    traces = [replace(trace(f"t{n}", PROMPT, [21, 60 + n, 22], logprobs=values), loss_mask=mask) for n in range(2)]
    equal = group(*(GroupRollout(rollout(n, 1.0), (one,)) for n, one in enumerate(traces)))
    echo = {"echo_coef": 0.5}
    policy = learner(folder, **echo)
    step = make_batch([equal], CONFIG.model_copy(update=echo))
    before = policy.update(step, 0)
    after = policy.update(step, 1)
    assert (before.tokens, before.mismatch_max) == (0, 0.0)
    assert before.observation_loss is not None
    assert after.observation_loss is not None
    assert after.observation_loss < before.observation_loss

"""Sampling: tokens follow the requested distribution, and log-probabilities belong to it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.engines.local.sampling import SampledToken, SequenceSampler, sample_tokens
from polar_proxy.types import Sampling

INF = float("-inf")
P = Sampling


def sampler(params: Sampling, seed: int = 0, vocab: int = 4) -> SequenceSampler:
    return SequenceSampler(params, seed, vocab)


def sample(logits: list[float], row: SequenceSampler) -> SampledToken:
    return sample_tokens(torch.tensor([logits]), [row])[0]


def kept(logits: list[float], params: Sampling) -> list[int]:
    out = sampler(params).adjust(torch.tensor(logits))
    return [token for token, value in enumerate(out.tolist()) if value != INF]


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (P(top_k=1), [1]),
        (P(top_k=2), [1, 3]),
        (P(top_k=9), [0, 1, 2, 3]),
        (P(top_p=0.4), [1]),
        (P(top_p=0.41), [1, 3]),
        (P(top_p=0.7001), [1, 2, 3]),
        (P(top_p=1e-9), [1]),
        (P(min_p=0.6), [1, 3]),
        (P(min_p=1.0), [1]),
        (P(top_k=3, top_p=0.5), [1, 3]),  # top_p applies to the tokens that top_k keeps: 0.4 / 0.9 < 0.5
        (P(top_k=2, temperature=0.0), [0, 1, 2, 3]),
    ],
)
def test_truncate(params: Sampling, tokens: list[int]) -> None:
    assert kept(LOGITS, params) == tokens


def test_each_row_has_its_own_params() -> None:
    rows = [sampler(P(top_k=1, top_logprobs=4)), sampler(P(top_logprobs=4))]
    first, second = sample_tokens(torch.tensor([LOGITS, LOGITS]), rows)
    assert first.top == [(1, 0.0)]
    assert dict(second.top) == pytest.approx(dict(enumerate(LOGITS)))


def test_logprobs_belong_to_the_processed_distribution() -> None:
    drawn = sample(LOGITS, sampler(P(temperature=0.5, top_k=2, top_logprobs=4)))
    weights = {1: 0.4**2, 3: 0.3**2}
    expected = {token: math.log(weight / sum(weights.values())) for token, weight in weights.items()}
    assert drawn.logprob == pytest.approx(expected[drawn.token_id], abs=1e-6)
    assert dict(drawn.top) == pytest.approx(expected, abs=1e-6)


def test_greedy_reports_logprobs_of_temperature_one() -> None:
    drawn = sample(LOGITS, sampler(P(temperature=0.0, top_p=0.1)))
    assert drawn.token_id == 1
    assert drawn.logprob == pytest.approx(math.log(0.4), abs=1e-6)


def test_frequencies_follow_the_probabilities() -> None:
    row, n = sampler(P()), 4000
    counts = Counter(sample(LOGITS, row).token_id for _ in range(n))
    for token, probability in enumerate((0.1, 0.4, 0.2, 0.3)):
        assert counts[token] / n == pytest.approx(probability, abs=4 * math.sqrt(0.25 / n))


def test_seed_gives_the_same_tokens_in_any_batch() -> None:
    logits = torch.randn(50, 1, 100, generator=torch.Generator().manual_seed(3))
    alone = sampler(P(temperature=0.8), 11, 100)
    one = [sample_tokens(step, [alone])[0].token_id for step in logits]
    rows = [sampler(P(), 1, 100), sampler(P(temperature=0.8), 11, 100), sampler(P(temperature=0.0), 2, 100)]
    two = [sample_tokens(step.expand(3, -1), rows)[1].token_id for step in logits]
    assert one == two


def test_penalties_count_sampled_tokens() -> None:
    row = sampler(P(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5))
    tokens = [sample([2.0, 1.2, 0.1, -9.0], row).token_id for _ in range(4)]
    # 2.0 wins; then 0.5 < 1.2; then 0.5 > -0.3 and 0.1; then 0.1 beats 0.0.
    assert tokens == [0, 1, 0, 2]


def test_logit_bias() -> None:
    assert sample(LOGITS, sampler(P(logit_bias={"3": 50.0}))).token_id == 3


@given(
    st.lists(st.floats(-30, 30) | st.just(-1e9), min_size=2, max_size=40),
    st.floats(0.05, 3.0),
    st.floats(0.01, 1.0),
    st.integers(0, 50),
    st.floats(0, 1),
    st.integers(0, 2**60),
)
def test_sampled_token_has_a_probability(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    params = P(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    drawn = sample(logits, SequenceSampler(params, seed, len(logits)))
    assert drawn.logprob > -200
    assert drawn.logprob <= 1e-6


def test_repetition_penalty_lowers_tokens_of_prompt_and_answer() -> None:
    """As in vLLM: positive logits are divided by it, negative ones multiplied."""
    row = SequenceSampler(P(temperature=1.0, repetition_penalty=2.0), 0, 4, prompt=[1])
    logits = torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert row.adjust(logits).tolist() == [1.0, 0.5, -1.0, -1.0]
    row.accept(2)
    assert row.adjust(logits).tolist() == [1.0, 0.5, -2.0, -1.0]

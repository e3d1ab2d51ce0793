from __future__ import annotations

import math

import pytest
import torch

from verl_async.rollout.interface import SamplingParams
from verl_async.rollout.random_streams import uniform_numbers
from verl_async.rollout.sampling import RowSampling, draw_inverse_cdf, draw_tokens, filter_probs

CPU = torch.device("cpu")
LAST = 1 - 2.0**-53
"""The largest number that a stream can give."""


def uniform(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_inverse_cdf_by_hand() -> None:
    # Cumulated: 0.5, 0.5, 0.75, 1.0, 1.0. A number on an edge belongs to the token after it.
    probs = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0]]).expand(7, 5)
    drawn = draw_inverse_cdf(probs, uniform(0.0, 0.499, 0.5, 0.7499, 0.75, 0.9999, LAST))
    assert drawn.tolist() == [0, 0, 2, 2, 3, 3, 3]


def test_inverse_cdf_needs_no_normalised_probabilities() -> None:
    # 0.1 and 0.3: the first has a quarter.
    probs = torch.tensor([[0.1, 0.3]]).expand(4, 2)
    assert draw_inverse_cdf(probs, uniform(0.0, 0.2499, 0.2501, LAST)).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("number", [0.0, LAST])
def test_a_token_of_probability_zero_is_never_drawn(number: float) -> None:
    probs = torch.zeros(3, 1000)
    probs[0, 500] = 1.0
    probs[1, 999] = 1e-9  # all there is
    probs[2, 1:999] = torch.rand(998, generator=torch.Generator().manual_seed(0)) / 500 + 1e-6
    drawn = draw_inverse_cdf(probs, uniform(number, number, number))
    assert drawn.tolist() == [500, 999, 1 if number == 0 else 998]


def test_a_row_that_is_not_finite_gives_a_valid_token() -> None:
    probs = torch.tensor([[math.nan, math.nan, math.nan], [0.0, 0.0, 0.0]])
    assert ((draw_inverse_cdf(probs, uniform(0.5, 0.5)) >= 0) & (draw_inverse_cdf(probs, uniform(0.5, 0.5)) < 3)).all()


def test_top_k_keeps_exactly_k_and_of_equals_the_lower_ids() -> None:
    probs = torch.tensor([[0.2, 0.3, 0.2, 0.2, 0.1]]).expand(3, 5)
    kept = filter_probs(probs, torch.tensor([1, 3, 9]), uniform(math.inf, math.inf, math.inf))
    assert (kept > 0).tolist() == [
        [False, True, False, False, False],
        [True, True, True, False, False],
        [True, True, True, True, True],
    ]
    assert torch.equal(kept[kept > 0], probs[kept > 0])


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    # Sorted 0.5, 0.25, 0.125, 0.125: p = 0.5 is reached by one token, 0.6 by two, 0.75 by two, 0.76 by three.
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).expand(5, 4)
    kept = filter_probs(probs, torch.full((5,), 4), uniform(1e-9, 0.5, 0.6, 0.75, 0.76))
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[1], [1], [1, 3], [1, 3], [0, 1, 3]]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # The two of top-k have 0.5 and 0.25, so the first alone reaches 0.66 of the 0.75 that is left.
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).expand(2, 4)
    kept = filter_probs(probs, torch.tensor([2, 4]), uniform(0.66, 0.66))
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[1], [1, 3]]


def test_log_prob_is_of_the_full_softmax_at_the_rows_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)
    params = [SamplingParams(1, 0.0), SamplingParams(1, 0.5, 1.0, 1), SamplingParams(1, 2.0, 1e-6)]
    token, log_prob = draw_tokens(logits, RowSampling.of(params, CPU), uniform(0.9, 0.9, 0.9))
    assert token.tolist() == [0, 0, 0]
    wanted = [-math.log(sum(math.exp(-gap / temperature) for gap in (0, 1, 2))) for temperature in (1.0, 0.5, 2.0)]
    assert log_prob.tolist() == pytest.approx(wanted, rel=1e-6)
    assert log_prob.dtype == torch.float32


def test_rows_of_a_mixed_batch_draw_as_they_do_alone() -> None:
    logits = 3 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(1),
        SamplingParams(1, 0.0),
        SamplingParams(1, 0.7, 0.8),
        SamplingParams(1, 1.3, 1.0, 5),
        SamplingParams(1, 0.9, 0.9, 10),
    ]
    for number in (0.01, 0.35, 0.8, 0.99):
        tokens, log_probs = draw_tokens(logits, RowSampling.of(params, CPU), uniform(*[number] * 5))
        for i, one in enumerate(params):
            token, log_prob = draw_tokens(logits[i : i + 1], RowSampling.of([one], CPU), uniform(number))
            assert (token[0], log_prob[0]) == (tokens[i], log_probs[i])


def test_greedy_takes_the_likeliest_token_whatever_the_number() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(3, 50)
    token, _ = draw_tokens(logits, RowSampling.of([SamplingParams(1, 0.0)] * 3, CPU), uniform(0.0, 0.5, LAST))
    assert token.tolist() == [int(logits[0].argmax())] * 3


def test_frequencies_follow_the_filtered_probabilities() -> None:
    """Pearson's statistic over 20,000 draws of one stream is below the 0.999 quantile for 3 degrees of freedom."""
    probs = torch.tensor([0.05, 0.4, 0.1, 0.2, 0.05, 0.2])
    num = 20_000
    sampling = RowSampling.of([SamplingParams(1, 1.0, 1.0, 4)] * num, CPU)
    numbers = torch.from_numpy(uniform_numbers([11], [0], num)[0])
    token, _ = draw_tokens(probs.log().expand(num, 6), sampling, numbers)
    counts = token.bincount(minlength=6)
    assert counts[[0, 4]].tolist() == [0, 0]
    expected = probs[[1, 2, 3, 5]] / 0.9 * num
    assert float(((counts[[1, 2, 3, 5]] - expected) ** 2 / expected).sum()) < 16.27

"""pass@k against every choice of k responses, and intervals against resamples that are counted by hand."""

from itertools import combinations

import numpy as np
import pytest

from nemo_rl_lite.rollout.rollout import interval, pass_at_k, passes


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_choices_with_a_response_that_passes(samples):
    passed_P = np.arange(samples + 1)
    for k in range(1, samples + 1):
        expected = [
            np.mean([any(chosen) for chosen in combinations([1] * passed + [0] * (samples - passed), k)])
            for passed in passed_P
        ]
        assert pass_at_k(passed_P, samples, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_there_is_no_pass_at_more_responses_than_there_are(k):
    with pytest.raises(ValueError, match="is not between 1 and 4"):
        pass_at_k(np.array([1]), 4, k)


def test_a_response_passes_from_a_reward_on_and_a_failed_reward_does_not():
    rewards = np.array([1.0, 0.7 + 0.2 + 0.1, 0.99, np.nan, 2.0])
    assert passes(rewards).tolist() == [True, True, False, False, True]
    assert passes(rewards, 0.5).tolist() == [True, True, True, False, True]


def test_an_interval_is_that_of_all_resamples():
    sums_P, counts_P = np.array([0.0, 0.7, 1.1, 1.9, 4.0]), np.array([2, 2, 3, 2, 4])
    every = np.indices((5,) * 5).reshape(5, -1).T
    means = sums_P[every].sum(axis=1) / counts_P[every].sum(axis=1)
    assert interval(sums_P, counts_P) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.03)
    assert interval(sums_P, counts_P) == interval(sums_P, counts_P)


def test_an_interval_is_about_the_problems_and_as_wide_as_their_mean_is_unsure():
    values_P = np.random.default_rng(1).random(400)
    low, high = interval(values_P, np.ones(400))
    assert (high - low) / 2 == pytest.approx(1.96 * values_P.std() / 400**0.5, rel=0.1)
    assert low < values_P.mean() < high

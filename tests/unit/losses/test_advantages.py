import math
from itertools import combinations

import pytest
import torch

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.advantages import (
    advantage_metrics,
    best_of_subsets,
    clip_advantages,
    differ,
    group_advantages,
    reward_shares,
    separate_advantages,
)


def test_leave_one_out_baseline_is_the_mean_of_the_others():
    rewards = torch.tensor([[1.0, 0.0, 0.5]])
    advantages = group_advantages(rewards, leave_one_out=True, normalize=False)
    torch.testing.assert_close(advantages, torch.tensor([[1 - 0.25, 0 - 0.75, 0.5 - 0.5]]))


def test_mean_baseline_and_normalisation_are_grpos():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 2.0, 2.0]])
    advantages = group_advantages(rewards, leave_one_out=False, normalize=True)
    expected = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reward", [0.0, 0.3, 10.1, 1000.1])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_teach_exactly_nothing(reward, size, leave_one_out):
    advantages = group_advantages(torch.full((2, size), reward), leave_one_out, normalize=True)
    assert (advantages == 0).all()


@pytest.mark.parametrize("normalize", [True, False, "batch", "advantages"])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_a_single_sample_has_nothing_to_be_compared_with(leave_one_out, normalize):
    rewards = torch.tensor([[1.0], [0.0], [0.5]])
    assert (group_advantages(rewards, leave_one_out, normalize) == 0).all()


NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "shares"),
    [
        ([[0, 0], [1, 1], [1, 0], [0.5, 0.5]], (0.25, 0.25, 0.25)),
        ([[NAN, NAN], [1, 1], [0, 0]], (0.5, 0.5, 0)),
        ([[NAN, NAN], [NAN, 1], [0, NAN], [0, 1]], (1 / 3, 1 / 3, 1 / 3)),
        ([[NAN, NAN, NAN], [NAN, 0, 1]], (0, 0, 1)),
    ],
)
def test_shares_of_prompts_are_of_those_with_a_reward(rewards, shares):
    assert tuple(reward_shares(torch.tensor([rewards], dtype=torch.float64)).values()) == pytest.approx(shares)


def test_advantage_metrics():
    found = advantage_metrics(torch.tensor([[1.0, -1.0], [0.5, 0.0]]))
    assert found == {"advantages/mean": 0.125, "advantages/max": 1, "advantages/min": -1}


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_reward_that_failed_is_as_if_its_sample_were_not_there(leave_one_out, normalize):
    rewards = torch.tensor([[math.nan, 1.0, 0.0, 1.0], [0.5, math.nan, math.nan, 0.25]], dtype=torch.float64)
    advantages = group_advantages(rewards, leave_one_out, normalize)
    for own, all_of_them in zip(advantages, rewards, strict=True):
        judged = ~all_of_them.isnan()
        expected = group_advantages(all_of_them[judged][None], leave_one_out, normalize)[0]
        torch.testing.assert_close(own[judged], expected)
        assert (own[~judged] == 0).all()


def test_groups_of_which_nothing_or_one_reward_is_known_teach_nothing():
    rewards = torch.tensor([[math.nan, math.nan], [math.nan, 1.0]])
    assert (group_advantages(rewards, leave_one_out=True, normalize=True) == 0).all()


@pytest.mark.parametrize(
    ("rewards", "metric"),
    [
        ([0.1 + 0.2, 0.3, 0.3], None),
        ([10.0, 10.000001, 10.0], None),
        ([-10.0, -10.000001, math.nan], None),
        ([0.1 + 0.2 - 0.3, 0.0, 0.0], "pct_0"),
        ([0.1 + 0.2 + 0.7, 1.0, 0.7 + 0.2 + 0.1], "pct_1"),
        ([1000.1, 1000.10003, 1000.1], None),
    ],
)
def test_rewards_that_differ_by_rounding_are_equal(rewards, metric):
    table = torch.tensor([rewards], dtype=torch.float64)
    assert not differ(table)
    for baseline in (True, False, "batch"):
        for scale in (True, False, "batch", "advantages"):
            assert (group_advantages(table, baseline, scale) == 0).all()
    assert (separate_advantages(torch.stack([table, table]), [1.0, 1.0], True) == 0).all()
    metrics = reward_shares(table[None])
    assert metrics["baseline_reward/pct_mixed"] == 0 and (metric is None or metrics[f"baseline_reward/{metric}"] == 1)


@pytest.mark.parametrize("rewards", [[1e-6, 2e-6], [0.0, 1e-5], [0.999, 1.0], [10.0, 10.001], [1e8, 1e8 + 1], [-1, 1]])
def test_small_differences_are_differences(rewards):
    table = torch.tensor([rewards], dtype=torch.float64)
    assert differ(table) and reward_shares(table[None])["baseline_reward/pct_mixed"] == 1


def test_small_differences_of_large_rewards_are_not_lost():
    rewards = torch.tensor([[1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3]], dtype=torch.float64)
    assert group_advantages(rewards, leave_one_out=False, normalize=False).tolist() == [[-1.5, -0.5, 0.5, 1.5]]


def random_rewards(seed: int = 0) -> torch.Tensor:
    return torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_one_standard_deviation_for_the_whole_step():
    """Lite PPO: the prompt's mean, and the standard deviation of all rewards of the batch."""
    rewards = random_rewards()
    expected = (rewards - rewards.mean(1, keepdim=True)) / rewards.std()
    found = group_advantages(rewards, leave_one_out=False, normalize="batch")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("baseline", ["batch", True, False])
def test_reinforce_plus_plus_whitens_the_advantages(baseline):
    """REINFORCE++ with `batch`, REINFORCE++-baseline with the prompt's mean: (A - mean A) / std A over the batch."""
    rewards = random_rewards(1)
    plain = group_advantages(rewards, baseline, normalize=False)
    others = (rewards.sum(1, keepdim=True) - rewards) / 3
    wanted = rewards - {"batch": rewards.mean(), True: others, False: rewards.mean(1, keepdim=True)}[baseline]
    torch.testing.assert_close(plain, wanted)
    whitened = group_advantages(rewards, baseline, normalize="advantages")
    torch.testing.assert_close(whitened, (wanted - wanted.mean()) / wanted.std(), atol=1e-5, rtol=1e-5)
    assert whitened.std().item() == pytest.approx(1, abs=1e-5) and whitened.mean().item() == pytest.approx(0, abs=1e-12)


def test_equal_rewards_teach_with_a_baseline_of_the_step_unless_all_are_equal():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert group_advantages(rewards, "batch", normalize=False).tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    for scale in (False, True, "batch", "advantages"):
        assert (group_advantages(torch.full((3, 2), 0.3), "batch", scale) == 0).all()
        assert (group_advantages(rewards, leave_one_out=False, normalize=scale) == 0).all()


@pytest.mark.parametrize("baseline", ["batch", True])
@pytest.mark.parametrize("scale", ["batch", "advantages"])
def test_a_reward_that_failed_is_in_no_statistic_of_the_step(baseline, scale):
    rewards = torch.tensor([[math.nan, 1.0, 0.0], [0.5, math.nan, 0.25], [2.0, 1.0, 0.0]], dtype=torch.float64)
    found = group_advantages(rewards, baseline, scale)
    plain = group_advantages(rewards, baseline, normalize=False)
    judged = ~rewards.isnan()
    expected = plain[judged] / {"batch": rewards, "advantages": plain}[scale][judged].std()
    torch.testing.assert_close(found[judged], expected, atol=1e-5, rtol=1e-5)
    assert (found[~judged] == 0).all()
    if baseline == "batch":
        torch.testing.assert_close(plain[judged], rewards[judged] - rewards.nanmean())
    lonely = torch.tensor([[math.nan, math.nan], [math.nan, 1.0]])
    assert (group_advantages(lonely, baseline, scale) == 0).all()


def test_advantages_are_clipped_where_there_is_a_limit():
    advantages = torch.tensor([[-3.0, -0.5, 0.0, 2.0]])
    assert torch.equal(clip_advantages(advantages, None, None), advantages)
    assert clip_advantages(advantages, -1.0, None).tolist() == [[-1.0, -0.5, 0.0, 2.0]]
    assert clip_advantages(advantages, None, 1.5).tolist() == [[-3.0, -0.5, 0.0, 1.5]]


@pytest.mark.parametrize("baseline", [False, True])
def test_parts_of_a_reward_are_normalised_one_by_one(baseline):
    """GDPO: each part over its prompt, the weighted sum over the batch."""
    parts = torch.stack([random_rewards(1), 100 * random_rewards(2), torch.zeros(5, 4)])
    weights = [1.0, 0.5, 1.0]
    sums = torch.zeros(5, 4, dtype=torch.float64)
    for weight, part in zip(weights[:2], parts[:2], strict=True):
        mean = (part.sum(1, keepdim=True) - part) / 3 if baseline else part.mean(1, keepdim=True)
        sums += weight * (part - mean) / part.std(1, keepdim=True)
    found = separate_advantages(parts, weights, baseline)
    torch.testing.assert_close(found, (sums - sums.mean()) / sums.std(), atol=1e-5, rtol=1e-5)
    # The scale of a part is not its weight.
    torch.testing.assert_close(separate_advantages(parts * 1000, weights, baseline), found, atol=1e-5, rtol=1e-5)


def test_a_part_that_is_not_there_or_failed_says_nothing():
    first, rest = random_rewards(3)[:, :2], torch.zeros(5, 2, dtype=torch.float64)
    first[0, 0] = rest[0, 0] = math.nan
    found = separate_advantages(torch.stack([first, torch.full((5, 2), math.nan), rest]), [1.0, 2.0, 1.0], True)
    alone = separate_advantages(torch.stack([first, rest]), [1.0, 1.0], True)
    assert torch.equal(found, alone) and (found[0] == 0).all() and found[1:].abs().min() > 0.5


def test_maxrl_divides_by_the_mean_reward():
    """K of N correct responses: each has (1 - K/N) / (K/N), the others -1, and nothing is learned without any."""
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.float64)
    found = group_advantages(rewards, leave_one_out=False, normalize="mean")
    expected = torch.tensor([[3.0, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # With equal scores of all responses, the score's mean weight is the gradient of the log of the mean reward.
    unbiased = group_advantages(rewards, leave_one_out=True, normalize="mean")
    torch.testing.assert_close(unbiased, expected * 4 / 3, atol=1e-5, rtol=1e-5)


def test_maxrl_needs_rewards_with_a_positive_mean():
    assert (group_advantages(torch.full((2, 3), -1.0), leave_one_out=False, normalize="mean") == 0).all()
    with pytest.raises(TrainingError, match=r"normalize_rewards = mean: the mean reward of a prompt is -0.25"):
        group_advantages(torch.tensor([[1.0, 0.0], [0.0, -0.5]]), leave_one_out=False, normalize="mean")


def by_subsets(rewards: list[float], k: int) -> tuple[list[float], list[float]]:
    """The largest rewards of all subsets of k samples, and each sample's mean over the subsets that contain it."""
    subsets = [*combinations(range(len(rewards)), k)]
    largest = [max(rewards[one] for one in own) for own in subsets]
    of_sample = [
        [best for best, own in zip(largest, subsets, strict=True) if one in own] for one in range(len(rewards))
    ]
    return largest, [sum(own) / len(own) for own in of_sample]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("rewards", [[0.3, -1.0, 2.0, 0.3, 0.0, 7.5], [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
def test_the_best_of_k_is_that_of_all_subsets(rewards, k):
    largest, expected = by_subsets(rewards, k)
    table = torch.tensor([[*rewards[:2], math.nan, *rewards[2:]]], dtype=torch.float64)
    best, deviation = best_of_subsets(table, k)
    judged = ~table.isnan()
    assert best[judged].tolist() == pytest.approx(expected) and best[~judged].isnan().all()
    assert deviation.item() == pytest.approx(torch.tensor(largest, dtype=torch.float64).std(correction=0).item())


@pytest.mark.parametrize(("correct", "size", "k"), [(1, 8, 4), (3, 8, 2), (5, 8, 4), (2, 16, 8)])
def test_pass_at_k_training_has_its_analytical_advantages(correct, size, k):
    """Of the N wrong of G responses (Chen et al. 2025): R = 1 - C(N, k) / C(G, k), s = sqrt(R (1 - R))."""
    wrong = size - correct
    mean = 1 - math.comb(wrong, k) / math.comb(size, k)
    scale = max(math.sqrt(mean * (1 - mean)), 1e-12)
    positive = (1 - mean) / scale
    negative = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / scale
    expected = torch.tensor([[positive] * correct + [negative] * wrong], dtype=torch.float64)
    if wrong < k:
        # Every subset has a correct response.
        expected = torch.zeros_like(expected)
    rewards = torch.tensor([[1.0] * correct + [0.0] * wrong], dtype=torch.float64)
    found = group_advantages(rewards, leave_one_out=False, normalize=True, pass_at_k=k)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("baseline", [True, False])
def test_pass_at_k_has_an_unbiased_gradient(baseline):
    """Pass@k is 1 - (1 - p)^k for a policy that is right with probability p. Its gradient is the mean of k / G x
    advantage x score over all rollouts. Only the baseline of the other subsets keeps it unbiased."""
    p, size, k, gradient = 0.3, 5, 2, 0.0
    for outcome in range(2**size):
        rewards = [float(outcome >> place & 1) for place in range(size)]
        chance = math.prod(p if reward else 1 - p for reward in rewards)
        table = torch.tensor([rewards], dtype=torch.float64)
        found = group_advantages(table, baseline, normalize=False, pass_at_k=k)[0].tolist()
        scores = [1 / p if reward else -1 / (1 - p) for reward in rewards]
        gradient += chance * k / size * sum(a * score for a, score in zip(found, scores, strict=True))
    expected = k * (1 - p) ** (k - 1)
    assert gradient == pytest.approx(expected if baseline else expected * (1 - k / size))


def test_one_of_one_is_the_reward_itself():
    rewards = random_rewards(4)
    for baseline in (True, False, "batch"):
        for scale in (False, "batch", "advantages", "mean"):
            found = group_advantages(rewards, baseline, scale, pass_at_k=1)
            torch.testing.assert_close(found, group_advantages(rewards, baseline, scale))


def test_prompts_with_too_few_rewards_for_a_subset_teach_nothing():
    rewards = torch.tensor([[1.0, 0.0, math.nan], [1.0, 0.0, 0.5]], dtype=torch.float64)
    for baseline in (True, False, "batch"):
        found = group_advantages(rewards, baseline, normalize=False, pass_at_k=2)
        assert (found[0] == 0).all() and found[1].abs().max() > 0.1

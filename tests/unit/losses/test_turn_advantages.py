"""Advantages of turns: by hand, and without bias under a variable number of turns. They are those of episodes if only
the last turn has a reward."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.advantages import group_advantages, returns_to_go, turn_advantages
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import count_masked
from tests.unit.losses.batches import loss_config, rows_of, split_loss

NAN = math.nan
# Two episodes of one prompt, with two and three turns.
REWARDS = [[1.0, 0.0], [0.0, 2.0, 1.0]]


def turns(rewards, discount=1.0):
    """The returns to go of one prompt's samples, [T, 1, G]."""
    return returns_to_go(rewards, discount)[:, None]


def test_a_return_is_the_discounted_sum_of_the_own_and_later_rewards():
    assert returns_to_go(REWARDS, 1.0).tolist() == [[1, 3], [0, 3], [0, 1]]
    assert returns_to_go(REWARDS, 0.5).tolist() == [[1, 1.25], [0, 2.5], [0, 1]]
    assert returns_to_go(REWARDS, 0.0).tolist() == [[1, 0], [0, 2], [0, 1]]
    assert returns_to_go([[1.0], [NAN, NAN]], 0.5).nan_to_num(nan=-1).tolist() == [[1, -1], [1, -1]]


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        (False, False, [[-1, 1], [-1.5, 1.5], [-0.5, 0.5]]),
        (True, False, [[-2, 2], [-3, 3], [-1, 1]]),
        # The second turn's returns of 0 and 3 have the largest standard deviation.
        (False, True, [[-1 / 4.5**0.5, 1 / 4.5**0.5], [-(0.5**0.5), 0.5**0.5], [-0.5 / 4.5**0.5, 0.5 / 4.5**0.5]]),
        # The mean return of the first turn is 2.
        (False, "mean", [[-0.5, 0.5], [-0.75, 0.75], [-0.25, 0.25]]),
    ],
)
def test_two_episodes_by_hand(baseline, scale, expected):
    assert turn_advantages(turns(REWARDS), baseline, scale)[:, 0].tolist() == [
        pytest.approx(own, rel=1e-5) for own in expected
    ]


@pytest.mark.parametrize("baseline", [True, False, "batch"])
@pytest.mark.parametrize("scale", [True, False, "batch", "advantages", "mean"])
@pytest.mark.parametrize("seed", range(4))
def test_with_a_reward_of_the_last_turn_only_each_turn_has_the_advantage_of_the_episode(baseline, scale, seed):
    source = np.random.default_rng(seed)
    rewards = source.choice([0.0, 0.1, 0.3, 1.0, NAN], size=(4, 7), p=[0.3, 0.2, 0.2, 0.2, 0.1])
    rewards[0], rewards[1, 1] = 0.3, 0.7
    counts = source.integers(1, 6, size=28)
    outcomes = [[*[0.0 * last] * (count - 1), last] for count, last in zip(counts, rewards.flat, strict=True)]
    found = turn_advantages(returns_to_go(outcomes, 1.0).view(-1, 4, 7), baseline, scale)
    expected = group_advantages(torch.from_numpy(rewards), baseline, scale)
    assert len(found) == max(counts) and all(torch.equal(own, expected) for own in found)


def test_equal_totals_teach_if_the_returns_of_a_later_turn_differ():
    found = turn_advantages(turns([[1.0, 0.0], [0.0, 1.0]]), False, True)[:, 0]
    assert found[0].tolist() == [0, 0] and found[1].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    assert not turn_advantages(turns([[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]]), True, True).any()


def test_a_failed_reward_is_in_no_baseline():
    alone = turn_advantages(turns(REWARDS), True, True)[:, 0]
    found = turn_advantages(turns([REWARDS[0], [NAN, NAN, NAN, NAN], REWARDS[1]]), True, True)[:, 0]
    assert torch.equal(found[:3, [0, 2]], alone) and not found[:, 1].any()


def test_maxrl_refuses_returns_whose_mean_is_not_positive():
    with pytest.raises(TrainingError, match="normalize_rewards = mean"):
        turn_advantages(turns([[1.0, -1.0], [-1.0, 1.0]]), False, "mean")


class Walk:
    """At each turn the policy continues with probability `sigmoid(logits[turn])`, or ends the episode. The rewards of
    continuing and of ending differ by turn. After the last logit, the episode ends by itself."""

    GO, END = (1.0, 0.5, 2.0), (1.4, 1.2, -0.5)

    def __init__(self):
        self.logits = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64)
        go = self.logits.sigmoid().tolist()
        self.paths = []
        """Of each path: probability, rewards of its turns, and for each turn the gradient of its logprob, [T, 3]."""
        for last in range(4):
            chosen = [1] * last + [0] * (last < 3)
            chance = math.prod(p if goes else 1 - p for p, goes in zip(go, chosen, strict=False))
            rewards = [(self.GO if goes else self.END)[turn] for turn, goes in enumerate(chosen)]
            scores = np.diag([goes - p for goes, p in zip(chosen, go, strict=False)] + [0.0] * (3 - len(chosen)))
            self.paths.append((chance, rewards, scores[: len(chosen)]))

    def gradient(self) -> np.ndarray:
        """The exact gradient of the expected sum of rewards."""
        return sum(chance * sum(rewards) * scores.sum(0) for chance, rewards, scores in self.paths)

    def expected(self, advantages, samples: int = 3) -> np.ndarray:
        """The exact mean of a gradient estimate over all groups of `samples` episodes."""
        total = np.zeros(3)
        for group in itertools.product(self.paths, repeat=samples):
            found = advantages([rewards for _, rewards, _ in group])
            chance = math.prod(path[0] for path in group)
            for place, (_, _, scores) in enumerate(group):
                for turn, score in enumerate(scores):
                    total += chance * found[turn][place] * score / samples
        return total


def by_turn_index(rewards):
    """Centre each turn's reward over the samples that have this turn, and sum over the later turns."""
    longest = max(map(len, rewards))
    means = [np.mean([own[turn] for own in rewards if turn < len(own)]) for turn in range(longest)]
    return [
        [sum(own[later] - means[later] for later in range(turn, len(own))) for own in rewards]
        for turn in range(longest)
    ]


def test_the_policy_gradient_has_no_bias_under_a_variable_number_of_turns():
    walk = Walk()
    exact = walk.gradient()
    for baseline, factor in ((True, 1.0), (False, 2 / 3)):
        mean = walk.expected(lambda rewards, of=baseline: turn_advantages(turns(rewards), of, False)[:, 0].numpy())
        assert mean == pytest.approx(factor * exact, abs=1e-12)
    # Only an episode that continues pays the mean of the next turn, so continuing looks bad.
    naive = walk.expected(by_turn_index)
    assert exact[0] > 0 > naive[0]


def test_the_loss_of_a_token_has_the_advantage_of_its_turn():
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]], dtype=torch.float32)
    advantages = torch.tensor([[0, 2, 2, 0, -1], [0, 0.5, 0, 0, 0]])
    logprobs = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    known = {"mask": mask, "logprobs": logprobs, "previous_logprobs": logprobs, "generation_logprobs": logprobs}
    loss, counts = GRPOLoss(loss_config()), count_masked(rows_of(mask))
    _, gradient, _ = split_loss(loss, known | {"token_advantages": advantages}, counts)
    torch.testing.assert_close(gradient, -advantages * mask / 4)
    _, of_episodes, _ = split_loss(loss, known | {"advantages": torch.tensor([1.5, -0.5])}, counts, size=1)
    equal = torch.tensor([[1.5], [-0.5]]).expand_as(mask)
    _, of_tokens, _ = split_loss(loss, known | {"token_advantages": equal}, counts, size=1)
    assert torch.equal(of_tokens, of_episodes)


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_covariances_are_those_of_the_tokens_advantages(kind):
    loss, source = GRPOLoss(loss_config(policy_loss=kind)), np.random.default_rng(0)
    lengths, of_rows = [5, 3], [0.75, -1.25]
    each = [(source.random(length) > 0.3, -source.random(length)) for length in lengths]
    plain = [TokenRow([0] * len(own), own, logs, of) for (own, logs), of in zip(each, of_rows, strict=True)]
    spread = [replace(one, advantage=None, token_advantages=[one.advantage] * len(one.tokens)) for one in plain]
    assert loss.counts(spread) == loss.counts(plain)
    assert loss.counts([replace(spread[0], token_advantages=[0.5, 1, 2, 3, 4]), spread[1]]) != loss.counts(plain)

"""An episode of several rows is one sequence of the loss, however its rows are split."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl_lite.losses.batch import Batch, CountedRows, RoutedExperts, TokenRow, TokenRows, episode_numbers
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import count_masked
from tests.unit.losses.batches import loss_config, split_loss

# Episode 0 has rows 0 to 2, episode 1 row 3, and episode 2 row 4, which has no loss.
ROW_COUNTS, TRAINED = [3, 1, 1], [2, 1, 4, 3, 0]
EPISODES = [0, 0, 0, 1, 2]
WIDTH = 6


def inputs() -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    mask = torch.zeros(5, WIDTH)
    for row, count in enumerate(TRAINED):
        mask[row, 1 : 1 + count] = 1
    logprobs = -torch.rand(5, WIDTH, generator=source) - 0.1
    return {
        "mask": mask,
        "logprobs": logprobs,
        "previous_logprobs": logprobs + 0.3 * torch.randn(5, WIDTH, generator=source),
        "generation_logprobs": logprobs + 0.3 * torch.randn(5, WIDTH, generator=source),
        "advantages": torch.tensor([1.5, 1.5, 1.5, -0.5, 2.0]),
        "episode_tokens": torch.tensor([7.0, 7.0, 7.0, 3.0, 0.0]),
    }


def rows() -> TokenRows:
    mask = inputs()["mask"]
    found = TokenRows.of([TokenRow([5] * WIDTH, (one > 0).tolist(), ages=[0, 1, 0, 0, 0, 0]) for one in mask])
    return replace(found, episodes=episode_numbers(ROW_COUNTS))


def terms(logprobs: torch.Tensor, given: dict[str, torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """PPO's clipped term of each trained token, by episode."""
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for row, count in enumerate(TRAINED):
        for place in range(1, 1 + count):
            ratio = (logprobs[row, place] - given["previous_logprobs"][row, place]).exp()
            advantage = given["advantages"][row]
            term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            found[EPISODES[row]].append(term)
    return found


BY_HAND = {
    True: lambda of: sum(map(sum, of.values())) / 10,
    False: lambda of: (sum(of[0]) / 7 + sum(of[1]) / 3) / 2,
    "constant": lambda of: (sum(of[0]) + sum(of[1])) / (2 * 7),
}


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("level", BY_HAND)
def test_loss_and_gradient_are_those_by_hand(level, size):
    given, loss = inputs(), GRPOLoss(loss_config(token_level_loss=level))
    counts = loss.counts(rows())
    assert (counts.tokens, counts.sequences) == (10, 2)
    value, gradient, _ = split_loss(loss, given, counts, size)
    logprobs = given["logprobs"].clone().requires_grad_()
    expected = BY_HAND[level](terms(logprobs, given))
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, logprobs.grad, rtol=1e-6, atol=1e-8)
    assert gradient[:4].abs().sum() > 0 and not gradient[4].any()


def test_a_rejected_row_counts_by_its_share_of_its_episode():
    given = inputs()
    given["generation_logprobs"] = given["previous_logprobs"].clone()
    given["generation_logprobs"][2] -= 5.0
    loss = GRPOLoss(loss_config(sequence_rejection_ratio=2.0))
    _, _, metrics = split_loss(loss, given, loss.counts(rows()))
    assert metrics["correction/rejected"] == pytest.approx(4 / 7 / 2)


def test_where_each_row_is_an_episode_nothing_changes():
    assert episode_numbers([1, 1, 1]) is None and episode_numbers([]) is None
    given = inputs()
    alone = {name: values for name, values in given.items() if name != "episode_tokens"}
    as_episodes = given | {"episode_tokens": given["mask"].sum(dim=1)}
    loss = GRPOLoss(loss_config(token_level_loss=False))
    counts = loss.counts(replace(rows(), episodes=None))
    assert counts.sequences == 4
    value, gradient, _ = split_loss(loss, alone, counts)
    other, other_gradient, _ = split_loss(loss, as_episodes, counts)
    assert value.item() == pytest.approx(other.item(), rel=1e-6)
    torch.testing.assert_close(gradient, other_gradient)


class Elsewhere:
    """A source of rows that are here."""

    def fetch(self, index):
        return replace(rows(), episodes=None).select(index)


def test_counted_rows_agree_with_the_rows_that_they_count():
    there, loss = rows(), GRPOLoss(loss_config(token_level_loss=False))
    ages = [{0: count - 1, 1: 1} if count > 1 else {1: 1} if count else {} for count in TRAINED]
    rewards = np.zeros(5)
    counted = CountedRows(Elsewhere(), np.arange(5), there.lengths, rewards, ages, there.episodes)  # pyrefly: ignore
    for own in (slice(None), slice(3), slice(3, 5), slice(1, 4)):
        assert loss.counts(counted[own]) == loss.counts(there[own]) == count_masked(there[own])
        assert counted[own].trained.tolist() == there[own].trained.tolist() == TRAINED[own]
        assert counted[own].episodes.tolist() == there[own].episodes.tolist() == EPISODES[own]
    assert counted.fetched.episodes.tolist() == EPISODES
    assert loss.counts(there[:3]).sequences == 1 and loss.counts(there[4:]).tokens == 1


def test_rows_without_a_loss_keep_one_token():
    batch = Batch.padded(rows()).without_loss([0, 3])
    assert batch.lengths.tolist() == [1, 6, 6, 1, 6] and batch.mask.sum(dim=1).tolist() == [0, 1, 4, 0, 0]
    assert batch.tokens[0].tolist() == [5, 0, 0, 0, 0, 0] and Batch.padded(rows()).lengths.tolist() == [WIDTH] * 5
    assert torch.equal(batch.without_loss([]).tokens, batch.tokens)
    values = np.arange(9, dtype=np.uint8).reshape(9, 1, 1)
    cut = RoutedExperts(values, np.array([5, 0, 4])).cut(np.array([1, 3, 9]))
    assert cut.values.flatten().tolist() == [0, 5, 6, 7, 8] and cut.counts.tolist() == [1, 0, 4]

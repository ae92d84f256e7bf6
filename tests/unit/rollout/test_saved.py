"""Rollouts in a checkpoint are the same to the bit."""

import dataclasses
import pickle

import numpy as np
import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.rollout.episode import Episode, Rollout
from nemo_rl_lite.rollout.store import SavedRollout, load_rollouts, save_rollouts


def make_rollout() -> Rollout:
    problem = Problem(chat("what?"), "7", {"row": [1, "é"]}, ({"type": "function"},))
    episode = Episode(problem, [1, 2], 2)
    episode.add_turn(Completion((5, 6, 7), (-0.1, -1 / 3, -1e-9), "length", (2, 2, 3)), "five")
    episode.add_messages([8], [{"role": "user", "content": "on"}])
    episode.add_turn(Completion((9,), (-0.5,), "stop", (3,)), "nine")
    episode.reward, episode.reward_parts, episode.length_penalty = 1 / 3, {"format": 0.25}, -1 / 7
    lost = Episode(Problem(chat("lost"), ""), [3], 1, ending="error", is_left_out=True, own_prompt=chat("own"))
    lost.add_turn(Completion((4,), (-2.0,), "stop", (1,)), "four")
    return Rollout([episode], 1, 2, 1, (True, False), 4, 6.0, dropped=(lost,))


def test_a_saved_rollout_is_the_same_to_the_bit(tmp_path):
    assert load_rollouts(tmp_path) == []
    rollout = make_rollout()
    saved = [
        SavedRollout(9, [[4], [6, 7]], rollout, {}),
        # Of this one, the prompt of number 1 is done, and number 0 is not.
        SavedRollout(10, [[8], [9]], None, {1: [*rollout.episodes, *rollout.dropped]}),
        SavedRollout(11, [], None, {}),
    ]
    save_rollouts(saved, tmp_path)
    found = load_rollouts(tmp_path)
    assert found == saved
    assert [one.oldest for one in found] == [2, 1, 11]


def test_routed_experts_are_saved(tmp_path):
    rollout, experts = make_rollout(), np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    place, turn = rollout.episodes[0].turns[0]
    rollout.episodes[0].turns[0] = place, dataclasses.replace(turn, routed_experts=experts)
    save_rollouts([SavedRollout(3, [[6]], rollout, {})], tmp_path)
    (found,) = load_rollouts(tmp_path)
    (_, first), (_, second) = found.rollout.episodes[0].turns
    assert np.array_equal(first.routed_experts, experts) and first.routed_experts.dtype == np.uint8
    assert second.routed_experts is None


def test_a_rollout_that_is_not_json_is_not_saved(tmp_path):
    rollout = make_rollout()
    rollout.episodes[0].said[1] |= {"other": {1, 2}}
    save_rollouts([SavedRollout(3, [[6]], rollout, {})], tmp_path)
    wrong = dataclasses.replace(rollout.episodes[0], problem=Problem(chat("?"), "", {(1, 2): 3}))
    with pytest.raises(OSError, match=r"the rollout of step 3 cannot be saved: .* cannot be written as JSON"):
        save_rollouts([SavedRollout(3, [[6]], Rollout([wrong], 1, 0), {})], tmp_path)


def test_a_row_takes_at_most_20_bytes_a_token():
    episode, count = Episode(Problem(chat("what?"), "7"), [1, 2], 2, reward=1.0), 10_000
    logprobs = -np.random.default_rng(1).random(count)
    episode.add_turn(Completion(np.arange(count), logprobs, "stop", ((4, 6_000), (5, count - 6_000))), "text")
    row = episode.row(0.5, 6)
    assert len(pickle.dumps(row)) < 14 * count
    assert len(pickle.dumps(episode.turns[0][1])) < 9 * count
    assert row.ages[2:].tolist() == [2] * 6_000 + [1] * 4_000
    assert np.array_equal(row.generation_logprobs[2:], logprobs.astype(np.float32))
    assert row.mask[2:].all() and not row.mask[:2].any()


def test_ages_count_tokens():
    assert make_rollout().ages(3) == {"trajectory_age_mean": 0.5, "trajectory_age_max": 1.0}

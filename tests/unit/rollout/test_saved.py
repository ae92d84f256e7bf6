"""Rollouts in a checkpoint are the same to the bit."""

import dataclasses
import pickle

import numpy as np
import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.saved import RolloutState, begin_save, load_groups, load_rollouts, save_groups


def make_rollout() -> Rollout:
    problem = Problem(chat("what?"), "7", {"row": [1, "é"]}, ({"type": "function"},))
    episode = Episode(problem, [1, 2], 2)
    episode.add_turn(Completion((5, 6, 7), (-0.1, -1 / 3, -1e-9), "length", (2, 2, 3)), "five")
    episode.add_messages([8], [{"role": "user", "content": "on"}])
    episode.add_turn(Completion((9,), (-0.5,), "stop", (3,)), "nine")
    episode.reward, episode.reward_parts, episode.length_penalty = 1 / 3, {"format": 0.25}, -1 / 7
    episode.note_metrics("step()", {"calls": 1 / 3})
    lost = Episode(Problem(chat("lost"), ""), [3], 1, ending="error", is_left_out=True, own_prompt=chat("own"))
    lost.add_turn(Completion((4,), (-2.0,), "stop", (1,)), "four")
    return Rollout([episode], 1, 2, 1, (True, False), 4, 6.0, dropped=(lost,))


def test_a_saved_rollout_is_the_same_to_the_bit(tmp_path):
    assert load_rollouts(tmp_path) == []
    rollout = make_rollout()
    saved = [
        (RolloutState(9, [[4], [6, 7]], 2, 1.5), {0: list(rollout.episodes), 1: list(rollout.dropped)}),
        # Of this one, the prompt of number 1 is done, and number 0 is not.
        (RolloutState(10, [[8], [9]]), {1: [*rollout.episodes, *rollout.dropped]}),
        (RolloutState(11, []), {}),
    ]
    for state, groups in saved:
        begin_save(tmp_path, state, groups, None)()
    found = load_rollouts(tmp_path)
    assert [(one.state, {number: own.read() for number, own in one.groups.items()}) for one in found] == saved


def test_a_group_of_a_removed_checkpoint_is_not_read(tmp_path):
    file = tmp_path / "groups.parquet"
    save_groups(file, {3: make_rollout().episodes})
    (group,) = load_groups(file).values()
    file.unlink()
    assert group.read() is None


def test_routed_experts_are_saved(tmp_path):
    rollout, experts = make_rollout(), np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    place, turn = rollout.episodes[0].turns[0]
    rollout.episodes[0].turns[0] = place, dataclasses.replace(turn, routed_experts=experts)
    save_groups(tmp_path / "groups.parquet", {0: rollout.episodes})
    [episode] = load_groups(tmp_path / "groups.parquet")[0].read()
    (_, first), (_, second) = episode.turns
    assert np.array_equal(first.routed_experts, experts) and first.routed_experts.dtype == np.uint8
    assert second.routed_experts is None


def test_a_rollout_that_is_not_json_is_not_saved(tmp_path):
    rollout = make_rollout()
    rollout.episodes[0].said[1] |= {"other": {1, 2}}
    file = tmp_path / "groups.parquet"
    save_groups(file, {0: rollout.episodes})
    wrong = dataclasses.replace(rollout.episodes[0], problem=Problem(chat("?"), "", {(1, 2): 3}))
    with pytest.raises(OSError, match=r"groups.parquet cannot be saved: .* cannot be written as JSON"):
        save_groups(file, {0: [wrong]})


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

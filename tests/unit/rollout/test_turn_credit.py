"""Rewards of turns, from environments and agents to advantages of tokens."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.losses.advantages import turn_advantages
from nemo_rl_lite.rollout.episode import EpisodeRecord, rewards_by_turn
from nemo_rl_lite.rollout.groups import Group, PromptTask
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.store import RolloutFiles, read_rollout, rollout_files, rollout_rows
from tests.unit.rollout.histories import wandered
from tests.unit.rollout.script import Script
from tests.unit.rollout.test_agents import Book, config
from tests.unit.rollout.test_agents import collect as collect_agents
from tests.unit.rollout.test_turns import CALCULATOR, SAMPLING, collect, endings

HERE = "tests.unit.rollout.test_turn_credit"


class Scores:
    """Gives the number that a turn says, or nothing for other texts. `end` ends the episode, `cut` is its reward at the
    limit."""

    def __init__(self, cut=None):
        self.cut = cut

    def step(self, problem, conversation):
        said = conversation[-1]["content"]
        reward = float(said.removesuffix(" end")) if said[0].isdigit() else None
        return Observation(({"role": "user", "content": "on"},), said.endswith("end"), reward)

    def cut_short(self, problem, conversation):
        return self.cut


def scored(*said, discount=1.0, **options):
    """Two episodes of one prompt, which say these texts in each turn, with credit by turn."""
    rollout = collect(Script(*said), (f"{HERE}.Scores", options), max_turns=3)
    rollout.turn_discount = discount
    return rollout


def test_an_environment_rewards_turns():
    rollout = scored(["1", "0"], ["no", "2"], ["3 end", "1 end"])
    assert [one.turn_rewards for one in rollout.episodes] == [[1, 0, 3], [0, 2, 1]]
    assert rollout.rewards_B.tolist() == [4, 3]
    assert rollout.returns_TPG[:, 0].tolist() == [[4, 3], [3, 3], [3, 1]]
    assert rollout.metrics()["early_reward"] == 1.5
    assert replace(rollout, turn_discount=None).returns_TPG.tolist() == [[[4, 3]]]


def test_the_reward_at_the_limit_is_that_of_the_last_turn():
    rollout = scored(["1", "0"], ["no", "2"], ["3", "1"], cut=10.0)
    assert endings(rollout) == ["turns", "turns"]
    assert [rewards_by_turn(one).tolist() for one in rollout.episodes] == [[1, 0, 13], [0, 2, 11]]


def test_a_reward_function_and_the_length_penalty_score_the_last_turn():
    rollout = collect(Script(["<calc>6*7</calc>", "44"], ["43"]), CALCULATOR)
    rollout.turn_discount = 0.5
    first, second = rollout.episodes
    first.length_penalty = -0.25
    assert rewards_by_turn(first).tolist() == [0, 0.75] and rewards_by_turn(second).tolist() == [0]
    assert rewards_by_turn(first, shaped=False).tolist() == [0, 1]
    assert rollout.returns_TPG[:, 0].tolist() == [[0.375, 0], [0.75, 0]]


def test_an_agent_rewards_its_responses():
    found = collect_agents(Book(), config("player", how="by turn"), samples=2)
    assert [one.turn_rewards for one in found.episodes] == [[0.25, 1]] * 2 and found.rewards_B.tolist() == [1.25, 1.25]


def test_rewards_for_other_responses_fail_the_episode():
    found = collect_agents(Book(), config("player", how="too few"), share=1.0)
    assert endings(found) == ["error"] and found.rewards_B.isnan().all() and found.environment_errors == 1


def test_an_episode_that_failed_before_its_first_turn_has_a_row_without_a_loss():
    rollout = collect_agents(Book(), config("player", how="silent"), share=1.0)
    rollout.turn_discount = 1.0
    rollout.advantages = rollout.spread_over_turns(turn_advantages(rollout.returns_TPG, True, True))
    (row,) = rollout.rows(rollout.advantages, 0)
    assert not row.mask.any() and not row.token_advantages.any() and len(row.token_advantages) == len(row.tokens)
    assert rollout_rows(1, "train", rollout)[0]["turn_rewards"] is None and rollout.metrics()["early_reward"] == 0


@pytest.mark.parametrize("seed", range(20))
def test_each_token_has_the_advantage_of_its_turn(seed):
    """Tokens of later responses have larger numbers, and all rows are of one episode."""
    episode, _ = wandered(seed)
    advantages = np.arange(1.0, episode.turn_count + 1)
    rows = replace(Rollout([episode], 1, 0), turn_discount=1.0).rows([advantages], 3)
    assert rows.advantages is None and not rows.token_advantages[~rows.mask].any()
    tokens, found = rows.tokens[rows.mask], rows.token_advantages[rows.mask]
    starts = sorted(turn.tokens[0] for one in episode.segments for _, turn in one.turns)
    assert found.tolist() == (np.searchsorted(starts, tokens, side="right")).tolist()


@pytest.mark.parametrize("discount", [None, 0.5])
def test_records_have_the_returns_of_their_episodes(discount):
    episodes = [wandered(seed)[0] for seed in range(4)]
    for place, one in enumerate(episodes):
        one.turn_rewards = [0.1 * turn for turn in range(one.turn_count)]
        one.reward = None if place == 2 else sum(one.turn_rewards) + 1
        one.length_penalty = -0.5
    here = Rollout(episodes, 2, 0, turn_discount=discount)
    there = replace(here, episodes=[EpisodeRecord.of(one, 0, place) for place, one in enumerate(episodes)])
    assert torch.equal(here.returns_TPG.nan_to_num(), there.returns_TPG.nan_to_num())
    found = here.spread_over_turns(turn_advantages(here.returns_TPG, True, True))
    assert [np.size(own) for own in found] == [1 if discount is None else one.turn_count for one in episodes]
    assert not np.any(found[2])


def test_a_prompt_with_equal_totals_is_useful_if_a_turn_has_different_returns():
    rollout = scored(["1", "0"], ["0", "1"], ["3 end", "3 end"])
    assert rollout.rewards_B.tolist() == [4, 4]
    assert rollout.metrics()["baseline_reward/pct_mixed"] == 1
    assert replace(rollout, turn_discount=None).metrics()["baseline_reward/pct_mixed"] == 0

    async def is_useful(discount):
        played = asyncio.get_running_loop().create_future()
        played.set_result(None)
        task = PromptTask(0, 0, rollout.episodes[0].problem, 2, SAMPLING, 0, 0, turn_discount=discount)
        return Group(task, played, rollout.episodes).is_useful

    assert [asyncio.run(is_useful(discount)) for discount in (None, 1.0)] == [False, True]


def test_a_file_has_the_advantages_of_tokens_and_the_rewards_of_turns(tmp_path):
    rollout = scored(["1", "0"], ["no", "2"], ["3 end", "1 end"])
    rollout.advantages = [np.array([0.5, 0.25, -1.0]), np.array([1.0, 2.0, 3.0])]
    RolloutFiles(tmp_path, None, done=0).write(1, "train", rollout)
    first, second = read_rollout(rollout_files(tmp_path)[0], tokens=True)
    assert (first["advantage"], first["turn_rewards"]) == (0.5, [1, 0, 3])
    assert (second["advantage"], second["turn_rewards"]) == (1.0, [0, 2, 1])
    rows = rollout.rows(rollout.advantages, 0)
    assert first["token_advantages"] == rows[0].token_advantages.tolist()
    assert sorted(set(first["token_advantages"])) == [-1, 0, 0.25, 0.5]
    assert rollout_rows(1, "train", rollout)[0]["turn_rewards"].tolist() == [1, 0, 3]
    plain = replace(rollout, turn_discount=None, advantages=[0.5, -0.5])
    assert [row["token_advantages"] for row in rollout_rows(1, "train", plain)] == [None, None]

import asyncio
import dataclasses
import logging
import math
from contextlib import nullcontext

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rewards.judge import RewardResult
from nemo_rl_lite.rewards.registry import LateReward, RewardError, checked_reward
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutCollector, RolloutTask
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.groups import GroupPlayer, LocalPlayers
from nemo_rl_lite.rollout.play import SingleTurn
from nemo_rl_lite.rollout.rollout import Rollout
from tests.unit.rollout.script import Letters, Script, collected_by, judged_by

SAMPLING = Sampling(1.0, 1.0, None, max_new_tokens=4, stop_token_ids=(0,), stop_strings=())
ANSWERS = ["A", "BBBB...", "XYZ", ""]


def collector(judge, max_length=32, max_failure_fraction=0.0) -> RolloutCollector:
    return collected_by(Script(ANSWERS), judge, max_length, ErrorShares(max_failure_fraction, 0.0))


def collect(judge, max_failure_fraction=0.0) -> Rollout:
    return collector(judge, max_failure_fraction=max_failure_fraction).collect(task("a", "xyz"))


def task(*texts: str) -> RolloutTask:
    return RolloutTask(problems(*texts).__getitem__, len(texts), 2, SAMPLING, 1)


def judged(reward):
    return judged_by(lambda response, problem: checked_reward("mine", reward(response, problem.answer)))


def problems(*texts: str) -> list[Problem]:
    return [Problem(chat(text), text.upper()) for text in texts]


def test_sequences_masks_and_logprobs_line_up():
    rollout = collect(judged(lambda response, answer: float(response == answer)))
    rows = rollout.rows([0.5, -0.5, 0.25, -0.25], 0)
    assert rows[0].tokens.tolist() == [ord("a"), ord("|"), ord("A"), 0]
    assert rows[0].mask.tolist() == [False, False, True, True]
    assert [sum(row.mask) for row in rows] == [2, 4, 4, 1] and rollout.generated == 11
    assert rows[2].mask.tolist() == [False] * 4 + [True] * 4
    assert rows[3].generation_logprobs.tolist() == [0, 0, 0, 0, -1 / 8]
    assert [row.advantage for row in rows] == [0.5, -0.5, 0.25, -0.25]
    assert rollout.rows([0.0] * 4, 3)[0].ages.tolist() == [0, 0, 3, 3], "steps since version 0, which sampled it"
    assert rollout.rewards_B.tolist() == [1, 0, 1, 0]
    assert [episode.response for episode in rollout.episodes] == ["A", "BBBB", "XYZ", ""]
    metrics = rollout.metrics()
    assert metrics["reward"] == 0.5
    assert metrics["truncation_rate"] == 0.25 and metrics["natural_termination_rate"] == 0.75
    assert metrics["mean_prompt_length"] == 3 and metrics["mean_gen_tokens_per_sample"] == 11 / 4
    assert metrics["total_num_tokens"] == 12 + 11
    assert [len(row.tokens) for row in rows] == [4, 6, 8, 5]
    assert metrics["global_valid_seqs"] == metrics["num_valid_samples"] == 4 and metrics["global_valid_toks"] == 11
    assert metrics["avg_turns_per_sample"] == 1 and metrics["mean_env_tokens_per_sample"] == 0
    assert rows[1].tokens[2:].tolist() == list(map(ord, "BBBB"))


def fragile(response: str, answer: str) -> float:
    return 1 / len(response)


def test_truncated_responses_alone_are_left_out():
    rollout = collect(judged(lambda response, answer: float(response == answer)))
    assert [episode.ending for episode in rollout.episodes] == ["stop", "length", "stop", "stop"]
    # An episode without a turn left was not cut.
    rollout.episodes[2].ending = "turns"
    rollout.leave_out_truncated()
    assert [episode.is_left_out for episode in rollout.episodes] == [False, True, False, False]
    assert [any(row.mask) for row in rollout.rows([0.5, -0.5, 0.25, -0.25], 0)] == [True, False, True, True]
    assert rollout.metrics()["left_out_samples"] == 1 and rollout.rewards_B.tolist() == [1, 0, 1, 0]


def test_a_reward_that_fails_leaves_its_sample_out(caplog):
    with caplog.at_level(logging.INFO):
        rollout = collect(judged(fragile), 0.25)
    assert "in fragile\n" in caplog.text, "the log has the traceback"
    assert [episode.reward for episode in rollout.episodes] == [1, 1 / 4, 1 / 3, None]
    metrics = rollout.metrics()
    assert rollout.reward_errors == metrics["reward_errors"] == 1 and "ZeroDivisionError" in caplog.text
    assert metrics["reward"] == pytest.approx((1 + 1 / 4 + 1 / 3) / 3)
    assert metrics["num_valid_samples"] == 3 and metrics["global_valid_toks"] == 10
    *kept, left_out = rollout.rows([0.5, -0.5, 0.25, 0.0], 0)
    assert not any(left_out.mask) and left_out.advantage == 0 and all(any(row.mask) for row in kept)
    assert [sample.reward for sample in rollout.samples(9)] == [1 / 4, 1 / 3, 1]


def test_a_reward_that_fails_on_too_many_samples_ends_the_run():
    with pytest.raises(
        DataError, match=r"failed on 1 of 4 samples.* reward.max_failure_fraction = 0.2.*ZeroDivisionError"
    ):
        collect(judged(fragile), 0.2)


def test_too_many_failures_end_the_run_although_other_calls_hang():
    async def judge(response, problem):
        if problem.answer == "XYZ":
            await asyncio.Event().wait()
        return RewardError("no answer in time")

    with pytest.raises(DataError, match=r"failed on 2 of 2 samples, more than .* 0.25; first with no answer in time"):
        collect(judge, 0.25)


@pytest.mark.parametrize(
    ("many", "few", "error"),
    [
        (0.25, 0.25, None),
        (0.2, 0.2, r"of few failed on 1 of 2 samples \(1 of 4 in all"),
        (0.25, 0.3, r"of few failed on 1 of 2 samples, more .* data\.sources\.few\.reward\.max_failure_fraction"),
    ],
)
def test_sources_with_the_same_limit_are_counted_together(many, few, error):
    sources = ["many", "few"]
    players = dict.fromkeys(sources, GroupPlayer(Letters(), judged(fragile), SingleTurn(), 32))
    shares = {"many": ErrorShares(many, 0.0), "few": ErrorShares(few, 0.0)}
    asked = [dataclasses.replace(one, source=name) for one, name in zip(problems("a", "xyz"), sources, strict=True)]
    collector = RolloutCollector(LocalPlayers(Script(ANSWERS), players), shares)
    with pytest.raises(DataError, match=error) if error else nullcontext():
        collector.collect(RolloutTask(asked.__getitem__, 2, 2, SAMPLING, 1))


def test_a_response_that_is_wrong_because_judging_it_takes_too_long_is_trained_on_and_counts_as_a_failure(caplog):
    async def judge(response, problem):
        return RewardResult(0.0, late=LateReward("no answer in time")) if response == "XYZ" else RewardResult(1.0)

    rollout = collect(judge, 0.25)
    assert rollout.rewards_B.tolist() == [1, 1, 0, 1] and rollout.reward_errors == 0
    assert all(any(row.mask) for row in rollout.rows([1.0] * 4, 0)) and "no answer in time" in caplog.text
    with pytest.raises(DataError, match=r"failed on 1 of 4 samples.* first with no answer in time"):
        collect(judge, 0.2)


def test_a_prompt_without_room_is_an_error_that_names_both_limits():
    short = collector(judged(lambda *_: 0.0), max_length=6)
    with pytest.raises(DataError, match=r"6 tokens and generation.max_new_tokens = 4 .*max_total_sequence_length = 6"):
        short.collect(task("abcde"))


def episode(reward: float | None, **parts: float) -> Episode:
    return Episode(problems("?")[0], [1], 1, reward=reward, reward_parts=parts)


def test_parts_of_rewards_what_is_in_none_of_them_and_what_is_missing():
    weights, total = {"right": 1.0, "short": 0.1}, 0.0 + 1.0 * 0.3 + 0.1 * 0.7
    episodes = [episode(total, right=0.3, short=0.7), episode(total - 0.5, right=0.3, short=0.7)]
    first, second, rest = Rollout(episodes, 2, 0).parts_NB(weights).tolist()
    assert (first, second) == ([0.3, 0.3], [0.7, 0.7])
    assert rest[0] == 0 and abs(rest[1] + 0.5) < 1e-12
    parts = Rollout([episode(None), episode(2.0)], 2, 1).parts_NB(weights)
    assert parts[:2].isnan().all() and math.isnan(parts[2, 0]) and parts[2, 1] == 2

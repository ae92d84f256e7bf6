import logging

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.rewards.judge import one_by_one
from nemo_rl_lite.rewards.registry import WrongReward, checked_reward
from nemo_rl_lite.rollout.rollout import RolloutCollector

SAMPLING = Sampling(1.0, 1.0, None, max_new_tokens=4, stop_token_ids=(0,), stop_strings=(), samples_per_prompt=2)


class Letters:
    """One token a letter; 0 ends."""

    end_tokens = (0,)

    def prompt(self, messages):
        return [ord(letter) for letter in messages[-1]["content"]]

    def text(self, tokens):
        return "".join(chr(token) for token in tokens if token)


class Script:
    """A generation engine that answers from a list."""

    def __init__(self, answers):
        self.answers = answers

    def generate(self, prompts, sampling):
        assert len(self.answers) == len(prompts) * sampling.samples_per_prompt
        return [
            Completion(tuple(map(ord, text)) + ((0,) if reason == "stop" else ()), tuple(logprobs), reason)
            for text, logprobs, reason in self.answers
        ]


def judged(reward):
    return one_by_one(lambda response, problem: checked_reward("mine", reward(response, problem.answer)))


def problems(*texts: str) -> list[Problem]:
    return [Problem(chat(text), text.upper()) for text in texts]


ANSWERS = [
    ("A", [-0.1, -0.2], "stop"),
    ("BBBB", [-1.0, -1.1, -1.2, -1.3], "length"),
    ("XYZ", [-0.5, -0.6, -0.7, -0.8], "stop"),
    ("", [-2.0], "stop"),
]


def test_sequences_masks_and_logprobs_line_up():
    collector = RolloutCollector(
        Script(ANSWERS), Letters(), judged(lambda response, answer: float(response == answer)), 32, 0.0
    )
    rollout = collector.collect(problems("a", "xyz"), SAMPLING)
    rows = rollout.rows([0.5, -0.5, 0.25, -0.25])
    assert rows[0].tokens == [ord("a"), ord("A"), 0] and rows[0].mask == [False, True, True]
    assert [sum(row.mask) for row in rows] == [2, 4, 4, 1] and rollout.generated == 11
    assert rows[2].mask == [False] * 3 + [True] * 4
    assert rows[3].generation_logprobs == [0, 0, 0, -2.0]
    assert [row.advantage for row in rows] == [0.5, -0.5, 0.25, -0.25]
    assert rollout.rewards_B.tolist() == [1, 0, 1, 0]
    assert [episode.response for episode in rollout.episodes] == ["A", "BBBB", "XYZ", ""]
    metrics = rollout.metrics()
    assert metrics["reward"] == 0.5
    assert metrics["truncation_rate"] == 0.25 and metrics["natural_termination_rate"] == 0.75
    assert metrics["mean_prompt_length"] == 2 and metrics["mean_gen_tokens_per_sample"] == 11 / 4
    assert metrics["total_num_tokens"] == 8 + 11
    assert [len(row.tokens) for row in rows] == [3, 5, 7, 4]
    assert metrics["global_valid_seqs"] == metrics["num_valid_samples"] == 4 and metrics["global_valid_toks"] == 11
    assert metrics["avg_turns_per_sample"] == 1 and metrics["mean_env_tokens_per_sample"] == 0
    assert rows[1].tokens[1:] == list(map(ord, "BBBB"))


def fragile(response: str, answer: str) -> float:
    return 1 / len(response)


def test_a_reward_that_fails_leaves_its_sample_out(caplog):
    collector = RolloutCollector(Script(ANSWERS), Letters(), judged(fragile), 32, 0.25)
    with caplog.at_level(logging.WARNING):
        rollout = collector.collect(problems("a", "xyz"), SAMPLING)
    assert [episode.reward for episode in rollout.episodes] == [1, 1 / 4, 1 / 3, None]
    metrics = rollout.metrics()
    assert rollout.reward_errors == metrics["reward_errors"] == 1 and "ZeroDivisionError" in caplog.text
    assert metrics["reward"] == pytest.approx((1 + 1 / 4 + 1 / 3) / 3)
    assert metrics["num_valid_samples"] == 3 and metrics["global_valid_toks"] == 10
    *kept, left_out = rollout.rows([0.5, -0.5, 0.25, 0.0])
    assert not any(left_out.mask) and left_out.advantage == 0 and all(any(row.mask) for row in kept)
    assert [sample.reward for sample in rollout.samples(9)] == [1 / 4, 1 / 3, 1]


def test_a_reward_that_fails_on_too_many_samples_ends_the_run():
    collector = RolloutCollector(Script(ANSWERS), Letters(), judged(fragile), 32, 0.2)
    with pytest.raises(DataError, match=r"failed on 1 of 4 samples.* reward.max_error_share = 0.2 .*ZeroDivisionError"):
        collector.collect(problems("a", "xyz"), SAMPLING)


@pytest.mark.parametrize("broken", [lambda response, answer: 1 / 0, lambda response: 1.0, lambda *_: float("nan")])
def test_a_reward_that_never_works_ends_the_run(broken):
    collector = RolloutCollector(Script(ANSWERS), Letters(), judged(broken), 32, 0.5)
    with pytest.raises(DataError, match=r"failed on 4 of 4 samples, .* first with"):
        collector.collect(problems("a", "xyz"), SAMPLING)


def test_what_is_no_reward_ends_the_run_and_names_function_sample_and_value():
    def judge(responses, problems):
        return [WrongReward("mine returned '1.0', a str; a reward is one number"), *[1.0] * 3]

    with pytest.raises(DataError, match=r"mine returned '1\.0', a str.* the response was 'A' \(answer 'A'\)"):
        RolloutCollector(Script(ANSWERS), Letters(), judge, 32, 1.0).collect(problems("a", "xyz"), SAMPLING)


def test_a_prompt_without_room_is_an_error_that_names_both_limits():
    collector = RolloutCollector(Script(ANSWERS), Letters(), judged(lambda *_: 0.0), 6, 0.0)
    with pytest.raises(DataError, match=r"5 tokens and generation.max_new_tokens = 4 .*max_total_sequence_length = 6"):
        collector.collect(problems("abcde"), SAMPLING)

"""Prompts that teach nothing are replaced while others generate; which are kept depends on the data alone."""

import asyncio
import math
from collections import Counter
from dataclasses import replace

import pytest

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutTask
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder, Sampler
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.rollout.script import Queue, collected_by, judged_by

SAMPLES = 4
SAMPLING = Sampling(1.0, 1.0, None, max_new_tokens=4, stop_token_ids=(0,), stop_strings=())


class Engine(Queue):
    """Answers the first sample of a prompt whose text has an `m` differently; prompts with `slow` take longer."""

    def __init__(self):
        self.begun, self.aborted = [], 0

    async def sample(self, request, conversation, progress=None):
        text = "".join(map(chr, request.prompt))
        self.begun.append(text)
        is_first = self.begun.count(text) % SAMPLES == 1
        try:
            await asyncio.sleep(0.03 if "slow" in text else 0.001)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        length = 8 if "long" in text else 2
        reward = ord("1") if is_first and "m" in text else ord("0")
        tokens = (reward,) * (length - 1) + (0,)
        return Completion(tokens, (-0.5,) * length, "length" if length == 8 else "stop", (0,) * length), 0


class Data:
    def __init__(self, texts):
        self.texts = texts

    def problem(self, position):
        return Problem(chat(self.texts[position % len(self.texts)] + f" {position}"), "1")


def source(texts, position=0, resting=None, **options):
    config = compose_config([f"algorithm.num_generations_per_prompt={SAMPLES}"]).options(GRPOConfig)
    config = replace(config, num_prompts_per_step=3, **{"use_dynamic_sampling": True, **options})
    sampling, engine = Sampling(1.0, 1.0, None, 8, (0,), ()), Engine()
    judge = judged_by(lambda response, problem: float(response[:1] == "1"))
    collector = collected_by(engine, judge, 64, ErrorShares(0.0, 0.0))
    order = PromptOrder(Data(texts), resting or PromptCooldown(0, 0), {"position": position})
    return Sampler(config, collector, sampling, [], order), engine


def kept(rollout):
    return [episode.problem.messages[0]["content"] for episode in rollout.episodes[::SAMPLES]]


def test_every_prompt_of_a_step_teaches_and_the_next_step_begins_behind_it():
    own, engine = source(["m", "x", "x", "m slow", "m"], oversample=1.0)
    rollout = own.rollout(1)
    assert kept(rollout) == ["m 0", "m slow 3", "m 4"] and own.order.state()["position"] == 5
    metrics = rollout.metrics()
    assert metrics["filtered_prompts"] == 2 and metrics["dropped_tokens"] == 2 * SAMPLES * 2
    assert metrics["useful_tokens_share"] == 3 / 5 and engine.aborted == 0
    # A resumed run begins as many prompts together.
    assert own.state() == own.order.state() | {"useful_share": 3 / 5}
    assert kept(own.rollout(2)) == ["m 5", "m slow 8", "m 9"] and own.order.state() == {"position": 10, "resting": {}}


def test_what_is_kept_depends_neither_on_time_nor_on_oversampling():
    texts = ["m slow", "x slow", "m", "m", "m", "x", "m"]
    for oversample in (1.0, "auto", 2.0):
        own, engine = source(texts, oversample=oversample)
        assert kept(own.rollout(1)) == ["m slow 0", "m 2", "m 3"] and own.order.state()["position"] == 4
        # With oversampling more has begun than what is kept and replaced.
        assert (len(engine.begun) // SAMPLES > 4) == (oversample != 1)


class Ended:
    """Prompts of which some have ended, some of these with rewards that differ."""

    def __init__(self, ended, useful):
        self.is_done, self.is_useful = ended, useful


def missing_with(ended=0, useful=0, under_way=0, **own):
    task = RolloutTask(Data(["m"]).problem, 10, SAMPLES, SAMPLING, 0, useful=True, **own)
    task.groups = [Ended(True, place < useful) for place in range(ended)] + [Ended(False, False)] * under_way
    return task.missing()


def test_as_many_are_under_way_as_the_missing_ones_probably_take():
    assert missing_with() == 10 and missing_with(share=0.5) == 20
    # What this rollout tells counts as much as what was expected, when as many prompts have ended.
    assert missing_with(share=0.5, ended=10, useful=1, under_way=20) == math.ceil(9 / 0.3) - 20
    # The last one: it probably takes four more.
    assert missing_with(share=0.25, ended=38, useful=9) == math.ceil(1 / (11.5 / 48))
    assert missing_with(share=0.0) == 80 and missing_with(share=0.0, most=30) == 30
    assert missing_with(oversample=1.5, ended=5, useful=2, under_way=3) == 15 - 2 - 3


def test_a_rollout_begins_with_what_the_last_one_tells():
    own, engine = source(["m", "x", "x"])
    assert own.rollout(1).taught == (True, False, False, True, False, False, True)
    engine.begun, sample, seen = [], engine.sample, []

    async def noted(request, conversation, progress=None):
        completion = await sample(request, conversation)
        seen.append(len(engine.begun) // SAMPLES)
        return completion

    engine.sample = noted
    own.rollout(2)
    assert seen[0] == 7


def test_what_is_not_needed_any_more_is_aborted_and_comes_again():
    own, engine = source(["m", "m", "m", "m slow", "m slow", "m slow"], oversample=2.0)
    assert kept(own.rollout(1)) == ["m 0", "m 1", "m 2"] and own.order.state()["position"] == 3
    assert engine.aborted == 3 * SAMPLES
    assert kept(own.rollout(2)) == ["m slow 3", "m slow 4", "m slow 5"]


def test_prompts_that_teach_nothing_fill_the_step_when_the_limit_is_reached():
    own, engine = source(["x", "m", "x"], dynamic_sampling_max_gen_batches=2.0)
    rollout = own.rollout(1)
    assert kept(rollout) == ["x 0", "m 1", "m 4"] and len(engine.begun) == 6 * SAMPLES
    assert own.order.state()["position"] == 5 and rollout.metrics()["useful_tokens_share"] == 1 / 2


def test_without_it_nothing_is_replaced():
    own, _ = source(["x", "m"], use_dynamic_sampling=False)
    rollout = own.rollout(1)
    assert kept(rollout) == ["x 0", "m 1", "x 2"] and own.order.state()["position"] == 3
    assert rollout.metrics()["useful_tokens_share"] == 1 and rollout.metrics()["filtered_prompts"] == 0


def test_truncated_responses_are_left_out_and_long_ones_lose_reward():
    shaping = replace(source(["m"])[0].config.reward_shaping, overlong_buffer_length=4, overlong_buffer_penalty=0.5)
    own, _ = source(["m", "m long", "m"], overlong_filtering=True, reward_shaping=shaping)
    rollout = own.rollout(1)
    rows = rollout.rows([1.0] * 12, 0)
    assert [any(row.mask) for row in rows] == [True] * 4 + [False] * 4 + [True] * 4
    assert rollout.metrics()["left_out_samples"] == 4 and rollout.metrics()["num_valid_samples"] == 8
    assert rollout.rewards_B.tolist() == [1, 0, 0, 0, 0.5, -0.5, -0.5, -0.5, 1, 0, 0, 0]
    assert [row.reward for row in rows] == rollout.rewards_B.tolist()
    metrics = rollout.metrics()
    assert metrics["reward"] == metrics["filtered_reward"] == 3 / 12 and metrics["length_penalty"] == -0.5 / 3


REWARDS = {"right": [1, 1, 1, 1], "wrong": [0, 0, 0, 0], "mixed": [1, 0, 0, 0], "fails": [None] * 4}


@pytest.mark.parametrize("oversample", [1.0, 2.0])
@pytest.mark.parametrize(
    ("texts", "reward", "filtered", "shares", "errors"),
    [
        (["mixed"] * 3, 1 / 4, 1 / 4, (0, 0, 1), 0),
        (["right", "mixed", "right", "mixed", "mixed"], 11 / 20, 1 / 4, (0, 2 / 5, 3 / 5), 0),
        (["wrong", "mixed", "right", "mixed", "wrong", "mixed"], 7 / 24, 1 / 4, (2 / 6, 1 / 6, 3 / 6), 0),
        (["fails", "mixed", "right", "mixed", "mixed"], 7 / 16, 1 / 4, (0, 1 / 4, 3 / 4), 0),
        (["right", "fails", "fails", "fails", "fails", "fails"], 1, 1, (0, 1, 0), 8),
    ],
)
def test_rewards_and_shares_are_of_all_prompts_and_errors_of_those_kept(
    oversample, texts, reward, filtered, shares, errors
):
    own, _ = source([*texts, "slow"], oversample=oversample, dynamic_sampling_max_gen_batches=2.0)
    seen = Counter()

    def judge(response, problem):
        prompt = problem.messages[0]["content"]
        seen[prompt] += 1
        # An error where it is None.
        return float(REWARDS.get(prompt.split()[0], [0] * 4)[seen[prompt] - 1])

    players, own.collector._shares = own.collector.playground, {"": ErrorShares(1.0, 1.0)}
    players._players[""] = replace(players._players[""], judge=judged_by(judge))
    metrics = own.rollout(1).metrics()
    assert (metrics["reward"], metrics["filtered_reward"]) == pytest.approx((reward, filtered))
    found = tuple(metrics[f"baseline_reward/pct_{name}"] for name in ("0", "1", "mixed"))
    assert found == pytest.approx(shares) and sum(found) == pytest.approx(1)
    assert metrics["reward_errors"] == errors

"""What GRPO's validation measures, with one response to each held-out problem and with several."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.algorithms.grpo import GRPO
from nemo_rl_lite.checkpoint.resume import checkpoint_store
from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.validation.rewards import held_out_label
from tests.unit.rollout.fleet import Fleet, sampler

CALLS = {"episode/calls": 2.0}


def validated(rewards: list[float], samples: int) -> tuple[dict[str, float], str]:
    said = []
    tensor = torch.tensor(rewards, dtype=torch.float64)
    rollout = SimpleNamespace(rewards_B=tensor, generated=3 * len(rewards), episodes=(), episode_metrics=lambda: CALLS)
    loop = SimpleNamespace(
        held_out=len(rewards) // samples,
        held_out_label="held-out reward",
        config=SimpleNamespace(val_samples_per_problem=samples),
        rollouts=SimpleNamespace(held_out=lambda step, show: rollout),
        report=SimpleNamespace(console=RunConsole(), validation=lambda step, values, timer, told: said.append(told)),
        log=SimpleNamespace(begin=lambda *_: None, end=lambda *_: None),
    )
    return GRPO.validate(loop, 1), said[0]  # pyrefly: ignore


def test_with_one_response_each_there_is_a_mean():
    assert validated([1.0, 0.0, 1.0, 1.0], 1) == (
        {"accuracy": 0.75, "avg_length": 3.0, **CALLS},
        "held-out reward 0.750",
    )


def test_with_several_there_is_the_share_of_problems_that_one_of_them_solves():
    measured, said = validated([1.0, 0.0, 0.0, 0.0, 0.0, 1.0], 2)
    assert measured == pytest.approx({"accuracy": 1 / 3, "avg_length": 3.0, **CALLS, "pass_at_k": 2 / 3})
    assert said == "held-out reward 0.333, pass@2 0.667"
    measured, _ = validated([math.nan, 1.0, math.nan, 0.0], 2)
    assert measured == pytest.approx({"accuracy": 0.5, "avg_length": 3.0, **CALLS, "pass_at_k": 0.5})


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 1), ("pass_at_k", 2)])
def test_the_best_checkpoint_is_the_best_by_the_metric_that_is_named(metric, best, tmp_path):
    given = [f"algorithm.val_metric={metric}", "algorithm.val_samples_per_problem=2"]
    store = checkpoint_store(compose_config(given), tmp_path)
    # The first step's model solves two problems always, the second's each problem now and then.
    for step, rewards in ((1, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]), (2, [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]), (3, [0.0] * 6)):
        store.begin(step)
        store.finish(step, validated(rewards, 2)[0], {})
    assert [one.step for one in store.best()] == [best]


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("", "accuracy"),
        ("reward=math", "accuracy"),
        ("environment=calculator reward=math", "accuracy"),
        ("reward=program data=hub data.path=a/b data.validation_split=test", "accuracy"),
        ("reward=program reward.kwargs.share=true data=hub data.path=a/b data.validation_split=test", "reward"),
        ("reward=format reward.kwargs.pattern=a+", "reward"),
        ("reward.name=tests.functional.rewards.share_of_digits", "reward"),
        ("reward.name=tests.functional.rewards.share_of_digits reward.binary=true", "accuracy"),
        ("reward.binary=false", "reward"),
        ("+reward.terms.b.name=last_number +reward.terms.b.weight=1 +reward.terms.b.kwargs={}", "reward"),
        ("reward=math agent.name=tests.unit.validation.own.plays", "reward"),
    ],
)
def test_only_rewards_that_are_right_or_wrong_are_an_accuracy(given, label):
    values = dict(flatten(dataclasses.asdict(compose_config(given.split()))))
    assert held_out_label(values) == f"held-out {label}"


def held_out(samples: int) -> list[list[int]]:
    """The responses to the held-out problems, those of a problem next to each other."""
    fleet = Fleet()
    fleet.refit(0)
    rollout = sampler(fleet, val_samples_per_problem=samples).held_out(3)
    assert rollout.samples_per_prompt == samples
    return [episode.tokens for episode in rollout.episodes]


def test_the_first_response_to_a_problem_is_the_one_that_is_sampled_alone():
    one, three = held_out(1), held_out(3)
    assert len(one) == 2 and len(three) == 6
    assert three[::3] == one and three[0] != three[1]

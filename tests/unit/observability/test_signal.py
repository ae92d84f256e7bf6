"""Steps from which little can be learned, and what to try."""

import pytest

from nemo_rl_lite.observability.signal import WeakSignals

CONFIG = {
    "algorithm.name": "grpo",
    "algorithm.num_prompts_per_step": 16,
    "algorithm.num_generations_per_prompt": 8,
    "algorithm.use_leave_one_out_baseline": True,
    "generation.temperature": 0.7,
    "generation.max_new_tokens": 64,
}


def shares(mixed: float, zero: float = 0.0, truncated: float = 0.0) -> dict[str, float]:
    one = 1 - mixed - zero
    names = ("baseline_reward/pct_mixed", "baseline_reward/pct_0", "baseline_reward/pct_1", "truncation_rate")
    return dict(zip(names, (mixed, zero, one, truncated), strict=True))


def history(*steps: dict[str, float]) -> list[dict[str, float]]:
    return [{f"train/{name}": value for name, value in step.items()} for step in steps]


@pytest.mark.parametrize(
    ("step", "shown", "tries"),
    [
        (shares(0.05, zero=0.9), {"mixed prompts": 0.05}, "easier or mixed data"),
        (shares(0.05, zero=0.0), {"mixed prompts": 0.05}, "harder data"),
        (shares(0.5, truncated=0.75), {"truncated": 0.75}, "generation.max_new_tokens (now 64)"),
    ],
)
def test_a_weak_step_says_so_once_and_what_to_try(step, shown, tries):
    signals = WeakSignals(CONFIG)
    assert signals.shown(step) == shown
    (sentence,) = signals.news(step)
    assert tries in sentence and not [*signals.news(step)]
    assert [tries in one for one in signals.at_end(history(step, step))] == [True]


@pytest.mark.parametrize(
    ("changed", "step"),
    [
        ({}, shares(0.1, zero=0.9, truncated=0.5)),
        ({}, {"baseline_reward/pct_mixed": float("nan"), "truncation_rate": 0.0}),
        ({"algorithm.use_leave_one_out_baseline": "batch"}, shares(0.0, zero=1.0)),
        ({"algorithm.name": "distillation"}, shares(0.0, zero=1.0, truncated=1.0)),
    ],
)
def test_there_is_no_false_alarm(changed, step):
    signals = WeakSignals(CONFIG | changed)
    assert not signals.shown(step) and not [*signals.news(step)] and not signals.at_end(history(step))


def test_a_few_prompts_that_fail_by_chance_are_no_news():
    signals = WeakSignals(CONFIG | {"algorithm.num_prompts_per_step": 4})
    steps = [shares(0.0, zero=1.0), shares(0.75), shares(0.0, zero=1.0), shares(0.0, zero=1.0), shares(0.0, zero=1.0)]
    assert [len([*signals.news(step)]) for step in steps] == [0, 0, 0, 0, 1]


def test_the_end_looks_at_the_last_steps_too():
    good, bad = shares(0.9), shares(0.0, zero=1.0)
    (sentence,) = WeakSignals(CONFIG).at_end(history(*[good] * 20, *[bad] * 10))
    assert "last 10 steps" in sentence
    assert not WeakSignals(CONFIG).at_end(history(*[good] * 28, bad, bad))
    assert not WeakSignals(CONFIG).at_end([{"step": 0, "validation/accuracy": 0.0}])


def test_what_is_set_already_is_not_advised():
    given = CONFIG | {"algorithm.use_dynamic_sampling": True, "generation.stop_strings": ["end"]}
    step = shares(0.05, zero=0.95, truncated=1.0)
    told = " ".join(WeakSignals(given).news(step))
    assert "dynamic" not in told and "stop_strings" not in told
    told = " ".join(WeakSignals(CONFIG).news(step))
    assert "dynamic" in told and "stop_strings" in told
    assert "dynamic" not in " ".join(WeakSignals(CONFIG).news(shares(0.0, zero=1.0)))

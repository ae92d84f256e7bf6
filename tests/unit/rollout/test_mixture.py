"""Mixtures: shares of sources, what a checkpoint keeps, curricula, and metrics by source."""

import json
import random
from collections import Counter
from fractions import Fraction

import pytest

from nemo_rl_lite.data.mixture import MixedSet, Shares, items_per_epoch
from nemo_rl_lite.data.problems import FileSet, Problem, chat
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.mixture import (
    MixedOrder,
    metrics_by_source,
    mixed_order,
    solve_rates,
    validation_by_source,
)
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder


def rows(source: str, count: int = 10) -> FileSet[Problem]:
    return FileSet(tuple(Problem(chat(f"{source} {row}"), "1", source=source) for row in range(count)), 1, True)


def mixture(weights, state=None, count: int = 10, cooldown: int = 0) -> MixedOrder:
    def order(source, own):
        resting = PromptCooldown(cooldown, count, own.get("resting"), own["position"])
        return PromptOrder(rows(source, count), resting, own)

    return mixed_order(weights, order, json.loads(json.dumps(state or {})))


def episode(source: str, reward: float | None, tokens: int = 2) -> Episode:
    return Episode(Problem(chat("?"), "1", source=source), [0] * tokens, 1, reward=reward)


def drawn(order: MixedOrder, count: int, step: int = 1) -> list:
    return [order.draw(step)[-1] for _ in range(count)]


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0, "c": 4.0}, {"a": 0.1, "b": 0.7}])
def test_every_step_has_the_shares_of_the_weights(weights):
    order, total = mixture(weights), Fraction(sum(map(Fraction, weights.values())))
    counts, seen = Counter(), 0
    for step in range(1, 41):
        own = Counter(source for source, _ in drawn(order, 5, step))
        counts, seen = counts + own, seen + 5
        for name, weight in weights.items():
            assert abs(counts[name] - seen * Fraction(weight) / total) < 1
            assert abs(own[name] - 5 * Fraction(weight) / total) < 2


def test_a_source_is_sampled_epoch_by_epoch():
    places = drawn(mixture({"a": 2.0, "b": 1.0}), 30)
    for source, count in (("a", 20), ("b", 10)):
        assert [position for own, position in places if own == source] == list(range(count))


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 9.0}, {"a": 1.0, "b": 3.0, "new": 6.0}, {"b": 1.0, "new": 1.0}])
def test_draws_of_other_weights_are_undone_with_those(weights):
    order = mixture({"a": 9.0, "b": 1.0}, count=100)
    drawn(order, 20)
    ahead = [order.draw(2) for _ in range(20)]
    resumed = mixture(weights, order.state(), count=100)
    resumed.give_back(ahead)
    counts, total = Counter(source for source, _ in drawn(resumed, 20, 2)), sum(weights.values())
    assert all(abs(counts[name] - 20 * weight / total) < 2 for name, weight in weights.items()), counts


def test_a_resumed_run_continues_exactly():
    weights = {"a": {"step": {1: 1.0, 20: 0.2}}, "b": {"solve_rate": {0.0: 1.0, 1.0: 0.1}}, "c": 0.3}

    def steps(order, first, last):
        for step in range(first, last + 1):
            draws = [order.draw(step) for _ in range(7)]
            order.give_back(draws[5:])
            for number, (*_, place) in enumerate(draws[:5]):
                order.note(place, taught=number % 2 == 0)
            order.observe([episode(place[0], float(step % 3 == 0)) for *_, place in draws[:5]])
            yield draws[:5]

    whole = mixture(weights, cooldown=4)
    expected = list(steps(whole, 1, 20))
    first = mixture(weights, cooldown=4)
    before = list(steps(first, 1, 9))
    resumed = mixture(weights, first.state(), cooldown=4)
    assert [*before, *steps(resumed, 10, 20)] == expected
    assert resumed.state() == whole.state()


def test_draws_that_are_given_back_leave_no_trace():
    weights = {"a": 0.1, "b": 0.3, "c": 0.7}
    order, other = mixture(weights), mixture(weights)
    for step in range(1, 30):
        draws = [order.draw(step) for _ in range(4 + step % 5)]
        order.give_back(draws[4:])
        assert draws[:4] == [other.draw(step) for _ in range(4)]
    assert order.state() == other.state()


def test_draws_that_a_resumed_run_gives_back_leave_no_trace():
    weights = {"a": {"step": {1: 1.0, 20: 0.2}}, "b": 1.0}
    whole, other = mixture(weights), mixture(weights)
    drawn(whole, 6, 9)
    ahead = [whole.draw(10) for _ in range(5)]
    drawn(other, 6, 9)
    resumed = mixture(weights, whole.state())
    resumed.give_back(ahead)
    assert drawn(resumed, 9, 10) == drawn(other, 9, 10) and resumed.state() == other.state()


def test_a_weight_is_linear_between_steps():
    order = mixture({"a": {"step": {10: 1.0, 20: 0.0}}, "b": 1.0}, count=1000)
    share = {step: Counter(source for source, _ in drawn(order, 300, step))["a"] / 300 for step in (1, 10, 15, 20, 30)}
    assert share == pytest.approx({1: 1 / 2, 10: 1 / 2, 15: 1 / 3, 20: 0.0, 30: 0.0}, abs=0.01)


def test_a_weight_follows_the_solve_rate():
    shares = Shares({"easy": {"solve_rate": {0.5: 1.0, 1.0: 0.1}}, "hard": 1.0}, {})
    for _ in range(100):
        shares.observe(solve_rates([episode("easy", 1.0), episode("easy", None), episode("hard", 0.5)]))
    assert shares.weights() == pytest.approx({"easy": 0.1, "hard": 1.0})
    # The mean moves by a tenth per rollout.
    shares.observe(solve_rates([episode("easy", 0.0)]))
    assert shares.weights()["easy"] == pytest.approx(0.1 + 0.9 * 0.2)


def test_a_resumed_run_may_have_other_sources():
    first = mixture({"a": 1.0, "b": 1.0})
    draws = [first.draw(1) for _ in range(6)]
    resumed = mixture({"a": 1.0, "c": 1.0}, first.state())
    resumed.give_back(draws[4:])
    assert [place for place in drawn(resumed, 4) if place[0] == "a"] == [("a", 2), ("a", 3)]
    assert ("c", 0) in drawn(mixture({"a": 1.0, "c": 1.0}, first.state()), 4)


@pytest.mark.parametrize(
    ("counts", "weights", "expected"),
    [
        ({"a": 30}, {"a": 5.0}, 30),
        ({"a": 30, "b": 30}, {"a": 1.0, "b": 2.0}, 90),
        ({"a": 30, "endless": 0}, {"a": 1.0, "endless": 1.0}, 60),
        ({"endless": 0}, {"endless": 1.0}, 0),
        ({"a": 10, "later": 90}, {"a": 1.0, "later": {"step": {1: 0.0, 9: 1.0}}}, 10),
    ],
)
def test_an_epoch_samples_each_finite_source_once(counts, weights, expected):
    assert items_per_epoch(counts, weights) == expected


def test_metrics_by_source():
    kept = [episode("b", 1.0), episode("b", 0.0), episode("a", None), episode("a", 0.25)]
    dropped = (episode("b", 1.0), episode("b", 1.0))
    rollout = Rollout(kept, 2, 1, taught=(True, False, True), dropped=dropped, progress={"source/b/epochs": 0.5})
    kept[0].ending = "length"
    found = metrics_by_source(rollout)
    assert found == {
        "source/b/epochs": 0.5,
        "source/a/prompt_share": 0.5,
        "source/a/mean_gen_tokens_per_sample": 0.0,
        "source/a/truncation_rate": 0.0,
        "source/a/reward": 0.25,
        "source/a/solve_rate": 0.0,
        "source/b/prompt_share": 0.5,
        "source/b/mean_gen_tokens_per_sample": 0.0,
        "source/b/truncation_rate": 0.5,
        "source/b/reward": 0.75,
        "source/b/solve_rate": 0.75,
    }
    assert validation_by_source(Rollout(kept, 1, 1))["source/b/accuracy"] == 0.5
    assert metrics_by_source(Rollout([episode("", 1.0)], 1, 0)) == {}
    assert validation_by_source(Rollout([episode("", 1.0)], 1, 0)) == {}


def test_a_mixed_set_gives_the_same_item_at_a_position():
    sources, weights = {"a": rows("a"), "b": rows("b", 3)}, {"a": 1.0, "b": {"step": {1: 1.0, 4: 0.0}}}
    first, other = (MixedSet(sources, weights, 4) for _ in range(2))
    order = mixture(weights)
    found = [first.problem(position) for position in range(24)]
    assert found == [other.problem(position) for position in reversed(range(24))][::-1]
    assert [one.source for one in found[:8]] == [source for step in (1, 2) for source, _ in drawn(order, 4, step)]
    assert [Counter(one.source for one in found[at : at + 4])["a"] for at in (0, 12, 20)] == [2, 4, 4]
    assert len(first.finite()) == 13 and len(first.only(lambda one: one.source == "a").finite()) == 10


def test_draws_in_turn_from_several_sources_shuffle_each_once(monkeypatch):
    shuffled, shuffle = [], random.Random.shuffle
    monkeypatch.setattr(random.Random, "shuffle", lambda self, order: (shuffled.append(1), shuffle(self, order)))
    sets = [rows(name, 40) for name in "abc"]
    for position in range(60):
        for one in sets:
            one.problem(position)
    # Two epochs each.
    assert len(shuffled) == 6

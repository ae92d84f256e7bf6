"""Simulated groups of runs: how often the interval of a difference is wrong, and how often it decides."""

import numpy as np
import pytest

from nemo_rl_lite.report.verdict import difference, t_within

PROBLEMS, SPREAD = 500, 0.01


def runs(draw: np.random.Generator, abilities_P: np.ndarray, count: int, gain: float, spread: float) -> np.ndarray:
    """Results of `count` seeds, 0 or 1: [R, P]. The seeds' means have the standard deviation `spread`."""
    shift_R1 = gain + draw.normal(0, spread, (count, 1))
    return (draw.random((count, len(abilities_P))) < np.clip(abilities_P + shift_R1, 0, 1)).astype(float)


def signs(gain: float, seeds: int, spread: float = SPREAD, problems: int = PROBLEMS, pairs: int = 100) -> list[int]:
    draw, found = np.random.default_rng(0), []
    for _ in range(pairs):
        abilities_P = draw.beta(1, 1, problems) * 0.8 + 0.1
        groups = [runs(draw, abilities_P, seeds, own, spread) for own in (0.0, gain)]
        found.append(difference(*groups).sign)
    return found


@pytest.mark.parametrize("spread", [0.0, SPREAD, 0.03])
@pytest.mark.parametrize("seeds", [2, 3])
def test_equal_groups_are_rarely_called_different(seeds, spread):
    assert np.count_nonzero(signs(0.0, seeds, spread)) <= 5


@pytest.mark.parametrize(("problems", "spread"), [(1000, 0.0), (2000, 0.01)])
def test_five_points_are_found_with_three_seeds(problems, spread):
    found = signs(0.05, 3, spread, problems)
    assert found.count(1) >= 80 and found.count(-1) == 0


def test_one_run_each_covers_other_problems():
    assert np.count_nonzero(signs(0.0, 1, spread=0.0)) <= 8
    assert signs(0.1, 1, spread=0.0).count(1) >= 80


def test_the_needed_seeds_decide():
    draw = np.random.default_rng(1)
    abilities_P = draw.beta(1, 1, PROBLEMS) * 0.8 + 0.1
    groups = [runs(draw, abilities_P, 3, own, 0.03) for own in (0.0, 0.04)]
    found = difference(*groups)
    assert found.sign == 0 and 3 < found.needed < 40
    assert signs(found.value, found.needed, 0.03).count(1) >= 70


@pytest.mark.parametrize(("df", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042), (1000, 1.962)])
def test_t(df, t):
    assert t_within(0.95, df) == pytest.approx(t, abs=2e-3)


@pytest.mark.parametrize("runs", [1, 2])
def test_one_number_per_group_or_equal_numbers_have_no_interval(runs):
    with pytest.raises(ValueError, match="no interval"):
        difference(np.full((runs, 1), 0.5), np.full((runs, 1), 0.6))

"""Intervals for the difference of two groups of runs, from the results per run and problem.

Shapes: R runs of a group, P problems, or P = 1 for a number of the whole run.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHARE = 0.95
"""Coverage of the interval."""
POWER = 0.8
"""Probability of a verdict with the number of seeds or problems in `Difference.needed`."""
# Largest number of seeds that `needed` considers.
_MOST_SEEDS = 100


@dataclass(frozen=True)
class Difference:
    """The new mean minus the base mean, with its interval.

    `needed` is the number of seeds per group, or of problems if both groups have one run, for a verdict at this
    difference with the probability `POWER`. None: no number of seeds up to 100 is enough, or the groups are equal.
    """

    base: float
    new: float
    low: float
    high: float
    needed: int | None

    @property
    def value(self) -> float:
        return self.new - self.base

    @property
    def sign(self) -> int:
        """1 if the interval is above 0, -1 if it is below 0, else 0: undecided."""
        return (self.low > 0) - (self.high < 0)


@dataclass(frozen=True)
class _Part:
    """A part of the variance of the difference, for `count` runs or problems, estimated with `df` degrees of freedom
    per group."""

    variance: float
    count: int

    @property
    def df(self) -> int:
        return self.count - 1

    def with_count(self, count: int) -> "_Part":
        return _Part(self.variance * self.count / count, count)


def difference(base_RP: np.ndarray, new_RP: np.ndarray) -> Difference:
    """Compare two groups of runs on the same problems. Both arrays are float64 [R, P] without NaN.

    With several runs in a group, the interval covers new seeds and new problems. It is a t interval. Its variance is
    that between the runs of each group, plus that of the problems' effects. The first is at least what the variation of
    single results explains, because few runs may agree by chance. Degrees of freedom follow Welch and Satterthwaite. A
    group of one run borrows the variance of the other.

    With one run in each group, the interval covers only new problems.

    Raises:
        ValueError: there is one number per group, or one that is equal in all runs of each group.
    """
    base, new = float(base_RP.mean()), float(new_RP.mean())
    if math.isclose(base, new, rel_tol=1e-12):
        # Groups of different size round differently.
        new = base
    effects_P = new_RP.mean(axis=0) - base_RP.mean(axis=0)
    count = len(effects_P)
    by_problem = float(effects_P.var(ddof=1)) / count if count > 1 else 0.0
    groups = [base_RP, new_RP]
    if max(map(len, groups)) == 1:
        if count == 1:
            raise ValueError("one number per group has no interval")
        seeds, problems = [], _Part(by_problem, count)
    else:
        known = [_variances(one_RP) for one_RP in groups if len(one_RP) > 1]
        # A variance that both groups share is one part.
        shared = sum(1 / len(one_RP) for one_RP in groups)
        several = [len(one_RP) for one_RP in groups if len(one_RP) > 1]
        scales = [1 / runs for runs in several] if len(several) == 2 else [shared]
        seeds = [_Part(max(one) * scale, runs) for one, scale, runs in zip(known, scales, several, strict=True)]
        noise = sum(single * scale for (_, single), scale in zip(known, scales, strict=True))
        problems = _Part(max(by_problem - noise, 0.0), count)
    if count == 1 and not any(one.variance for one in seeds):
        raise ValueError("equal numbers in each group have no interval")
    margin = _margin([*seeds, problems], SHARE)
    value = new - base
    return Difference(base, new, value - margin, value + margin, _needed(abs(value), seeds, problems))


def _variances(one_RP: np.ndarray) -> tuple[float, float]:
    """Return the variance between the means of runs, and the part of it that single results explain."""
    means_R = one_RP.mean(axis=1)
    runs, count = one_RP.shape
    if count == 1:
        return float(means_R.var(ddof=1)), 0.0
    rest_RP = one_RP - means_R[:, None] - one_RP.mean(axis=0) + means_R.mean()
    return float(means_R.var(ddof=1)), float((rest_RP**2).sum()) / ((runs - 1) * (count - 1)) / count


def _margin(parts: Sequence[_Part], *shares: float) -> float:
    """Return the standard error of the sum of the parts, times the sum of t for each share."""
    used = [one for one in parts if one.variance > 0]
    if not used:
        return 0.0
    variance = sum(one.variance for one in used)
    df = variance**2 / sum(one.variance**2 / one.df for one in used)
    return math.sqrt(variance) * sum(t_within(share, df) for share in shares)


def _needed(effect: float, seeds: Sequence[_Part], problems: _Part) -> int | None:
    """See `Difference`."""
    # The t that a fraction POWER of all draws exceeds from below is that within 2 * POWER - 1.
    shares = (SHARE, 2 * POWER - 1)
    if not effect:
        return None
    if not seeds:
        return math.ceil(problems.count * (_margin([problems], *shares) / effect) ** 2)

    def decides(count: int) -> bool:
        return _margin([*(one.with_count(count) for one in seeds), problems], *shares) <= effect

    # More seeds give a smaller margin.
    count = bisect_left(range(_MOST_SEEDS + 1), True, lo=2, key=decides)
    return count if count <= _MOST_SEEDS else None


def t_within(share: float, df: float) -> float:
    """Return the t for which a variable of Student's distribution is between -t and t with the probability `share`."""
    # With x = sqrt(df) tan(angle), the density is proportional to cos(angle) ** (df - 1).
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos((angles[1:] + angles[:-1]) / 2) ** (df - 1)
    below = np.concatenate(([0.0], np.cumsum(density)))
    return math.sqrt(df) * math.tan(np.interp(share, below / below[-1], angles))

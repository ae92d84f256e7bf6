"""pass@k, and how sure a mean over problems is. Shapes: P problems, R resamples."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
_SEED, _TAILS = 0, (2.5, 97.5)
# The sums of a reward's terms are not exact.
_ROUNDING = 1e-6


def passes(rewards: np.ndarray, least: float = 1.0) -> np.ndarray:
    """Whether each response passes: its reward is at least `least`. One whose reward failed (NaN) does not."""
    return rewards >= least - _ROUNDING


def pass_at_k(passed_P: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Estimate for each problem, without bias, the probability that at least one of `k` responses passes, from the
    number of its `samples` responses that passed: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021). float64 [P].

    Raises:
        ValueError: `k` is not between 1 and `samples`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} is not between 1 and {samples}")
    failed_P, taken_k = samples - np.asarray(passed_P), np.arange(k)
    return 1.0 - np.prod(np.maximum(failed_P[:, None] - taken_k, 0) / (samples - taken_k), axis=1)


def ks(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()))})


def interval(sums_P: Sequence[float] | np.ndarray, counts_P: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The 95 % interval of sum(sums) / sum(counts): percentiles of a bootstrap over problems, with a fixed seed. It has
    no width where all problems have the same result. Resamples without any count are left out."""
    table_P2 = np.stack([np.asarray(sums_P, np.float64), np.asarray(counts_P, np.float64)], axis=1)
    problems = len(table_P2)
    source = np.random.default_rng(_SEED)
    found = []
    for _ in range(RESAMPLES):
        total, count = table_P2[source.integers(problems, size=problems)].sum(axis=0)
        if count:
            found.append(total / count)
    low, high = np.percentile(found, _TAILS)
    return float(low), float(high)

"""Group-relative advantages. Shapes: P prompts, G samples per prompt, B = P G, N parts of a reward, T turns."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.errors import TrainingError

_STD_EPSILON = 1e-6
Baseline = bool | Literal["batch"]
Scale = bool | Literal["batch", "advantages", "mean"]


def group_advantages(
    rewards_PG: Tensor, leave_one_out: Baseline, normalize: Scale, pass_at_k: int | None = None
) -> Tensor:
    """Return advantages [P, G], in units of reward or of standard deviations.

    - `leave_one_out`: the baseline is the mean reward of the prompt's other samples (True; RLOO, Ahmadian et al. 2024),
      of all its samples (False; GRPO, Shao et al. 2024), or of the batch (`batch`; REINFORCE++, Hu et al. 2025,
      arXiv:2501.03262).
    - `normalize`: divide by an unbiased standard deviation, of the prompt's rewards (True), of all rewards (`batch`;
      Lite PPO, Liu et al. 2025, arXiv:2508.08221), or of all advantages (`advantages`; REINFORCE++). `mean`: divide by
      the prompt's mean reward (MaxRL, Tajwar et al. 2026, arXiv:2602.02710).
    - `pass_at_k`: replace each reward by its `best_of_subsets` first.

    Advantages are exactly 0 if all rewards of a baseline are equal up to rounding. A NaN reward means that it failed:
    it is excluded from baselines and deviations, and its advantage is 0.

    Raises TrainingError: `mean`, and the rewards of a prompt differ, but their mean is not positive.
    """
    if pass_at_k is None:
        return turn_advantages(rewards_PG[None], leave_one_out, normalize)[0]
    best_PG, deviation_P1 = best_of_subsets(rewards_PG, pass_at_k)
    centred_PG = _centred(best_PG, leave_one_out, pass_at_k)
    if not normalize:
        return centred_PG
    return _divided(centred_PG, deviation_P1 if normalize is True else _scale(best_PG, centred_PG, normalize))


def turn_advantages(returns_TPG: Tensor, leave_one_out: Baseline, normalize: Scale) -> Tensor:
    """Return advantages [T, P, G] of turns from their returns to go (`returns_to_go`).

    The baseline of turn t is that of `group_advantages` over all samples of the prompt. A sample that has ended before
    has the return of its last turn there. The other samples' terms do not depend on when a sample ends, and their
    number is constant.
    So the policy gradient has no bias under a variable number of turns. Without a division it is exact with
    `leave_one_out`, and has the factor (G - 1) / G without.

    All turns have one divisor, so their relative weights stay: the largest deviation of any turn. With `mean`, it is
    the mean return of the first turn. If only last turns have a reward and there is no discount, each turn has the
    advantage of `group_advantages`.

    Raises what `group_advantages` raises.
    """
    centred = [_centred(own_PG, leave_one_out) for own_PG in returns_TPG]
    if not normalize:
        return torch.stack(centred)
    scales = torch.stack([_scale(own, less, normalize) for own, less in zip(returns_TPG, centred, strict=True)])
    if normalize == "mean":
        _check_means(scales[0], torch.stack([_all_equal(own_PG) for own_PG in returns_TPG]).all(dim=0))
    scale = scales[0] if normalize == "mean" else scales.amax(dim=0)
    return torch.stack([_divided(own_PG, scale) for own_PG in centred])


def returns_to_go(rewards: Sequence[Sequence[float] | np.ndarray], discount: float) -> Tensor:
    """Return the discounted sum of a turn's own and later rewards, float64 [T, B], from the rewards of each episode's
    turns. After its last turn, an episode keeps the return of that turn."""
    returns_TB = np.empty((max(map(len, rewards)), len(rewards)))
    for place, own in enumerate(rewards):
        value = 0.0
        for turn in reversed(range(len(own))):
            value = returns_TB[turn, place] = own[turn] + discount * value
        returns_TB[len(own) :, place] = own[-1]
    return torch.from_numpy(returns_TB)


def _centred(rewards_PG: Tensor, leave_one_out: Baseline, pass_at_k: int | None = None) -> Tensor:
    """Return rewards less their baseline; 0 for NaN, and if all rewards of a baseline are equal."""
    judged_PG = ~rewards_PG.isnan()
    known_PG = torch.where(judged_PG, rewards_PG, 0.0)
    count_P1, total_P1 = judged_PG.sum(dim=1, keepdim=True), known_PG.sum(dim=1, keepdim=True)
    baseline, equal_P = total_P1 / count_P1.clamp(min=1), _all_equal(rewards_PG)
    if leave_one_out == "batch":
        baseline, equal_P = known_PG.sum() / judged_PG.sum().clamp(min=1), _all_equal(rewards_PG.view(1, -1))
    elif leave_one_out and pass_at_k is not None:
        # The mean over subsets without the sample.
        baseline = (count_P1 * baseline - pass_at_k * known_PG) / (count_P1 - pass_at_k).clamp(min=1)
    elif leave_one_out:
        baseline = (total_P1 - known_PG) / (count_P1 - 1).clamp(min=1)
    # Normalisation would amplify the rounding error of the mean.
    return torch.where(judged_PG & ~equal_P[:, None], known_PG - baseline, 0.0)


def _scale(rewards_PG: Tensor, centred_PG: Tensor, normalize: Scale) -> Tensor:
    """Return the divisor of advantages, broadcastable to [P, 1]."""
    judged_PG = ~rewards_PG.isnan()
    if normalize in ("batch", "advantages"):
        return _std((rewards_PG if normalize == "batch" else centred_PG)[judged_PG])
    known_PG, count_P1 = torch.where(judged_PG, rewards_PG, 0.0), judged_PG.sum(dim=1, keepdim=True)
    mean_P1 = known_PG.sum(dim=1, keepdim=True) / count_P1.clamp(min=1)
    if normalize == "mean":
        return mean_P1
    squares_PG = torch.where(judged_PG, (known_PG - mean_P1).square(), 0.0)
    return (squares_PG.sum(dim=1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()


def _divided(centred_PG: Tensor, scale: Tensor) -> Tensor:
    """Divide advantages; those of 0 stay 0."""
    return torch.where(centred_PG == 0, 0.0, centred_PG / (scale + _STD_EPSILON))


def best_of_subsets(rewards_PG: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compare the largest rewards of all subsets of k samples of a prompt.

    Returns each sample's mean over the subsets that contain it [P, G], and the standard deviation over all subsets
    [P, 1]. NaN rewards are in no subset. A prompt with at most k rewards has NaN.

    With rewards of 0 and 1, both are terms of Pass@k Training (Chen et al. 2025, arXiv:2508.10751, analytical form).
    With any rewards, k / G times the first estimates the gradient of the best of k (PKPO, Walder and Karkhanis 2025,
    arXiv:2505.15201).
    """
    best_PG, deviation_P1 = torch.full_like(rewards_PG, math.nan), torch.zeros_like(rewards_PG[:, :1])
    for row, rewards_G in enumerate(rewards_PG):
        own = rewards_G.isnan().logical_not().nonzero().squeeze(1)
        if len(own) <= k:
            continue
        ordered, order = rewards_G[own].double().sort()
        of_sample_GG, of_largest_G = _subset_shares(len(own), k)
        best_PG[row, own[order]] = (of_sample_GG @ ordered).to(best_PG.dtype)
        mean = of_largest_G @ ordered
        deviation_P1[row] = (of_largest_G @ (ordered - mean).square()).sqrt()
    return best_PG, deviation_P1


@cache
def _subset_shares(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return shares of the subsets of k of n samples, which ascend in reward. [i, j]: of those with i, the share in
    which j is the last. [j]: of all, the share in which j is the last."""
    largest_n = torch.tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], dtype=torch.float64)
    first_n = torch.tensor([math.comb(j, k - 1) for j in range(n)], dtype=torch.float64)
    later_n = torch.tensor([math.comb(j - 1, k - 2) if j and k > 1 else 0 for j in range(n)], dtype=torch.float64)
    return (later_n.expand(n, n).triu(1) + first_n.diag()) / math.comb(n - 1, k - 1), largest_n


def _check_means(mean_P1: Tensor, equal_P: Tensor) -> None:
    if (wrong := mean_P1[(mean_P1[:, 0] <= 0) & ~equal_P]).numel():
        raise TrainingError(
            f"algorithm.normalize_rewards = mean: the mean reward of a prompt is {wrong[0].item():g}, but MaxRL needs "
            "rewards of at least 0; shift the reward, or set algorithm.normalize_rewards=true"
        )


def separate_advantages(parts_NPG: Tensor, weights_N: Sequence[float], leave_one_out: Baseline) -> Tensor:
    """Return advantages [P, G] of rewards that are weighted sums of N parts (GDPO, Liu et al. 2026, arXiv:2601.05242).

    Each part is normalised within its prompt, so a part with a small variance still counts. Their weighted sum is
    divided by the standard deviation of all sums. NaN is an unknown part, with advantage 0; in the last part, it is a
    failed reward.
    """
    parts = zip(weights_N, parts_NPG, strict=True)
    own = [weight * group_advantages(part, leave_one_out, normalize=True) for weight, part in parts]
    sums_PG = torch.stack(own).sum(0)
    judged_PG = ~parts_NPG[-1].isnan()
    return torch.where(judged_PG, sums_PG / (_std(sums_PG[judged_PG]) + _STD_EPSILON), 0.0)


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clip advantages to `low` and `high`; None is no limit."""
    return advantages.clamp(-math.inf if low is None else low, math.inf if high is None else high)


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Return metrics of advantages of any shape."""
    return {
        "advantages/mean": advantages.mean().item(),
        "advantages/max": advantages.max().item(),
        "advantages/min": advantages.min().item(),
    }


def reward_shares(returns_TPG: Tensor) -> dict[str, float]:
    """Return the shares of prompts whose rewards (T = 1) or returns to go are all 0, all 1, or mixed. Failed rewards
    (NaN) are ignored; prompts without other rewards are not counted. Returns are equal if those of each turn are, and
    then have the value of the first turn."""
    known_TPG = returns_TPG[:, ~returns_TPG[0].isnan().all(dim=1)]
    mean_P = known_TPG[0].nanmean(dim=1)
    all_equal_P = torch.stack([_all_equal(own_PG) for own_PG in known_TPG]).all(dim=0)
    return {
        "baseline_reward/pct_0": (all_equal_P & (mean_P.abs() <= 1e-8)).double().mean().item(),
        "baseline_reward/pct_1": (all_equal_P & ((mean_P - 1).abs() <= 1e-6)).double().mean().item(),
        "baseline_reward/pct_mixed": (~all_equal_P).double().mean().item(),
    }


def differ(returns_TG: Tensor) -> bool:
    """Return whether two rewards of a prompt (T = 1), or its returns to go in a turn, differ by more than rounding.
    Failed ones (NaN) are ignored."""
    return not _all_equal(returns_TG).all().item()


def overlong_penalty(tokens: int, most: int, buffer: int, penalty: float) -> float:
    """Return 0 up to `most - buffer` tokens, then linearly down to `-penalty` at `most` (soft overlong punishment,
    DAPO, Yu et al. 2025)."""
    return -penalty * min(max(tokens - (most - buffer), 0) / buffer, 1.0)


def _std(values: Tensor) -> Tensor:
    """Return the unbiased standard deviation; 0 for a single value."""
    return values.var(correction=min(1, len(values) - 1)).sqrt()


def _all_equal(rewards_PG: Tensor) -> Tensor:
    """Return for each prompt whether its rewards, except NaN, are equal up to rounding; True with one or none."""
    largest = rewards_PG.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(dim=1)
    smallest = rewards_PG.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).amin(dim=1)
    size = torch.maximum(largest.abs(), smallest.abs()).nan_to_num(posinf=0.0)
    # A few float32 steps, but less than a difference of counts.
    return largest - smallest <= (1e-6 * size).clamp(1e-8, 1e-3)

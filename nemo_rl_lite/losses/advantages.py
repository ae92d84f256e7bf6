"""Group-relative advantages. Shapes: P prompts, G samples per prompt, N parts of a reward."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

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
    deviation_P1 = None
    if pass_at_k is not None:
        rewards_PG, deviation_P1 = best_of_subsets(rewards_PG, pass_at_k)
    judged_PG = ~rewards_PG.isnan()
    known_PG = torch.where(judged_PG, rewards_PG, 0.0)
    count_P1, total_P1 = judged_PG.sum(dim=1, keepdim=True), known_PG.sum(dim=1, keepdim=True)
    mean_P1, others_P1 = total_P1 / count_P1.clamp(min=1), (count_P1 - 1).clamp(min=1)
    baseline, equal_P = mean_P1, _all_equal(rewards_PG)
    if leave_one_out == "batch":
        baseline, equal_P = known_PG.sum() / judged_PG.sum().clamp(min=1), _all_equal(rewards_PG.view(1, -1))
    elif leave_one_out and pass_at_k is not None:
        # The mean over subsets without the sample.
        baseline = (count_P1 * mean_P1 - pass_at_k * known_PG) / (count_P1 - pass_at_k).clamp(min=1)
    elif leave_one_out:
        baseline = (total_P1 - known_PG) / others_P1
    # Normalisation would amplify the rounding error of the mean.
    useful_PG = judged_PG & ~equal_P[:, None]
    advantages_PG = torch.where(useful_PG, known_PG - baseline, 0.0)
    if normalize == "mean":
        _check_means(mean_P1, equal_P)
        advantages_PG = advantages_PG / (mean_P1 + _STD_EPSILON)
    elif isinstance(normalize, str):
        of_all_PG = {"batch": rewards_PG, "advantages": advantages_PG}[normalize]
        advantages_PG = advantages_PG / (_std(of_all_PG[judged_PG]) + _STD_EPSILON)
    elif normalize and deviation_P1 is not None:
        advantages_PG = advantages_PG / (deviation_P1 + _STD_EPSILON)
    elif normalize:
        squares_PG = torch.where(judged_PG, (known_PG - mean_P1).square(), 0.0)
        advantages_PG = advantages_PG / ((squares_PG.sum(dim=1, keepdim=True) / others_P1).sqrt() + _STD_EPSILON)
    return torch.where(useful_PG, advantages_PG, 0.0)


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


def advantage_metrics(advantages_PG: Tensor) -> dict[str, float]:
    return {
        "advantages/mean": advantages_PG.mean().item(),
        "advantages/max": advantages_PG.max().item(),
        "advantages/min": advantages_PG.min().item(),
    }


def reward_shares(rewards_PG: Tensor) -> dict[str, float]:
    """Return the shares of prompts whose rewards [P, G] are all 0, all 1, or mixed. Failed rewards (NaN) are
    ignored; prompts without other rewards are not counted."""
    known_PG = rewards_PG[~rewards_PG.isnan().all(dim=1)]
    mean_P, all_equal_P = known_PG.nanmean(dim=1), _all_equal(known_PG)
    return {
        "baseline_reward/pct_0": (all_equal_P & (mean_P.abs() <= 1e-8)).double().mean().item(),
        "baseline_reward/pct_1": (all_equal_P & ((mean_P - 1).abs() <= 1e-6)).double().mean().item(),
        "baseline_reward/pct_mixed": (~all_equal_P).double().mean().item(),
    }


def differ(rewards: Sequence[float]) -> bool:
    """Return whether two rewards of a prompt differ by more than rounding; failed ones (NaN) are ignored."""
    return not _all_equal(torch.tensor([rewards], dtype=torch.float64)).item()


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

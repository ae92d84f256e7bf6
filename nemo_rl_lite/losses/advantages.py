"""Group-relative advantages: how a sample's reward compares with those of its prompt's other samples."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

_STD_EPSILON = 1e-6
Baseline = bool | Literal["batch"]
Scale = bool | Literal["batch", "advantages"]


def group_advantages(rewards_PG: Tensor, leave_one_out: Baseline, normalize: Scale) -> Tensor:
    """Advantages of `P` prompts with `G` samples each, shape [P, G], in units of reward or of standard deviations.

    The baseline is the mean reward of the prompt's other samples (`leave_one_out`; RLOO, Ahmadian et al. 2024), of all
    its samples (GRPO, Shao et al. 2024) or of all samples of all prompts (`batch`; REINFORCE++, Hu et al. 2025,
    arXiv:2501.03262). Normalisation divides by an unbiased standard deviation: that over the prompt's `G` rewards, that
    over all rewards (`batch`; Lite PPO, Liu et al. 2025, arXiv:2508.08221), or that over all advantages, whose mean is
    0 (`advantages`; REINFORCE++). Where all rewards of a baseline are equal, advantages are exactly 0, as is a single
    sample's.

    NaN stands for a reward that failed: the sample enters no baseline and no deviation, and its advantage is 0.
    """
    if rewards_PG.dim() != 2:
        raise ValueError(f"rewards must be [prompts, samples], got {list(rewards_PG.shape)}")
    judged_PG = ~rewards_PG.isnan()
    known_PG = torch.where(judged_PG, rewards_PG, 0.0)
    count_P1, total_P1 = judged_PG.sum(dim=1, keepdim=True), known_PG.sum(dim=1, keepdim=True)
    mean_P1, others_P1 = total_P1 / count_P1.clamp(min=1), (count_P1 - 1).clamp(min=1)
    baseline, equal_P = mean_P1, _all_equal(rewards_PG)
    if leave_one_out == "batch":
        baseline, equal_P = known_PG.sum() / judged_PG.sum().clamp(min=1), _all_equal(rewards_PG.view(1, -1))
    elif leave_one_out:
        baseline = (total_P1 - known_PG) / others_P1
    # Select exactly 0: normalisation would blow up the rounding error of the mean.
    teaches_PG = judged_PG & ~equal_P[:, None]
    advantages_PG = torch.where(teaches_PG, known_PG - baseline, 0.0)
    if isinstance(normalize, str):
        of_all_PG = {"batch": rewards_PG, "advantages": advantages_PG}[normalize]
        advantages_PG = advantages_PG / (_std(of_all_PG[judged_PG]) + _STD_EPSILON)
    elif normalize:
        squares_PG = torch.where(judged_PG, (known_PG - mean_P1).square(), 0.0)
        advantages_PG = advantages_PG / ((squares_PG.sum(dim=1, keepdim=True) / others_P1).sqrt() + _STD_EPSILON)
    return torch.where(teaches_PG, advantages_PG, 0.0)


def separate_advantages(parts_NPG: Tensor, weights_N: Sequence[float], leave_one_out: Baseline) -> Tensor:
    """Advantages [P, G] of rewards that are weighted sums of `N` parts: each part's own advantages in units of its
    prompt's standard deviation, added up by the weights, and divided by the standard deviation of all these sums (GDPO,
    Liu et al. 2026, arXiv:2601.05242). So a part that varies little is not drowned by one that varies much.

    NaN stands for an unknown part, whose advantage is 0, or in the last part for a reward that failed.
    """
    parts = zip(weights_N, parts_NPG, strict=True)
    sums_PG = torch.stack(
        [weight * group_advantages(part, leave_one_out, normalize=True) for weight, part in parts]
    ).sum(0)
    judged_PG = ~parts_NPG[-1].isnan()
    return torch.where(judged_PG, sums_PG / (_std(sums_PG[judged_PG]) + _STD_EPSILON), 0.0)


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Advantages between `low` and `high`; None is no limit."""
    return advantages.clamp(-math.inf if low is None else low, math.inf if high is None else high)


def baseline_metrics(rewards_PG: Tensor, advantages_PG: Tensor) -> dict[str, float]:
    """Metrics of a rollout's advantages and rewards [P, G], NaN where they failed: the share of prompts that teach."""
    mean_P, all_equal_P = rewards_PG.nanmean(dim=1), _all_equal(rewards_PG)
    return {
        "advantages/mean": advantages_PG.mean().item(),
        "advantages/max": advantages_PG.max().item(),
        "advantages/min": advantages_PG.min().item(),
        "baseline_reward/pct_0": (all_equal_P & (mean_P == 0)).double().mean().item(),
        "baseline_reward/pct_1": (all_equal_P & (mean_P == 1)).double().mean().item(),
        "baseline_reward/pct_mixed": (~all_equal_P).double().mean().item(),
    }


def differ(rewards: Sequence[float]) -> bool:
    """Whether at least two rewards of a prompt's samples differ; NaN where they failed."""
    return not _all_equal(torch.tensor([rewards], dtype=torch.float64)).item()


def overlong_penalty(tokens: int, most: int, buffer: int, penalty: float) -> float:
    """Punishment (<= 0) in units of reward: nothing up to `most - buffer` tokens, then linearly more, and `penalty` at
    `most` (soft overlong punishment, DAPO, Yu et al. 2025)."""
    return -penalty * min(max(tokens - (most - buffer), 0) / buffer, 1.0)


def _std(values: Tensor) -> Tensor:
    """Unbiased standard deviation; 0 of a single value."""
    return values.var(correction=min(1, len(values) - 1)).sqrt()


def _all_equal(rewards_PG: Tensor) -> Tensor:
    """Whether all known rewards of a prompt are the same; none, and one, are."""
    largest = rewards_PG.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(dim=1)
    smallest = rewards_PG.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).amin(dim=1)
    return largest <= smallest

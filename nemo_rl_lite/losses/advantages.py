"""Group-relative advantages: how a sample's reward compares with those of its prompt's other samples."""

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_advantages(rewards_PG: Tensor, leave_one_out: bool, normalize: bool) -> Tensor:
    """Advantages of `P` prompts with `G >= 2` samples each, shape [P, G], in units of reward or of standard deviations.

    The baseline is the mean reward of the prompt's other samples (`leave_one_out`; RLOO, Ahmadian et al. 2024) or of
    all its samples (GRPO, Shao et al. 2024). Normalisation divides by the unbiased standard deviation over all `G`
    samples, which is defined from `G = 2` on; a prompt whose rewards are all equal has advantages of exactly 0.
    """
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise ValueError(f"rewards must be [prompts, samples >= 2], got {list(rewards_PG.shape)}")
    group_size = rewards_PG.shape[1]
    total_P1 = rewards_PG.sum(dim=1, keepdim=True)
    baseline = (total_P1 - rewards_PG) / (group_size - 1) if leave_one_out else total_P1 / group_size
    advantages_PG = rewards_PG - baseline
    if normalize:
        advantages_PG = advantages_PG / (rewards_PG.std(dim=1, keepdim=True) + STD_EPSILON)
    # Select exactly 0: normalisation would blow up the rounding error of the mean.
    return torch.where(_all_equal(rewards_PG)[:, None], 0.0, advantages_PG)


def baseline_metrics(rewards_PG: Tensor, advantages_PG: Tensor) -> dict[str, float]:
    """Metrics of a rollout's rewards [P, G] and advantages: the share of prompts that teach something, and how much."""
    mean_P = rewards_PG.mean(dim=1)
    all_equal_P = _all_equal(rewards_PG)
    return {
        "advantages/mean": advantages_PG.mean().item(),
        "advantages/max": advantages_PG.max().item(),
        "advantages/min": advantages_PG.min().item(),
        "baseline_reward/pct_0": (all_equal_P & (mean_P == 0)).float().mean().item(),
        "baseline_reward/pct_1": (all_equal_P & (mean_P == 1)).float().mean().item(),
        "baseline_reward/pct_mixed": (~all_equal_P).float().mean().item(),
    }


def _all_equal(rewards_PG: Tensor) -> Tensor:
    return rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)

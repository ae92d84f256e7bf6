"""How much a sampled token counts where the engine's probability of it is not the policy's: because the engine rounds
otherwise, or because older weights sampled it. Shapes: B sequences, T tokens.

A ratio is previous policy / engine, where the previous policy is the one at the start of the step (decoupled PPO,
Hilton et al. 2021; AReaL, Fu et al. 2025). Tokens and sequences that are left out have weight 0, and still count in
what the loss is divided by, as in NeMo-RL and TRL.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import LossConfig
from nemo_rl_lite.losses.interface import Metrics, Normalizers, mean_over_tokens

_SQUARE = "correction/weight_square"


@dataclass(frozen=True)
class Correction:
    """The weights of a micro-batch, and what was done to them. Each tensor broadcasts to [B, T]."""

    weights: Tensor
    """What a token's policy term is multiplied by."""
    truncated: Tensor
    """Whether the weight was clamped."""
    masked: Tensor
    """Whether the weight was set to 0 because it was out of bounds."""
    rejected_B1: Tensor
    """Whether the whole sequence was left out."""

    def metrics(self, mask_BT: Tensor, counts: Normalizers) -> Metrics:
        """This micro-batch's share of the metrics, which `summarize` completes."""
        of_tokens = {
            "correction/weight": self.weights,
            _SQUARE: self.weights.square(),
            "correction/truncated": self.truncated,
            "correction/masked": self.masked,
        }
        return {
            **{name: mean_over_tokens(values, mask_BT, counts) for name, values in of_tokens.items()},
            "correction/rejected": self.rejected_B1.sum() / counts.sequences,
        }


def corrects(config: LossConfig) -> bool:
    """Whether any weight can differ from 1."""
    rejects = (config.sequence_rejection_ratio, config.sequence_rejection_ratio_min, config.token_veto_ratio)
    return config.use_importance_sampling_correction or any(limit is not None for limit in rejects)


def correction(config: LossConfig, log_ratio_BT: Tensor, mask_BT: Tensor) -> Correction:
    """The weights of tokens with these log ratios, which are 0 outside the mask.

    Sources: truncated importance sampling (`tis`, Yao et al. 2025), masked tokens (`icepop`, Ring-1T, Ling Team 2025),
    one weight or one mask for a sequence, its geometric mean, and the veto by a token (Liu, Li et al. 2025, "When speed
    kills stability"). `seq-mask-tis` leaves the weights of the sequences that it keeps as they are, as NeMo-RL does.
    """
    total_B1 = log_ratio_BT.sum(dim=1, keepdim=True)
    geometric_mean_B1 = (total_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)).exp()
    nothing = torch.zeros_like(total_B1, dtype=torch.bool)
    weights, truncated, masked = torch.ones_like(total_B1), nothing, nothing
    limits = _bounds(config.sequence_rejection_ratio_min, config.sequence_rejection_ratio)
    rejected_B1 = _outside(geometric_mean_B1, *limits)
    if config.token_veto_ratio is not None:
        rejected_B1 = rejected_B1 | (log_ratio_BT < math.log(config.token_veto_ratio)).any(dim=1, keepdim=True)
    if config.use_importance_sampling_correction:
        weights = (total_B1 if config.correction_level == "sequence" else log_ratio_BT).exp()
        bounds = _bounds(config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio)
        match config.truncated_importance_sampling_type:
            case "tis":
                truncated, weights = _outside(weights, *bounds), weights.clamp(*bounds)
            case "icepop":
                masked = _outside(weights, *bounds)
                weights = weights.masked_fill(masked, 0.0)
            case "seq-mask-tis":
                rejected_B1 = rejected_B1 | _outside(geometric_mean_B1, *bounds)
    return Correction(weights.masked_fill(rejected_B1, 0.0), truncated, masked, rejected_B1)


def summarize(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a global batch, with the effective sample size of its weights as a share of its tokens,
    (sum w)^2 / (N sum w^2) (Kish 1965), in place of the mean square that it is made of."""
    if _SQUARE not in metrics:
        return metrics
    square = metrics[_SQUARE]
    effective = metrics["correction/weight"] ** 2 / square if square else 0.0
    return {name: value for name, value in metrics.items() if name != _SQUARE} | {"correction/ess": effective}


def _bounds(low: float | None, high: float | None) -> tuple[float, float]:
    return 0.0 if low is None else low, math.inf if high is None else high


def _outside(ratios: Tensor, low: float, high: float) -> Tensor:
    return (ratios < low) | (ratios > high)

"""The policy terms of GRPO's loss: what a sampled token adds to it, by the name in `loss_fn.policy_loss`. They are pure
functions of ratios and advantages. Shapes: B sequences, T tokens.

A ratio is that of the trained policy's probability to the previous policy's, [B, T], or one a sequence, [B, 1].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import LossConfig
from nemo_rl_lite.losses.covariance import are_chosen, are_largest, covariances


@dataclass(frozen=True)
class Sampled:
    """The tokens of a micro-batch. Logprobs are 0 outside the mask."""

    ratio: Tensor
    advantages: Tensor
    """Of a sequence, [B, 1], or of each token, [B, T]."""
    logprobs_BT: Tensor
    """Of the trained policy, with gradient."""
    previous_BT: Tensor
    step: Mapping[str, float]
    """What the loss has counted over the optimizer step: `Normalizers.own`."""


@dataclass(frozen=True)
class PolicyTerm:
    """What the tokens of a micro-batch add to the loss. Each tensor broadcasts to [B, T]."""

    loss: Tensor
    """With gradient."""
    bounded: Tensor
    """The ratios within their bounds."""
    low: Tensor
    """Whether the lower bound acts."""
    high: Tensor
    """Whether the upper bound acts."""
    chosen: Tensor | None = None
    """Whether the token was chosen by its covariance, where the term chooses some."""


def clip(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """max(-A r, -A clip(r, 1 - min, 1 + max)), and at most -A c where A < 0.

    Sources: PPO (Schulman et al. 2017, arXiv:1707.06347), separate upper bound (DAPO, Yu et al. 2025,
    arXiv:2503.14476), dual clip (Ye et al. 2020, arXiv:1912.09729).
    """
    ratio, advantages = sampled.ratio, sampled.advantages
    clipped = _clipped(config, ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if config.ratio_clip_c is not None:
        loss = torch.where(advantages < 0, loss.minimum(-advantages * config.ratio_clip_c), loss)
    # The clip acts on one side for each sign of the advantage.
    return PolicyTerm(loss, clipped, (ratio < clipped) & (advantages < 0), (ratio > clipped) & (advantages > 0))


def clip_cov(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """The term of `clip`, or 0 for `clip_cov_ratio` of all tokens: some that the clip leaves alone, chosen at random
    from those with a covariance within `clip_cov_lb` and `clip_cov_ub` (Clip-Cov, Cui et al. 2025, arXiv:2505.22617).
    """
    term = clip(config, sampled)
    covariances_BT = covariances(sampled.step, sampled.logprobs_BT, sampled.advantages)
    chosen_BT = are_chosen(config, sampled.step, covariances_BT) & ~(term.low | term.high)
    return replace(term, loss=torch.where(chosen_BT, 0.0, term.loss), chosen=chosen_BT)


def kl_cov(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A r, without bounds, and c |log pi - log previous| more for the `kl_cov_ratio` of all tokens that have the
    largest covariances, with c = `ppo_kl_coef` (KL-Cov, Cui et al. 2025, arXiv:2505.22617)."""
    covariances_BT = covariances(sampled.step, sampled.logprobs_BT, sampled.advantages)
    chosen_BT = are_largest(sampled.step, covariances_BT)
    moved_BT = (sampled.logprobs_BT - sampled.previous_BT).abs()
    loss_BT = -sampled.advantages * sampled.ratio + torch.where(chosen_BT, config.ppo_kl_coef * moved_BT, 0.0)
    return replace(_without_bounds(loss_BT, sampled.ratio), chosen=chosen_BT)


def cispo(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A sg(clip(r, 1 - min, 1 + max)) log pi, with sg a constant for the gradient: a token out of the bounds keeps its
    gradient, with the weight of the bound (CISPO, MiniMax 2025, arXiv:2506.13585; there min = 1, no lower bound)."""
    ratio, clipped = sampled.ratio, _clipped(config, sampled.ratio)
    loss_BT = -sampled.advantages * clipped.detach() * sampled.logprobs_BT
    return PolicyTerm(loss_BT, clipped, ratio < clipped, ratio > clipped)


def sapo(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A (4 / tau) sigmoid(tau (r - 1)): a gate whose gradient is that of r at r = 1 and fades away from it, faster
    with a larger tau, which is one for A > 0 and another for the rest (SAPO, Gao et al. 2025, arXiv:2511.20347)."""
    ratio, advantages = sampled.ratio, sampled.advantages
    tau = torch.where(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
    return _without_bounds(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, ratio)


def reinforce(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A log pi, without a ratio (REINFORCE, Williams 1992; RLOO, Ahmadian et al. 2024, arXiv:2402.14740)."""
    return _without_bounds(-sampled.advantages * sampled.logprobs_BT, sampled.ratio)


POLICY_TERMS: Mapping[str, Callable[[LossConfig, Sampled], PolicyTerm]] = {
    "clip": clip,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}

CHOOSES_BY_COVARIANCE = ("clip_cov", "kl_cov")


def importance_ratio(config: LossConfig, logprobs_BT: Tensor, previous_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The ratio of each token, [B, T], or the geometric mean of a sequence's, [B, 1] (GSPO, Zheng et al. 2025,
    arXiv:2507.18071). With `token` each token has the sequence's ratio and the gradient of its own logprob,
    sg(s) pi / sg(pi), [B, T] (GSPO-token, the same). Logprobs are 0 outside the mask."""
    log_ratio_BT, level = logprobs_BT - previous_BT, config.sequence_level_importance_ratios
    if not level:
        return log_ratio_BT.exp()
    ratio_B1 = (log_ratio_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)).exp()
    return ratio_B1.detach() * (logprobs_BT - logprobs_BT.detach()).exp() if level == "token" else ratio_B1


def _clipped(config: LossConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)


def _without_bounds(loss: Tensor, ratio: Tensor) -> PolicyTerm:
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyTerm(loss, ratio, nothing, nothing)

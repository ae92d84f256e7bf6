"""Policy terms: tokens' terms in GRPO's loss, by name in `loss_fn.policy_loss`. Shapes: B sequences, T tokens, N tokens
with a loss.

Their importance ratio is trained policy / previous policy, per token [B, T] or per sequence [B, 1].

A token's covariance is (A - mean A)(log pi - mean log pi). Tokens with large ones reduce the entropy most (Cui et al.
2025, arXiv:2505.22617). Means and thresholds are over the optimizer step, from the engine's logprobs, so they do not
depend on the split; verl's quantiles are per micro-batch.

Log ratios are clamped to +-20 before exp, as in verl: in float32, exp(89) is infinite and its gradient NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.schema_algorithm import LossConfig
from nemo_rl_lite.losses.batch import TokenRow, TokenRows

# Counts of an optimizer step.
_ADVANTAGE, _LOGPROB = "covariance/advantage", "covariance/logprob"
_LEAST, _CHANCE = "covariance/least", "covariance/chance"
_LEAST_LOGPROB, _LEAST_CHANCE = "covariance/least_logprob", "covariance/least_chance"
_LARGEST_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()


def count_covariances(config: LossConfig, rows: Sequence[TokenRow]) -> dict[str, float]:
    """Return numbers over an optimizer step's tokens.

    - `_ADVANTAGE`, `_LOGPROB`: means.
    - `_LEAST`, `_LEAST_LOGPROB`, `_LEAST_CHANCE`: the smallest covariance among the `kl_cov_ratio` largest, its
      logprob, and the probability of choosing a token with both.
    - `_CHANCE`: the probability of choosing a token within `clip_cov`'s bounds, for a share of `clip_cov_ratio`.
    """
    joined = TokenRows.of(rows)
    if (advantages_N := joined.advantages_N) is None or joined.generation_logprobs is None:
        raise ValueError("covariances need rows with advantages and with logprobs of the engine")
    # float32, because a token's covariance must equal the one in its batch.
    advantages_N = advantages_N[joined.mask].astype(np.float64)
    logprobs_N = joined.generation_logprobs[joined.mask].astype(np.float64)
    if not len(logprobs_N):
        return dict.fromkeys((_ADVANTAGE, _LOGPROB, _LEAST, _LEAST_LOGPROB, _LEAST_CHANCE, _CHANCE), 0.0)
    advantage, logprob = advantages_N.mean(), logprobs_N.mean()
    covariances_N = (advantages_N - advantage) * (logprobs_N - logprob)
    largest = max(int(config.kl_cov_ratio * len(covariances_N)), 1)
    within = int(((config.clip_cov_lb < covariances_N) & (covariances_N < config.clip_cov_ub)).sum())
    chosen = max(int(config.clip_cov_ratio * len(covariances_N)), 1)
    # On ties, smaller logprobs first.
    chosen_N = np.lexsort((-logprobs_N, covariances_N))[-largest:]
    least = chosen_N[0]
    equal_N = (covariances_N == covariances_N[least]) & (logprobs_N == logprobs_N[least])
    return {
        _ADVANTAGE: float(advantage),
        _LOGPROB: float(logprob),
        _LEAST: float(covariances_N[least]),
        _LEAST_LOGPROB: float(logprobs_N[least]),
        _LEAST_CHANCE: float(equal_N[chosen_N].sum() / equal_N.sum()),
        _CHANCE: min(chosen / max(within, 1), 1.0),
    }


@torch.no_grad()
def covariances(step: Mapping[str, float], logprobs_BT: Tensor, advantages: Tensor) -> Tensor:
    """Return the covariance [B, T] of each token in an optimizer step with these counts."""
    return (advantages.double() - step[_ADVANTAGE]) * (logprobs_BT.double() - step[_LOGPROB])


@dataclass(frozen=True)
class Sampled:
    """Tokens of a micro-batch. Ratio and advantages are [B, T] or [B, 1]. Logprobs are 0 outside the mask; those of the
    trained policy have a gradient. `step`: `Normalizers.own`."""

    ratio: Tensor
    advantages: Tensor
    logprobs_BT: Tensor
    previous_BT: Tensor
    generation_BT: Tensor
    mask_BT: Tensor
    step: Mapping[str, float]


@dataclass(frozen=True)
class PolicyTerm:
    """Terms of a micro-batch's tokens in the loss, and masks. Each tensor broadcasts to [B, T]."""

    loss: Tensor
    bounded: Tensor
    """Ratios within their bounds."""
    low: Tensor
    """True where the lower bound acts."""
    high: Tensor
    """True where the upper bound acts."""
    chosen: Tensor | None = None
    """True for tokens chosen by covariance."""


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
    """Return the terms of `clip`, set to 0 for a random share `clip_cov_ratio` of all tokens (Clip-Cov, Cui et al.
    2025, arXiv:2505.22617). Candidates are unclipped tokens with a covariance between `clip_cov_lb` and `clip_cov_ub`.
    """
    term = clip(config, sampled)
    covariances_BT = covariances(sampled.step, sampled.logprobs_BT, sampled.advantages)
    within_BT = (config.clip_cov_lb < covariances_BT) & (covariances_BT < config.clip_cov_ub) & (sampled.mask_BT > 0)
    open_BT = within_BT & ~(term.low | term.high)
    # The step's counts include clipped tokens, so unclipped ones are chosen more often.
    chance = sampled.step[_CHANCE] * within_BT.sum() / open_BT.sum().clamp(min=1)
    chosen_BT = open_BT & (torch.rand_like(covariances_BT) < chance)
    return replace(term, loss=torch.where(chosen_BT, 0.0, term.loss), chosen=chosen_BT)


def kl_cov(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A r, plus `ppo_kl_coef` |log pi - log previous| for the share `kl_cov_ratio` of tokens with the largest
    covariances (KL-Cov, Cui et al. 2025, arXiv:2505.22617)."""
    step, engine_BT = sampled.step, sampled.generation_BT.double()
    covariances_BT = covariances(step, sampled.logprobs_BT, sampled.advantages)
    # Of tokens with equal covariance and equal logprob in the engine, a random share.
    drawn_BT = (engine_BT == step[_LEAST_LOGPROB]) & (torch.rand_like(engine_BT) < step[_LEAST_CHANCE])
    equal_BT = (covariances_BT == step[_LEAST]) & ((engine_BT < step[_LEAST_LOGPROB]) | drawn_BT)
    chosen_BT = ((covariances_BT > step[_LEAST]) | equal_BT) & (sampled.mask_BT > 0)
    moved_BT = (sampled.logprobs_BT - sampled.previous_BT).abs()
    loss_BT = -sampled.advantages * sampled.ratio + torch.where(chosen_BT, config.ppo_kl_coef * moved_BT, 0.0)
    return replace(_without_bounds(loss_BT, sampled.ratio), chosen=chosen_BT)


def cispo(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A sg(clip(r, 1 - min, 1 + max)) log pi, with sg = stop-gradient (CISPO, MiniMax 2025, arXiv:2506.13585, where
    min = 1). A clipped token keeps its gradient, weighted by the bound."""
    ratio, clipped = sampled.ratio, _clipped(config, sampled.ratio)
    loss_BT = -sampled.advantages * clipped.detach() * sampled.logprobs_BT
    return PolicyTerm(loss_BT, clipped, ratio < clipped, ratio > clipped)


def sapo(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A (4 / tau) sigmoid(tau (r - 1)), with tau by the sign of A (SAPO, Gao et al. 2025, arXiv:2511.20347).

    At r = 1 its gradient is that of -A r; away from it the gradient decays, faster with a larger tau.
    """
    ratio, advantages = sampled.ratio, sampled.advantages
    tau = torch.where(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
    return _without_bounds(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, ratio)


def dppo_tv(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A sg(min(r, c)) log pi, without tokens outside a trust region around the engine's policy mu (DPPO, Qi et al.
    2026, arXiv:2602.04879). The distance is the total variation between "this token" and "another", |pi - mu|."""
    policy_BT, engine_BT = sampled.logprobs_BT.detach().exp(), sampled.generation_BT.exp()
    return _within_region(config, sampled, (policy_BT - engine_BT).abs(), 0.15)


def dppo_kl(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """Return the terms of `dppo_tv` with another distance: mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))."""
    policy_BT, engine_BT = sampled.logprobs_BT.detach(), sampled.generation_BT
    chance_BT = engine_BT.exp()
    others_BT = (1 - chance_BT) * (_log_of_others(engine_BT) - _log_of_others(policy_BT))
    return _within_region(config, sampled, chance_BT * (engine_BT - policy_BT) + others_BT, 0.05)


def _log_of_others(logprobs: Tensor) -> Tensor:
    """Return log(1 - p); finite for p = 1."""
    return torch.log1p(-logprobs.exp().clamp(max=1 - 1e-6))


def _within_region(config: LossConfig, sampled: Sampled, distance_BT: Tensor, usual: float) -> PolicyTerm:
    """Mask tokens whose update would increase a distance that exceeds its limit, `usual` by default."""
    ratio, advantages = sampled.ratio, sampled.advantages
    least, most = (usual if limit is None else limit for limit in (config.dppo_mask_low, config.dppo_mask_high))
    is_above_BT = sampled.logprobs_BT > sampled.generation_BT
    low_BT = (distance_BT > least) & ~is_above_BT & (advantages < 0)
    high_BT = (distance_BT > most) & is_above_BT & (advantages > 0)
    bounded = ratio if config.ratio_clip_c is None else ratio.clamp(max=config.ratio_clip_c)
    loss_BT = -advantages * bounded.detach() * sampled.logprobs_BT
    return PolicyTerm(torch.where(low_BT | high_BT, 0.0, loss_BT), bounded, low_BT, high_BT)


def reinforce(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A log pi, without a ratio (REINFORCE, Williams 1992; RLOO, Ahmadian et al. 2024, arXiv:2402.14740)."""
    return _without_bounds(-sampled.advantages * sampled.logprobs_BT, sampled.ratio)


POLICY_TERMS: Mapping[str, Callable[[LossConfig, Sampled], PolicyTerm]] = {
    one.__name__: one for one in (clip, clip_cov, kl_cov, cispo, sapo, dppo_tv, dppo_kl, reinforce)
}


def importance_ratio(config: LossConfig, logprobs_BT: Tensor, previous_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the ratio of each token [B, T], or the geometric mean of each sequence [B, 1] (GSPO, Zheng et al. 2025,
    arXiv:2507.18071). With `token` (GSPO-token, ibid.), each token has the sequence's ratio and its own gradient:
    sg(s) pi / sg(pi), [B, T]. Logprobs are 0 outside the mask."""
    log_ratio_BT, level = logprobs_BT - previous_BT, config.sequence_level_importance_ratios
    if not level:
        return bounded_exp(log_ratio_BT)
    ratio_B1 = bounded_exp(log_ratio_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1))
    return ratio_B1.detach() * (logprobs_BT - logprobs_BT.detach()).exp() if level == "token" else ratio_B1


def _clipped(config: LossConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)


def _without_bounds(loss: Tensor, ratio: Tensor) -> PolicyTerm:
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyTerm(loss, ratio, nothing, nothing)

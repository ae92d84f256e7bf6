"""GRPO's loss and its variants as pure functions of logprobs. Shapes: B sequences, T tokens, N tokens that have a loss.

A policy term is what a sampled token adds to the loss, by the name in `loss_fn.policy_loss`. Its ratio is that of the
trained policy's probability to the previous policy's, [B, T], or one a sequence, [B, 1].

A correction weights tokens whose probability in the engine differs from the policy's, because of rounding or staleness.
Its ratio is previous policy / engine, with the policy at the start of the step (decoupled PPO, Hilton et al. 2021;
AReaL, Fu et al. 2025). Masked tokens and sequences have weight 0 but count in the denominator, as in NeMo-RL and TRL.

The covariance of a token is (A - mean A)(log pi - mean log pi); tokens with large ones reduce the entropy most (Cui et
al. 2025, arXiv:2505.22617). Means and thresholds are of the whole optimizer step, from the engine's logprobs, so they
do not depend on micro-batches and replicas. In verl, quantiles are of a micro-batch.

Log ratios are clamped to +-20 before exp, as in verl: the float32 exp of 89 is infinite, and its gradient NaN.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.schema_algorithm import GRPOConfig, LossConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Metrics, Need, Normalizers, count_masked, masked_sum, mean_over_tokens

# Counts of an optimizer step, and a metric that `GRPOLoss.summarize` replaces.
_ADVANTAGE, _LOGPROB = "covariance/advantage", "covariance/logprob"
_LEAST, _CHANCE = "covariance/least", "covariance/chance"
_LEAST_LOGPROB, _LEAST_CHANCE = "covariance/least_logprob", "covariance/least_chance"
_POSITIVE = "positive_tokens"
_SQUARE = "correction/weight_square"
_LARGEST_LOG_RATIO = 20.0


def _exp(log_ratio: Tensor) -> Tensor:
    """Return the ratio; beyond the clamp it is constant and has no gradient."""
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()


def _count_covariances(config: LossConfig, rows: Sequence[TokenRow]) -> dict[str, float]:
    """Count, over an optimizer step's tokens: the mean advantage and logprob; the smallest covariance among the
    `kl_cov_ratio` largest, its logprob, and the chance of a token that has both; the chance of a token within
    `clip_cov`'s bounds that makes `clip_cov_ratio` of all."""
    joined = TokenRows.of(rows)
    if joined.advantages is None or joined.generation_logprobs is None:
        raise ValueError("covariances are of rows with advantages and with logprobs of the engine")
    # float32, as in a batch, so that a token has the same covariance here and there.
    advantages_N = np.repeat(joined.advantages.astype(np.float32), joined.lengths)[joined.mask].astype(np.float64)
    logprobs_N = joined.generation_logprobs[joined.mask].astype(np.float64)
    if not len(logprobs_N):
        return dict.fromkeys((_ADVANTAGE, _LOGPROB, _LEAST, _LEAST_LOGPROB, _LEAST_CHANCE, _CHANCE), 0.0)
    advantage, logprob = advantages_N.mean(), logprobs_N.mean()
    covariances_N = (advantages_N - advantage) * (logprobs_N - logprob)
    largest = max(int(config.kl_cov_ratio * len(covariances_N)), 1)
    within = int(((config.clip_cov_lb < covariances_N) & (covariances_N < config.clip_cov_ub)).sum())
    chosen = max(int(config.clip_cov_ratio * len(covariances_N)), 1)
    # Of equal covariances, those with the smaller logprobs.
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
    """Covariance of each token, [B, T], in an optimizer step with these counts."""
    return (advantages.double() - step[_ADVANTAGE]) * (logprobs_BT.double() - step[_LOGPROB])


@dataclass(frozen=True)
class Sampled:
    """Tokens of a micro-batch. Logprobs are 0 outside the mask; those of the trained policy have a gradient. Ratio and
    advantages are [B, T] or, one a sequence, [B, 1]. `step` has the counts of the step, `Normalizers.own`."""

    ratio: Tensor
    advantages: Tensor
    logprobs_BT: Tensor
    previous_BT: Tensor
    generation_BT: Tensor
    mask_BT: Tensor
    step: Mapping[str, float]


@dataclass(frozen=True)
class PolicyTerm:
    """Terms of a micro-batch's tokens in the loss, with gradient; the ratios within their bounds; whether the lower or
    the upper bound acts; whether a token was chosen by its covariance. Each tensor broadcasts to [B, T]."""

    loss: Tensor
    bounded: Tensor
    low: Tensor
    high: Tensor
    chosen: Tensor | None = None


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
    """Return the terms of `clip`, with 0 for `clip_cov_ratio` of all tokens (Clip-Cov, Cui et al. 2025,
    arXiv:2505.22617). These are drawn from unclipped tokens with a covariance within `clip_cov_lb` and `clip_cov_ub`.
    """
    term = clip(config, sampled)
    covariances_BT = covariances(sampled.step, sampled.logprobs_BT, sampled.advantages)
    within_BT = (config.clip_cov_lb < covariances_BT) & (covariances_BT < config.clip_cov_ub) & (sampled.mask_BT > 0)
    open_BT = within_BT & ~(term.low | term.high)
    # The step's counts do not know which tokens are clipped: here the unclipped ones take the place of the others.
    chance = sampled.step[_CHANCE] * within_BT.sum() / open_BT.sum().clamp(min=1)
    chosen_BT = open_BT & (torch.rand_like(covariances_BT) < chance)
    return replace(term, loss=torch.where(chosen_BT, 0.0, term.loss), chosen=chosen_BT)


def kl_cov(config: LossConfig, sampled: Sampled) -> PolicyTerm:
    """-A r, without bounds, and c |log pi - log previous| more for the `kl_cov_ratio` of all tokens that have the
    largest covariances, with c = `ppo_kl_coef` (KL-Cov, Cui et al. 2025, arXiv:2505.22617)."""
    covariances_BT = covariances(sampled.step, sampled.logprobs_BT, sampled.advantages)
    chosen_BT = _has_large_covariance(sampled, covariances_BT)
    moved_BT = (sampled.logprobs_BT - sampled.previous_BT).abs()
    loss_BT = -sampled.advantages * sampled.ratio + torch.where(chosen_BT, config.ppo_kl_coef * moved_BT, 0.0)
    return replace(_without_bounds(loss_BT, sampled.ratio), chosen=chosen_BT)


def _has_large_covariance(sampled: Sampled, covariances_BT: Tensor) -> Tensor:
    """Select the `kl_cov_ratio` largest of the step. Chance decides between tokens with the same engine's logprob."""
    step, logprobs_BT = sampled.step, sampled.generation_BT.double()
    drawn_BT = (logprobs_BT == step[_LEAST_LOGPROB]) & (torch.rand_like(logprobs_BT) < step[_LEAST_CHANCE])
    equal_BT = (covariances_BT == step[_LEAST]) & ((logprobs_BT < step[_LEAST_LOGPROB]) | drawn_BT)
    return ((covariances_BT > step[_LEAST]) | equal_BT) & (sampled.mask_BT > 0)


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


def _importance_ratio(config: LossConfig, logprobs_BT: Tensor, previous_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the ratio of each token, [B, T], or the geometric mean of a sequence, [B, 1] (GSPO, Zheng et al. 2025,
    arXiv:2507.18071). With `token` (GSPO-token, the same), tokens have the sequence's ratio and their own gradient,
    sg(s) pi / sg(pi), [B, T]. Logprobs are 0 outside the mask."""
    log_ratio_BT, level = logprobs_BT - previous_BT, config.sequence_level_importance_ratios
    if not level:
        return _exp(log_ratio_BT)
    ratio_B1 = _exp(log_ratio_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1))
    return ratio_B1.detach() * (logprobs_BT - logprobs_BT.detach()).exp() if level == "token" else ratio_B1


def _clipped(config: LossConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)


def _without_bounds(loss: Tensor, ratio: Tensor) -> PolicyTerm:
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyTerm(loss, ratio, nothing, nothing)


@dataclass(frozen=True)
class Correction:
    """Weights of a micro-batch's policy terms: whether one was clamped, whether it was set to 0 out of bounds, and
    whether the whole sequence was left out. Each tensor broadcasts to [B, T]."""

    weights: Tensor
    truncated: Tensor
    masked: Tensor
    rejected_B1: Tensor

    def metrics(self, mask_BT: Tensor, counts: Normalizers) -> Metrics:
        """This micro-batch's share of the metrics, which `GRPOLoss.summarize` completes."""
        return {
            "correction/weight": mean_over_tokens(self.weights, mask_BT, counts),
            _SQUARE: mean_over_tokens(self.weights.square(), mask_BT, counts),
            "correction/truncated": mean_over_tokens(self.truncated, mask_BT, counts),
            "correction/masked": mean_over_tokens(self.masked, mask_BT, counts),
            "correction/rejected": self.rejected_B1.sum() / counts.sequences,
        }


def corrects(config: LossConfig) -> bool:
    """Return True if any weight can differ from 1."""
    rejects = (config.sequence_rejection_ratio, config.sequence_rejection_ratio_min, config.token_veto_ratio)
    return config.use_importance_sampling_correction or any(limit is not None for limit in rejects)


def correction(config: LossConfig, log_ratio_BT: Tensor, mask_BT: Tensor) -> Correction:
    """Return the weights of tokens with these log ratios, which are 0 outside the mask.

    Sources: truncated importance sampling (`tis`, Yao et al. 2025), masked tokens (`icepop`, Ring-1T, Ling Team 2025),
    one weight or one mask for a sequence, its geometric mean, and the veto by a token (Liu, Li et al. 2025, "When speed
    kills stability"). `seq-mask-tis` leaves the weights of the sequences that it keeps as they are, as NeMo-RL does.
    """
    total_B1 = log_ratio_BT.sum(dim=1, keepdim=True)
    geometric_mean_B1 = _exp(total_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1))
    nothing = torch.zeros_like(total_B1, dtype=torch.bool)
    weights, truncated, masked = torch.ones_like(total_B1), nothing, nothing
    limits = _bounds(config.sequence_rejection_ratio_min, config.sequence_rejection_ratio)
    rejected_B1 = _outside(geometric_mean_B1, *limits)
    if config.token_veto_ratio is not None:
        rejected_B1 = rejected_B1 | (log_ratio_BT < math.log(config.token_veto_ratio)).any(dim=1, keepdim=True)
    if config.use_importance_sampling_correction:
        weights = _exp(total_B1 if config.correction_level == "sequence" else log_ratio_BT)
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


def _bounds(low: float | None, high: float | None) -> tuple[float, float]:
    return 0.0 if low is None else low, math.inf if high is None else high


def _outside(ratios: Tensor, low: float, high: float) -> Tensor:
    return (ratios < low) | (ratios > high)


@dataclass(frozen=True)
class GRPOLoss:
    """A policy term for each token, a KL penalty, an entropy bonus and the likelihood of good responses.

    The KL penalty is a term of the loss or, with `use_kl_in_reward`, a part of the advantages (`less_kl_to_go`).

    Sources: GRPO (Shao et al. 2024), KL estimators (Schulman 2020), likelihood of responses with a positive reward
    (VAPO, Yue et al. 2025, arXiv:2504.05118, eq. 10), tokens of high entropy alone (Wang et al. 2025,
    arXiv:2506.01939).
    """

    config: LossConfig

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset[Need](("entropy",))

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count tokens and sequences, tokens of responses with a positive reward, and covariances."""
        own: dict[str, float] = {}
        if self.config.policy_loss in ("clip_cov", "kl_cov"):
            own |= _count_covariances(self.config, rows)
        if self.config.positive_example_nll_weight:
            joined = TokenRows.of(rows)
            if joined.rewards is None:
                raise ValueError("positive_example_nll_weight needs rows with rewards")
            own[_POSITIVE] = max(float((np.repeat(joined.rewards > 0, joined.lengths) & joined.mask).sum()), 1.0)
        return replace(count_masked(rows), own=own)

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Replace the weights' mean square in a global batch's metrics by their effective sample size as a share of the
        tokens, (sum w)^2 / (N sum w^2) (Kish 1965)."""
        if _SQUARE not in metrics:
            return metrics
        square = metrics[_SQUARE]
        effective = metrics["correction/weight"] ** 2 / square if square else 0.0
        return {name: value for name, value in metrics.items() if name != _SQUARE} | {"correction/ess": effective}

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Loss (scalar, with gradient) and metrics (each this micro-batch's share of the global value).

        Reads `previous_logprobs`, `generation_logprobs`, `advantages`, `reference_logprobs` with a KL penalty,
        `entropy` with a bonus for it or a mask by it, and `rewards` with the likelihood of good responses. An entropy
        that is there is measured.
        """
        previous_BT, generation_BT = batch.require("previous_logprobs", "generation_logprobs")
        config, mask_BT = self.config, batch.mask
        # A selection, not a product: logprobs outside the mask may be infinite, whose gradient would be NaN.
        logprobs_BT, previous_BT, generation_BT = (
            torch.where(mask_BT > 0, values, 0.0) for values in (logprobs_BT, previous_BT, generation_BT)
        )
        ratio = _importance_ratio(config, logprobs_BT, previous_BT, mask_BT)
        advantages, kl_BT = self.advantages(batch, previous_BT), None
        penalty, in_reward = config.reference_policy_kl_penalty, config.use_kl_in_reward
        if penalty > 0:
            (reference_BT,) = batch.require("reference_logprobs")
            kl_BT = kl_estimate(
                previous_BT if in_reward else logprobs_BT,
                torch.where(mask_BT > 0, reference_BT, 0.0),
                config.reference_policy_kl_type,
                None if in_reward else _sampled_with(config, batch, logprobs_BT, previous_BT, generation_BT),
                config.kl_input_clamp_value,
                config.kl_output_clamp_value,
            )
            if in_reward:
                advantages = less_kl_to_go(advantages, kl_BT, mask_BT, penalty)
        sampled = Sampled(ratio, advantages, logprobs_BT, previous_BT, generation_BT, mask_BT, counts.own)
        term = POLICY_TERMS[config.policy_loss](config, sampled)
        corrected = correction(config, previous_BT - generation_BT, mask_BT)
        loss_BT = (term.loss * corrected.weights).expand_as(mask_BT)

        open_BT, nll = None, None
        if config.top_entropy_quantile < 1:
            (entropy_BT,) = batch.require("entropy")
            open_BT = _of_high_entropy(entropy_BT, mask_BT, config.top_entropy_quantile)
            loss_BT = torch.where(open_BT, loss_BT, 0.0)
        if kl_BT is not None and not in_reward:
            loss_BT = loss_BT + penalty * kl_BT

        total = self._mean(loss_BT, mask_BT, counts)
        if config.entropy_coef:
            (entropy_BT,) = batch.require("entropy")
            total = total - config.entropy_coef * masked_sum(entropy_BT, mask_BT) / counts.tokens
        if config.positive_example_nll_weight:
            (rewards_B,) = batch.require("rewards")
            nll = -masked_sum(logprobs_BT, mask_BT * (rewards_B > 0)[:, None]) / counts.own[_POSITIVE]
            total = total + config.positive_example_nll_weight * nll
        with torch.no_grad():
            metrics = {
                "sampling_importance_ratio": masked_sum(_exp(previous_BT - generation_BT), mask_BT) / counts.tokens,
                "approx_entropy": -(_exp(logprobs_BT - generation_BT) * logprobs_BT).sum() / counts.tokens,
                **_spread("probs_ratio", ratio, mask_BT, counts),
                **_spread("probs_ratio_clamped", term.bounded, mask_BT, counts),
                "clip_ratio/low": mean_over_tokens(term.low, mask_BT, counts),
                "clip_ratio/high": mean_over_tokens(term.high, mask_BT, counts),
            }
            if corrects(config):
                metrics |= corrected.metrics(mask_BT, counts)
            if kl_BT is not None:
                metrics["kl_penalty"] = masked_sum(kl_BT, mask_BT) / counts.tokens
            if batch.entropy is not None:
                metrics["entropy"] = masked_sum(batch.entropy, mask_BT) / counts.tokens
            if nll is not None:
                metrics["positive_nll"] = nll.detach().clone()
            for name, tokens_BT in (("high_entropy_share", open_BT), ("covariance_share", term.chosen)):
                if tokens_BT is not None:
                    metrics[name] = mean_over_tokens(tokens_BT, mask_BT, counts)
            metrics["loss"] = total.detach().clone()
        return total, metrics

    def advantages(self, batch: Batch, previous_BT: Tensor) -> Tensor:
        """Advantage of each token, without gradient; broadcasts to [B, T]. `previous_BT` is 0 outside the mask."""
        (advantages_B,) = batch.require("advantages")
        return advantages_B[:, None]

    def _mean(self, values_BT: Tensor, mask_BT: Tensor, counts: Normalizers) -> Tensor:
        """Return the mean over tokens, the mean over sequences of their token means, or that of their sums divided by a
        constant length (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""
        if self.config.token_level_loss == "constant":
            return masked_sum(values_BT, mask_BT) / (counts.sequences * self.config.constant_length)
        if self.config.token_level_loss:
            return masked_sum(values_BT, mask_BT) / counts.tokens
        return ((values_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum() / counts.sequences


def grpo_loss(options: GRPOConfig) -> GRPOLoss:
    return GRPOLoss(options.loss_fn)


@torch.no_grad()
def _of_high_entropy(entropy_BT: Tensor, mask_BT: Tensor, share: float) -> Tensor:
    """Select this share of the micro-batch's tokens by the highest entropy: at or above the quantile, as in TRL. The
    entropy is known only in the training pass, which sees one micro-batch at a time."""
    least = torch.where(mask_BT > 0, entropy_BT.float(), math.nan).nanquantile(1 - share)
    return (entropy_BT >= least) & (mask_BT > 0)


def _spread(name: str, values: Tensor, mask_BT: Tensor, counts: Normalizers) -> Metrics:
    """Mean, smallest and largest of values that broadcast to the mask, over its tokens."""
    # No boolean index: the host would wait for the number of values that it keeps.
    values_BT, kept_BT = values.expand_as(mask_BT), mask_BT > 0
    return {
        name: mean_over_tokens(values, mask_BT, counts),
        f"{name}_min": torch.where(kept_BT, values_BT, math.inf).min(),
        f"{name}_max": torch.where(kept_BT, values_BT, -math.inf).max(),
    }


def _sampled_with(
    config: LossConfig, batch: Batch, logprobs_BT: Tensor, previous_BT: Tensor, generation_BT: Tensor
) -> Tensor | None:
    """Return the logprobs [B, T] of the policy that the KL penalty takes for the sampler; None if it does not ask.

    It is the previous policy for fresh tokens, whose engine differs by rounding alone, and an older one for the rest.
    """
    match config.use_bias_correction_kl:
        case "on_policy":
            return logprobs_BT.detach()
        case True:
            return previous_BT if batch.ages is None else torch.where(batch.ages > 0, generation_BT, previous_BT)
        case _:
            return None


def less_kl_to_go(advantages: Tensor, kl_BT: Tensor, mask_BT: Tensor, penalty: float) -> Tensor:
    """Return advantages with a KL penalty in the reward, [B, T]: A_t - penalty (k_t + k_t+1 + ... + k_T).

    The sum is over the tokens that have a loss. `advantages` broadcasts to [B, T]; `kl_BT` is in nats, of the policy at
    the start of the step, without gradient. With k1 and on-policy samples, the policy gradient is that of the reward
    less `penalty` times the KL(policy || reference) of whole responses (Liu et al. 2025, arXiv:2510.01555).

    Source: REINFORCE++ (Hu et al. 2025, arXiv:2501.03262), eq. 8, here with a baseline and before any normalisation of
    the KL, so that `penalty` weights it as in the loss. verl's `use_kl_in_reward` with `reinforce_plus_plus` has this
    sum, TRL's `RLOOTrainer` that of the whole response for each token, NeMo-RL's `use_kl_in_reward` k_t alone.
    """
    to_go_BT = torch.where(mask_BT > 0, kl_BT, 0.0).flip(1).cumsum(1).flip(1)
    return advantages - penalty * to_go_BT


def kl_estimate(
    logprobs: Tensor,
    reference: Tensor,
    kind: str,
    sampled_with: Tensor | None,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, with gradient, from logprobs of sampled tokens.

    With d = reference - logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. These are weighted by the policy's
    probability over that of `sampled_with`, the logprobs under the policy that sampled the tokens: an expectation over
    samples changes with their probability, too, and without this factor the gradient of k1 averages to zero and that
    of k3 to the gradient of KL(reference || policy) (Tang and Munos 2025, arXiv:2506.09477). None leaves the factor
    out. Where `input_clamp` cuts d, a token has no gradient.
    """
    d = whole = reference - logprobs
    if input_clamp is not None:
        d = whole.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        estimate = -d
    elif kind == "k2":
        estimate = d.square() / 2
    elif kind == "k3":
        estimate = _k3(d)
    else:
        raise ValueError(f"KL estimator must be k1, k2 or k3, got {kind!r}")
    if sampled_with is not None:
        weight = _exp(logprobs - sampled_with)
        estimate = estimate * torch.where(d == whole, weight, weight.detach())
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def _k3(log_ratio: Tensor) -> Tensor:
    return _exp(log_ratio) - 1 - log_ratio


@torch.no_grad()
def mismatch_metrics(batch: Batch, counts: Normalizers) -> Metrics:
    """Compare the engine's logprobs of its samples with the policy's: this batch's share of a global batch's metrics.

    `token_mult_prob_error` is the mean factor between the two probabilities (1 = equal; above 1.05 something is wrong);
    `gen_kl_error`, `policy_kl_error` and `js_divergence_error` are k3 estimates in nats; `logprob_abs_diff_mean` and
    `_max` are the tokens' mean and worst difference. `age_<n>/...` are over the tokens of one age; each share of the
    global batch has the metrics of all its ages.
    """
    mask_BT, tokens = batch.mask, counts.tokens
    # A selection, not a product: logprobs outside the mask may be infinite.
    policy_BT, generation_BT = (
        torch.where(mask_BT > 0, values.double(), 0.0)
        for values in batch.require("previous_logprobs", "generation_logprobs")
    )
    difference_BT = policy_BT - generation_BT
    mixture_BT = torch.logaddexp(policy_BT, generation_BT) - math.log(2)

    def k3(log_ratio_BT: Tensor) -> Tensor:
        return masked_sum(_k3(log_ratio_BT), mask_BT) / tokens

    metrics = {
        "token_mult_prob_error": masked_sum(_exp(difference_BT.abs()), mask_BT) / tokens,
        "gen_kl_error": k3(difference_BT),
        "policy_kl_error": k3(-difference_BT),
        "js_divergence_error": (k3(policy_BT - mixture_BT) + k3(generation_BT - mixture_BT)) / 2,
        "logprob_abs_diff_mean": difference_BT.abs().sum() / tokens,
        "logprob_abs_diff_max": difference_BT.abs().max(),
    }
    for age, own in counts.tokens_by_age.items():
        (ages_BT,) = batch.require("ages")
        of_age_BT = mask_BT * (ages_BT == age)
        metrics[f"age_{age}/gen_kl_error"] = masked_sum(_k3(difference_BT), of_age_BT) / own
        metrics[f"age_{age}/tokens_share"] = of_age_BT.sum() / tokens
    return metrics

"""GRPO's loss and its variants as pure functions of logprobs. Shapes: B sequences, T tokens.

`policy_terms` has the tokens' terms in the loss.

A correction weights tokens whose probability differs between engine and policy, because of rounding or staleness. Its
ratio is previous policy / engine, with the policy at the start of the step (decoupled PPO, Hilton et al. 2021; AReaL,
Fu et al. 2025). Masked tokens and sequences have weight 0 but count in the denominator, as in NeMo-RL and TRL.

Ratios and corrections of a sequence, and the KL penalty of later tokens, are of a row. An episode with several rows has
several of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.schema_algorithm import GRPOConfig, LossConfig
from nemo_rl_lite.losses.batch import Batch, CountedRows, TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Metrics, Need, Normalizers, count_masked, masked_sum, mean_over_tokens
from nemo_rl_lite.losses.policy_terms import (
    POLICY_TERMS,
    PolicyTerm,
    Sampled,
    bounded_exp,
    count_covariances,
    importance_ratio,
)

# The parts of the loss, as `TokenShares.parts` names them.
POLICY, KL, ENTROPY, LIKELIHOOD = "policy term", "KL penalty", "entropy bonus", "likelihood"
# A count of an optimizer step, and a metric that `GRPOLoss.summarize` replaces.
_POSITIVE = "positive_tokens"
_SQUARE = "correction/weight_square"


@dataclass(frozen=True)
class Correction:
    """Weights of a micro-batch's policy terms. Each tensor broadcasts to [B, T]."""

    weights: Tensor
    truncated: Tensor
    """True for clamped weights."""
    masked: Tensor
    """True for weights set to 0, outside the bounds."""
    rejected_B1: Tensor
    """True for sequences with weight 0."""

    def metrics(self, batch: Batch, counts: Normalizers) -> Metrics:
        """Return this micro-batch's share of the metrics, which `GRPOLoss.summarize` completes."""
        mask_BT = batch.mask
        return {
            "correction/weight": mean_over_tokens(self.weights, mask_BT, counts),
            _SQUARE: mean_over_tokens(self.weights.square(), mask_BT, counts),
            "correction/truncated": mean_over_tokens(self.truncated, mask_BT, counts),
            "correction/masked": mean_over_tokens(self.masked, mask_BT, counts),
            "correction/rejected": batch.sum_over_episodes(self.rejected_B1[:, 0]) / counts.sequences,
        }


def corrects(config: LossConfig) -> bool:
    """Return True if any weight can differ from 1."""
    rejects = (config.sequence_rejection_ratio, config.sequence_rejection_ratio_min, config.token_veto_ratio)
    return config.use_importance_sampling_correction or any(limit is not None for limit in rejects)


def correction(config: LossConfig, log_ratio_BT: Tensor, mask_BT: Tensor) -> Correction:
    """Return the weights of tokens with these log ratios, which are 0 outside the mask.

    Sources: truncated importance sampling (`tis`, Yao et al. 2025); masked tokens (`icepop`, Ring-1T, Ling Team 2025);
    sequence weights and masks, geometric means and the token veto (Liu, Li et al. 2025, "When speed kills stability").
    `seq-mask-tis` does not change the weights of accepted sequences, as in NeMo-RL.
    """
    total_B1 = log_ratio_BT.sum(dim=1, keepdim=True)
    geometric_mean_B1 = bounded_exp(total_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1))
    nothing = torch.zeros_like(total_B1, dtype=torch.bool)
    weights, truncated, masked = torch.ones_like(total_B1), nothing, nothing
    limits = _bounds(config.sequence_rejection_ratio_min, config.sequence_rejection_ratio)
    rejected_B1 = _outside(geometric_mean_B1, *limits)
    if config.token_veto_ratio is not None:
        rejected_B1 = rejected_B1 | (log_ratio_BT < math.log(config.token_veto_ratio)).any(dim=1, keepdim=True)
    if config.use_importance_sampling_correction:
        weights = bounded_exp(total_B1 if config.correction_level == "sequence" else log_ratio_BT)
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
class TokenShares:
    """Shares of a micro-batch's tokens in the loss, and what they follow from. Each tensor is [B, T]."""

    parts: Mapping[str, Tensor]
    """Share of each part by name, 0 outside the mask. They add up to the micro-batch's share of the loss."""
    advantages: Tensor
    ratio: Tensor
    """Trained policy / previous policy."""
    weights: Tensor
    """Weights of the policy terms."""
    low: Tensor
    """True where the lower bound of the ratio acts."""
    high: Tensor
    """True where the upper bound of the ratio acts."""
    truncated: Tensor
    """True for clamped weights."""
    dropped: Tensor
    """True for tokens without a policy term: their weight is 0, their entropy is low, or chance has chosen them."""


@dataclass(frozen=True)
class _Terms:
    """Terms of a micro-batch's tokens in the loss."""

    sampled: Sampled
    policy: PolicyTerm
    corrected: Correction
    addends: Mapping[str, Tensor]
    """Summands of the loss by part, [B, T]; see `GRPOLoss._total`."""
    kl_BT: Tensor | None
    open_BT: Tensor | None
    """True for tokens of high entropy; None if all count."""


def _count_positive(rows: Sequence[TokenRow]) -> int:
    """Count the trained tokens of rows with a positive reward."""
    if isinstance(rows, CountedRows):
        return int(rows.trained[rows.rewards > 0].sum())
    joined = TokenRows.of(rows)
    if joined.rewards is None:
        raise ValueError("positive_example_nll_weight needs rows with rewards")
    return int((np.repeat(joined.rewards > 0, joined.lengths) & joined.mask).sum())


@dataclass(frozen=True)
class GRPOLoss:
    """Policy terms, KL penalty, entropy bonus, and negative log likelihood (NLL) of responses with a positive reward.

    The KL penalty is a term of the loss or, with `use_kl_in_reward`, a part of the advantages (`less_kl_to_go`).

    Sources: GRPO (Shao et al. 2024), KL estimators (Schulman 2020), NLL (VAPO, Yue et al. 2025, arXiv:2504.05118,
    eq. 10), restriction to high-entropy tokens (Wang et al. 2025, arXiv:2506.01939).
    """

    config: LossConfig

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset[Need](("entropy",))

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count tokens, sequences and tokens of responses with a positive reward; summarize covariances."""
        own: dict[str, float] = {}
        if self.config.policy_loss in ("clip_cov", "kl_cov"):
            own |= count_covariances(self.config, rows)
        if self.config.positive_example_nll_weight:
            own[_POSITIVE] = max(float(_count_positive(rows)), 1.0)
        return replace(count_masked(rows), own=own)

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Replace the mean square of the weights by their effective sample size per token, (sum w)^2 / (N sum w^2)
        (Kish 1965)."""
        if _SQUARE not in metrics:
            return metrics
        square = metrics[_SQUARE]
        effective = metrics["correction/weight"] ** 2 / square if square else 0.0
        return {name: value for name, value in metrics.items() if name != _SQUARE} | {"correction/ess": effective}

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """See `Loss`.

        Reads `previous_logprobs`, `generation_logprobs`, and `advantages` or `token_advantages`. Options read
        `reference_logprobs` (KL penalty), `entropy` (bonus, high-entropy tokens) and `rewards` (NLL).
        """
        config, mask_BT = self.config, batch.mask
        terms = self._terms(logprobs_BT, batch, counts)
        total = self._total(terms.addends, batch, counts)
        with torch.no_grad():
            metrics = _policy_metrics(terms.sampled, terms.policy, counts)
            if corrects(config):
                metrics |= terms.corrected.metrics(batch, counts)
            measured = ("kl_penalty", terms.kl_BT), ("entropy", batch.entropy), ("high_entropy_share", terms.open_BT)
            for name, values_BT in measured:
                if values_BT is not None:
                    metrics[name] = mean_over_tokens(values_BT, mask_BT, counts)
            if LIKELIHOOD in terms.addends:
                metrics["positive_nll"] = self._nll(terms.addends[LIKELIHOOD], batch, counts)
            metrics["loss"] = total.detach().clone()
        return total, metrics

    def correction_weights(self, batch: Batch) -> Tensor:
        """See `Loss`. Reads `previous_logprobs` and `generation_logprobs`."""
        previous_BT, generation_BT = batch.require("previous_logprobs", "generation_logprobs")
        log_ratio_BT = torch.where(batch.mask > 0, previous_BT - generation_BT, 0.0)
        return correction(self.config, log_ratio_BT, batch.mask).weights

    def advantages(self, batch: Batch, previous_BT: Tensor) -> Tensor:
        """Return each token's advantage, without gradient, broadcastable to [B, T]. `previous_BT` is 0 outside the
        mask."""
        if batch.token_advantages is not None:
            return batch.token_advantages
        (advantages_B,) = batch.require("advantages")
        return advantages_B[:, None]

    def token_shares(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> TokenShares:
        """See `Loss`. Reads what `__call__` reads."""
        terms, mask_BT = self._terms(logprobs_BT, batch, counts), batch.mask
        # The loss is linear in its addends, so its gradient has their factors.
        addends = {name: values.detach().requires_grad_() for name, values in terms.addends.items()}
        with torch.enable_grad():
            factors = torch.autograd.grad(self._total(addends, batch, counts), list(addends.values()))
        parts = {
            name: torch.where(mask_BT > 0, values.detach() * factor, 0.0)
            for (name, values), factor in zip(addends.items(), factors, strict=True)
        }
        corrected, policy = terms.corrected, terms.policy
        dropped = (corrected.weights == 0) | (False if terms.open_BT is None else ~terms.open_BT)
        if self.config.policy_loss == "clip_cov" and policy.chosen is not None:
            dropped = dropped | policy.chosen
        of_tokens = terms.sampled.advantages, terms.sampled.ratio, corrected.weights, policy.low, policy.high
        each = [one.detach().expand_as(mask_BT) for one in (*of_tokens, corrected.truncated, dropped)]
        return TokenShares(parts, *each)

    def _terms(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> _Terms:
        previous_BT, generation_BT = batch.require("previous_logprobs", "generation_logprobs")
        config, mask_BT = self.config, batch.mask
        # Select instead of multiplying: infinite logprobs outside the mask would make gradients NaN.
        logprobs_BT, previous_BT, generation_BT = (
            torch.where(mask_BT > 0, values, 0.0) for values in (logprobs_BT, previous_BT, generation_BT)
        )
        ratio = importance_ratio(config, logprobs_BT, previous_BT, mask_BT)
        advantages, penalty = self.advantages(batch, previous_BT), config.reference_policy_kl_penalty
        kl_BT = self._kl(batch, logprobs_BT, previous_BT, generation_BT) if penalty > 0 else None
        if kl_BT is not None and config.use_kl_in_reward:
            advantages = less_kl_to_go(advantages, kl_BT, mask_BT, penalty)
        sampled = Sampled(ratio, advantages, logprobs_BT, previous_BT, generation_BT, mask_BT, counts.own)
        term = POLICY_TERMS[config.policy_loss](config, sampled)
        corrected = correction(config, previous_BT - generation_BT, mask_BT)
        loss_BT, open_BT = (term.loss * corrected.weights).expand_as(mask_BT), None
        if config.top_entropy_quantile < 1:
            (entropy_BT,) = batch.require("entropy")
            open_BT = _of_high_entropy(entropy_BT, mask_BT, config.top_entropy_quantile)
            loss_BT = torch.where(open_BT, loss_BT, 0.0)
        addends = {POLICY: loss_BT}
        if kl_BT is not None and not config.use_kl_in_reward:
            addends[KL] = kl_BT
        if config.entropy_coef:
            (addends[ENTROPY],) = batch.require("entropy")
        if config.positive_example_nll_weight:
            addends[LIKELIHOOD] = logprobs_BT
        return _Terms(sampled, term, corrected, addends, kl_BT, open_BT)

    def _total(self, addends: Mapping[str, Tensor], batch: Batch, counts: Normalizers) -> Tensor:
        """Return the loss, which is linear in its addends."""
        config, loss_BT = self.config, addends[POLICY]
        if KL in addends:
            loss_BT = loss_BT + config.reference_policy_kl_penalty * addends[KL]
        total = self._mean(loss_BT, batch, counts)
        if ENTROPY in addends:
            total = total - config.entropy_coef * masked_sum(addends[ENTROPY], batch.mask) / counts.tokens
        if LIKELIHOOD in addends:
            total = total + config.positive_example_nll_weight * self._nll(addends[LIKELIHOOD], batch, counts)
        return total

    def _nll(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> Tensor:
        """Return the mean negative log likelihood of responses with a positive reward."""
        (rewards_B,) = batch.require("rewards")
        return -masked_sum(logprobs_BT, batch.mask * (rewards_B > 0)[:, None]) / counts.own[_POSITIVE]

    def _kl(self, batch: Batch, logprobs_BT: Tensor, previous_BT: Tensor, generation_BT: Tensor) -> Tensor:
        """Return the KL estimate [B, T] of each token."""
        (reference_BT,) = batch.require("reference_logprobs")
        config, policy_BT, sampler_BT = self.config, logprobs_BT, None
        if config.use_kl_in_reward:
            policy_BT = previous_BT
        elif config.use_bias_correction_kl == "on_policy":
            sampler_BT = logprobs_BT.detach()
        elif config.use_bias_correction_kl:
            # For fresh tokens the engine differs from the previous policy only by rounding.
            sampler_BT = previous_BT if batch.ages is None else torch.where(batch.ages > 0, generation_BT, previous_BT)
        reference_BT, kind = torch.where(batch.mask > 0, reference_BT, 0.0), config.reference_policy_kl_type
        clamps = config.kl_input_clamp_value, config.kl_output_clamp_value
        return kl_estimate(policy_BT, reference_BT, kind, sampler_BT, *clamps)

    def _mean(self, values_BT: Tensor, batch: Batch, counts: Normalizers) -> Tensor:
        """Return the mean over tokens, the mean of sequence means, or the mean of sequence sums divided by a constant
        length (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). The rows of an episode are one sequence."""
        mask_BT = batch.mask
        if self.config.token_level_loss == "constant":
            return masked_sum(values_BT, mask_BT) / (counts.sequences * self.config.constant_length)
        if self.config.token_level_loss:
            return masked_sum(values_BT, mask_BT) / counts.tokens
        means_B = (values_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
        return batch.sum_over_episodes(means_B) / counts.sequences


def grpo_loss(options: GRPOConfig) -> GRPOLoss:
    return GRPOLoss(options.loss_fn)


@torch.no_grad()
def _of_high_entropy(entropy_BT: Tensor, mask_BT: Tensor, share: float) -> Tensor:
    """Select the `share` of the micro-batch's tokens with the highest entropy, as in TRL. The entropy is known only in
    the training pass, which sees one micro-batch at a time."""
    least = torch.where(mask_BT > 0, entropy_BT.float(), math.nan).nanquantile(1 - share)
    return (entropy_BT >= least) & (mask_BT > 0)


def _policy_metrics(sampled: Sampled, term: PolicyTerm, counts: Normalizers) -> Metrics:
    """Return this micro-batch's share of the metrics of ratios and bounds."""
    logprobs_BT, generation_BT, mask_BT = sampled.logprobs_BT, sampled.generation_BT, sampled.mask_BT
    before_BT = bounded_exp(sampled.previous_BT - generation_BT)
    metrics = {
        "sampling_importance_ratio": masked_sum(before_BT, mask_BT) / counts.tokens,
        "approx_entropy": -(bounded_exp(logprobs_BT - generation_BT) * logprobs_BT).sum() / counts.tokens,
        **_spread("probs_ratio", sampled.ratio, mask_BT, counts),
        **_spread("probs_ratio_clamped", term.bounded, mask_BT, counts),
        "clip_ratio/low": mean_over_tokens(term.low, mask_BT, counts),
        "clip_ratio/high": mean_over_tokens(term.high, mask_BT, counts),
    }
    if term.chosen is not None:
        metrics["covariance_share"] = mean_over_tokens(term.chosen, mask_BT, counts)
    return metrics


def _spread(name: str, values: Tensor, mask_BT: Tensor, counts: Normalizers) -> Metrics:
    """Return mean, minimum and maximum over the mask's tokens of values that broadcast to it."""
    # A boolean index would synchronize host and device.
    values_BT, kept_BT = values.expand_as(mask_BT), mask_BT > 0
    return {
        name: mean_over_tokens(values, mask_BT, counts),
        f"{name}_min": torch.where(kept_BT, values_BT, math.inf).min(),
        f"{name}_max": torch.where(kept_BT, values_BT, -math.inf).max(),
    }


def less_kl_to_go(advantages: Tensor, kl_BT: Tensor, mask_BT: Tensor, penalty: float) -> Tensor:
    """Return advantages with a KL penalty in the reward, [B, T]: A_t - penalty (k_t + k_t+1 + ... + k_T).

    The sum is over tokens with a loss. `advantages` broadcasts to [B, T]. `kl_BT` is in nats, of the policy at the
    start of the step, without gradient. With k1 and on-policy samples, this is the policy gradient of
    reward - penalty KL(policy || reference) over responses (Liu et al. 2025, arXiv:2510.01555).

    Source: REINFORCE++ (Hu et al. 2025, arXiv:2501.03262), eq. 8, but with a baseline and without normalising the KL,
    so `penalty` means the same as in the loss. verl's `use_kl_in_reward` with `reinforce_plus_plus` has this sum, TRL's
    `RLOOTrainer` the response's total for each token, NeMo-RL's `use_kl_in_reward` only k_t.
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
    """Return an estimate of KL(policy || reference) per sampled token, in nats, with gradient.

    With d = reference - logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. `sampled_with`: logprobs under the
    sampling policy; estimates are weighted by policy / sampling policy. Without this weight, the gradient of k1
    averages to 0, and k3's is that of KL(reference || policy) (Tang and Munos 2025, arXiv:2506.09477). Tokens whose d
    is clamped have no gradient.
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
        weight = bounded_exp(logprobs - sampled_with)
        estimate = estimate * torch.where(d == whole, weight, weight.detach())
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def _k3(log_ratio: Tensor) -> Tensor:
    return bounded_exp(log_ratio) - 1 - log_ratio


@torch.no_grad()
def mismatch_metrics(batch: Batch, counts: Normalizers) -> Metrics:
    """Compare the engine's logprobs of its samples with the policy's. Returns this batch's share of the metrics.

    - `token_mult_prob_error`: mean factor between the two probabilities (1 = equal; above 1.05 indicates an error).
    - `gen_kl_error`, `policy_kl_error`, `js_divergence_error`: k3 estimates in nats.
    - `logprob_abs_diff_mean`, `_max`: mean and maximum over tokens.
    - `age_<n>/...`: over tokens with a staleness of n steps, for each staleness in the global batch.
    """
    mask_BT, tokens = batch.mask, counts.tokens
    policy_BT, generation_BT = (
        torch.where(mask_BT > 0, values.double(), 0.0)
        for values in batch.require("previous_logprobs", "generation_logprobs")
    )
    difference_BT = policy_BT - generation_BT
    mixture_BT = torch.logaddexp(policy_BT, generation_BT) - math.log(2)

    def k3(log_ratio_BT: Tensor) -> Tensor:
        return masked_sum(_k3(log_ratio_BT), mask_BT) / tokens

    metrics = {
        "token_mult_prob_error": masked_sum(bounded_exp(difference_BT.abs()), mask_BT) / tokens,
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

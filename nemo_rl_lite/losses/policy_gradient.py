"""The policy-gradient loss of GRPO and its variants as a pure function of logprobs. Shapes: B sequences, T tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import GRPOConfig, LossConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow, TokenRows
from nemo_rl_lite.losses.correction import correction, corrects, summarize
from nemo_rl_lite.losses.covariance import count_covariances
from nemo_rl_lite.losses.interface import Metrics, Need, Normalizers, count_masked, masked_sum, mean_over_tokens
from nemo_rl_lite.losses.policy_terms import CHOOSES_BY_COVARIANCE, POLICY_TERMS, Sampled, importance_ratio

_POSITIVE = "positive_tokens"


@dataclass(frozen=True)
class GRPOLoss:
    """A policy term for each token, a KL penalty, an entropy bonus and the likelihood of good responses, of one
    micro-batch's current logprobs.

    The KL penalty is a term of the loss or, with `use_kl_in_reward`, a part of the advantages (`less_kl_to_go`).

    Sources: GRPO (Shao et al. 2024), KL estimators (Schulman 2020), likelihood of responses with a positive reward
    (VAPO, Yue et al. 2025, arXiv:2504.05118, eq. 10), tokens of high entropy alone (Wang et al. 2025,
    arXiv:2506.01939); those of the policy terms are at `policy_terms`,
    those of the correction for the engines and for older rollouts at `correction`.
    """

    config: LossConfig

    @property
    def needs(self) -> frozenset[Need]:
        asked = self.config.entropy_coef or self.config.top_entropy_quantile < 1
        return frozenset[Need](("entropy",) if asked else ())

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count tokens and sequences, tokens of responses with a positive reward, and covariances."""
        own: dict[str, float] = {}
        if self.config.policy_loss in CHOOSES_BY_COVARIANCE:
            own |= count_covariances(self.config, rows)
        if self.config.positive_example_nll_weight:
            own[_POSITIVE] = _positive_tokens(TokenRows.of(rows))
        return replace(count_masked(rows), own=own)

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """See `correction.summarize`."""
        return summarize(metrics)

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Loss (scalar, with gradient) and metrics (each this micro-batch's share of the global value).

        Reads `previous_logprobs`, `generation_logprobs`, `advantages`, `reference_logprobs` with a KL penalty,
        `entropy` with a bonus for it or a mask by it, and `rewards` with the likelihood of good responses.
        """
        previous_BT, generation_BT = batch.require("previous_logprobs", "generation_logprobs")
        mask_BT = batch.mask
        # A selection, not a product: logprobs outside the mask may be infinite, whose gradient would be NaN.
        logprobs_BT, previous_BT, generation_BT = (
            torch.where(mask_BT > 0, values, 0.0) for values in (logprobs_BT, previous_BT, generation_BT)
        )
        ratio = importance_ratio(self.config, logprobs_BT, previous_BT, mask_BT)
        advantages, kl_BT = self.advantages(batch, previous_BT), None
        penalty, in_reward = self.config.reference_policy_kl_penalty, self.config.use_kl_in_reward
        if penalty > 0:
            (reference_BT,) = batch.require("reference_logprobs")
            of_BT = previous_BT if in_reward else logprobs_BT
            kl_BT = self._kl(of_BT, torch.where(mask_BT > 0, reference_BT, 0.0), previous_BT)
            if in_reward:
                advantages = less_kl_to_go(advantages, kl_BT, mask_BT, penalty)
        sampled = Sampled(ratio, advantages, logprobs_BT, previous_BT, counts.own)
        term = POLICY_TERMS[self.config.policy_loss](self.config, sampled)
        corrected = correction(self.config, previous_BT - generation_BT, mask_BT)
        loss_BT = (term.loss * corrected.weights).expand_as(mask_BT)

        open_BT, nll = None, None
        if self.config.top_entropy_quantile < 1:
            (entropy_BT,) = batch.require("entropy")
            open_BT = _of_high_entropy(entropy_BT, mask_BT, self.config.top_entropy_quantile)
            loss_BT = torch.where(open_BT, loss_BT, 0.0)
        if kl_BT is not None and not in_reward:
            loss_BT = loss_BT + penalty * kl_BT

        total, entropy = self._mean(loss_BT, mask_BT, counts), None
        if self.config.entropy_coef:
            (entropy_BT,) = batch.require("entropy")
            entropy = masked_sum(entropy_BT, mask_BT) / counts.tokens
            total = total - self.config.entropy_coef * entropy
        if self.config.positive_example_nll_weight:
            (rewards_B,) = batch.require("rewards")
            nll = -masked_sum(logprobs_BT, mask_BT * (rewards_B > 0)[:, None]) / counts.own[_POSITIVE]
            total = total + self.config.positive_example_nll_weight * nll
        with torch.no_grad():
            metrics = {
                "sampling_importance_ratio": masked_sum((previous_BT - generation_BT).exp(), mask_BT) / counts.tokens,
                "approx_entropy": -((logprobs_BT - generation_BT).exp() * logprobs_BT).sum() / counts.tokens,
                **_spread("probs_ratio", ratio, mask_BT, counts),
                **_spread("probs_ratio_clamped", term.bounded, mask_BT, counts),
                "clip_ratio/low": mean_over_tokens(term.low, mask_BT, counts),
                "clip_ratio/high": mean_over_tokens(term.high, mask_BT, counts),
            }
            if corrects(self.config):
                metrics |= corrected.metrics(mask_BT, counts)
            if kl_BT is not None:
                metrics["kl_penalty"] = masked_sum(kl_BT, mask_BT) / counts.tokens
            if entropy is not None:
                metrics["entropy"] = entropy.detach().clone()
            if nll is not None:
                metrics["positive_nll"] = nll.detach().clone()
            for name, tokens_BT in (("high_entropy_share", open_BT), ("covariance_share", term.chosen)):
                if tokens_BT is not None:
                    metrics[name] = mean_over_tokens(tokens_BT, mask_BT, counts)
            metrics["loss"] = total.detach().clone()
        return total, metrics

    def advantages(self, batch: Batch, previous_BT: Tensor) -> Tensor:
        """How much better than expected each token is, without gradient; broadcasts to [B, T]. `previous_BT`: previous
        logprobs, 0 outside the mask."""
        (advantages_B,) = batch.require("advantages")
        return advantages_B[:, None]

    def _kl(self, logprobs_BT: Tensor, reference_BT: Tensor, previous_BT: Tensor) -> Tensor:
        config = self.config
        return kl_estimate(
            logprobs_BT,
            reference_BT,
            config.reference_policy_kl_type,
            previous_BT if config.use_bias_correction_kl else None,
            config.kl_input_clamp_value,
            config.kl_output_clamp_value,
        )

    def _mean(self, values_BT: Tensor, mask_BT: Tensor, counts: Normalizers) -> Tensor:
        """The mean over tokens, the sum over them for each sequence by one constant length (Dr. GRPO, Liu et al. 2025,
        arXiv:2503.20783), or the mean over sequences of their token means."""
        if self.config.token_level_loss == "constant":
            return masked_sum(values_BT, mask_BT) / (counts.sequences * self.config.constant_length)
        if self.config.token_level_loss:
            return masked_sum(values_BT, mask_BT) / counts.tokens
        return ((values_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum() / counts.sequences


def grpo_loss(options: GRPOConfig) -> GRPOLoss:
    return GRPOLoss(options.loss_fn)


def _positive_tokens(rows: TokenRows) -> float:
    """Tokens that have a loss in rows with a positive reward, at least 1."""
    if rows.rewards is None:
        raise ValueError("positive_example_nll_weight needs rows with rewards")
    return max(float((np.repeat(rows.rewards > 0, rows.lengths) & rows.mask).sum()), 1.0)


@torch.no_grad()
def _of_high_entropy(entropy_BT: Tensor, mask_BT: Tensor, share: float) -> Tensor:
    """Whether a token is of this share of the micro-batch's tokens, those with the highest entropy: at or above the
    quantile, as TRL has it. The entropy is known in the training pass alone, which sees one micro-batch at a time."""
    least = torch.where(mask_BT > 0, entropy_BT.float(), math.nan).nanquantile(1 - share)
    return (entropy_BT >= least) & (mask_BT > 0)


def _spread(name: str, values: Tensor, mask_BT: Tensor, counts: Normalizers) -> Metrics:
    """Mean, smallest and largest of values that broadcast to the mask, over its tokens."""
    # The values that a boolean index keeps are counted first, for which the host would wait.
    values_BT, kept_BT = values.expand_as(mask_BT), mask_BT > 0
    return {
        name: mean_over_tokens(values, mask_BT, counts),
        f"{name}_min": torch.where(kept_BT, values_BT, math.inf).min(),
        f"{name}_max": torch.where(kept_BT, values_BT, -math.inf).max(),
    }


def less_kl_to_go(advantages: Tensor, kl_BT: Tensor, mask_BT: Tensor, penalty: float) -> Tensor:
    """The advantages with a KL penalty in the reward, [B, T]: A_t - penalty (k_t + k_t+1 + ... + k_T), over the tokens
    that have a loss. `advantages` broadcasts to [B, T]; `kl_BT` is in nats, of the policy at the start of the step,
    without gradient.

    A token answers for the KL of those that follow it, because it changes how likely they are. With k1 and on-policy
    samples, the policy gradient of these advantages is that of the reward less `penalty` times the KL(policy ||
    reference) of whole responses (k1 as a reward: Liu et al. 2025, arXiv:2510.01555).

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
        estimate = d.exp() - 1 - d
    else:
        raise ValueError(f"KL estimator must be k1, k2 or k3, got {kind!r}")
    if sampled_with is not None:
        weight = (logprobs - sampled_with).exp()
        estimate = estimate * torch.where(d == whole, weight, weight.detach())
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)

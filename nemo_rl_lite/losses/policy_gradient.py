"""The policy-gradient loss of GRPO and its variants as a pure function of logprobs. Shapes: B sequences, T tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import GRPOConfig, LossConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.correction import correction, corrects, summarize
from nemo_rl_lite.losses.interface import Metrics, Normalizers, count_masked, masked_sum, mean_over_tokens


@dataclass(frozen=True)
class GRPOLoss:
    """The clipped policy-gradient loss with a KL penalty, of one micro-batch's current logprobs.

    Sources: PPO clipping (Schulman et al. 2017), GRPO (Shao et al. 2024), separate upper clip (DAPO, Yu et al. 2025),
    dual clip (Ye et al. 2020), sequence-level ratios (GSPO, Zheng et al. 2025), KL estimators (Schulman 2020); those of
    the correction for the engines and for older rollouts are at `correction`.
    """

    config: LossConfig

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        return count_masked(rows)

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """See `correction.summarize`."""
        return summarize(metrics)

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Loss (scalar, with gradient) and metrics (each this micro-batch's share of the global value).

        Reads `previous_logprobs`, `generation_logprobs`, `advantages` and, with a KL penalty, `reference_logprobs`.
        """
        previous_BT, generation_BT, advantages_B = batch.require(
            "previous_logprobs", "generation_logprobs", "advantages"
        )
        mask_BT, advantages_B1 = batch.mask, advantages_B[:, None]
        # A selection, not a product: logprobs outside the mask may be infinite, whose gradient would be NaN.
        logprobs_BT, previous_BT, generation_BT = (
            torch.where(mask_BT > 0, values, 0.0) for values in (logprobs_BT, previous_BT, generation_BT)
        )
        ratio = self._ratio(logprobs_BT - previous_BT, mask_BT)
        clipped = ratio.clamp(1 - self.config.ratio_clip_min, 1 + self.config.ratio_clip_max)
        loss = torch.maximum(-advantages_B1 * ratio, -advantages_B1 * clipped)
        if self.config.ratio_clip_c is not None:
            loss = torch.where(advantages_B1 < 0, loss.minimum(-advantages_B1 * self.config.ratio_clip_c), loss)
        corrected = correction(self.config, previous_BT - generation_BT, mask_BT)
        loss_BT = (loss * corrected.weights).expand_as(mask_BT)

        kl_BT = None
        if self.config.reference_policy_kl_penalty > 0:
            (reference_BT,) = batch.require("reference_logprobs")
            kl_BT = self._kl(logprobs_BT, torch.where(mask_BT > 0, reference_BT, 0.0), previous_BT)
            loss_BT = loss_BT + self.config.reference_policy_kl_penalty * kl_BT

        total = self._mean(loss_BT, mask_BT, counts)
        with torch.no_grad():
            metrics = {
                "sampling_importance_ratio": masked_sum((previous_BT - generation_BT).exp(), mask_BT) / counts.tokens,
                "approx_entropy": -((logprobs_BT - generation_BT).exp() * logprobs_BT).sum() / counts.tokens,
                **_spread("probs_ratio", ratio, mask_BT, counts),
                **_spread("probs_ratio_clamped", clipped, mask_BT, counts),
                # The clip acts on one side for each sign of the advantage.
                "clip_ratio/low": mean_over_tokens((ratio < clipped) & (advantages_B1 < 0), mask_BT, counts),
                "clip_ratio/high": mean_over_tokens((ratio > clipped) & (advantages_B1 > 0), mask_BT, counts),
            }
            if corrects(self.config):
                metrics |= corrected.metrics(mask_BT, counts)
            if kl_BT is not None:
                metrics["kl_penalty"] = masked_sum(kl_BT, mask_BT) / counts.tokens
            metrics["loss"] = total.detach().clone()
        return total, metrics

    def _ratio(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """The ratio of each token, [B, T], or the geometric mean of a sequence's, [B, 1]."""
        if not self.config.sequence_level_importance_ratios:
            return log_ratio_BT.exp()
        return (log_ratio_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)).exp()

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
        if self.config.token_level_loss:
            return masked_sum(values_BT, mask_BT) / counts.tokens
        return ((values_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum() / counts.sequences


def grpo_loss(options: GRPOConfig) -> GRPOLoss:
    return GRPOLoss(options.loss_fn)


def _spread(name: str, values: Tensor, mask_BT: Tensor, counts: Normalizers) -> Metrics:
    """Mean, smallest and largest of values that broadcast to the mask, over its tokens."""
    # The values that a boolean index keeps are counted first, for which the host would wait.
    values_BT, kept_BT = values.expand_as(mask_BT), mask_BT > 0
    return {
        name: mean_over_tokens(values, mask_BT, counts),
        f"{name}_min": torch.where(kept_BT, values_BT, math.inf).min(),
        f"{name}_max": torch.where(kept_BT, values_BT, -math.inf).max(),
    }


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

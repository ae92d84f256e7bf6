"""Losses on datasets: SFT; DPO and variants, and ORPO, on pairs; KTO and variants on single responses.

Shapes: B sequences, T tokens, P pairs. The sequences of a pair are neighbours, the chosen one first.

`algorithm.preference_loss` selects a pair loss by TRL's name for it (`dpo` is TRL's `sigmoid`). `chosen_P` and
`rejected_P` are log(policy / reference) of the responses, or their `divergence_scores`; `beta` is
`reference_policy_kl_penalty`; `smoothing` is the assumed share of swapped pairs.

KTO compares a response's log ratio with a baseline: the KL of the policy to the reference. A separate pass without a
gradient estimates it on mismatched responses (a prompt with another prompt's response). The mean over the optimizer
step comes with the counts, so it does not depend on micro-batches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_lite.config.schema_algorithm import DPOConfig, KTOConfig, ORPOConfig, SFTConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Metrics, Normalizers, count_masked, masked_sum, masked_sums

# Keeps exp() within float32.
_LARGEST_EXPONENT = 80.0


def dpo(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290), with smoothing conservative DPO (Mitchell 2023)."""
    scaled_P = beta * (chosen_P - rejected_P)
    return -(1 - smoothing) * F.logsigmoid(scaled_P) - smoothing * F.logsigmoid(-scaled_P)


def ipo(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """IPO (Azar et al. 2024, arXiv:2310.12036), on averages over tokens, as in TRL."""
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def hinge(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """max(0, 1 - beta Delta): RSO (Liu et al. 2024, arXiv:2309.06657), SLiC (Zhao et al. 2023, arXiv:2305.10425)."""
    return torch.relu(1 - beta * (chosen_P - rejected_P))


def robust(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024, arXiv:2403.00409): unbiased if `smoothing` is the true share."""
    scaled_P = beta * (chosen_P - rejected_P)
    right_P, swapped_P = F.logsigmoid(scaled_P), F.logsigmoid(-scaled_P)
    return (smoothing * swapped_P - (1 - smoothing) * right_P) / (1 - 2 * smoothing)


def exo_pair(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """EXO (Ji et al. 2024, arXiv:2402.00856, eq. 16): KL of the policy's preference to (1 - smoothing, smoothing), for
    `smoothing` > 0."""
    scaled_P = beta * (chosen_P - rejected_P)
    log_chosen_P, log_rejected_P = F.logsigmoid(scaled_P), F.logsigmoid(-scaled_P)
    of_chosen_P = log_chosen_P.exp() * (log_chosen_P - math.log1p(-smoothing))
    return of_chosen_P + log_rejected_P.exp() * (log_rejected_P - math.log(smoothing))


def sppo_hard(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """SPPO (Wu et al. 2024, arXiv:2405.00675, eq. 4.7) with a win probability of 1 for the chosen response."""
    return (chosen_P - 0.5 / beta).square() + (rejected_P + 0.5 / beta).square()


def nca_pair(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """NCA (Chen et al. 2024, arXiv:2402.05369) on pairs."""
    either_P = F.logsigmoid(-beta * chosen_P) + F.logsigmoid(-beta * rejected_P)
    return -F.logsigmoid(beta * chosen_P) - 0.5 * either_P


def bco_pair(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """BCO (Jung et al. 2024, arXiv:2404.04656) on pairs, without its shift, as in TRL."""
    return -F.logsigmoid(beta * chosen_P) - F.logsigmoid(-beta * rejected_P)


def apo_zero(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """APO (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7): raise chosen responses, lower rejected ones."""
    return 1 - torch.sigmoid(beta * chosen_P) + torch.sigmoid(beta * rejected_P)


def apo_down(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """APO (ibid., eq. 8): lower both responses, the rejected one more."""
    return torch.sigmoid(beta * chosen_P) + 1 - torch.sigmoid(beta * (chosen_P - rejected_P))


PREFERENCES: Mapping[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    one.__name__: one for one in (dpo, ipo, hinge, robust, exo_pair, sppo_hard, nca_pair, bco_pair, apo_zero, apo_down)
}


def divergence_scores(config: DPOConfig, log_ratios: Tensor) -> Tensor:
    """Return f'(policy / reference) of an f-divergence from log ratios, without terms that cancel in a difference
    (f-DPO, Wang et al. 2024, arXiv:2309.16240). Alpha = 1 is the reverse KL, alpha = 0 the forward KL."""
    if config.f_divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratios)
    alpha = {"forward_kl": 0.0, "alpha_divergence": config.f_alpha_divergence_coef}.get(config.f_divergence, 1.0)
    if alpha >= 1:
        return log_ratios
    return (((alpha - 1) * log_ratios).clamp(max=_LARGEST_EXPONENT).exp() - 1) / (alpha - 1)


class _PairLoss:
    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count chosen responses' tokens, and pairs."""
        return replace(count_masked(rows[::2]), sequences=len(rows) / 2)

    @torch.no_grad()
    def _metrics(
        self, losses: tuple[Tensor, Tensor, Tensor], scores_B: Tensor, batch: Batch, beta: float, pairs: float
    ) -> Metrics:
        """`losses`: total, preference loss, NLL. `scores_B`: rewards / `beta`."""
        (total, preference, nll), chosen_P, rejected_P = losses, scores_B[::2], scores_B[1::2]
        present_P = batch.lengths[::2] > 0
        # A tie, as before the first step, counts half.
        right_P = present_P * ((chosen_P > rejected_P) + 0.5 * (chosen_P == rejected_P))
        return {
            "loss": total.detach().clone(),
            "preference_loss": preference.detach().clone(),
            "sft_loss": nll.detach().clone(),
            "accuracy": right_P.sum() / pairs,
            "rewards_chosen_mean": beta * chosen_P.sum() / pairs,
            "rewards_rejected_mean": beta * rejected_P.sum() / pairs,
            "rewards_margin_mean": beta * (chosen_P - rejected_P).sum() / pairs,
        }


@dataclass(frozen=True)
class DPOLoss(_PairLoss):
    """Preference loss, and the chosen responses' negative log likelihood added to it (RPO, Pang et al. 2024,
    arXiv:2404.19733)."""

    config: DPOConfig

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """See `Loss`. Reads `reference_logprobs`."""
        config, (reference_BT,) = self.config, batch.require("reference_logprobs")
        tokens_B = batch.mask.sum(dim=1).clamp(min=1)
        sums_B = masked_sums(logprobs_BT, batch.mask)
        ratios_B = sums_B - masked_sums(reference_BT, batch.mask)
        scores_B = divergence_scores(config, ratios_B)
        if config.preference_average_log_probs or config.preference_loss == "ipo":
            ratios_B, scores_B = ratios_B / tokens_B, scores_B / tokens_B
        beta, pair_loss = config.reference_policy_kl_penalty, PREFERENCES[config.preference_loss]
        pairs_P = pair_loss(scores_B[::2], scores_B[1::2], beta, config.label_smoothing)
        # Rows of length 0 are padding.
        preference = torch.where(batch.lengths[::2] > 0, pairs_P, 0.0).sum() / counts.sequences
        chosen_logprobs_P = sums_B[::2] / tokens_B[::2] if config.sft_average_log_probs else sums_B[::2]
        nll = -chosen_logprobs_P.sum() / counts.sequences
        total = config.preference_loss_weight * preference + config.sft_loss_weight * nll
        return total, self._metrics((total, preference, nll), ratios_B, batch, beta, counts.sequences)


@dataclass(frozen=True)
class ORPOLoss(_PairLoss):
    """NLL of chosen responses + `preference_loss_weight` * mean over pairs of -log sigmoid(log odds ratio).

    The odds ratio is odds(chosen) / odds(rejected), with odds = p / (1 - p) (ORPO, Hong et al. 2024, arXiv:2403.07691,
    eq. 6 and 7). p is the geometric mean of a response's token probabilities. `preference_loss_weight` is TRL's beta,
    and lambda in the paper. The NLL is the mean over the optimizer step's chosen response tokens; TRL includes prompt
    tokens.
    """

    config: ORPOConfig

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        beta, mask_BT = self.config.preference_loss_weight, batch.mask
        means_B = masked_sums(logprobs_BT, mask_BT) / mask_BT.sum(dim=1).clamp(min=1)
        chosen_P, rejected_P = means_B[::2], means_B[1::2]
        log_odds_P = chosen_P - rejected_P - _log_one_minus_exp(chosen_P) + _log_one_minus_exp(rejected_P)
        # Rows of length 0 are padding.
        preference = -torch.where(batch.lengths[::2] > 0, F.logsigmoid(log_odds_P), 0.0).sum() / counts.sequences
        nll = -masked_sum(logprobs_BT[::2], mask_BT[::2]) / counts.tokens
        total = nll + beta * preference
        return total, self._metrics((total, preference, nll), means_B, batch, beta, counts.sequences)


def _log_one_minus_exp(logprob: Tensor) -> Tensor:
    """log(1 - exp(x)) of x <= 0, exact on both sides of -log 2 (Maechler 2012). A probability of 1, with infinite odds,
    is replaced by the largest one below it."""
    below = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    near = below > -math.log(2)
    # Safe inputs for the side that is not taken, whose gradient would be NaN.
    of_near = torch.log(-torch.expm1(torch.where(near, below, -1.0)))
    return torch.where(near, of_near, torch.log1p(-torch.exp(torch.where(near, -1.0, below))))


# Names in `Normalizers.own`.
_DESIRABLE, _UNDESIRABLE, _BASELINE = "desirable", "undesirable", "baseline"


@dataclass(frozen=True)
class UnpairedLoss:
    """Weighted mean over responses of 1 - sigmoid(beta (s - z)) if desirable, else 1 - sigmoid(beta (z - s)).

    s = log(policy / reference). The baseline z is 0 (APO-zero for single responses, D'Oosterlinck et al. 2024,
    arXiv:2408.06266, as in TRL).
    """

    config: KTOConfig
    baseline: float = 0.0
    """Workers read it from the counts."""
    measures_kl: ClassVar[bool] = False
    """True if the baseline is a KL, which is logged."""

    def __getstate__(self) -> dict[str, KTOConfig]:
        """Drop the baseline, because it changes each step and CUDA graphs need a constant loss."""
        return {"config": self.config}

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count responses, in total and by label, and add the baseline."""
        rewards_B = TokenRows.of(rows).rewards
        if rewards_B is None:
            raise ValueError("KTO needs rows with a label")
        desirable = int((rewards_B > 0).sum())
        kinds = {_DESIRABLE: max(desirable, 1), _UNDESIRABLE: max(len(rows) - desirable, 1)}
        return replace(count_masked(rows), sequences=float(len(rows)), own=kinds | {_BASELINE: self.baseline})

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """See `Loss`. Reads `reference_logprobs` and `rewards`."""
        config, (reference_BT, rewards_B) = self.config, batch.require("reference_logprobs", "rewards")
        beta, is_desirable_B = config.reference_policy_kl_penalty, rewards_B > 0
        ratios_B = masked_sums(logprobs_BT, batch.mask) - masked_sums(reference_BT, batch.mask)
        above_B = ratios_B - counts.own[_BASELINE]
        losses_B = 1 - torch.sigmoid(beta * torch.where(is_desirable_B, above_B, -above_B))
        weights_B = torch.where(is_desirable_B, config.desirable_weight, config.undesirable_weight)
        # Rows of length 0 are padding.
        weights_B = torch.where(batch.lengths > 0, weights_B, 0.0)
        total = (weights_B * losses_B).sum() / counts.sequences
        with torch.no_grad():
            chosen = beta * torch.where(is_desirable_B, ratios_B, 0.0).sum() / counts.own[_DESIRABLE]
            rejected = beta * torch.where(is_desirable_B, 0.0, ratios_B).sum() / counts.own[_UNDESIRABLE]
            metrics = {
                "loss": total.detach().clone(),
                "rewards_chosen_mean": chosen,
                "rewards_rejected_mean": rejected,
                "rewards_margin_mean": chosen - rejected,
                "desirable_share": is_desirable_B.sum() / counts.sequences,
            }
            if self.measures_kl:
                # This micro-batch's share of the baseline.
                metrics["kl"] = (batch.lengths > 0).sum() * counts.own[_BASELINE] / counts.sequences
        return total, metrics


class KTOLoss(UnpairedLoss):
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7): the baseline is the optimizer step's KL of the policy to
    the reference on mismatched responses, without a gradient."""

    measures_kl = True

    def with_mismatched_kl(self, kl: float) -> "KTOLoss":
        """See `Loss`. A negative estimate counts as 0."""
        return replace(self, baseline=max(kl, 0.0))


@dataclass(frozen=True)
class MeanLogRatio:
    """Mean over sequences of log(policy / reference), in nats; for measurement, not for training."""

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        return replace(count_masked(rows), sequences=float(len(rows)))

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        (reference_BT,) = batch.require("reference_logprobs")
        ratios_B = masked_sums(logprobs_BT, batch.mask) - masked_sums(reference_BT, batch.mask)
        mean = ratios_B.sum() / counts.sequences
        return mean, {"loss": mean.detach().clone()}


def kto_loss(options: KTOConfig) -> UnpairedLoss:
    return {"kto": KTOLoss, "apo_zero_unpaired": UnpairedLoss}[options.preference_loss](options)


def mismatched(rows: Sequence[TokenRow], longest: int) -> list[TokenRow]:
    """Return each row's prompt with the previous row's response, truncated to `longest` tokens. The first row gets the
    last response. As in TRL, but over a whole batch."""
    firsts = [int(np.argmax(row.mask)) for row in rows]
    found = []
    for at, row in enumerate(rows):
        other, begin, own = rows[at - 1], firsts[at - 1], firsts[at]
        tokens = np.concatenate([row.tokens[:own], other.tokens[begin:]])
        mask = np.concatenate([np.zeros(own, np.bool_), other.mask[begin:]])
        found.append(TokenRow(tokens[:longest], mask[:longest]))
    return found


@dataclass(frozen=True)
class SFTLoss:
    """Mean negative log likelihood of response tokens, in nats per token."""

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        return count_masked(rows)

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        total = -masked_sum(logprobs_BT, batch.mask) / counts.tokens
        return total, {"loss": total.detach().clone()}


def sft_loss(options: SFTConfig) -> SFTLoss:
    return SFTLoss()

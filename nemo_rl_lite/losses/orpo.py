"""The loss of odds ratio preference optimisation, which has no reference policy. Shapes: B sequences, T tokens, P
pairs; the sequences of a pair are neighbours, the chosen one first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import ORPOConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.interface import Metrics, Normalizers, count_masked, masked_sum, masked_sums


@dataclass(frozen=True)
class ORPOLoss:
    """The chosen responses' mean negative log likelihood, and `preference_loss_weight` (TRL's beta, the paper's lambda)
    times the mean over pairs of -log sigmoid(log odds ratio). The odds ratio is that of the chosen response to the
    rejected one, with odds = p / (1 - p), where p is the geometric mean of a response's token probabilities (ORPO, Hong
    et al. 2024, arXiv:2403.07691, eq. 6 and 7). The likelihood is averaged over all chosen response tokens of the
    optimizer step; TRL averages over the prompts' tokens, too."""

    config: ORPOConfig

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count the chosen responses' tokens, and pairs."""
        return replace(count_masked(rows[::2]), sequences=len(rows) / 2)

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Loss (scalar, with gradient) and metrics (each this micro-batch's share of the global value)."""
        beta, mask_BT = self.config.preference_loss_weight, batch.mask
        means_B = masked_sums(logprobs_BT, mask_BT) / mask_BT.sum(dim=1).clamp(min=1)
        chosen_P, rejected_P = means_B[::2], means_B[1::2]
        log_odds_P = chosen_P - rejected_P - _log_one_minus_exp(chosen_P) + _log_one_minus_exp(rejected_P)
        # Rows of length 0, which fill up a bucket, are no pairs.
        present_P = batch.lengths[::2] > 0
        preference = -torch.where(present_P, F.logsigmoid(log_odds_P), 0.0).sum() / counts.sequences
        nll = -masked_sum(logprobs_BT[::2], mask_BT[::2]) / counts.tokens
        total = nll + beta * preference
        with torch.no_grad():
            metrics = {
                "loss": total.detach().clone(),
                "preference_loss": preference.detach().clone(),
                "sft_loss": nll.detach().clone(),
                "accuracy": (present_P * ((chosen_P > rejected_P) + 0.5 * (chosen_P == rejected_P))).sum()
                / counts.sequences,
                "rewards_chosen_mean": beta * chosen_P.sum() / counts.sequences,
                "rewards_rejected_mean": beta * rejected_P.sum() / counts.sequences,
                "rewards_margin_mean": beta * (chosen_P - rejected_P).sum() / counts.sequences,
            }
        return total, metrics


def _log_one_minus_exp(logprob: Tensor) -> Tensor:
    """log(1 - exp(x)) of x <= 0, exact on both sides of -log 2 (Maechler 2012). A probability of 1 counts as the
    largest one below it, since its odds are infinite."""
    below = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    near = below > -math.log(2)
    # Each side has a safe input where the other is taken, whose gradient would be NaN.
    of_near = torch.log(-torch.expm1(torch.where(near, below, -1.0)))
    return torch.where(near, of_near, torch.log1p(-torch.exp(torch.where(near, -1.0, below))))

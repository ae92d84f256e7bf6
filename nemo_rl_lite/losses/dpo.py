"""The loss of direct preference optimisation. Shapes: B sequences, T tokens, P pairs; the sequences of a pair are
neighbours, the chosen one first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import DPOConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.interface import Metrics, Normalizers, count_masked, masked_sums
from nemo_rl_lite.losses.preferences import PREFERENCES, divergence_scores


@dataclass(frozen=True)
class DPOLoss:
    """The preference loss of a micro-batch's pairs, and the chosen responses' negative log likelihood added to it.

    Sources: added NLL (RPO, Pang et al. 2024, arXiv:2404.19733); those of the preference losses and of the divergences
    are at `preferences`.
    """

    config: DPOConfig

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count the chosen responses' tokens, and pairs."""
        return replace(count_masked(rows[::2]), sequences=len(rows) / 2)

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Loss (scalar, with gradient) and metrics (each this micro-batch's share of the global value). Reads
        `reference_logprobs`."""
        config, (reference_BT,) = self.config, batch.require("reference_logprobs")
        tokens_B = batch.mask.sum(dim=1).clamp(min=1)
        sums_B = masked_sums(logprobs_BT, batch.mask)
        ratios_B = sums_B - masked_sums(reference_BT, batch.mask)
        scores_B = divergence_scores(config, ratios_B)
        if config.preference_average_log_probs or config.preference_loss == "ipo":
            ratios_B, scores_B = ratios_B / tokens_B, scores_B / tokens_B
        chosen_P, rejected_P = ratios_B[::2], ratios_B[1::2]
        pairs_P = PREFERENCES[config.preference_loss](
            scores_B[::2], scores_B[1::2], config.reference_policy_kl_penalty, config.label_smoothing
        )
        # Rows of length 0 are no pairs, though a loss of equal ratios is not 0.
        present_P = batch.lengths[::2] > 0
        preference = torch.where(present_P, pairs_P, 0.0).sum() / counts.sequences
        chosen_logprobs_P = sums_B[::2] / tokens_B[::2] if config.sft_average_log_probs else sums_B[::2]
        nll = -chosen_logprobs_P.sum() / counts.sequences
        total = config.preference_loss_weight * preference + config.sft_loss_weight * nll
        with torch.no_grad():
            beta = config.reference_policy_kl_penalty
            metrics = {
                "loss": total.detach().clone(),
                "preference_loss": preference.detach().clone(),
                "sft_loss": nll.detach().clone(),
                # A tie, such as before the first step, counts as half right.
                "accuracy": (present_P * ((chosen_P > rejected_P) + 0.5 * (chosen_P == rejected_P))).sum()
                / counts.sequences,
                "rewards_chosen_mean": beta * chosen_P.sum() / counts.sequences,
                "rewards_rejected_mean": beta * rejected_P.sum() / counts.sequences,
                "rewards_margin_mean": beta * (chosen_P - rejected_P).sum() / counts.sequences,
            }
        return total, metrics

"""The losses of single responses that are desirable or not. Shapes: B sequences, T tokens.

KTO compares the logprob ratio of a response with a baseline: the KL of the policy to the reference, which is estimated
on mismatched responses, each prompt with the response of another one. These are scored in a pass of their own, without
a gradient, and their mean over the whole optimizer step comes to the loss with its counts, so that it does not depend
on micro-batches and replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import KTOConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Metrics, Normalizers, count_masked, masked_sums

# What the loss counts of its own.
_DESIRABLE, _UNDESIRABLE, _BASELINE = "desirable", "undesirable", "baseline"


@dataclass(frozen=True)
class UnpairedLoss:
    """1 - sigmoid(beta (s - z)) of each desirable response and 1 - sigmoid(beta (z - s)) of each other one, with
    s = log(policy / reference), each by its weight, averaged over all responses. The baseline z is 0 (APO-zero for
    single responses, D'Oosterlinck et al. 2024, arXiv:2408.06266, as TRL has it)."""

    config: KTOConfig
    baseline: float = 0.0
    """The workers read it from the counts."""

    def __getstate__(self) -> dict[str, KTOConfig]:
        """A worker's copy has no baseline: it differs in each step, and passes are recorded for one loss."""
        return {"config": self.config}

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count all responses, and those of each kind; the baseline comes with the counts."""
        rewards_B = TokenRows.of(rows).rewards
        if rewards_B is None:
            raise ValueError("KTO needs rows with a label")
        desirable = int((rewards_B > 0).sum())
        kinds = {_DESIRABLE: max(desirable, 1), _UNDESIRABLE: max(len(rows) - desirable, 1)}
        return replace(count_masked(rows), sequences=float(len(rows)), own=kinds | {_BASELINE: self.baseline})

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Loss (scalar, with gradient) and metrics (each this micro-batch's share of the global value). Reads
        `reference_logprobs` and `rewards`."""
        config, (reference_BT, rewards_B) = self.config, batch.require("reference_logprobs", "rewards")
        beta, is_desirable_B = config.reference_policy_kl_penalty, rewards_B > 0
        ratios_B = masked_sums(logprobs_BT, batch.mask) - masked_sums(reference_BT, batch.mask)
        above_B = ratios_B - counts.own[_BASELINE]
        losses_B = 1 - torch.sigmoid(beta * torch.where(is_desirable_B, above_B, -above_B))
        weights_B = torch.where(is_desirable_B, config.desirable_weight, config.undesirable_weight)
        # Rows of length 0 fill up a bucket.
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
        return total, metrics


class KTOLoss(UnpairedLoss):
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7): the baseline is the KL of the policy to the reference on
    mismatched responses of the optimizer step, a constant for the gradient."""

    def with_mismatched_kl(self, kl: float) -> "KTOLoss":
        """The loss of a batch whose mismatched responses have this KL, which counts as 0 where it is below."""
        return replace(self, baseline=max(kl, 0.0))


@dataclass(frozen=True)
class MeanLogRatio:
    """The mean over sequences of log(policy / reference), in nats: an estimate of the KL where the policy has sampled
    them. It is measured, not trained on."""

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
    """Each row's prompt, up to its first token that has a loss, with what follows the prompt in the row before it; the
    first row gets that of the last. A row is cut after `longest` tokens. As TRL has it, but over a whole batch."""
    firsts = [int(np.argmax(row.mask)) for row in rows]
    found = []
    for at, row in enumerate(rows):
        other, begin, own = rows[at - 1], firsts[at - 1], firsts[at]
        tokens = np.concatenate([row.tokens[:own], other.tokens[begin:]])
        mask = np.concatenate([np.zeros(own, np.bool_), other.mask[begin:]])
        found.append(TokenRow(tokens[:longest], mask[:longest]))
    return found

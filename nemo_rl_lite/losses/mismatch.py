"""How far the generation engines' probabilities are from the policy's. Shapes: B sequences, T tokens."""

import math

import torch
from torch import Tensor

from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Metrics, Normalizers, masked_sum


@torch.no_grad()
def mismatch_metrics(batch: Batch, counts: Normalizers) -> Metrics:
    """How far the generation engine's logprobs of its own samples are from the policy's, over response tokens: this
    batch's share of the metrics of a global batch with these counts.

    `token_mult_prob_error` is the mean factor between the two probabilities (1 = equal; above 1.05 something is wrong);
    `gen_kl_error`, `policy_kl_error` and `js_divergence_error` are k3 estimates in nats; `logprob_abs_diff_mean` and
    `_max` are the tokens' mean and worst difference. `age_<n>/gen_kl_error` is the same estimate over the tokens of one
    age alone, and `age_<n>/tokens_share` their share of all tokens; every share of the global batch has those of all
    its ages.
    """
    policy_BT, generation_BT = (values.double() for values in batch.require("previous_logprobs", "generation_logprobs"))
    mask_BT, tokens = batch.mask, counts.tokens
    difference_BT = (policy_BT - generation_BT) * mask_BT
    mixture_BT = torch.logaddexp(policy_BT, generation_BT) - math.log(2)

    def k3(log_ratio_BT: Tensor) -> Tensor:
        return masked_sum(_k3(log_ratio_BT), mask_BT) / tokens

    metrics = {
        "token_mult_prob_error": masked_sum(difference_BT.abs().exp(), mask_BT) / tokens,
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


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1 - log_ratio

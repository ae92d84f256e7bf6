"""Which tokens make the entropy fall most: those whose advantage and logprob are both far above the mean, or both far
below (Cui et al. 2025, arXiv:2505.22617). Shapes: B sequences, T tokens, N tokens that have a loss.

The covariance of a token is (A - mean A)(log pi - mean log pi). The means, and what a covariance is compared with, are
those of the whole optimizer step, from the engine's logprobs, which every row has before a policy is asked. So a
token's choice does not depend on micro-batches and replicas, as it does in verl, whose quantiles are of a micro-batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import LossConfig
from nemo_rl_lite.losses.batch import TokenRow, TokenRows

_ADVANTAGE, _LOGPROB = "covariance/advantage", "covariance/logprob"
_LEAST, _CHANCE = "covariance/least", "covariance/chance"


def count_covariances(config: LossConfig, rows: Sequence[TokenRow]) -> dict[str, float]:
    """What the tokens of an optimizer step's rows are compared with: the mean advantage and logprob, the smallest
    covariance of the share `kl_cov_ratio` with the largest ones, and the chance with which a covariance within the
    bounds of `clip_cov` is chosen, so that the share `clip_cov_ratio` of all tokens is."""
    joined = TokenRows.of(rows)
    if joined.advantages is None or joined.generation_logprobs is None:
        raise ValueError("covariances are of rows with advantages and with logprobs of the engine")
    # Of float32, as a batch has them, so that the same token has the same covariance here and there.
    advantages_N = np.repeat(joined.advantages.astype(np.float32), joined.lengths)[joined.mask].astype(np.float64)
    logprobs_N = joined.generation_logprobs[joined.mask].astype(np.float64)
    if not len(logprobs_N):
        return dict.fromkeys((_ADVANTAGE, _LOGPROB, _LEAST, _CHANCE), 0.0)
    advantage, logprob = advantages_N.mean(), logprobs_N.mean()
    covariances_N = (advantages_N - advantage) * (logprobs_N - logprob)
    largest = max(int(config.kl_cov_ratio * len(covariances_N)), 1)
    within = int(((config.clip_cov_lb < covariances_N) & (covariances_N < config.clip_cov_ub)).sum())
    chosen = max(int(config.clip_cov_ratio * len(covariances_N)), 1)
    return {
        _ADVANTAGE: float(advantage),
        _LOGPROB: float(logprob),
        _LEAST: float(np.partition(covariances_N, -largest)[-largest]),
        _CHANCE: min(chosen / max(within, 1), 1.0),
    }


@torch.no_grad()
def covariances(step: Mapping[str, float], logprobs_BT: Tensor, advantages: Tensor) -> Tensor:
    """The covariance of each token, [B, T], in an optimizer step with these counts."""
    return (advantages.double() - step[_ADVANTAGE]) * (logprobs_BT.double() - step[_LOGPROB])


def are_largest(step: Mapping[str, float], covariances_BT: Tensor) -> Tensor:
    """Whether a token is of the share with the largest covariances."""
    return covariances_BT >= step[_LEAST]


def are_chosen(config: LossConfig, step: Mapping[str, float], covariances_BT: Tensor) -> Tensor:
    """Whether a token within the bounds of `clip_cov` is chosen, at random."""
    within_BT = (config.clip_cov_lb < covariances_BT) & (covariances_BT < config.clip_cov_ub)
    return within_BT & (torch.rand_like(covariances_BT) < step[_CHANCE])

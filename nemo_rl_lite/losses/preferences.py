"""The preference losses of DPO, by the name in `algorithm.preference_loss`, which is TRL's but for `dpo`; and the
divergences by which it compares policy and reference. Pure functions; shapes: P pairs.

`chosen_P` and `rejected_P` are log(policy / reference) of the responses, or what a divergence makes of them; `beta` is
`reference_policy_kl_penalty`, and `smoothing` the share of pairs that are assumed to be swapped.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import DPOConfig

# exp() of more than this is beyond float32.
_LARGEST_EXPONENT = 80.0


def sigmoid(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290), with smoothing conservative DPO (Mitchell 2023)."""
    scaled_P = beta * (chosen_P - rejected_P)
    return -(1 - smoothing) * F.logsigmoid(scaled_P) - smoothing * F.logsigmoid(-scaled_P)


def ipo(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """IPO (Azar et al. 2024, arXiv:2310.12036), of averages over tokens, as TRL has it by its authors' word."""
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def hinge(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """max(0, 1 - beta Delta): RSO (Liu et al. 2024, arXiv:2309.06657), SLiC (Zhao et al. 2023, arXiv:2305.10425)."""
    return torch.relu(1 - beta * (chosen_P - rejected_P))


def robust(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024, arXiv:2403.00409): without bias where `smoothing` is the true share."""
    scaled_P = beta * (chosen_P - rejected_P)
    right_P, swapped_P = F.logsigmoid(scaled_P), F.logsigmoid(-scaled_P)
    return (smoothing * swapped_P - (1 - smoothing) * right_P) / (1 - 2 * smoothing)


def exo_pair(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """EXO (Ji et al. 2024, arXiv:2402.00856, eq. 16): KL of the policy's preference to (1 - smoothing, smoothing),
    where `smoothing` must be above 0."""
    scaled_P = beta * (chosen_P - rejected_P)
    log_chosen_P, log_rejected_P = F.logsigmoid(scaled_P), F.logsigmoid(-scaled_P)
    of_chosen_P = log_chosen_P.exp() * (log_chosen_P - math.log1p(-smoothing))
    return of_chosen_P + log_rejected_P.exp() * (log_rejected_P - math.log(smoothing))


def sppo_hard(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """SPPO (Wu et al. 2024, arXiv:2405.00675, eq. 4.7) with a probability of 1 that the chosen response wins."""
    return (chosen_P - 0.5 / beta).square() + (rejected_P + 0.5 / beta).square()


def nca_pair(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """NCA (Chen et al. 2024, arXiv:2402.05369) on pairs."""
    either_P = F.logsigmoid(-beta * chosen_P) + F.logsigmoid(-beta * rejected_P)
    return -F.logsigmoid(beta * chosen_P) - 0.5 * either_P


def bco_pair(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """BCO (Jung et al. 2024, arXiv:2404.04656) on pairs, without its shift, as TRL has it."""
    return -F.logsigmoid(beta * chosen_P) - F.logsigmoid(-beta * rejected_P)


def apo_zero(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """APO (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7): chosen responses become likelier, others less."""
    return 1 - torch.sigmoid(beta * chosen_P) + torch.sigmoid(beta * rejected_P)


def apo_down(chosen_P: Tensor, rejected_P: Tensor, beta: float, smoothing: float) -> Tensor:
    """APO (the same, eq. 8): both responses become less likely, the rejected one more so."""
    return torch.sigmoid(beta * chosen_P) + 1 - torch.sigmoid(beta * (chosen_P - rejected_P))


PREFERENCES: Mapping[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "dpo": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "exo_pair": exo_pair,
    "sppo_hard": sppo_hard,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
}


def divergence_scores(config: DPOConfig, log_ratios: Tensor) -> Tensor:
    """f'(policy / reference) of an f-divergence, from the logarithm (f-DPO, Wang et al. 2024, arXiv:2309.16240),
    without terms that cancel in a difference. The alpha divergence is the reverse KL at alpha = 1, the forward KL at 0.
    """
    match config.f_divergence:
        case "forward_kl":
            return _alpha_score(log_ratios, 0.0)
        case "js_divergence":
            return math.log(2) + F.logsigmoid(log_ratios)
        case "alpha_divergence" if config.f_alpha_divergence_coef < 1:
            return _alpha_score(log_ratios, config.f_alpha_divergence_coef)
    return log_ratios


def _alpha_score(log_ratios: Tensor, alpha: float) -> Tensor:
    return (((alpha - 1) * log_ratios).clamp(max=_LARGEST_EXPONENT).exp() - 1) / (alpha - 1)

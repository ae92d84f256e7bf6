"""Preference losses and divergences against the published formulas, pair by pair in plain Python."""

import math

import pytest
import torch

from nemo_rl_lite.losses.supervised import PREFERENCES, divergence_scores
from tests.unit.losses.batches import dpo_config
from tests.unit.losses.test_dpo_loss_matches_trl import our_loss, random_pairs


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def exo(c: float, r: float, beta: float, smoothing: float) -> float:
    """KL of (p, 1 - p) to (1 - smoothing, smoothing)."""
    p = math.exp(beta * c) / (math.exp(beta * c) + math.exp(beta * r))
    return p * math.log(p / (1 - smoothing)) + (1 - p) * math.log((1 - p) / smoothing)


def robust(c: float, r: float, beta: float, smoothing: float) -> float:
    right, swapped = -math.log(sigma(beta * (c - r))), -math.log(sigma(beta * (r - c)))
    return ((1 - smoothing) * right - smoothing * swapped) / (1 - 2 * smoothing)


# Of a pair's log ratios c and r, beta and the label smoothing s.
FORMULAS = {
    "dpo": lambda c, r, b, s: -(1 - s) * math.log(sigma(b * (c - r))) - s * math.log(sigma(b * (r - c))),
    "ipo": lambda c, r, b, s: (c - r - 1 / (2 * b)) ** 2,
    "hinge": lambda c, r, b, s: max(0.0, 1 - b * (c - r)),
    "robust": robust,
    "exo_pair": exo,
    "sppo_hard": lambda c, r, b, s: (c - 1 / (2 * b)) ** 2 + (r + 1 / (2 * b)) ** 2,
    "nca_pair": lambda c, r, b, s: -math.log(sigma(b * c)) - 0.5 * sum(math.log(sigma(-b * one)) for one in (c, r)),
    "bco_pair": lambda c, r, b, s: -math.log(sigma(b * c)) - math.log(sigma(-b * r)),
    "apo_zero": lambda c, r, b, s: (1 - sigma(b * c)) + sigma(b * r),
    "apo_down": lambda c, r, b, s: sigma(b * c) + (1 - sigma(b * (c - r))),
}


def log_ratios(seed: int) -> torch.Tensor:
    return 3 * torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.2), (0.7, 1e-3)])
def test_a_preference_is_the_published_one(name, beta, smoothing):
    chosen, rejected = log_ratios(0)
    found = PREFERENCES[name](chosen, rejected, beta, smoothing)
    pairs = zip(chosen.tolist(), rejected.tolist(), strict=True)
    expected = [FORMULAS[name](c, r, beta, smoothing) for c, r in pairs]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "derivative"),
    [
        ({"f_divergence": "reverse_kl"}, lambda t: math.log(t)),
        ({"f_divergence": "forward_kl"}, lambda t: 1 - 1 / t),
        ({"f_divergence": "js_divergence"}, lambda t: math.log(2 * t / (t + 1))),
        ({"f_divergence": "alpha_divergence", "f_alpha_divergence_coef": 0.3}, lambda t: (t**-0.7 - 1) / -0.7),
        ({"f_divergence": "alpha_divergence", "f_alpha_divergence_coef": 0.0}, lambda t: 1 - 1 / t),
        ({"f_divergence": "alpha_divergence", "f_alpha_divergence_coef": 1.0}, lambda t: math.log(t)),
    ],
    ids=lambda changes: "+".join(map(str, changes.values())) if isinstance(changes, dict) else "",
)
def test_a_divergence_compares_its_derivatives(changes, derivative):
    ratios, _ = log_ratios(2)
    found = divergence_scores(dpo_config(**changes), ratios).tolist()
    assert found == pytest.approx([derivative(math.exp(one)) for one in ratios.tolist()], rel=1e-6)


def test_a_divergence_stays_finite_where_a_response_has_become_impossible():
    ratios = torch.tensor([-500.0, 500.0], requires_grad=True)
    scores = divergence_scores(dpo_config(f_divergence="forward_kl"), ratios)
    scores.sum().backward()
    assert scores.isfinite().all() and ratios.grad.isfinite().all()


@pytest.mark.parametrize("name", ["hinge", "robust", "exo_pair", "sppo_hard", "nca_pair", "bco_pair", "apo_zero"])
def test_the_loss_of_pairs_is_that_of_their_sums_of_logprobs(name):
    pairs = random_pairs(3)
    config = dpo_config(preference_loss=name, label_smoothing=0.1 if name in ("robust", "exo_pair") else 0.0)
    whole, gradient, _ = our_loss(config, pairs)
    sums = ((pairs["logprobs"] - pairs["reference_logprobs"]) * pairs["mask"]).sum(dim=1).tolist()
    of_pairs = [
        FORMULAS[name](c, r, config.reference_policy_kl_penalty, config.label_smoothing)
        for c, r in zip(sums[::2], sums[1::2], strict=True)
    ]
    assert whole.item() == pytest.approx(sum(of_pairs) / len(of_pairs), abs=1e-5)
    split, split_gradient, _ = our_loss(config, pairs, rows=2)
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(split_gradient, gradient)


def test_averages_are_taken_of_scores_as_trl_has_it():
    pairs = random_pairs(4)
    config = dpo_config(preference_loss="ipo", f_divergence="js_divergence")
    sums = ((pairs["logprobs"] - pairs["reference_logprobs"]) * pairs["mask"]).sum(dim=1)
    scores = ((2 * sums.exp() / (1 + sums.exp())).log() / pairs["mask"].sum(dim=1)).tolist()
    expected = [(c - r - 1 / (2 * 0.1)) ** 2 for c, r in zip(scores[::2], scores[1::2], strict=True)]
    assert our_loss(config, pairs)[0].item() == pytest.approx(sum(expected) / len(expected), abs=1e-5)

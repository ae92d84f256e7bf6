"""Losses that treat some tokens of an optimizer step in another way, against the formulas of verl, TRL and NeMo-RL."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from tests.unit.losses.batches import loss_config, split_loss
from tests.unit.losses.test_losses_match_trl import random_inputs

TOLERANCE = 1e-6


def on_policy(seed: int, rows: int = 12, moved: float = 0.3) -> dict[str, torch.Tensor]:
    """The engine and the policy agree, and the policy has `moved` since the start of the step. Values are those of
    float32, as rows have them."""
    inputs = random_inputs(seed, rows=rows)
    source = torch.Generator().manual_seed(seed)
    noise = moved * torch.randn(inputs["logprobs"].shape, generator=source)
    inputs |= {"generation_logprobs": inputs["logprobs"], "previous_logprobs": inputs["logprobs"] + noise}
    inputs |= {"rewards": torch.randint(-1, 2, (rows,), generator=source).float(), "entropy": torch.rand(noise.shape)}
    return {name: values.double() for name, values in inputs.items()}


def rows_of(inputs: dict[str, torch.Tensor]) -> list[TokenRow]:
    """As the driver has them."""
    each = zip(*(inputs[n].tolist() for n in ("mask", "generation_logprobs", "advantages", "rewards")), strict=True)
    return [
        TokenRow([0] * len(mask), np.array(mask) > 0, logprobs, advantage, None, reward)
        for mask, logprobs, advantage, reward in each
    ]


def ours(inputs: dict[str, torch.Tensor], pieces: int = 1, **changes) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Value, gradient and metrics, of as many micro-batches."""
    loss = GRPOLoss(loss_config(**changes))
    return split_loss(loss, inputs, loss.counts(rows_of(inputs)), -(-len(inputs["logprobs"]) // pieces))


def flat(inputs: dict[str, torch.Tensor], logprobs: torch.Tensor):
    """Logprob, previous logprob, advantage and covariance of each token that has a loss, as verl defines them."""
    mask = inputs["mask"].bool()
    advantages = inputs["advantages"][:, None].expand(mask.shape)[mask]
    own, before = logprobs[mask], inputs["previous_logprobs"][mask]
    return own, before, advantages, (advantages - advantages.mean()) * (own - own.mean()).detach()


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [2e-4, 0.1, 0.4])
def test_kl_cov_is_verls_over_the_whole_step(share, seed, pieces):
    inputs = on_policy(seed)
    logprobs = inputs["logprobs"].clone().requires_grad_()
    own, before, advantages, covariances = flat(inputs, logprobs)
    losses = -advantages * (own - before).exp()
    largest = covariances.topk(max(1, int(len(own) * share))).indices
    chosen = torch.zeros(len(own), dtype=torch.bool).index_fill(0, largest, True)
    expected = (losses + torch.where(chosen, 0.7 * (own - before).abs(), 0.0)).mean()
    expected.backward()
    value, gradient, metrics = ours(inputs, pieces, policy_loss="kl_cov", kl_cov_ratio=share, ppo_kl_coef=0.7)
    torch.testing.assert_close(value, expected.detach(), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(gradient, logprobs.grad, atol=TOLERANCE, rtol=0)
    assert metrics["covariance_share"] == pytest.approx(len(largest) / len(own), abs=1e-6)


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("equal", ["advantages", "logprobs", "both"])
@pytest.mark.parametrize("share", [2e-4, 0.1, 0.4])
def test_kl_cov_penalises_as_many_tokens_where_covariances_are_equal(share, equal, pieces):
    inputs = on_policy(1, rows=200)
    torch.manual_seed(0)
    if equal != "logprobs":
        inputs["advantages"] = torch.full_like(inputs["advantages"], 0.3).float().double()
    if equal != "advantages":
        inputs["logprobs"] = inputs["generation_logprobs"] = torch.full_like(inputs["logprobs"], -0.7).float().double()
    tokens = int(inputs["mask"].sum())
    found = ours(inputs, pieces, policy_loss="kl_cov", kl_cov_ratio=share)[2]["covariance_share"] * tokens
    # Tokens with the same advantage and logprob are drawn: three standard deviations.
    spread = 0 if equal == "advantages" else 3 * (share * tokens) ** 0.5 + 3
    assert found == pytest.approx(max(1, int(share * tokens)), abs=spread + 1e-2)


def clip_terms(inputs: dict[str, torch.Tensor], logprobs: torch.Tensor, low: float, high: float):
    """The PPO loss of each token, and whether verl's Clip-Cov may choose it."""
    own, before, advantages, covariances = flat(inputs, logprobs)
    ratio = (own - before).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    return torch.maximum(plain, clipped), (low < covariances) & (covariances < high) & ~(clipped > plain)


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_is_verls_where_it_chooses_all_tokens_within_its_bounds(seed, pieces):
    inputs = on_policy(seed)
    logprobs = inputs["logprobs"].clone().requires_grad_()
    losses, may_be_chosen = clip_terms(inputs, logprobs, 0.2, 2.0)
    expected = torch.where(may_be_chosen, 0.0, losses).mean()
    expected.backward()
    changes = {"policy_loss": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 2.0}
    value, gradient, metrics = ours(inputs, pieces, **changes)
    torch.testing.assert_close(value, expected.detach(), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(gradient, logprobs.grad, atol=TOLERANCE, rtol=0)
    assert metrics["covariance_share"] == pytest.approx(may_be_chosen.double().mean().item(), abs=1e-6) and (
        0 < metrics["covariance_share"] < 0.9
    )


def test_clip_cov_chooses_its_share_of_all_tokens_however_they_are_split():
    inputs = on_policy(0, rows=2000, moved=0.0)
    _, may_be_chosen = clip_terms(inputs, inputs["logprobs"], 0.2, 2.0)
    assert may_be_chosen.double().mean() > 0.1
    torch.manual_seed(0)
    shares = [
        ours(inputs, pieces, policy_loss="clip_cov", clip_cov_ratio=0.05, clip_cov_lb=0.2, clip_cov_ub=2.0)[2]
        for pieces in (1, 50)
    ]
    # Of 8,000 tokens, 400 are chosen; the standard deviation is below 20.
    assert [one["covariance_share"] for one in shares] == pytest.approx([0.05, 0.05], abs=0.01)


def test_clip_cov_draws_its_share_from_the_tokens_that_are_not_clipped():
    inputs = on_policy(0, rows=2000, moved=0.5)
    _, may_be_chosen = clip_terms(inputs, inputs["logprobs"], 0.2, 2.0)
    torch.manual_seed(0)
    for pieces in (1, 50):
        found = ours(inputs, pieces, policy_loss="clip_cov", clip_cov_ratio=0.05, clip_cov_lb=0.2, clip_cov_ub=2.0)[2][
            "covariance_share"
        ]
        assert found == pytest.approx(0.05, abs=0.008) and may_be_chosen.double().mean() > 0.06


def trl_mask(entropy: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """TRL's own mask, of one process."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    alone = SimpleNamespace(pad_across_processes=lambda values, **_: values, gather=lambda values: values)
    return GRPOTrainer.get_high_entropy_mask(SimpleNamespace(accelerator=alone), entropy, mask, 1 - share)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_tokens_of_high_entropy_alone_have_a_policy_term_as_in_trl(share, seed):
    inputs = on_policy(seed)
    whole, gradient, metrics = ours(inputs, reference_policy_kl_penalty=0.1)
    masked, own_gradient, own_metrics = ours(inputs, top_entropy_quantile=share, reference_policy_kl_penalty=0.1)
    kept = trl_mask(inputs["entropy"], inputs["mask"], share)
    assert own_metrics["high_entropy_share"] == pytest.approx(kept.sum().item() / inputs["mask"].sum().item(), abs=1e-6)
    _, of_kl, _ = ours(inputs | {"advantages": torch.zeros(12).double()}, reference_policy_kl_penalty=0.1)
    torch.testing.assert_close(own_gradient, torch.where(kept, gradient, of_kl), atol=TOLERANCE, rtol=0)
    assert not torch.isclose(masked, whole) and metrics["kl_penalty"] == own_metrics["kl_penalty"]


@pytest.mark.parametrize("pieces", [1, 5])
def test_the_likelihood_of_good_responses_is_added_as_in_vapo(pieces):
    inputs = on_policy(1)
    plain, gradient, _ = ours(inputs)
    value, own_gradient, metrics = ours(inputs, pieces, positive_example_nll_weight=0.3)
    good = (inputs["mask"] * (inputs["rewards"] > 0)[:, None]).bool()
    assert 0 < good.sum() < inputs["mask"].sum()
    nll = -inputs["logprobs"][good].mean()
    torch.testing.assert_close(value, plain + 0.3 * nll, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(own_gradient, gradient - 0.3 * good / good.sum(), atol=TOLERANCE, rtol=0)
    assert metrics["positive_nll"] == pytest.approx(nll.item())


@pytest.mark.parametrize(
    "changes", [{"policy_loss": "kl_cov"}, {"positive_example_nll_weight": 0.1}, {"top_entropy_quantile": 0.2}]
)
def test_a_step_without_a_good_response_or_a_token_has_a_loss(changes):
    inputs = on_policy(2)
    inputs |= {"rewards": torch.zeros(12), "mask": torch.zeros_like(inputs["mask"])}
    value, gradient, _ = ours(inputs, **changes)
    assert value.item() == 0 and not gradient.any()

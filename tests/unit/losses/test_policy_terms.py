"""Policy terms, ratios, means and the entropy bonus against the published formulas, written out token by token."""

import math

import pytest
import torch

from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import count_masked, needs_of
from tests.unit.losses.batches import batch_of, loss_config, rows_of
from tests.unit.losses.test_losses_match_trl import our_loss, random_inputs

TOLERANCE = 1e-6


def doubles(seed: int) -> dict[str, torch.Tensor]:
    return {name: values.double() for name, values in random_inputs(seed).items()}


def by_hand(inputs: dict[str, torch.Tensor], of_token, of_sums) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient with `of_token(logprob, previous logprob, advantage, mean log ratio)` for each token,
    and `of_sums(list of the tokens' losses of each sequence)`."""
    logprobs = inputs["logprobs"].clone().requires_grad_()
    sequences = []
    for row, mask in enumerate(inputs["mask"].bool()):
        own, before = logprobs[row][mask], inputs["previous_logprobs"][row][mask]
        geometric = (own - before).sum() / len(own)
        advantage = inputs["advantages"][row].item()
        sequences.append([of_token(p, q, advantage, geometric) for p, q in zip(own, before, strict=True)])
    loss = of_sums(sequences)
    loss.backward()
    return loss.detach(), logprobs.grad


def over_tokens(sequences):
    return sum(sum(one) for one in sequences) / sum(len(one) for one in sequences)


def over_sequences(sequences):
    return sum(sum(one) / len(one) for one in sequences) / len(sequences)


def by_length(length):
    return lambda sequences: sum(sum(one) for one in sequences) / (len(sequences) * length)


def ppo(p, q, advantage, geometric, low=0.8, high=1.2):
    ratio = (p - q).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def cispo(low, high):
    """The loss of MiniMax-M1."""
    return lambda p, q, advantage, geometric: -min(max(math.exp(p.item() - q.item()), low), high) * advantage * p


def sapo(positive, negative):
    """The gate of SAPO."""

    def of_token(p, q, advantage, geometric):
        tau = positive if advantage > 0 else negative
        return -4 / tau / (1 + (-tau * ((p - q).exp() - 1)).exp()) * advantage

    return of_token


def gspo_token(p, q, advantage, geometric):
    """GSPO-token, of the paper of GSPO."""
    ratio = geometric.exp().detach() * (p - p.detach()).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


CASES = {
    "constant length": ({"token_level_loss": "constant"}, ppo, by_length(7)),
    "sums": ({"token_level_loss": "constant", "constant_length": 1}, ppo, by_length(1)),
    "cispo": ({"policy_loss": "cispo", "ratio_clip_min": 0.3, "ratio_clip_max": 0.25}, cispo(0.7, 1.25), over_tokens),
    "cispo without a lower bound": (
        {"policy_loss": "cispo", "ratio_clip_min": 1.0, "ratio_clip_max": 0.1},
        cispo(0.0, 1.1),
        over_tokens,
    ),
    "sapo": ({"policy_loss": "sapo", "token_level_loss": False}, sapo(1.0, 1.05), over_sequences),
    "sapo with other temperatures": (
        {"policy_loss": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 3.0},
        sapo(0.5, 3.0),
        over_tokens,
    ),
    "gspo token": ({"sequence_level_importance_ratios": "token"}, gspo_token, over_tokens),
    "reinforce": (
        {"policy_loss": "reinforce", "token_level_loss": "constant", "constant_length": 1},
        lambda p, q, advantage, geometric: -advantage * p,
        by_length(1),
    ),
}


def divergence(kind: str, policy: float, engine: float) -> float:
    """The distance of the distributions over "this token" and "another"."""
    pairs = [(engine, policy), (1 - engine, 1 - policy)]
    if kind == "dppo_tv":
        return sum(abs(one - other) for one, other in pairs) / 2
    return sum(one * math.log(one / other) for one, other in pairs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("dppo_tv", {}),
        ("dppo_kl", {}),
        ("dppo_tv", {"dppo_mask_low": 0.02, "dppo_mask_high": 0.05}),
        ("dppo_kl", {"dppo_mask_low": 0.01, "dppo_mask_high": 0.002, "ratio_clip_c": 1.1}),
    ],
)
def test_dppo_masks_tokens_outside_its_region_around_the_engine(kind, limits, seed):
    """Qi et al. 2026: M A pi / mu, with mu of the engine; the ratio's parts are pi / previous, at most c, and
    previous / mu."""
    # Probabilities of at most 1.
    inputs = {name: one - 1.5 if name.endswith("logprobs") else one for name, one in doubles(seed).items()}
    usual = 0.15 if kind == "dppo_tv" else 0.05
    low, high = (limits.get(f"dppo_mask_{side}", usual) for side in ("low", "high"))
    logprobs, kept = inputs["logprobs"].clone().requires_grad_(), inputs["mask"].bool()
    total, masked = 0.0, {"low": 0, "high": 0}
    for row, place in kept.nonzero().tolist():
        p, advantage = logprobs[row, place], inputs["advantages"][row].item()
        before, engine = (inputs[f"{name}_logprobs"][row, place].item() for name in ("previous", "generation"))
        policy, distance = p.item(), divergence(kind, math.exp(p.item()), math.exp(engine))
        if advantage > 0 and policy > engine and distance > high:
            masked["high"] += 1
        elif advantage < 0 and policy < engine and distance > low:
            masked["low"] += 1
        else:
            ratio = min(math.exp(policy - before), limits.get("ratio_clip_c", math.inf)) * math.exp(before - engine)
            total = total - ratio * advantage * p
    (total / kept.sum()).backward()
    loss, counts = GRPOLoss(loss_config(policy_loss=kind, **limits, **WEIGHTED)), count_masked(rows_of(inputs["mask"]))
    found, metrics = loss(own := inputs["logprobs"].clone().requires_grad_(), batch_of(inputs), counts)
    found.backward()
    assert found.item() == pytest.approx(total.item() / kept.sum().item())
    torch.testing.assert_close(own.grad, logprobs.grad, atol=TOLERANCE, rtol=TOLERANCE)
    for side, count in masked.items():
        assert metrics[f"clip_ratio/{side}"].item() == pytest.approx(count / kept.sum().item())
    assert not limits or any(masked.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("changes", "of_token", "of_sums"), CASES.values(), ids=CASES)
def test_value_and_gradient_are_the_published_ones(changes, of_token, of_sums, seed):
    inputs = doubles(seed)
    for ours, theirs in zip(our_loss(loss_config(**changes), inputs), by_hand(inputs, of_token, of_sums), strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_sequences_ratio_has_the_same_gradient_with_and_without_its_tokens():
    """GSPO-token is GSPO where all tokens of a sequence have one advantage."""
    inputs = doubles(1)
    settings = {"token_level_loss": False, "ratio_clip_min": 0.1, "ratio_clip_max": 0.1}
    whole, tokens = (
        our_loss(loss_config(**settings, sequence_level_importance_ratios=level), inputs) for level in (True, "token")
    )
    for one, other in zip(whole, tokens, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


TERMS = {name: CASES[name][0] for name in ("constant length", "cispo", "sapo", "gspo token", "reinforce")}
TERMS["dppo"] = {"policy_loss": "dppo_kl", "dppo_mask_high": 0.01}


@pytest.mark.parametrize("changes", TERMS.values(), ids=TERMS)
def test_terms_add_up_over_micro_batches_and_ignore_padding(changes):
    inputs = doubles(2)
    loss, counts = GRPOLoss(loss_config(**changes)), count_masked(rows_of(inputs["mask"]))
    whole, metrics = loss(inputs["logprobs"], batch_of(inputs), counts)
    dirty = {
        key: torch.where(inputs["mask"] > 0, values, -math.inf) if key.endswith("logprobs") else values
        for key, values in inputs.items()
    }
    halves = [{key: values[part] for key, values in dirty.items()} for part in (slice(0, 2), slice(2, 6))]
    found = [loss(half["logprobs"], batch_of(half), counts) for half in halves]
    torch.testing.assert_close(sum(value for value, _ in found), whole)
    torch.testing.assert_close(
        sum(own["clip_ratio/high"] for _, own in found), metrics["clip_ratio/high"], atol=1e-6, rtol=0
    )


WEIGHTED = {"use_importance_sampling_correction": True}
KL = {"reference_policy_kl_penalty": 0.1}
EXTREMES = {
    "clip": {},
    "dual clip": {"ratio_clip_c": 3.0},
    "cispo": {"policy_loss": "cispo"},
    "sapo": {"policy_loss": "sapo"},
    "dppo tv": {"policy_loss": "dppo_tv"},
    "dppo kl": {"policy_loss": "dppo_kl"},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "gspo token": {"sequence_level_importance_ratios": "token"},
    "weights of tokens": WEIGHTED,
    "weights of sequences": WEIGHTED | {"importance_sampling_correction_level": "sequence"},
    "rejection": {"sequence_rejection_ratio": 2.0, "sequence_rejection_ratio_min": 0.5},
    "k1": KL | {"reference_policy_kl_type": "k1"},
    "k2": KL | {"reference_policy_kl_type": "k2"},
    "k3": KL,
    "k3 as it stands": KL | {"use_bias_correction_kl": False},
    "k3 in the reward": KL | {"use_kl_in_reward": True},
    "k3 clamped": KL | {"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0},
}


@pytest.mark.parametrize("moved", ["previous_logprobs", "generation_logprobs", "reference_logprobs", "logprobs"])
@pytest.mark.parametrize("changes", EXTREMES.values(), ids=EXTREMES)
def test_large_log_ratios_leave_loss_gradient_and_metrics_finite(changes, moved):
    for nats in (89.0, -89.0, 3000.0, -3000.0):
        for advantage in (1.0, 0.0, -1.0):
            inputs = random_inputs(3)
            inputs["advantages"] = torch.full_like(inputs["advantages"], advantage)
            inputs[moved] = inputs[moved] + nats
            logprobs = inputs["logprobs"].requires_grad_()
            counts = count_masked(rows_of(inputs["mask"]))
            loss, metrics = GRPOLoss(loss_config(**changes))(logprobs, batch_of(inputs), counts)
            loss.backward()
            assert loss.isfinite(), (nats, advantage)
            assert logprobs.grad is not None and logprobs.grad.isfinite().all(), (nats, advantage)
            assert all(math.isfinite(value) for value in metrics.values()), (nats, advantage)


def test_a_long_response_that_drifts_has_a_finite_weight():
    shape = (2, 2000)
    inputs = {name: -torch.ones(shape) for name in ("logprobs", "previous_logprobs")}
    inputs |= {"generation_logprobs": -torch.ones(shape) - 0.05, "mask": torch.ones(shape)}
    inputs["advantages"] = torch.tensor([0.0, 1.0])
    settings = WEIGHTED | {"importance_sampling_correction_level": "sequence"}
    value, gradient = our_loss(loss_config(**settings), inputs)
    assert value.item() == pytest.approx(-math.exp(20) / 2)
    assert gradient.isfinite().all()


def test_cispo_counts_bounds_of_all_tokens_and_sapo_has_none():
    inputs = doubles(0) | {"advantages": torch.ones(6, dtype=torch.float64)}
    counts = count_masked(rows_of(inputs["mask"]))

    def metrics(kind):
        return GRPOLoss(loss_config(policy_loss=kind))(inputs["logprobs"], batch_of(inputs), counts)[1]

    kept = inputs["mask"].bool()
    ratio = (inputs["logprobs"] - inputs["previous_logprobs"]).exp()[kept]
    assert metrics("cispo")["clip_ratio/low"].item() == pytest.approx((ratio < 0.8).double().mean().item())
    assert metrics("clip")["clip_ratio/low"].item() == 0 < (ratio < 0.8).double().mean().item()
    assert metrics("sapo")["clip_ratio/high"].item() == metrics("reinforce")["clip_ratio/high"].item() == 0


def test_the_entropy_bonus_is_the_mean_over_tokens():
    inputs = doubles(0) | {"entropy": torch.rand(6, 10, dtype=torch.float64).requires_grad_()}
    counts = count_masked(rows_of(inputs["mask"]))
    plain, bonus = GRPOLoss(loss_config()), GRPOLoss(loss_config(entropy_coef=0.5))
    assert needs_of(plain) == needs_of(bonus) == {"entropy"}
    without, metrics = plain(inputs["logprobs"], batch_of(inputs), counts)
    total, with_entropy = bonus(inputs["logprobs"], batch_of(inputs), counts)
    mean = inputs["entropy"][inputs["mask"].bool()].mean()
    torch.testing.assert_close(total, without - 0.5 * mean, atol=TOLERANCE, rtol=0)
    assert with_entropy["entropy"].item() == metrics["entropy"].item() == pytest.approx(mean.item())
    assert not without.requires_grad, "the entropy is only measured"
    total.backward()
    torch.testing.assert_close(inputs["entropy"].grad, -0.5 * inputs["mask"] / inputs["mask"].sum())

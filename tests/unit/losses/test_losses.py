import math

import pytest
import torch

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.grpo import GRPOLoss, kl_estimate
from nemo_rl_lite.losses.interface import combine_metrics, count_masked, floats, loss_of, mean_of_steps
from tests.unit.losses.batches import batch_of, loss_config, rows_of
from tests.unit.losses.test_losses_match_trl import our_loss, random_inputs

EVERYTHING = {
    "ratio_clip_c": 2.0,
    "reference_policy_kl_penalty": 0.05,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 2.0,
}


@pytest.mark.parametrize("pieces", [[6], [3, 3], [1, 5], [2, 2, 2], [1] * 6])
@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("in_reward", [True, False])
def test_loss_does_not_depend_on_how_the_batch_is_split(pieces, token_level, in_reward):
    inputs = random_inputs()
    loss = GRPOLoss(loss_config(**EVERYTHING, token_level_loss=token_level, use_kl_in_reward=in_reward))
    counts = count_masked(rows_of(inputs["mask"]))
    whole, whole_metrics = loss(inputs["logprobs"], batch_of(inputs), counts)
    parts, metrics, start = [], [], 0
    for size in pieces:
        piece = {name: values[start : start + size] for name, values in inputs.items()}
        value, piece_metrics = loss(piece["logprobs"], batch_of(piece), counts)
        parts.append(value)
        metrics.append({name: metric.item() for name, metric in piece_metrics.items()})
        start += size
    torch.testing.assert_close(sum(parts), whole)
    combined = combine_metrics(metrics)
    for name, value in whole_metrics.items():
        assert combined[name] == pytest.approx(value.item(), abs=1e-6), name


def test_padding_may_hold_anything():
    inputs = random_inputs()
    loss, counts = GRPOLoss(loss_config(**EVERYTHING)), count_masked(rows_of(inputs["mask"]))
    clean, _ = loss(inputs["logprobs"], batch_of(inputs), counts)
    dirty = {
        name: torch.where(inputs["mask"] > 0, values, -50.0) if name.endswith("logprobs") else values
        for name, values in inputs.items()
    }
    soiled, _ = loss(dirty["logprobs"], batch_of(dirty), counts)
    torch.testing.assert_close(soiled, clean)


def test_on_policy_the_ratio_is_one_and_the_kl_zero():
    inputs = random_inputs()
    for name in ("previous_logprobs", "reference_logprobs", "generation_logprobs"):
        inputs[name] = inputs["logprobs"]
    _, metrics = GRPOLoss(loss_config(**EVERYTHING))(
        inputs["logprobs"], batch_of(inputs), count_masked(rows_of(inputs["mask"]))
    )
    assert metrics["kl_penalty"].item() == 0
    assert metrics["probs_ratio"].item() == pytest.approx(1, abs=1e-6)
    assert metrics["probs_ratio_min"].item() == metrics["probs_ratio_max"].item() == 1


def test_an_empty_response_contributes_nothing_and_breaks_nothing():
    inputs = random_inputs()
    inputs["mask"][2] = 0
    counts = count_masked(rows_of(inputs["mask"]))
    assert counts.sequences == 5
    for token_level in (True, False):
        loss, _ = GRPOLoss(loss_config(token_level_loss=token_level))(inputs["logprobs"], batch_of(inputs), counts)
        assert math.isfinite(loss.item())
    empty = {name: values[2:3] for name, values in inputs.items()}
    loss, metrics = GRPOLoss(loss_config())(empty["logprobs"], batch_of(empty), counts)
    assert loss.item() == 0
    assert metrics["probs_ratio_min"].item() == math.inf


@pytest.mark.parametrize("sampler", [None, [0.1, 0.5, -0.4, 0.2]], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(("kind", "tolerance"), [("k1", 1e-6), ("k2", 2e-3), ("k3", 1e-6)])
def test_kl_estimators_have_the_right_mean_and_gradient(kind, tolerance, sampler):
    """Exactly, over a small vocabulary: E[estimate] and E[gradient] against the true KL, whichever policy sampled. (The
    mean of k2 is the KL to second order.)"""
    logits = torch.tensor([0.3, -0.2, 0.6, 0.1], requires_grad=True)
    reference = torch.tensor([0.25, -0.15, 0.5, 0.2]).log_softmax(0)
    true = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
    (true_gradient,) = torch.autograd.grad(true, logits)

    logprobs = logits.log_softmax(0)
    sampled_with = logprobs.detach() if sampler is None else torch.tensor(sampler).log_softmax(0)
    expected = (sampled_with.exp() * kl_estimate(logprobs, reference, kind, sampled_with)).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    assert expected.item() == pytest.approx(true.item(), abs=max(tolerance, 1e-6))
    torch.testing.assert_close(gradient, true_gradient, atol=tolerance, rtol=0)


LOGITS = torch.tensor([0.3, -0.2, 0.6, 0.1])
REFERENCE = torch.tensor([0.25, -0.15, 0.5, 0.2]).log_softmax(0)


def expected_penalty(kind, weighted, engine, age=1):
    """Value and gradient of the penalty in the loss, over samples of `engine`: each token with its probability there,
    in rows of one token, and a policy at the start of the step that is neither."""
    logits = LOGITS.clone().requires_grad_()
    logprobs, previous = logits.log_softmax(0), torch.tensor([0.7, 0.3, -0.2, 0.0]).log_softmax(0)
    config = loss_config(
        reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind, use_bias_correction_kl=weighted
    )
    counts, total = count_masked(rows_of(torch.ones(1, 1))), torch.zeros(())
    for token, chance in enumerate((engine if age else previous).exp()):
        own = {"previous_logprobs": previous, "generation_logprobs": engine, "reference_logprobs": REFERENCE}
        batch = {name: values[token].view(1, 1) for name, values in own.items()}
        batch |= {"mask": torch.ones(1, 1), "advantages": torch.zeros(1), "ages": torch.full((1, 1), age)}
        total = total + chance * GRPOLoss(config)(logprobs[token].view(1, 1), batch_of(batch), counts)[0]
    return total.item(), torch.autograd.grad(total, logits)[0]


def true_kl():
    logits = LOGITS.clone().requires_grad_()
    true = (logits.softmax(0) * (logits.log_softmax(0) - REFERENCE)).sum()
    return true.item(), torch.autograd.grad(true, logits)[0]


@pytest.mark.parametrize(("drift", "age"), [(0.0, 1), (0.1, 1), (0.6, 2), (3.0, 1), (0.1, 0)])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_penalty_is_exact_whichever_weights_sampled(kind, drift, age):
    """The engine's rounding is no part of a fresh token's weight."""
    engine = (LOGITS + drift * torch.tensor([1.0, -1.0, 0.5, -0.2])).log_softmax(0)
    (value, gradient), (true, true_gradient) = expected_penalty(kind, True, engine, age), true_kl()
    assert value == pytest.approx(true, abs=1e-6)
    torch.testing.assert_close(gradient, true_gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_on_policy_weights_of_the_penalty_are_one_with_a_gradient(kind):
    own = LOGITS.log_softmax(0)
    (value, gradient), (true, true_gradient) = expected_penalty(kind, "on_policy", own), true_kl()
    assert value == pytest.approx(true, abs=1e-6)
    torch.testing.assert_close(gradient, true_gradient, atol=1e-6, rtol=0)
    drifted = (LOGITS + torch.tensor([1.0, -1.0, 0.5, -0.2])).log_softmax(0)
    plain = (drifted.exp() * kl_estimate(own, REFERENCE, kind, None)).sum().item()
    assert expected_penalty(kind, "on_policy", drifted)[0] == pytest.approx(plain, abs=1e-6)


def test_k3_as_it_stands_has_the_gradient_of_the_forward_kl():
    logits = torch.tensor([0.9, -0.2, 0.6, -0.8], requires_grad=True)
    reference = torch.tensor([0.25, -0.15, 0.5, 0.2]).log_softmax(0)
    logprobs = logits.log_softmax(0)
    plain = (logprobs.exp().detach() * kl_estimate(logprobs, reference, "k3", None)).sum()
    forward = (reference.exp() * (reference - logprobs)).sum()
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (plain, forward)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)


def test_a_token_whose_log_ratio_is_clamped_has_no_gradient():
    logprobs = torch.tensor([-30.0, -1.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([0.0, -2.0]), "k1", logprobs.detach(), 20.0).sum().backward()
    assert logprobs.grad.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("name", ["logprobs", "previous_logprobs", "generation_logprobs", "reference_logprobs"])
@pytest.mark.parametrize(
    "changes", [{}, {"sequence_level_importance_ratios": True, "token_level_loss": False}, {"use_kl_in_reward": True}]
)
def test_an_infinite_logprob_outside_the_mask_changes_nothing(name, changes):
    config = loss_config(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True, **changes)
    inputs = random_inputs()
    expected = our_loss(config, inputs)
    inputs[name] = inputs[name].masked_fill(inputs["mask"] == 0, -math.inf)
    for value, other in zip(our_loss(config, inputs), expected, strict=True):
        assert torch.equal(value, other)


def test_a_sequence_ratio_has_a_sequence_correction_of_the_engine():
    """GSPO's weight is the product over the sequence, as NeMo-RL has it."""
    settings = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    config = loss_config(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=2.0, **settings)
    inputs = random_inputs()
    difference = (inputs["previous_logprobs"] - inputs["generation_logprobs"]) * inputs["mask"]
    weighted = dict(inputs, advantages=inputs["advantages"] * difference.sum(dim=1).exp().clamp(max=2.0))
    for value, other in zip(our_loss(config, inputs), our_loss(loss_config(**settings), weighted), strict=True):
        torch.testing.assert_close(value, other)


def of_step(loss: float, skipped: float = 0.0) -> dict[str, float]:
    return {"loss": loss, "ratio_min": loss, "ratio_max": loss, "skipped_steps": skipped}


@pytest.mark.parametrize(
    ("steps", "mean", "least", "most", "skipped"),
    [
        ([of_step(1.0), of_step(3.0)], 2, 1, 3, 0),
        ([of_step(1.0), of_step(math.nan, 1.0), of_step(3.0), of_step(5.0)], 3, 1, 5, 1 / 4),
        # A finite loss whose gradient was not.
        ([of_step(9.0, 1.0), of_step(2.0)], 2, 2, 2, 1 / 2),
        ([of_step(math.nan, 1.0)] * 2, math.nan, math.nan, math.nan, 1),
        # A step that was taken hides nothing.
        ([of_step(math.nan), of_step(2.0)], math.nan, math.nan, math.nan, 0),
    ],
)
def test_metrics_of_a_rollout_are_those_of_the_steps_that_were_taken(steps, mean, least, most, skipped):
    found = {"loss": mean, "ratio_min": least, "ratio_max": most, "skipped_steps": skipped}
    assert mean_of_steps(steps) == pytest.approx(found, nan_ok=True)


@pytest.mark.parametrize("order", [[math.nan, 0.0], [1.0, math.nan]])
def test_the_extreme_of_a_nan_is_nan_in_any_order(order):
    combined = combine_metrics([{"ratio_min": value, "ratio_max": value} for value in order])
    assert all(math.isnan(value) for value in combined.values())


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda logprobs: (logprobs.sum().detach(), {"loss": logprobs.sum()}), "has no gradient"),
        (lambda logprobs: (0.5, {"loss": logprobs.sum()}), "has no gradient"),
        (lambda logprobs: (logprobs.sum(), {"nll": logprobs.sum()}), "has no metric 'loss', .*: nll"),
    ],
)
def test_what_cannot_train_is_refused_where_it_is_returned(returned, words):
    inputs = random_inputs()
    batch, counts = batch_of(inputs), count_masked(rows_of(inputs["mask"]))
    logprobs = inputs["logprobs"].detach().requires_grad_()
    with pytest.raises(TrainingError, match=f"^algorithm.loss: the result of function {words}"):
        loss_of(lambda logprobs, batch, counts: returned(logprobs), logprobs, batch, counts)


def test_a_micro_batch_without_trained_tokens_may_have_a_constant_loss():
    inputs = random_inputs()
    logprobs, batch = inputs["logprobs"].detach().requires_grad_(), batch_of(inputs | {"mask": inputs["mask"] * 0})
    constant = (torch.zeros(()), {"loss": torch.zeros(())})
    value, metrics = loss_of(lambda *arguments: constant, logprobs, batch, count_masked([]))
    assert value == 0 and metrics == constant[1]
    value.backward()
    assert torch.equal(logprobs.grad, torch.zeros_like(logprobs)), "other ranks wait for its gradients"


def test_metrics_of_several_micro_batches_become_the_numbers_that_they_are():
    third, whole, yes = torch.tensor(1 / 3), torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([True])
    shares = [{"a": third, "b": whole}, {}, {"c": yes, "a": torch.tensor(7), "d": third.requires_grad_()}]
    numbers = floats(shares)
    assert numbers == [{name: value.item() for name, value in share.items()} for share in shares]
    assert [list(share) for share in numbers] == [["a", "b"], [], ["c", "a", "d"]] and floats([{}]) == [{}]

"""The correction for the engines' probabilities: each mode against its formula in plain Python."""

import math
from math import prod

import pytest
import torch

from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import count_masked, summary
from tests.unit.losses.batches import batch_of, loss_config, rows_of
from tests.unit.losses.test_losses_match_trl import our_loss, random_inputs

ON = {"use_importance_sampling_correction": True}
ICEPOP = {
    **ON,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio_min": 0.7,
    "truncated_importance_sampling_ratio": 1.3,
}
SEQ_MASK = {
    **ON,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio_min": 0.9,
    "truncated_importance_sampling_ratio": 1.15,
}
SEQUENCE = {"importance_sampling_correction_level": "sequence"}
TIS = {**ON, "truncated_importance_sampling_ratio": 1.2}
REJECT = {"sequence_rejection_ratio_min": 0.9, "sequence_rejection_ratio": 1.15}


def root(ratios):
    """The geometric mean."""
    return prod(ratios) ** (1 / len(ratios))


# The weights of one sequence, from the ratios of its tokens. TRL calls tis and icepop token_truncate and token_mask, or
# sequence_truncate and sequence_mask with one weight per sequence.
MODES = {
    "no bounds": (ON, lambda ratios: ratios),
    "tis": (TIS, lambda ratios: [min(ratio, 1.2) for ratio in ratios]),
    "tis, both bounds": (
        {**TIS, "truncated_importance_sampling_ratio_min": 0.8},
        lambda ratios: [min(max(ratio, 0.8), 1.2) for ratio in ratios],
    ),
    "icepop": (ICEPOP, lambda ratios: [ratio if 0.7 <= ratio <= 1.3 else 0.0 for ratio in ratios]),
    "seq-mask-tis": (SEQ_MASK, lambda ratios: ratios if 0.9 <= root(ratios) <= 1.15 else [0.0] * len(ratios)),
    "sequence_truncate": ({**TIS, **SEQUENCE}, lambda ratios: [min(prod(ratios), 1.2)] * len(ratios)),
    "sequence_mask": (
        {**ICEPOP, **SEQUENCE, "truncated_importance_sampling_ratio_min": None},
        lambda ratios: [prod(ratios) if prod(ratios) <= 1.3 else 0.0] * len(ratios),
    ),
    "rejection alone": (REJECT, lambda ratios: [float(0.9 <= root(ratios) <= 1.15)] * len(ratios)),
    "rejection and tis": (
        {**TIS, **REJECT},
        lambda ratios: [min(ratio, 1.2) * (0.9 <= root(ratios) <= 1.15) for ratio in ratios],
    ),
    "veto and tis": (
        {**TIS, "token_veto_ratio": 0.5},
        lambda ratios: [min(ratio, 1.2) * (min(ratios) >= 0.5) for ratio in ratios],
    ),
}
each_mode = pytest.mark.parametrize(("settings", "formula"), MODES.values(), ids=MODES)


def ratios_of(inputs):
    """The ratios of each sequence's own tokens, as lists."""
    for previous, generation, mask in zip(
        *(inputs[name].tolist() for name in ("previous_logprobs", "generation_logprobs", "mask")), strict=True
    ):
        yield [math.exp(one - other) for one, other, own in zip(previous, generation, mask, strict=True) if own]


def weights_of(config, inputs):
    """The weights of each sequence's own tokens, as lists."""
    mask = inputs["mask"]
    found = GRPOLoss(config).correction_weights(batch_of(inputs)).expand_as(mask)
    return [row[own > 0].tolist() for row, own in zip(found, mask, strict=True)]


@each_mode
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_those_of_the_formula(settings, formula, seed):
    inputs = random_inputs(seed, rows=12)
    wanted = [formula(ratios) for ratios in ratios_of(inputs)]
    found = weights_of(loss_config(**settings), inputs)
    for own, other in zip(found, wanted, strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    # The inputs reach both sides of each bound.
    assert wanted != list(ratios_of(inputs)) or settings == ON
    assert any(any(own) for own in wanted)


@each_mode
@pytest.mark.parametrize("token_level", [True, False])
def test_a_weight_multiplies_the_policy_term_and_nothing_else(settings, formula, token_level):
    """What is left out still counts in the mean, and keeps its KL penalty."""
    inputs = random_inputs()
    common = {"token_level_loss": token_level, "reference_policy_kl_penalty": 0.1, "ratio_clip_c": 2.0}
    value, gradient = our_loss(loss_config(**common, **settings), inputs)
    kl, kl_gradient = our_loss(loss_config(**common), inputs | {"advantages": inputs["advantages"] * 0})
    plain = loss_config(**common | {"reference_policy_kl_penalty": 0.0})
    counts, policy, policy_gradient = count_masked(rows_of(inputs["mask"])), 0.0, torch.zeros_like(gradient)
    weights = [formula(ratios) for ratios in ratios_of(inputs)]
    for row, own in enumerate(weights):
        for place, weight in zip(inputs["mask"][row].nonzero().flatten().tolist(), own, strict=True):
            logprobs = inputs["logprobs"].clone().requires_grad_()
            mask = torch.zeros_like(inputs["mask"])
            mask[row, place] = 1
            alone, _ = GRPOLoss(plain)(logprobs, batch_of(inputs | {"mask": mask}), count_masked(rows_of(mask)))
            alone.backward()
            share = weight / (counts.tokens if token_level else counts.sequences * len(own))
            policy, policy_gradient = policy + share * alone.item(), policy_gradient + share * logprobs.grad
    assert value.item() == pytest.approx(policy + kl.item(), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradient, policy_gradient + kl_gradient, atol=1e-6, rtol=1e-4)


@each_mode
def test_on_policy_all_modes_are_the_same(settings, formula):
    inputs = random_inputs()
    inputs["generation_logprobs"] = inputs["previous_logprobs"]
    for value, other in zip(our_loss(loss_config(**settings), inputs), our_loss(loss_config(), inputs), strict=True):
        assert torch.equal(value, other)


def metrics_of(config, inputs, counts):
    _, metrics = GRPOLoss(config)(inputs["logprobs"], batch_of(inputs), counts)
    return {name: value.item() for name, value in metrics.items()}


@each_mode
def test_metrics_count_what_was_done_however_the_batch_is_split(settings, formula):
    inputs, config = random_inputs(rows=12), loss_config(**settings)
    counts = count_masked(rows_of(inputs["mask"]))
    whole = summary(GRPOLoss(config), [metrics_of(config, inputs, counts)])
    for pieces in ([5, 7], [1] * 12):
        parts = zip(*(values.split(pieces) for values in inputs.values()), strict=True)
        shares = [metrics_of(config, dict(zip(inputs, part, strict=True)), counts) for part in parts]
        assert summary(GRPOLoss(config), shares) == pytest.approx(whole, rel=1e-5, abs=1e-7)

    ratios = list(ratios_of(inputs))
    weights = [weight for own in ratios for weight in formula(own)]
    squares = [weight * weight for weight in weights]
    assert whole["correction/weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert whole["correction/ess"] == pytest.approx(sum(weights) ** 2 / sum(squares) / len(weights), rel=1e-5)
    assert "correction/weight_square" not in whole
    # In each mode something is out of bounds, and is counted once, as what was done to it.
    counted = {name for name in ("truncated", "masked", "rejected") if whole[f"correction/{name}"]}
    rejects = {"sequence_rejection_ratio", "token_veto_ratio"} & settings.keys()
    kind = settings.get("truncated_importance_sampling_type", "tis")
    acts = {"tis": "truncated", "icepop": "masked", "seq-mask-tis": "rejected"}[kind]
    bounded = "truncated_importance_sampling_ratio" in settings
    assert counted == ({acts} if bounded else set()) | ({"rejected"} if rejects else set())


def test_shares_of_what_was_truncated_masked_and_rejected():
    inputs = random_inputs(rows=12)
    counts, ratios = count_masked(rows_of(inputs["mask"])), list(ratios_of(inputs))
    tokens = [ratio for own in ratios for ratio in own]

    def share(settings, name):
        return metrics_of(loss_config(**settings), inputs, counts)[f"correction/{name}"]

    assert share(TIS, "truncated") == pytest.approx(sum(ratio > 1.2 for ratio in tokens) / len(tokens))
    assert share(ICEPOP, "masked") == pytest.approx(sum(not 0.7 <= ratio <= 1.3 for ratio in tokens) / len(tokens))
    rejected = sum(not 0.9 <= root(own) <= 1.15 for own in ratios) / len(ratios)
    assert 0 < share(SEQ_MASK, "rejected") == pytest.approx(rejected)
    assert share(REJECT, "rejected") == pytest.approx(rejected)


def test_the_effective_sample_size_is_one_for_equal_weights_and_none_where_all_is_left_out():
    inputs = random_inputs()
    inputs["generation_logprobs"] = inputs["previous_logprobs"] - 0.3
    config, counts = loss_config(**ON), count_masked(rows_of(inputs["mask"]))
    assert GRPOLoss(config).summarize(metrics_of(config, inputs, counts))["correction/ess"] == pytest.approx(
        1, rel=1e-5
    )
    nothing = GRPOLoss(config).summarize(metrics_of(loss_config(**SEQ_MASK), inputs, counts))
    assert nothing["correction/ess"] == nothing["correction/weight"] == nothing["loss"] == 0
    assert nothing["correction/rejected"] == 1


def test_a_weight_that_overflows_is_truncated_masked_or_rejected():
    inputs = random_inputs()
    inputs["previous_logprobs"] = inputs["generation_logprobs"] + 200.0
    for settings, weight in ((TIS, 1.2), (ICEPOP, 0.0), (SEQ_MASK, 0.0), ({**TIS, **SEQUENCE}, 1.2)):
        found = weights_of(loss_config(**settings), inputs)
        assert {round(one, 6) for own in found for one in own} == {weight}


def test_the_clip_is_counted_where_it_acts():
    """As TRL counts it: below where the advantage is negative, above where it is positive."""
    inputs = random_inputs()
    metrics = metrics_of(loss_config(), inputs, count_masked(rows_of(inputs["mask"])))
    low = high = tokens = 0
    for row, advantage in enumerate(inputs["advantages"].tolist()):
        for place in inputs["mask"][row].nonzero().flatten().tolist():
            ratio = math.exp(inputs["logprobs"][row, place] - inputs["previous_logprobs"][row, place])
            tokens += 1
            low += ratio < 0.8 and advantage < 0
            high += ratio > 1.2 and advantage > 0
    assert 0 < metrics["clip_ratio/low"] == pytest.approx(low / tokens)
    assert 0 < metrics["clip_ratio/high"] == pytest.approx(high / tokens)

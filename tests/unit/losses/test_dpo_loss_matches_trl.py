"""Values and gradients of the DPO loss against TRL's DPOTrainer, on the same random inputs."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.config.schema_algorithm import DPOConfig
from nemo_rl_lite.losses.supervised import DPOLoss
from tests.unit.losses.batches import dpo_config, rows_of, split_loss

TOLERANCE = 1e-5


def random_pairs(seed: int = 0, pairs: int = 5, prompt: int = 3, response: int = 8) -> dict[str, torch.Tensor]:
    """Rows of pairs, the chosen before the rejected, whose responses end at random places."""
    source = torch.Generator().manual_seed(seed)
    shape = (2 * pairs, prompt + response)
    lengths = torch.randint(1, response + 1, (2 * pairs, 1), generator=source)
    place = torch.arange(shape[1])[None] - prompt
    logprobs = -torch.rand(shape, generator=source) * 3
    mask = ((place >= 0) & (place < lengths)).float()
    reference_BT = logprobs + 0.4 * torch.randn(shape, generator=source)
    return {"logprobs": logprobs, "mask": mask, "reference_logprobs": reference_BT}


def our_loss(config: DPOConfig, pairs: dict, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """The sum over micro-batches with this number of rows."""
    loss = DPOLoss(config)
    return split_loss(loss, pairs, loss.counts(rows_of(pairs["mask"])), rows)


def trl_loss(config: DPOConfig, pairs: dict) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """TRL's own `_compute_loss`, with a trainer reduced to the attributes it reads. Its rows are all chosen, then all
    rejected ones."""
    # Its import takes seconds, in every process that collects tests.
    from trl.trainer.dpo_trainer import DPOTrainer

    logprobs = pairs["logprobs"].clone().requires_grad_()
    order = torch.cat([torch.arange(0, len(logprobs), 2), torch.arange(1, len(logprobs), 2)])
    mask = pairs["mask"][order]
    outputs = SimpleNamespace(
        log_probs=(logprobs[order] * mask)[:, 1:],
        entropy=torch.zeros_like(mask[:, 1:]),
        mean_logits=torch.zeros_like(mask[:, 1:]),
        is_top1=torch.zeros_like(mask[:, 1:], dtype=torch.bool),
    )
    averaged = config.preference_loss == "dpo" and config.preference_average_log_probs
    kinds = ["ipo" if config.preference_loss == "ipo" else "sigmoid_norm" if averaged else "sigmoid"]
    weights = [config.preference_loss_weight]
    if config.label_smoothing:
        kinds = ["robust"]
    if config.sft_loss_weight:
        # TRL averages over all chosen tokens, and ours is NeMo-RL's: a sum over each response.
        tokens_a_response = pairs["mask"][::2].sum().item() / (len(logprobs) / 2)
        kinds, weights = [*kinds, "sft"], [*weights, config.sft_loss_weight * tokens_a_response]
    unchanged = lambda value, **_: value  # noqa: E731
    reference = (pairs["reference_logprobs"] * pairs["mask"]).sum(dim=1)[order].chunk(2)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=unchanged, gather_for_metrics=unchanged),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=kinds,
        loss_weights=weights,
        beta=config.reference_policy_kl_penalty,
        label_smoothing=config.label_smoothing,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.long),
        "attention_mask": torch.ones(mask.shape),
        "completion_mask": mask,
        "ref_chosen_logps": reference[0],
        "ref_rejected_logps": reference[1],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    loss.backward()
    return loss.detach(), logprobs.grad, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("rows", [2, 4, 10])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reference_policy_kl_penalty": 0.5},
        {"preference_loss": "ipo"},
        {"preference_average_log_probs": True},
        {"sft_loss_weight": 0.7},
        {"sft_loss_weight": 0.3, "preference_loss_weight": 0.5},
    ],
    ids=lambda changes: "+".join(changes) or "defaults",
)
def test_value_and_gradient_agree_with_trl_however_pairs_are_split(changes, seed, rows):
    config, pairs = dpo_config(**changes), random_pairs(seed)
    ours, our_gradient, metrics = our_loss(config, pairs, rows)
    theirs, their_gradient, their_metrics = trl_loss(config, pairs)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(our_gradient, their_gradient, atol=TOLERANCE, rtol=TOLERANCE)
    if config.preference_loss == "dpo" and not config.preference_average_log_probs:
        # TRL's are of sums always.
        assert metrics["accuracy"] == pytest.approx(their_metrics["rewards/accuracies"])
        assert metrics["rewards_chosen_mean"] == pytest.approx(their_metrics["rewards/chosen"], abs=TOLERANCE)
        assert metrics["rewards_rejected_mean"] == pytest.approx(their_metrics["rewards/rejected"], abs=TOLERANCE)
        assert metrics["rewards_margin_mean"] == pytest.approx(their_metrics["rewards/margins"], abs=TOLERANCE)


def test_smoothing_mixes_the_loss_with_that_of_exchanged_pairs():
    """TRL's `robust` loss is an unbiased variant: (1 - 2e) times it is (1 - e) of the loss less e of the exchanged."""
    epsilon, pairs = 0.2, random_pairs()
    swapped = {name: values.view(-1, 2, *values.shape[1:]).flip(1).flatten(0, 1) for name, values in pairs.items()}
    straight, exchanged = our_loss(dpo_config(), pairs)[0], our_loss(dpo_config(), swapped)[0]
    smoothed, _, _ = our_loss(dpo_config(label_smoothing=epsilon), pairs)
    assert smoothed.item() == pytest.approx((1 - epsilon) * straight.item() + epsilon * exchanged.item(), abs=TOLERANCE)
    robust, _, _ = trl_loss(dpo_config(label_smoothing=epsilon), pairs)
    expected = ((1 - epsilon) * straight.item() - epsilon * exchanged.item()) / (1 - 2 * epsilon)
    assert robust.item() == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("is_averaged", [True, False])
def test_the_chosen_responses_likelihood_is_a_sum_over_each_as_in_nemo_rl_or_an_average(is_averaged):
    pairs = random_pairs()
    _, _, metrics = our_loss(dpo_config(sft_average_log_probs=is_averaged), pairs, rows=2)
    sums, tokens = (pairs["logprobs"] * pairs["mask"]).sum(dim=1)[::2], pairs["mask"].sum(dim=1)[::2]
    expected = sums / tokens if is_averaged else sums
    assert metrics["sft_loss"] == pytest.approx(-expected.mean().item(), abs=TOLERANCE)


def test_a_policy_that_is_the_reference_has_half_of_the_pairs_right():
    pairs = random_pairs()
    pairs["reference_logprobs"] = pairs["logprobs"]
    loss, _, metrics = our_loss(dpo_config(), pairs)
    assert loss.item() == pytest.approx(0.693147, abs=TOLERANCE) and metrics["accuracy"] == 0.5


def test_what_lies_outside_the_responses_does_not_matter():
    pairs = random_pairs()
    expected = our_loss(dpo_config(), pairs)[0]
    pairs["logprobs"] = torch.where(pairs["mask"] > 0, pairs["logprobs"], float("-inf"))
    loss, gradient, _ = our_loss(dpo_config(), pairs)
    assert loss == expected and torch.equal(gradient != 0, pairs["mask"] > 0)

"""Values and gradients of KTO and ORPO against TRL's trainers, on the same random inputs."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.supervised import KTOLoss, MeanLogRatio, ORPOLoss, UnpairedLoss, kto_loss, mismatched
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.losses.batches import rows_of, split_loss
from tests.unit.losses.test_dpo_loss_matches_trl import random_pairs

TOLERANCE = 1e-6


def inputs_of(seed: int, labels: str = "TFTTF") -> dict[str, torch.Tensor]:
    rows = {name: values[: len(labels)].double() for name, values in random_pairs(seed).items()}
    return rows | {"rewards": torch.tensor([float(label == "T") for label in labels])}


def labelled_rows(inputs: dict[str, torch.Tensor]) -> list[TokenRow]:
    each = zip(inputs["mask"].tolist(), inputs["rewards"].tolist(), strict=True)
    return [TokenRow([0] * len(mask), np.array(mask) > 0, reward=reward) for mask, reward in each]


def kto_options(**changes):
    overrides = [f"algorithm.{name}={value}" for name, value in changes.items()]
    return compose_config(["algorithm=kto", *overrides]).algorithm


def trl_kto(options, inputs: dict[str, torch.Tensor], other: dict[str, torch.Tensor]):
    """TRL's own `_compute_loss`, with a trainer reduced to the attributes it reads. `other`: mismatched rows."""
    from trl.trainer.kto_trainer import KTOTrainer

    logprobs, mask = inputs["logprobs"].clone().requires_grad_(), inputs["mask"]

    def sums(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return (values * where).sum(dim=1)

    model = SimpleNamespace(training=True)
    unchanged = lambda value, **_: value  # noqa: E731
    trainer = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=unchanged, gather=unchanged),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=options.preference_loss == "kto",
        loss_type=options.preference_loss,
        beta=options.reference_policy_kl_penalty,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        _compute_kl_logps=lambda *_: sums(other["logprobs"], other["mask"]),
    )
    zeros = torch.zeros_like(mask[:, 1:])
    outputs = SimpleNamespace(
        log_probs=(logprobs * mask)[:, 1:], entropy=zeros, mean_logits=zeros, is_top1=zeros > 0, logits=zeros
    )
    batch = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.long),
        "attention_mask": torch.ones(mask.shape),
        "completion_mask": mask,
        "label": inputs["rewards"] > 0,
        "ref_logps": sums(inputs["reference_logprobs"], mask),
        "ref_KL_logps": sums(other["reference_logprobs"], other["mask"]),
    }
    loss = KTOTrainer._compute_loss(trainer, lambda **_: outputs, batch, return_outputs=False)
    loss.backward()
    return loss.detach(), logprobs.grad, trainer._metrics["train"]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("labels", ["TFTTF", "TTTTT", "FFFFF"])
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto_agrees_with_trl_however_responses_are_split(kind, labels, size):
    inputs, other = inputs_of(0, labels), inputs_of(3)
    other["reference_logprobs"] = other["logprobs"] - other["reference_logprobs"].abs() / 5
    options = kto_options(
        preference_loss=kind, reference_policy_kl_penalty=0.3, desirable_weight=1.3, undesirable_weight=0.7
    )
    value, gradient, metrics = trl_kto(options, inputs, other)
    loss = kto_loss(options)
    if kind == "kto":
        _, _, measured = split_loss(MeanLogRatio(), other, MeanLogRatio().counts(labelled_rows(other)), size)
        loss = loss.with_mismatched_kl(measured["loss"])
        assert loss.baseline == pytest.approx(metrics["kl"][-1]) and loss.baseline > 0
    found, own_gradient, own = split_loss(loss, inputs, loss.counts(labelled_rows(inputs)), size)
    torch.testing.assert_close(found, value, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(own_gradient, gradient, atol=TOLERANCE, rtol=0)
    assert own["desirable_share"] == pytest.approx(labels.count("T") / 5)
    assert own.get("kl") == (pytest.approx(metrics["kl"][-1]) if kind == "kto" else None)


def test_a_kl_below_0_counts_as_0():
    options = kto_options()
    assert isinstance(kto_loss(options), KTOLoss) and KTOLoss(options).with_mismatched_kl(-2.0).baseline == 0
    assert not hasattr(UnpairedLoss(options), "with_mismatched_kl")


def test_a_mismatched_row_has_the_response_of_the_row_before():
    rows = [
        TokenRow([1, 2, 30, 40], [False, False, True, True], reward=1.0),
        TokenRow([5, 60, 7, 80], [False, True, False, True], reward=0.0),
        TokenRow([9, 10, 11, 12, 90], [False] * 4 + [True], reward=1.0),
    ]
    found = mismatched(rows, longest=5)
    assert [row.tokens.tolist() for row in found] == [[1, 2, 90], [5, 30, 40], [9, 10, 11, 12, 60]]
    masks = [[False, False, True], [False, True, True], [False] * 4 + [True]]
    assert [row.mask.tolist() for row in found] == masks


def orpo_by_hand(inputs: dict[str, torch.Tensor], beta: float, logprobs: torch.Tensor) -> torch.Tensor:
    """With TRL's own `odds_ratio_loss`, and the likelihood of the chosen response tokens."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    mask = inputs["mask"]
    means = (logprobs * mask).sum(dim=1) / mask.sum(dim=1)
    trainer = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device="cpu"))
    weighted, *_ = ORPOTrainer.odds_ratio_loss(trainer, means[::2], means[1::2])
    return -logprobs[::2][mask[::2] > 0].mean() - weighted.mean()


@pytest.mark.parametrize("size", [2, 4, 10])
@pytest.mark.parametrize("seed", range(2))
def test_orpo_agrees_with_trl_however_pairs_are_split(seed, size):
    inputs = random_pairs(seed)
    options = compose_config(["algorithm=orpo", "algorithm.preference_loss_weight=0.4"]).algorithm
    logprobs = inputs["logprobs"].clone().requires_grad_()
    expected = orpo_by_hand(inputs, 0.4, logprobs)
    expected.backward()
    loss = ORPOLoss(options)
    value, gradient, metrics = split_loss(loss, inputs, loss.counts(rows_of(inputs["mask"])), size)
    torch.testing.assert_close(value, expected.detach(), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(gradient, logprobs.grad, atol=TOLERANCE, rtol=0)
    assert metrics["loss"] == pytest.approx(metrics["sft_loss"] + 0.4 * metrics["preference_loss"])


def test_odds_stay_finite_at_both_ends():
    mask = torch.tensor([[0.0, 1.0]] * 4)
    inputs = {"mask": mask, "logprobs": torch.tensor([[0.0, 0.0], [0.0, -90.0], [0.0, -1e-9], [0.0, 0.0]])}
    options = compose_config(["algorithm=orpo"]).algorithm
    loss = ORPOLoss(options)
    value, gradient, _ = split_loss(loss, inputs, loss.counts(rows_of(mask)))
    assert value.isfinite() and gradient.isfinite().all()

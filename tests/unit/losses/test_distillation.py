"""The losses of distillation against plain torch, and against TRL's divergences."""

import math

import pytest
import torch

from nemo_rl_lite.config.schema_algorithm import DistillationLossConfig
from nemo_rl_lite.losses.distillation import SampledKLLoss, TopkKLLoss
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import count_masked
from tests.unit.losses.batches import batch_of, loss_config, rows_of

ROWS, TOKENS, VOCABULARY, K = 3, 6, 11, 4


def config(**changes) -> DistillationLossConfig:
    own = {"reward_coef": 0.0, "kl_type": "mixed", "mixed_kl_weight": 0.5, "zero_outside_topk": False}
    names = set(own)
    base = {name: value for name, value in changes.items() if name not in names}
    return DistillationLossConfig(**(vars(loss_config(**base)) | own | {n: changes[n] for n in names & set(changes)}))


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Logits of both models for each token, the tokens, and a mask that leaves out prompts and paddings."""
    source = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(ROWS, TOKENS, VOCABULARY, generator=source) for _ in range(2))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]]).float()
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=source)
    return {"student": student.requires_grad_(), "teacher": teacher, "mask": mask, "tokens": tokens}


def topk_batch(given: dict[str, torch.Tensor], k: int):
    """What the workers make of the logits, and the logprobs of the sampled tokens."""
    student, teacher = given["student"].log_softmax(-1), given["teacher"].log_softmax(-1)
    logits, ids = given["teacher"].topk(k, dim=-1)
    tensors = {
        "mask": given["mask"],
        "tokens": given["tokens"],
        "teacher_topk_logits": logits,
        "teacher_topk_ids": ids,
        "student_topk_logprobs": student.gather(-1, ids),
        "teacher_logprobs": teacher.gather(-1, given["tokens"][..., None])[..., 0],
        "entropy": -(student.exp() * student).sum(-1),
    }
    return student.gather(-1, given["tokens"][..., None])[..., 0], batch_of(tensors)


def value_and_gradient(loss, given: dict[str, torch.Tensor], k: int):
    logprobs, batch = topk_batch(given, k)
    value, metrics = loss(logprobs, batch, count_masked(rows_of(given["mask"])))
    (gradient,) = torch.autograd.grad(value, given["student"])
    return value.detach(), gradient, metrics


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0), ("reverse", 1)])
@pytest.mark.parametrize("zero_outside", [False, True])
def test_over_the_whole_vocabulary_the_divergences_are_trls(kind, beta, zero_outside):
    from trl.experimental.gkd import GKDTrainer

    given = inputs()
    loss = TopkKLLoss(config(kl_type=kind, zero_outside_topk=zero_outside))
    value, gradient, _ = value_and_gradient(loss, given, VOCABULARY)
    labels = torch.where(given["mask"] > 0, 0, -100)
    expected = GKDTrainer.generalized_jsd_loss(given["student"], given["teacher"], labels, beta)
    (of_trl,) = torch.autograd.grad(expected, given["student"])
    torch.testing.assert_close(value, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, of_trl, atol=1e-5, rtol=1e-5)


def plain(given, kind: str, zero_outside: bool, weight: float) -> torch.Tensor:
    """The formulas of the docstring, place by place over the whole vocabulary."""
    total = torch.zeros(())
    for row, token in given["mask"].nonzero().tolist():
        student, teacher = given["student"][row, token], given["teacher"][row, token]
        ids = teacher.argsort(descending=True)[:K]
        q = teacher[ids].softmax(0)
        p = student.softmax(0)[ids] if zero_outside else student[ids].softmax(0)
        forward, reverse = (q * (q.log() - p.log())).sum(), (p * (p.log() - q.log())).sum()
        if zero_outside:
            rest = student.softmax(0)[[one for one in range(VOCABULARY) if one not in ids.tolist()]]
            reverse = reverse + (rest * (rest.log() + 100)).sum()
        total = (
            total + {"forward": forward, "reverse": reverse, "mixed": weight * forward + (1 - weight) * reverse}[kind]
        )
    return total / given["mask"].sum()


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("zero_outside", [False, True])
def test_of_the_largest_logits_the_divergences_are_those_of_the_formulas(kind, zero_outside):
    given = inputs(1)
    loss = TopkKLLoss(config(kl_type=kind, zero_outside_topk=zero_outside, mixed_kl_weight=0.3))
    value, gradient, metrics = value_and_gradient(loss, given, K)
    expected = plain(given, kind, zero_outside, 0.3)
    (of_torch,) = torch.autograd.grad(expected, given["student"])
    torch.testing.assert_close(value, expected.detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gradient, of_torch, atol=1e-4, rtol=1e-4)
    assert metrics["loss"] == value
    # The entropy takes a longer pass, and is asked for only where it is read.
    assert ("entropy" in loss.needs) is (zero_outside and kind != "forward")


def test_what_lies_outside_the_mask_does_not_matter():
    given = inputs(2)
    loss, counts = TopkKLLoss(config(zero_outside_topk=True)), count_masked(rows_of(given["mask"]))
    logprobs, batch = topk_batch(given, K)
    value, _ = loss(logprobs, batch, counts)
    outside = given["mask"] == 0
    with torch.no_grad():
        for name in ("teacher_topk_logits", "student_topk_logprobs"):
            getattr(batch, name)[outside] = math.nan
        for one in (logprobs, batch.teacher_logprobs, batch.entropy):
            one[outside] = math.inf
    again, metrics = loss(logprobs, batch, counts)
    assert again == value and all(one.isfinite() for one in metrics.values())


def sampled_batch(given: dict[str, torch.Tensor], **more: torch.Tensor):
    logprobs, batch = topk_batch(given, 1)
    own = {name: getattr(batch, name) for name in ("mask", "tokens", "teacher_logprobs")}
    now = logprobs.detach()
    return logprobs, batch_of(own | {"previous_logprobs": now, "generation_logprobs": now} | more)


@pytest.mark.parametrize("policy_loss", ["clip", "reinforce"])
def test_over_all_tokens_the_policy_gradient_is_that_of_the_reverse_kl(policy_loss):
    """The expectation over a policy's own tokens, which are enumerated here, weighted by their probabilities."""
    given, loss = inputs(3), SampledKLLoss(config(policy_loss=policy_loss))
    counts, gradient = count_masked(rows_of(given["mask"])), torch.zeros_like(given["student"])
    for token in range(VOCABULARY):
        logprobs, batch = sampled_batch(given | {"tokens": torch.full((ROWS, TOKENS), token)})
        value, _ = loss(logprobs, batch, counts)
        (of_places,) = torch.autograd.grad(value, logprobs, retain_graph=True)
        (part,) = torch.autograd.grad(logprobs, given["student"], of_places * logprobs.detach().exp())
        gradient += part
    p, q = given["student"].log_softmax(-1), given["teacher"].log_softmax(-1)
    kl = ((p.exp() * (p - q)).sum(-1) * given["mask"]).sum() / counts.tokens
    (expected,) = torch.autograd.grad(kl, given["student"])
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


def test_the_advantage_of_a_token_is_what_the_teacher_gives_it_more():
    given = inputs(4)
    logprobs, batch = sampled_batch(given)
    counts = count_masked(rows_of(given["mask"]))
    value, metrics = SampledKLLoss(config())(logprobs, batch, counts)
    difference = ((batch.teacher_logprobs - logprobs) * given["mask"]).sum() / given["mask"].sum()
    torch.testing.assert_close(value, -difference)
    torch.testing.assert_close(metrics["teacher_kl"], -difference.detach())
    torch.testing.assert_close(metrics["student_logprobs"] - metrics["teacher_logprobs"], metrics["teacher_kl"])


def test_the_reward_is_added_by_its_coefficient():
    """With a teacher that agrees with the policy, what is left is GRPO's loss times the coefficient."""
    given = inputs(5)
    logprobs, batch = sampled_batch(given, advantages=torch.tensor([1.0, -2.0, 0.5]))
    agreeing = batch_of(vars(batch) | {"teacher_logprobs": batch.previous_logprobs})
    counts = count_masked(rows_of(given["mask"]))
    value, _ = SampledKLLoss(config(reward_coef=0.25))(logprobs, agreeing, counts)
    expected, _ = GRPOLoss(loss_config())(logprobs, agreeing, counts)
    torch.testing.assert_close(value, 0.25 * expected)
    without, _ = SampledKLLoss(config())(logprobs, agreeing, counts)
    assert without == 0


def test_tokens_of_older_weights_are_corrected():
    """The loss takes GRPO's correction: a token that the engine gave twice its probability has half its weight."""
    given = inputs(6)
    logprobs, batch = sampled_batch(given)
    older = batch_of(vars(batch) | {"generation_logprobs": batch.generation_logprobs + math.log(2)})
    counts, corrected = count_masked(rows_of(given["mask"])), {"use_importance_sampling_correction": True}
    value, _ = SampledKLLoss(config(**corrected))(logprobs, older, counts)
    expected, _ = SampledKLLoss(config())(logprobs, batch, counts)
    torch.testing.assert_close(value, expected / 2)

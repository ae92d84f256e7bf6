"""Losses of on-policy distillation: the policy learns from a teacher's logprobs of the policy's own samples.

Shapes: B sequences, T tokens, k vocabulary entries. All logprobs are at the sampling temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.config.schema_algorithm import DistillationConfig, DistillationLossConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import Loss, Metrics, Need, Normalizers, count_masked, masked_sum

# The teacher's logprob outside its k largest, as in NeMo-RL.
_LOG_NOTHING = -100.0


@dataclass(frozen=True)
class SampledKLLoss(GRPOLoss):
    """Reverse KL on sampled tokens as a policy gradient: a token's advantage is log teacher - log policy.

    A token's gradient of KL(policy || teacher) is E[(log policy - log teacher) grad log policy] over the policy's
    samples. That is the gradient of GRPO's loss with these advantages, so GRPO's policy terms and corrections apply.
    The cost of later tokens is ignored (discount 0). Advantages are of the policy at the start of the step.

    Sources: Agarwal et al. 2024 (GKD, arXiv:2306.13649), Gu et al. 2024 (MiniLLM, arXiv:2306.08543); as an advantage of
    each token: Lu and Thinking Machines Lab 2025, "On-policy distillation".
    """

    config: DistillationLossConfig

    def advantages(self, batch: Batch, previous_BT: Tensor) -> Tensor:
        (teacher_BT,) = batch.require("teacher_logprobs")
        own_BT = torch.where(batch.mask > 0, teacher_BT, 0.0) - previous_BT
        if not self.config.reward_coef:
            return own_BT
        return own_BT + self.config.reward_coef * super().advantages(batch, previous_BT)

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """See `GRPOLoss.__call__`. Also reads `teacher_logprobs`."""
        total, metrics = super().__call__(logprobs_BT, batch, counts)
        return total, metrics | _teacher_metrics(logprobs_BT, batch, counts)


@dataclass(frozen=True)
class TopkKLLoss:
    """KL between policy and teacher over the teacher's k largest logits, at each token of the policy's samples.

    With q the teacher's distribution over its k tokens, and p the policy's:

    - forward: sum of q (log q - log p)
    - reverse: sum of p (log p - log q)
    - mixed: w forward + (1 - w) reverse

    p is normalised over the k tokens, or over the vocabulary with `zero_outside_topk`. In that case, the reverse KL
    includes the other tokens, where log q = -100.

    The formulas are NeMo-RL's. With k the whole vocabulary, forward and reverse are GKD's with beta = 0 and 1 (Agarwal
    et al. 2024, arXiv:2306.13649).
    """

    config: DistillationLossConfig

    @property
    def needs(self) -> frozenset[Need]:
        entropy: tuple[Need, ...] = ("entropy",) if self._has_rest else ()
        return frozenset[Need](("student_topk_logprobs", *entropy))

    @property
    def _has_rest(self) -> bool:
        return self.config.zero_outside_topk and self.config.kl_type != "forward"

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        return count_masked(rows)

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """See `Loss`. Reads `student_topk_logprobs`, `teacher_topk_logits`, `teacher_logprobs`, and `entropy` for the
        reverse KL with `zero_outside_topk`."""
        teacher_BTk, student_BTk = batch.require("teacher_topk_logits", "student_topk_logprobs")
        # Select first: values outside the mask are undefined.
        inside_BT1 = batch.mask[..., None] > 0
        teacher_BTk, whole_BTk = (torch.where(inside_BT1, one, 0.0) for one in (teacher_BTk, student_BTk))
        teacher_BTk = teacher_BTk.log_softmax(-1)
        own_BTk = whole_BTk if self.config.zero_outside_topk else whole_BTk.log_softmax(-1)
        forward_BT = (teacher_BTk.exp() * (teacher_BTk - own_BTk)).sum(-1)
        reverse_BT = (own_BTk.exp() * (own_BTk - teacher_BTk)).sum(-1)
        if self._has_rest:
            (entropy_BT,) = batch.require("entropy")
            of_rest_BT = -entropy_BT - (own_BTk.exp() * own_BTk).sum(-1)
            reverse_BT = reverse_BT + of_rest_BT - _LOG_NOTHING * (1 - own_BTk.exp().sum(-1))
        forward, reverse = (masked_sum(one, batch.mask) / counts.tokens for one in (forward_BT, reverse_BT))
        weight = {"forward": 1.0, "reverse": 0.0, "mixed": self.config.mixed_kl_weight}[self.config.kl_type]
        total = weight * forward + (1 - weight) * reverse
        metrics = {
            "loss": total.detach().clone(),
            "forward_kl": forward.detach().clone(),
            "reverse_kl": reverse.detach().clone(),
        }
        return total, metrics | _teacher_metrics(logprobs_BT, batch, counts)


def distillation_loss(options: DistillationConfig) -> Loss:
    """Return the loss over the teacher's largest logits if the run has them, else the one over sampled tokens."""
    return (SampledKLLoss if options.topk_logits_k is None else TopkKLLoss)(options.loss_fn)


@torch.no_grad()
def _teacher_metrics(logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> Metrics:
    """Return this micro-batch's share of KL(policy || teacher), estimated from sampled tokens, in nats per token, and
    of both mean logprobs."""
    (teacher_BT,) = batch.require("teacher_logprobs")
    own, teacher = (masked_sum(one, batch.mask) / counts.tokens for one in (logprobs_BT, teacher_BT))
    return {"teacher_kl": own - teacher, "student_logprobs": own.clone(), "teacher_logprobs": teacher}

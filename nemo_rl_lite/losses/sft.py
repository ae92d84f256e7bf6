"""The loss of supervised fine-tuning. Shapes: B sequences, T tokens."""

from dataclasses import dataclass

from torch import Tensor

from nemo_rl_lite.losses.policy_gradient import Batch, Metrics, Normalizers, masked_sum


@dataclass(frozen=True)
class SFTLoss:
    """Mean negative log likelihood of the global batch's response tokens, in nats a token."""

    def counts(self, batch: Batch) -> Normalizers:
        return Normalizers.of(batch["mask"])

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Loss (scalar, with gradient) and metrics (each this micro-batch's share of the global value).

        `batch` has `mask` ([B, T]), 1 on the tokens that have a loss.
        """
        total = -masked_sum(logprobs_BT, batch["mask"]) / counts.tokens
        return total, {"loss": total.detach().clone()}

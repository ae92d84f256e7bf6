"""The loss of supervised fine-tuning. Shapes: B sequences, T tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nemo_rl_lite.config.sections.algorithm import SFTConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.interface import Metrics, Normalizers, count_masked, masked_sum


@dataclass(frozen=True)
class SFTLoss:
    """Mean negative log likelihood of the global batch's response tokens, in nats a token."""

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        return count_masked(rows)

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Loss (scalar, with gradient) and metrics (each this micro-batch's share of the global value)."""
        total = -masked_sum(logprobs_BT, batch.mask) / counts.tokens
        return total, {"loss": total.detach().clone()}


def sft_loss(options: SFTConfig) -> SFTLoss:
    return SFTLoss()

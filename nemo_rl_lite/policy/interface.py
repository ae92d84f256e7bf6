"""What the loop needs of a policy."""

from typing import Protocol

from torch import Tensor

from nemo_rl_lite.losses.policy_gradient import Batch, Loss
from nemo_rl_lite.offload.mover import Move


class Policy(Protocol):
    """All policy ranks, as the loop sees them. B sequences of T tokens, right-padded."""

    def prepare_for_logprob(self) -> None:
        """Enter the logprob phase, from any other: parameters, gradients and optimizer states are where the residency
        table has them."""
        ...

    def logprobs(self, tokens_BT: Tensor, lengths_B: Tensor, phase: str = "logprob") -> Tensor:
        """Logprobs [B, T] in nats at the sampling temperature; entry t belongs to token t, entry 0 is 0, and so are
        entries beyond the `lengths_B` tokens of each sequence. `phase` is what the memory's peak is logged as."""
        ...

    def reference_logprobs(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """The same under the weights the run started from."""
        ...

    def prepare_for_training(self) -> None:
        """Enter the training phase, from any other."""
        ...

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One optimizer step for each `train_global_batch_size` sequences of the batch (`tokens`, `mask` [B, T],
        `lengths` [B] and what the loss needs); metrics, averaged over the steps."""
        ...

    def take_memory(self) -> dict[str, float]:
        """Memory of each phase since the last call, in bytes, the fullest rank's (`MemoryMeter`)."""
        ...

    def take_moves(self) -> dict[str, Move]:
        """What has moved between device and host since the last call, by "<component>/to_host" or "/to_device", the
        slowest rank's."""
        ...

    def begin_save(self, folder: str) -> None:
        """From the training phase, begin to write weights, optimizer and schedule to an empty folder that all ranks
        see; what follows may change them."""
        ...

    def save_is_written(self) -> bool:
        """Whether `finish_save` would not have to wait."""
        ...

    def finish_save(self) -> None:
        """Complete what `begin_save` began. Raises CheckpointError: it could not be written."""
        ...

    def load(self, folder: str) -> None:
        """Go on from what was saved to `folder`, under this parallel layout or another."""
        ...

    def export_hf(self, path: str) -> None:
        """Write the current weights as a Hugging Face folder."""
        ...

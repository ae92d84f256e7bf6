"""What the loop needs of a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from nemo_rl_lite.losses.batch import TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Loss
from nemo_rl_lite.offload.mover import Move

Scored = Literal["previous", "later", "reference"]
"""Whose logprobs a loss compares with: those of the policy as it is now (`previous`), or as the run started. `later`:
of the policy as it is now, without the rows of the first optimizer step, whose training pass has the same logprobs."""


@dataclass(frozen=True)
class BatchRef:
    """Rows that the workers hold, each replica those that it trains on. The scores of these rows stay there."""

    name: str
    rows: TokenRows


@dataclass(frozen=True)
class Work:
    """Model FLOPs of all ranks on a batch: of its scores, and of training on it."""

    scoring: float
    training: float


class Teacher(Protocol):
    """All ranks of a teacher, as the loop sees them."""

    def scored(self, rows: TokenRows) -> TokenRows:
        """In the policy's logprob phase, return the rows with the teacher's scores. The teacher's weights come to the
        device for that, and leave it."""
        ...

    def take_memory(self) -> dict[str, float]:
        """See `Policy.take_memory`."""
        ...

    def take_moves(self) -> dict[str, Move]:
        """See `Policy.take_moves`."""
        ...


class Policy(Protocol):
    """All policy ranks, as the loop sees them."""

    def prepare_for_logprob(self) -> None:
        """Enter the logprob phase, from any other: parameters, gradients and optimizer states are where the residency
        table has them."""
        ...

    def hold(self, rows: Sequence[TokenRow], name: str = "train") -> BatchRef:
        """Send each row to the replica that trains on it. The workers keep one batch of each name, the newest."""
        ...

    def score(self, batch: BatchRef, which: Sequence[Scored]) -> None:
        """Let the workers add the logprobs of `which` policies to the batch."""
        ...

    def work(self, batch: BatchRef, which: Sequence[Scored]) -> Work | None:
        """What `score` with `which`, and `train`, have to compute for the batch; None for a model of unknown shape."""
        ...

    def evaluate(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        """The loss of a batch of any size and its metrics, without a gradient."""
        ...

    def prepare_for_training(self) -> None:
        """Enter the training phase, from any other."""
        ...

    def train(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        """One optimizer step for each `train_global_batch_size` of the batch's rows, in their order; metrics, averaged
        over the steps. Where engines sampled the rows, the `mismatch_metrics` of the whole batch are among them; rows
        of the first step that have no `previous` logprobs take those of the training pass itself."""
        ...

    def logprobs(self, tokens_BT: Tensor, lengths_B: Tensor, phase: str = "probe") -> Tensor:
        """Logprobs [B, T] in nats of a few right-padded sequences at the sampling temperature; entry t belongs to token
        t, entry 0 is 0, and so are entries beyond the `lengths_B` tokens of each sequence. The memory's peak is logged
        as that of `phase`."""
        ...

    def take_memory(self) -> dict[str, float]:
        """Memory of each phase since the last call, in bytes, the fullest rank's (`MemoryMeter`)."""
        ...

    def take_moves(self) -> dict[str, Move]:
        """Moves between device and host since the last call, by "<component>/to_host" or "/to_device", the slowest
        rank's."""
        ...

    def take_waits(self) -> dict[str, float]:
        """How data-parallel replicas have waited for each other since the last call: `<phase>`, the seconds of the
        slowest replica's own part of its passes, and `idle_share/<phase>`, the share of the replicas' time in which
        they waited for the slowest one. Empty where there is one replica."""
        ...

    def begin_save(self, folder: str) -> None:
        """From the training phase, begin to write weights, optimizer and schedule to an empty folder that all ranks
        see; later steps may change them meanwhile."""
        ...

    def save_is_written(self) -> bool:
        """Whether `finish_save` would not have to wait."""
        ...

    def finish_save(self) -> dict[str, str]:
        """Complete what `begin_save` began; returns digests of files in its folder, by name.

        Raises:
            CheckpointError: it could not be written.
        """
        ...

    def load(self, folder: str) -> None:
        """Resume from what was saved to `folder`, under this parallel layout or another."""
        ...

    def export_hf(self, path: str) -> None:
        """Write the current weights as a Hugging Face folder."""
        ...

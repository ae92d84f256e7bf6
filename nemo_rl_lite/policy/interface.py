"""The policy and the teacher, as the loop sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from nemo_rl_lite.losses.batch import TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Loss
from nemo_rl_lite.offload.mover import Move

Scored = Literal["previous", "later", "reference"]
"""The policy whose logprobs a loss compares with: as it is now (`previous`), or as the run started (`reference`).
`later`: previous logprobs for all but the first optimizer step's rows."""


@dataclass(frozen=True)
class BatchRef:
    """A batch that the workers hold: each replica has the rows that it trains on, and their scores."""

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
        """In the policy's logprob phase, return the rows with the teacher's scores. Its weights are on the device only
        for this call."""
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
        """Enter the logprob phase, from any other: components move to where the residency table has them."""
        ...

    def hold(self, rows: Sequence[TokenRow], name: str = "train") -> BatchRef:
        """Send each row to the replica that trains on it. The workers keep one batch of each name, the newest."""
        ...

    def score(self, batch: BatchRef, which: Sequence[Scored]) -> None:
        """Add the logprobs of `which` policies to the batch, on the workers."""
        ...

    def work(self, batch: BatchRef, which: Sequence[Scored]) -> Work | None:
        """FLOPs of `score` with `which`, and of `train`, for the batch; None for a model of unknown shape."""
        ...

    def evaluate(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        """The loss of a batch of any size and its metrics, without a gradient."""
        ...

    def prepare_for_training(self) -> None:
        """Enter the training phase, from any other."""
        ...

    def train(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        """One optimizer step for each `train_global_batch_size` of the batch's rows, in order; metrics, averaged over
        the steps. Where engines sampled the rows, they include the `mismatch_metrics` of the whole batch. Rows of the
        first step without `previous` logprobs take those of the training pass."""
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
        """Waits of data-parallel replicas for each other since the last call: `<phase>`, the seconds of the slowest
        replica's passes without waits, and `idle_share/<phase>`, the share of the replicas' time spent waiting for it.
        Empty for one replica."""
        ...

    def begin_save(self, folder: str) -> None:
        """From the training phase, begin to write weights, optimizer and schedule to an empty folder that all ranks
        see; later steps may change them meanwhile."""
        ...

    def save_is_written(self) -> bool:
        """Whether `finish_save` would not have to wait."""
        ...

    def finish_save(self) -> dict[str, str]:
        """Complete the save; returns digests of files in its folder, by name.

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

"""Policy and teacher, as the loop sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from nemo_rl_lite.losses.batch import TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Loss
from nemo_rl_lite.offload.mover import Move

Scored = Literal["previous", "later", "reference"]
"""Policy whose logprobs a loss compares with: as it is now (`previous`), or as the run started (`reference`).
`later`: previous logprobs for all but the first optimizer step's rows."""


@dataclass(frozen=True)
class BatchRef:
    """Batch that the workers hold: each replica has the rows that it trains on, and their scores."""

    name: str
    rows: TokenRows


@dataclass(frozen=True)
class Work:
    """Model FLOPs of all ranks on a batch: of its scores, and of training on it."""

    scoring: float
    training: float


@dataclass(frozen=True)
class TeacherScores:
    """Scores of a teacher for the N tokens of some rows, joined end to end; see `TokenRow`."""

    logprobs: np.ndarray
    """[N]."""
    topk_logits: np.ndarray | None
    """[N, k]."""
    topk_ids: np.ndarray | None
    """[N, k], int32."""


class Teacher(Protocol):
    """Ranks of a teacher, as the loop sees them."""

    def scored(self, rows: TokenRows) -> TokenRows:
        """Return the rows with the teacher's scores. Called in the policy's logprob phase; the teacher's weights are on
        the device only for this call."""
        ...

    def pop_memory(self) -> dict[str, float]:
        """See `Policy.pop_memory`."""
        ...

    def pop_moves(self) -> dict[str, Move]:
        """See `Policy.pop_moves`."""
        ...


class Policy(Protocol):
    """Ranks of the policy, as the loop sees them."""

    def prepare_for_logprob(self) -> None:
        """Enter the logprob phase, from any other: components move to their places in the residency table."""
        ...

    def put_batch(self, rows: Sequence[TokenRow], name: str = "train") -> BatchRef:
        """Send each row to the replica that trains on it. The workers keep one batch of each name, the newest."""
        ...

    def score(self, batch: BatchRef, which: Sequence[Scored]) -> None:
        """Add the logprobs of `which` policies to the batch, on the workers."""
        ...

    def work(self, batch: BatchRef, which: Sequence[Scored]) -> Work | None:
        """Return FLOPs of `score` with `which`, and of `train`, for the batch; None for a model of unknown shape."""
        ...

    def evaluate(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        """Return the loss of a batch of any size and its metrics, without a gradient."""
        ...

    def prepare_for_training(self) -> None:
        """Enter the training phase, from any other."""
        ...

    def train(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        """Take one optimizer step for each `train_global_batch_size` of the batch's rows, in order. Returns metrics,
        averaged over the steps. If engines sampled the rows, they include the `mismatch_metrics` of the whole batch.
        Rows of the first step without `previous` logprobs take those of the training pass."""
        ...

    def logprobs(self, tokens_BT: Tensor, lengths_B: Tensor, phase: str = "probe") -> Tensor:
        """Return logprobs [B, T] in nats of a few right-padded sequences at the sampling temperature. Entry t belongs
        to token t; entry 0 and entries beyond the `lengths_B` tokens of each sequence are 0. Peak memory is logged as
        that of `phase`."""
        ...

    def pop_memory(self) -> dict[str, float]:
        """Return the memory of each phase since the last call, in bytes, the fullest rank's (`MemoryMeter`)."""
        ...

    def pop_moves(self) -> dict[str, Move]:
        """Return moves between device and host since the last call, by "<component>/to_host" or "/to_device", the
        slowest rank's."""
        ...

    def take_waits(self) -> dict[str, float]:
        """Return waits of data-parallel replicas for each other since the last call: `<phase>`, the seconds of the
        slowest replica's passes without waits, and `idle_share/<phase>`, the share of the replicas' time spent waiting
        for it. Empty for one replica."""
        ...

    def begin_save(self, folder: str) -> None:
        """Begin to write weights, optimizer and schedule to an empty folder that all ranks see. Called in the training
        phase; later steps may change them meanwhile."""
        ...

    def save_is_written(self) -> bool:
        """Return whether `finish_save` would not have to wait."""
        ...

    def finish_save(self) -> dict[str, str]:
        """Complete the save. Returns digests of files in its folder, by name.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        ...

    def load(self, folder: str) -> None:
        """Resume from a save in `folder`, of this parallel layout or another."""
        ...

    def export_hf(self, path: str) -> None:
        """Write the current weights as a Hugging Face folder."""
        ...

"""Policy and teacher as seen from the training loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from nemo_rl_lite.checkpoint.store import Part
from nemo_rl_lite.losses.batch import RowBatch, TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Loss
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.policy.score_files import ScoreFile

Scored = Literal["previous", "later", "reference"]
"""Logprobs that a loss compares with: of the current policy (`previous`; `later` omits the first optimizer step's
rows), or of the reference policy (`reference`)."""


SAVED_WORK = "saved_work"
"""Metric of a replica's training: the work of forward passes that shared prompts saved, in FLOPs or tokens."""


@dataclass(frozen=True)
class ParallelPlace:
    """A rank's place in the parallel layout."""

    data_rank: int
    data_size: int
    tensor_rank: int
    has_logits: bool
    is_whole: bool
    context_rank: int = 0
    replayed_layers: tuple[int, ...] = ()
    """Layers whose routers replay the engine's experts."""
    shares_prompts: bool = False
    """Packed rows may share prefixes (`shared_prompts.py`)."""

    @property
    def reports(self) -> bool:
        """True if this rank reports its replica's results."""
        return self.has_logits and self.tensor_rank == 0 and self.context_rank == 0


@dataclass(frozen=True)
class BatchRef:
    """Batch on the workers: each replica has its rows and their scores, in the order of the optimizer steps."""

    name: str
    rows: RowBatch
    shares: Sequence[Sequence[Sequence[int]]]
    """Indices of rows, by optimizer step and replica. Those of `len(rows)` or more are fillers, for replicas that would
    have no row."""

    def slices(self, step: int) -> list[slice]:
        """Return the place of an optimizer step's rows among each replica's."""
        before = [sum(len(share[replica]) for share in self.shares[:step]) for replica in range(len(self.shares[step]))]
        return [slice(first, first + len(own)) for first, own in zip(before, self.shares[step], strict=True)]

    def of_replicas(self) -> list[list[int]]:
        """Return the indices of each replica's rows."""
        return [[*chain(*of_steps)] for of_steps in zip(*self.shares, strict=True)]


@dataclass(frozen=True)
class Work:
    """Model FLOPs of all ranks for a batch. Those of a shared prompt count once."""

    scoring: float
    training: float


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's scores of the N tokens of concatenated rows; see `TokenRow`."""

    logprobs: np.ndarray
    """[N]."""
    topk_logits: np.ndarray | None
    """[N, k]."""
    topk_ids: np.ndarray | None
    """[N, k], int32."""


def with_scores(rows: TokenRows, shares: Sequence[np.ndarray], scores: Sequence[TeacherScores]) -> TokenRows:
    """Return the rows with the scores of each share of row indices. A row may be in several shares."""
    starts = rows.ends - rows.lengths
    places = np.concatenate([np.arange(starts[row], rows.ends[row]) for own in shares for row in own])

    def laid_out(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
        there = [part for part in parts if part is not None]
        if not there:
            return None
        joined = np.concatenate(there)
        whole = np.empty((len(rows.tokens), *joined.shape[1:]), joined.dtype)
        whole[places] = joined
        return whole

    return replace(
        rows,
        teacher_logprobs=laid_out([one.logprobs for one in scores]),
        teacher_topk_logits=laid_out([one.topk_logits for one in scores]),
        teacher_topk_ids=laid_out([one.topk_ids for one in scores]),
    )


class Teacher(Protocol):
    """Ranks of the teachers."""

    def scored(self, rows: RowBatch, sources: Sequence[str]) -> RowBatch:
        """Return the rows with the scores of the teacher of each row's source, in the policy's logprob phase. Weights
        of teachers are on the device only during this call, if they are offloaded."""

    def pop_memory(self) -> dict[str, float]: ...

    def pop_moves(self) -> dict[str, Move]: ...


class Policy(Protocol):
    """Ranks of the policy."""

    def prepare_for_logprob(self) -> None:
        """Enter the logprob phase from any other: move components to their places in the residency table."""

    def put_batch(self, rows: Sequence[TokenRow], name: str = "train") -> BatchRef:
        """Send each row to the replica that trains on it. A batch replaces the previous one of its name."""

    def score(self, batch: BatchRef, which: Sequence[Scored]) -> None:
        """Add logprobs to the batch on the workers."""

    def work(self, batch: BatchRef, which: Sequence[Scored]) -> Work | None:
        """Return FLOPs of `score` with `which` and of `train` for the batch; None for unknown model sizes."""

    def evaluate(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        """Return loss and metrics of a batch of any size, without a gradient."""

    def prepare_for_training(self) -> None:
        """Enter the training phase from any other."""

    def train(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        """Take one optimizer step per `train_global_batch_size` episodes, or sequences of datasets, in order.
        Repeat this for further passes over the batch. Returns metrics averaged over steps.

        If engines sampled the rows, the metrics include `mismatch_metrics` of the whole batch. Rows of the first step
        without `previous` logprobs use those of the training pass; several passes need `previous` logprobs.
        """

    def write_scores(self, batch: BatchRef, loss: Loss, target: ScoreFile) -> Callable[[], list[str]]:
        """Start to write scores of a batch of samples, after training on it. Return a function that waits for it, and
        returns errors of file systems."""

    def follow_policy(self, share: float) -> None:
        """Set the reference policy's weights to `share` x policy + (1 - `share`) x reference, in the training phase."""

    def logprobs(self, tokens_BT: Tensor, lengths_B: Tensor, phase: str = "probe") -> Tensor:
        """Return logprobs [B, T] in nats of a few right-padded sequences at the sampling temperature.

        Entry t is of token t; entry 0 and entries beyond `lengths_B` are 0. Peak memory is logged under `phase`.
        """

    def pop_memory(self) -> dict[str, float]:
        """Return memory in bytes by phase since the last call, of the rank with the highest peak (`MemoryMeter`)."""

    def pop_moves(self) -> dict[str, Move]:
        """Return moves since the last call, by "<component>/to_host" or "/to_device", of the slowest rank."""

    def take_waits(self) -> dict[str, float]:
        """Return idle time of data-parallel replicas since the last call; empty for one replica.

        `<phase>`: time of the slowest rank's passes in seconds, without waits for others. `idle_share/<phase>`: share
        of the ranks' time that they wait for it. Context-parallel ranks count separately.
        """

    def begin_save(self, folder: str) -> None:
        """Start to write weights, optimizer and schedule to an empty folder that all ranks see, in the training phase.
        Training may continue meanwhile."""

    def save_is_written(self) -> bool:
        """Return whether `finish_save` would return immediately."""

    def finish_save(self) -> dict[str, list[Part]]:
        """Complete the save. Returns digests of files in its folder, by name. Raises CheckpointError."""

    def load(self, folder: str) -> None:
        """Resume from a save of any parallel layout."""

    def export_hf(self, path: str) -> None:
        """Write the current weights as a Hugging Face folder."""

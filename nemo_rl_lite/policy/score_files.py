"""Policy's scores of a run's training samples: one Parquet file per step and replica, `scores/step-<step>-<replica>`.

Each replica writes those of the rows that it trains on. `rollout/store.py` writes the samples, and joins both.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Loss

SCORES = "scores"
# Columns with an entry per token; null if the loss has none.
SCORE_COLUMNS = ("policy_logprobs", "correction_weights")
# Further columns with an entry per token, which the loss reads as fields of `Batch`; null if the run lacks them.
OTHERS = ("reference_logprobs", "teacher_logprobs")
_LIST = pa.list_(pa.float32())
_UPDATE = pa.struct(
    [
        # Number among the optimizer steps of the rollout.
        ("optimizer_step", pa.int32()),
        # Number among the replica's micro-batches of the optimizer step.
        ("micro_batch", pa.int32()),
        ("skipped", pa.bool_()),
        # Null if they are `policy_logprobs`.
        ("logprobs", _LIST),
        # Null if the loss does not need it.
        ("entropy", _LIST),
    ]
)
# `segment`: number of the row among those of its sample.
_PLACE = ("step", "problem", "sample", "segment")


@dataclass(frozen=True)
class ScoreFile:
    """The scores of a step's samples in the run's folder."""

    folder: Path
    step: int
    samples_per_prompt: int
    count: int
    """Number of samples to write, the first ones."""


@dataclass(frozen=True)
class Update:
    """Scores of some rows of a batch from the training pass of an optimizer step."""

    rows: slice
    micro_batches: Tensor
    """Number of each row's micro-batch, [b]."""
    scores: Mapping[str, Tensor]
    """`logprobs` and, if the loss needs it, `entropy`, [b, T]."""
    is_skipped: bool
    """True if the optimizer took no step, because a gradient was not finite."""


WriteScores = Callable[[ScoreFile], Callable[[], list[str]]]
"""Starts to write a file. Returns a function that waits for it, and returns errors of the file system."""


class ScoreWriter:
    """Writes a replica's scores in a thread."""

    def __init__(self, replica: int):
        self._replica = replica
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scores")
        self._writing: list[Future[list[str]]] = []

    def write(self, target: ScoreFile, places: np.ndarray, batch: Batch, updates: Sequence[Update], loss: Loss) -> None:
        """Start to write the scores of a batch on the host. `places`: the number of each row's sample in the rollout,
        and of the row in the sample, [2, B]."""
        writing = self._thread.submit(write_scores, target, self._replica, places, batch, [*updates], loss)
        self._writing.append(writing)

    def written(self) -> list[str]:
        """Wait for all writes; return their errors. Raises what the loss raises."""
        writing, self._writing = self._writing, []
        return [error for one in writing for error in one.result()]


def write_scores(
    target: ScoreFile, replica: int, places: np.ndarray, batch: Batch, updates: Sequence[Update], loss: Loss
) -> list[str]:
    """Write the scores of a replica's rows. Return the errors of the file system."""
    rows = np.flatnonzero(places[0] < target.count)
    if not len(rows):
        return []
    table = _table(target, places[:, rows], batch.rows(torch.from_numpy(rows)), loss)
    table = table.append_column("updates", _updates(rows, batch, updates))
    return write_file(target.folder / f"step-{target.step:08d}-{replica}.parquet", table)


def write_file(file: Path, table: pa.Table) -> list[str]:
    """Write a file of numbers by token. Return the errors of the file system."""
    # Readers of the folder skip names that begin with a dot, so they see only complete files.
    partial = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(exist_ok=True)
        # Dictionaries of token ids and logprobs would be larger than the values.
        parquet.write_table(table, partial, compression="zstd", use_dictionary=False)
        partial.replace(file)
    except OSError as error:
        return [str(error)]
    return []


def read_scores(folder: Path, step: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the scores of a step's samples by problem and sample, those of a sample's segments in a row. Raises
    OSError or pyarrow.ArrowException: a file cannot be read."""
    files = sorted(folder.glob(f"step-{step:08d}-*.parquet"))
    columns = [*_PLACE, *SCORE_COLUMNS]
    rows = [row for file in files for row in parquet.read_table(file, columns=columns).to_pylist()]
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["segment"]):
        empty = {name: None if row[name] is None else [] for name in SCORE_COLUMNS}
        kept = found.setdefault((row["problem"], row["sample"]), empty)
        for name, values in kept.items():
            if values is not None:
                values += row[name]
    return found


def _table(target: ScoreFile, places_2B: np.ndarray, batch: Batch, loss: Loss) -> pa.Table:
    previous_BT, generation_BT = batch.require("previous_logprobs", "generation_logprobs")
    # Engines have sampled responses that are left out of the loss too.
    sampled_BT = (batch.mask > 0) | (generation_BT != 0)
    weights_of = getattr(loss, "correction_weights", None)
    weights_BT = None if weights_of is None else weights_of(batch).expand_as(batch.mask)
    numbers_B, segments_B = places_2B
    problems_B, samples_B = np.divmod(numbers_B, target.samples_per_prompt)
    columns = [
        pa.array(np.full(len(numbers_B), target.step), pa.int32()),
        pa.array(problems_B, pa.int32()),
        pa.array(samples_B, pa.int32()),
        pa.array(segments_B, pa.int32()),
        _of_tokens(torch.where(sampled_BT, previous_BT, 0.0), batch.lengths),
        _of_tokens(None if weights_BT is None else torch.where(batch.mask > 0, weights_BT, 0.0), batch.lengths),
        *(_of_tokens(getattr(batch, name), batch.lengths) for name in OTHERS),
    ]
    return pa.table(columns, names=[*_PLACE, *SCORE_COLUMNS, *OTHERS])


def _updates(rows: np.ndarray, batch: Batch, updates: Sequence[Update]) -> pa.Array:
    """Return the updates of each of these rows of a batch, as lists of `_UPDATE`."""
    previous_BT, generation_BT = batch.require("previous_logprobs", "generation_logprobs")
    sampled_BT, lengths_B = ((batch.mask > 0) | (generation_BT != 0)), batch.lengths.tolist()

    def of_row(row: int, step: int, update: Update) -> dict[str, Any]:
        place, length = row - update.rows.indices(len(lengths_B))[0], lengths_B[row]
        own = {name: values[place, :length] for name, values in update.scores.items()}
        sampled, logprobs = sampled_BT[row, :length], own["logprobs"]
        is_previous = torch.equal(logprobs[sampled], previous_BT[row, :length][sampled])
        entropy = own.get("entropy")
        return {
            "optimizer_step": step,
            "micro_batch": int(update.micro_batches[place]),
            "skipped": update.is_skipped,
            "logprobs": None if is_previous else torch.where(sampled, logprobs, 0.0).numpy(),
            "entropy": None if entropy is None else torch.where(sampled, entropy, 0.0).numpy(),
        }

    each = [
        [of_row(row, step, one) for step, one in enumerate(updates) if row in range(len(lengths_B))[one.rows]]
        for row in rows.tolist()
    ]
    return pa.array(each, pa.list_(_UPDATE))


def _of_tokens(values_BT: Tensor | None, lengths_B: Tensor) -> pa.Array:
    if values_BT is None:
        return pa.nulls(len(lengths_B), _LIST)
    inside_BT = torch.arange(values_BT.shape[1]) < lengths_B[:, None]
    ends = torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)]).to(torch.int32)
    return pa.ListArray.from_arrays(ends.numpy(), values_BT[inside_BT].float().numpy())

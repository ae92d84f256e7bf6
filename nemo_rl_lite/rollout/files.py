"""All samples of a run on disk, for people and for scripts: one Parquet file a rollout in the run's folder."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet

from nemo_rl_lite.observability.timer import Phase, unix_time
from nemo_rl_lite.observability.trackers import set_aside
from nemo_rl_lite.rollout.rollout import Rollout

log = logging.getLogger(__name__)

ROLLOUTS = "rollouts"
Split = Literal["train", "validation"]

_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        # Tool calls and the like, as JSON.
        ("other", pa.string()),
    ]
)
_SPAN = pa.struct(
    [("what", pa.string()), ("begin", pa.float32()), ("end", pa.float32()), ("place", pa.int32())],
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),
        # The problem's index in the step, and the sample's among those of the problem.
        ("problem", pa.int32()),
        ("sample", pa.int32()),
        ("prompt", pa.list_(_MESSAGE)),
        # What the assistant may call, as JSON.
        ("tools", pa.string()),
        ("answer", pa.string()),
        # The assistant's last turn, and all that was said since the prompt.
        ("response", pa.string()),
        ("turns", pa.list_(_MESSAGE)),
        ("reward", pa.float32()),
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),
        ("ending", pa.string()),
        # What the sample waited for (generate, environment, reward), in seconds of its rollout; `place` is the engine.
        ("spans", pa.list_(_SPAN)),
    ]
)
# The key of `Times` in a file's metadata.
_TIMES = b"times"


@dataclass(frozen=True)
class Times:
    """When a rollout was sampled, and what its step did. Times are Unix times in seconds."""

    began: float | None
    """The zero of the spans; None where no sample has any, as in a rollout that a checkpoint kept."""
    phases: list[tuple[str, float, float]]
    """The step's phases under the names of its timers: name, begin, end."""


class RolloutFiles:
    """Writes `rollouts/step-<step>-<split>.parquet`, each whole or not at all. Files of steps after `done`, which are
    repeated, are moved to `rollouts-undone/`."""

    def __init__(self, run_folder: Path, limit: int | None, done: int):
        """`limit`: samples of each rollout, the first ones (None: all of them)."""
        self._folder, self._limit = run_folder / ROLLOUTS, limit
        for cut_short in self._folder.glob(".*"):
            cut_short.unlink()
        set_aside([file for file in rollout_files(run_folder) if step_of(file) > done], run_folder / "rollouts-undone")

    def write(self, step: int, split: Split, rollout: Rollout, phases: Sequence[Phase] = ()) -> None:
        """Write one file, with the phases of the step in its metadata. A full disk is a warning, not an error: training
        continues."""
        if self._limit == 0:
            return
        # The whole folder can be read as one table at any time, because readers skip names that begin with a dot.
        file = self._folder / f"step-{step:08d}-{split}.parquet"
        partial = file.with_name(f".{file.name}")
        try:
            self._folder.mkdir(exist_ok=True)
            table = _table(step, split, rollout, self._limit)
            table = table.replace_schema_metadata({_TIMES: _times(rollout, phases)})
            parquet.write_table(table, partial, compression="zstd")
            partial.replace(file)
        except OSError as error:
            log.warning("the rollout of step %d cannot be written to %s: %s", step, self._folder, error)


def rollout_files(run_folder: Path) -> list[Path]:
    """The files of a run, in the order of their steps."""
    return sorted((run_folder / ROLLOUTS).glob("step-*.parquet"))


def step_of(file: Path) -> int:
    return int(file.stem.split("-")[1])


def read_rollout(file: Path) -> list[dict[str, Any]]:
    """The rows of one file. Raises OSError or pyarrow.ArrowException: it cannot be read."""
    return parquet.read_table(file).to_pylist()


def read_times(file: Path) -> Times | None:
    """When the rollout of a file was sampled; None in files of earlier versions. Raises what `read_rollout` raises."""
    kept = (parquet.read_schema(file).metadata or {}).get(_TIMES)
    return None if kept is None else Times(**json.loads(kept))


def read_spans(file: Path) -> list[dict[str, Any]]:
    """The spans of all samples of a file, without the texts. Raises what `read_rollout` raises."""
    samples = parquet.read_table(file, columns=["spans"]).column("spans").to_pylist()
    return [span for spans in samples for span in spans or []]


def _table(step: int, split: Split, rollout: Rollout, limit: int | None) -> pa.Table:
    rows = list(_rows(rollout))[:limit]
    return pa.Table.from_pylist([{"step": step, "split": split, **row} for row in rows], SCHEMA)


def _began(rollout: Rollout) -> float | None:
    return min((span.begin for episode in rollout.episodes for span in episode.spans), default=None)


def _times(rollout: Rollout, phases: Sequence[Phase]) -> str:
    """`Times` as JSON."""
    began = _began(rollout)
    own = [(one.name, unix_time(one.begin), unix_time(one.end)) for one in phases]
    return json.dumps({"began": None if began is None else unix_time(began), "phases": own})


def _rows(rollout: Rollout) -> Iterator[dict[str, Any]]:
    began = _began(rollout) or 0.0
    for index, episode in enumerate(rollout.episodes):
        place, sample = divmod(index, rollout.samples_per_prompt)
        yield {
            "problem": place,
            "sample": sample,
            "prompt": [_message(message) for message in episode.prompt],
            "tools": json.dumps(episode.problem.tools) if episode.problem.tools else None,
            "answer": str(episode.problem.answer),
            "response": episode.response,
            "turns": [_message(message) for message in episode.said],
            "reward": episode.reward,
            "prompt_tokens": episode.prompt_length,
            "tokens": episode.generated,
            "ending": episode.ending,
            "spans": [
                {
                    "what": one.what,
                    "begin": one.begin - began,
                    "end": one.begin - began + one.seconds,
                    "place": one.place,
                }
                for one in episode.spans
            ],
        }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    other = {name: value for name, value in message.items() if name not in ("role", "content")}
    return {
        "role": message["role"],
        "content": message.get("content"),
        "other": json.dumps(other, default=str) if other else None,
    }

"""Sample files: all samples of a run's rollouts, as Parquet files."""

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.observability.timer import Phase, unix_time
from nemo_rl_lite.observability.trackers import set_aside
from nemo_rl_lite.policy.score_files import SCORE_COLUMNS, SCORES, ScoreFile, WriteScores, read_scores, write_file
from nemo_rl_lite.rollout.episode import Advantage, Episode, Sampled, rewards_by_turn
from nemo_rl_lite.rollout.rollout import Rollout, SampleFile, Split
from nemo_rl_lite.rollout.segments import Segment

log = logging.getLogger(__name__)
ROLLOUTS = "rollouts"
_FILES = "step-*.parquet"

# `other`: further fields such as tool calls, as JSON.
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("other", pa.string())])
_SPAN = pa.struct([("what", pa.string()), ("begin", pa.float32()), ("end", pa.float32()), ("place", pa.int32())])
_RUN = pa.struct([("start", pa.int32()), ("length", pa.int32()), ("version", pa.int32()), ("turn", pa.int32())])
_SEGMENT = pa.struct(
    [
        ("start", pa.int32()),
        ("length", pa.int32()),
        # Tokens before the segment's first turn, also those that another segment has sampled.
        ("prompt_tokens", pa.int32()),
        ("messages", pa.list_(_MESSAGE)),
    ]
)
_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),
        # Index of the problem in the step, and of the sample among those of the problem.
        ("problem", pa.int32()),
        ("sample", pa.int32()),
        # Of the segment with the last turn, as `tools`, `response`, `turns` and `prompt_tokens` are.
        ("prompt", pa.list_(_MESSAGE)),
        # JSON.
        ("tools", pa.string()),
        ("answer", pa.string()),
        # Name of the problem's source in a mixture.
        ("source", pa.string()),
        # The last assistant turn, and all messages after the prompt.
        ("response", pa.string()),
        ("turns", pa.list_(_MESSAGE)),
        # Without the length penalty.
        ("reward", pa.float64()),
        ("length_penalty", pa.float64()),
        # Unweighted terms of the reward by name, as JSON; null without terms.
        ("reward_parts", pa.string()),
        # Numbers that environment or agent reported, by name, as JSON; null without any.
        ("metrics", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),
        ("ending", pa.string()),
        # Waits (generate, environment, reward) in seconds since the rollout's start; `place` is the engine.
        ("spans", pa.list_(_SPAN)),
        # Of training samples; with `credit=turn` of the first turn.
        ("advantage", pa.float32()),
        # With `credit=turn`: rewards of the turns without the length penalty, in the order in which they ended.
        ("turn_rewards", pa.list_(pa.float64())),
        # All segments, in order.
        ("token_ids", pa.list_(pa.int32())),
        # One for each token id; 0 for tokens that no engine sampled.
        ("generation_logprobs", pa.list_(pa.float32())),
        # Of training samples with `credit=turn`: one for each token id; 0 for tokens that no engine sampled.
        ("token_advantages", pa.list_(pa.float32())),
        # Runs of sampled tokens of one turn and one version of the weights: index in `token_ids`, number of tokens,
        # step, and number of the turn in the episode, in the order in which the turns ended.
        ("versions", pa.list_(_RUN)),
        # The segments in `token_ids`, if there are several: each is a training row.
        ("segments", pa.list_(_SEGMENT)),
    ]
)
# Columns with an entry per token.
_OF_TOKENS = ("token_ids", "generation_logprobs", "token_advantages")
# Key of `Times` in a file's metadata.
_TIMES = b"times"


@dataclass(frozen=True)
class Times:
    """Times of a rollout and its step, in Unix seconds."""

    began: float | None
    """Zero of the spans; None without spans, as in a rollout from a checkpoint."""
    phases: list[tuple[str, float, float]]
    """Phases of the step: name, begin, end."""


class RolloutFiles:
    """Writes `rollouts/step-<step>-<split>.parquet` atomically. Rollout workers write their samples to
    `step-<step>-<worker>-<split>.parquet`, and policy replicas their scores to `scores/`. Files of steps after `done`,
    which will be repeated, move to `rollouts-undone/` and `scores-undone/`."""

    def __init__(self, run_folder: Path, limit: int | None, done: int):
        """`limit`: maximum number of samples per rollout, the first ones (None: all)."""
        self._folder, self._scores, self._limit = run_folder / ROLLOUTS, run_folder / SCORES, limit
        self._written: dict[tuple[int, Split], list[Callable[[], list[str]]]] = {}
        for folder in (self._folder, self._scores):
            for cut_short in folder.glob(".*"):
                cut_short.unlink()
            files = [file for file in folder.glob(_FILES) if step_of(file) > done]
            undone, steps = folder.with_name(f"{folder.name}-undone"), set(map(step_of, files))
            # Rollout workers or replicas may have written other parts in an earlier attempt.
            for earlier in [file for file in undone.glob(_FILES) if step_of(file) in steps]:
                earlier.unlink()
            set_aside(sorted(files), undone)

    def begin(self, step: int, split: Split, rollout: Rollout) -> None:
        """Let rollout workers write their samples, before they may be lost."""
        if self._limit != 0 and rollout.store is not None:
            self._remove_lost(step, split)
            target = SampleFile(self._folder, step, split, rollout.samples_per_prompt, _began(rollout.episodes))
            advantages = rollout.advantages or [None] * len(rollout.episodes)
            write = rollout.store.write(target, rollout.records[: self._limit], advantages)
            self._written.setdefault((step, split), []).append(write)

    def _remove_lost(self, step: int, split: Split) -> None:
        """Remove the samples of a rollout whose worker has died."""
        for written in self._written.pop((step, split), ()):
            with suppress(WorkerError):
                written()
        for file in self._folder.glob(f"step-{step:08d}-*-{split}.parquet"):
            file.unlink()

    def scored(self, step: int, rollout: Rollout, write: WriteScores) -> None:
        """Let policy replicas write the scores of the samples that they have trained on."""
        if self._limit != 0:
            count = len(rollout.episodes[: self._limit])
            target = ScoreFile(self._scores, step, rollout.samples_per_prompt, count)
            self._written.setdefault((step, "train"), []).append(write(target))

    def write(self, step: int, split: Split, rollout: Rollout, phases: Sequence[Phase] = ()) -> None:
        """Write one file, with the step's phases in its metadata. A full disk is only a warning. Raises WorkerError: a
        rollout worker died before it wrote its samples, or a policy rank before it wrote its scores."""
        if self._limit == 0:
            return
        errors = [error for written in self._written.pop((step, split), ()) for error in written()]
        began = _began(rollout.episodes)
        target = SampleFile(self._folder, step, split, rollout.samples_per_prompt, began)
        here = [] if rollout.store is not None else _with_advantages(rollout)[: self._limit]
        errors += write_samples(target, here, phases)
        for error in errors:
            log.warning("the rollout of step %d cannot be written to %s: %s", step, self._folder, error)


def write_samples(
    target: SampleFile,
    samples: Sequence[tuple[int, Episode, Advantage | None]],
    phases: Sequence[Phase] = (),
    worker: int | None = None,
) -> list[str]:
    """Write the samples, each with its number in the rollout and its advantage. Return the errors of the file system.
    `worker`: the rollout worker that keeps them."""
    part = "" if worker is None else f"{worker}-"
    file = target.folder / f"step-{target.step:08d}-{part}{target.split}.parquet"
    phases_at = [(one.name, unix_time(one.begin), unix_time(one.end)) for one in phases]
    schema = _SCHEMA.with_metadata({_TIMES: json.dumps({"began": target.began, "phases": phases_at})})
    return write_file(file, pa.Table.from_pylist(_sample_rows(target, samples), schema))


def rollout_files(run_folder: Path) -> list[Path]:
    """Return one file for each rollout; `read_rollout` also reads those of rollout workers."""
    return sorted(file for file in (run_folder / ROLLOUTS).glob(_FILES) if file.stem.count("-") == 2)


def step_of(file: Path) -> int:
    return int(file.stem.split("-")[1])


def read_rollout(file: Path, tokens: bool = False) -> list[dict[str, Any]]:
    """Read the rows of a rollout, on request with the columns that have an entry per token, those of the policy's
    scores included. Raises OSError or pyarrow.ArrowException: a file cannot be read."""
    rows = [row for one in _parts(file) for row in _read(one, tokens)]
    if tokens:
        scores = read_scores(file.parent.with_name(SCORES), step_of(file)) if file.stem.endswith("-train") else {}
        unscored = dict.fromkeys(SCORE_COLUMNS)
        rows = [row | scores.get((row["problem"], row["sample"]), unscored) for row in rows]
    return sorted(rows, key=lambda row: (row["problem"], row["sample"]))


def _read(file: Path, tokens: bool) -> list[dict[str, Any]]:
    columns = [name for name in parquet.read_schema(file).names if tokens or name not in _OF_TOKENS]
    return parquet.read_table(file, columns=columns).to_pylist()


def read_times(file: Path) -> Times:
    """Read the times of a file. Raises what `read_rollout` raises."""
    return Times(**json.loads(parquet.read_schema(file).metadata[_TIMES]))


def read_spans(file: Path) -> list[dict[str, Any]]:
    """Read the spans of all samples of a rollout. Raises what `read_rollout` raises."""
    tables = [parquet.read_table(one, columns=["spans"]) for one in _parts(file)]
    return [span for table in tables for spans in table.column("spans").to_pylist() for span in spans or []]


def _parts(file: Path) -> list[Path]:
    step, split = f"step-{step_of(file):08d}", file.stem.rpartition("-")[2]
    return [file, *sorted(file.parent.glob(f"{step}-*-{split}.parquet"))]


def _began(episodes: Sequence[Sampled]) -> float | None:
    return min((one.began for one in episodes if one.began is not None), default=None)


def rollout_rows(step: int, split: Split, rollout: Rollout) -> list[dict[str, Any]]:
    """Return one row per sample, with the columns of the files. `token_ids` and `generation_logprobs` are arrays."""
    began = _began(rollout.episodes)
    return _sample_rows(SampleFile(Path(), step, split, rollout.samples_per_prompt, began), _with_advantages(rollout))


def _with_advantages(rollout: Rollout) -> list[tuple[int, Episode, Advantage | None]]:
    """Return each episode with its number and its advantage."""
    advantages = rollout.advantages or [None] * len(rollout.episodes)
    return [(index, one, advantages[index]) for index, one in enumerate(rollout.whole())]


def _sample_rows(target: SampleFile, samples: Sequence[tuple[int, Episode, Advantage | None]]) -> list[dict[str, Any]]:
    # The spans have this process' clock.
    began = 0.0 if target.began is None else target.began - unix_time(0.0)
    places = [divmod(index, target.samples_per_prompt) for index, _, _ in samples]
    each = zip(places, samples, strict=True)
    return [_row(target, *place, episode, advantage, began) for place, (_, episode, advantage) in each]


def _row(
    target: SampleFile, place: int, sample: int, episode: Episode, advantage: Advantage | None, began: float
) -> dict[str, Any]:
    segments, last = episode.row_segments, episode.last
    starts = [0, *accumulate(len(one.tokens) for one in segments)]
    each = list(zip(starts, segments, strict=False))
    return {
        "step": target.step,
        "split": target.split,
        "problem": place,
        "sample": sample,
        "prompt": _messages(last.prompt),
        "tools": json.dumps(last.tools) if last.tools else None,
        "answer": str(episode.problem.answer),
        "source": episode.source or None,
        "response": episode.response,
        "turns": _messages(last.said),
        "reward": episode.reward,
        "length_penalty": episode.length_penalty,
        "reward_parts": json.dumps(dict(episode.reward_parts)) if episode.reward_parts else None,
        "metrics": json.dumps(dict(episode.metrics)) if episode.metrics else None,
        "prompt_tokens": last.prompt_length,
        "tokens": episode.generated,
        "ending": episode.ending,
        "spans": [
            {"what": one.what, "begin": begin, "end": begin + one.seconds, "place": one.place}
            for one in episode.spans
            # Unix times are precise to a microsecond.
            for begin in [max(round(one.begin - began, 6), 0.0)]
        ],
        **_credit(episode, advantage),
        "token_ids": np.concatenate([np.asarray(one.tokens, np.int32) for one in segments]),
        "generation_logprobs": np.concatenate([one.generation_logprobs() for one in segments]),
        "versions": [
            {"start": before + start, "length": length, "version": version, "turn": turn}
            for before, one in each
            for turn, (start, length, version) in _runs_by_turn(episode, one)
        ],
        "segments": [_segment(start, one) for start, one in each] if len(each) > 1 else None,
    }


def _runs_by_turn(episode: Episode, segment: Segment) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield the runs of a segment's sampled tokens, each with its turn's number in the episode."""
    turns = [turn for turn, place in enumerate(episode.order) if episode.segments[place] is segment]
    starts = [start for start, _ in segment.turns]
    for run in segment.sampled_runs():
        yield turns[bisect_right(starts, run[0]) - 1], run


def _credit(episode: Episode, advantage: Advantage | None) -> dict[str, Any]:
    if not isinstance(advantage, np.ndarray):
        return {"advantage": advantage, "turn_rewards": None, "token_advantages": None}
    return {
        "advantage": advantage[0],
        "turn_rewards": None if episode.reward is None else rewards_by_turn(episode, shaped=False),
        "token_advantages": np.concatenate([episode.token_advantages(advantage, one) for one in episode.row_segments]),
    }


def _segment(start: int, one: Segment) -> dict[str, Any]:
    counts = {"start": start, "length": len(one.tokens), "prompt_tokens": one.prompt_length}
    return counts | {"messages": _messages([*one.prompt, *one.said])}


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [
        {
            "role": message["role"],
            "content": message.get("content"),
            "other": json.dumps(other, default=str) if other else None,
        }
        for message in messages
        for other in [{name: value for name, value in message.items() if name not in ("role", "content")}]
    ]

"""Rollouts of coming steps in a checkpoint: everything that training on them needs, to the bit."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.rollout import Rollout

_TURN = pa.struct(
    [
        ("start", pa.int64()),
        ("length", pa.int64()),
        ("logprobs", pa.list_(pa.float64())),
        ("finish_reason", pa.string()),
        ("versions", pa.list_(pa.int64())),
        # A file of numpy's.
        ("routed_experts", pa.binary()),
    ]
)
_SCHEMA = pa.schema(
    [
        # Of a rollout that is not complete, the number of the prompt.
        ("prompt", pa.int64()),
        ("is_dropped", pa.bool_()),
        # Messages, answer, metadata and tools, and the agent's own messages or null, as JSON.
        ("problem", pa.string()),
        ("tokens", pa.list_(pa.int64())),
        ("prompt_length", pa.int64()),
        ("turns", pa.list_(_TURN)),
        ("said", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),
        ("ending", pa.string()),
        ("is_left_out", pa.bool_()),
    ]
)
_NUMBERS = ("samples_per_prompt", "reward_errors", "environment_errors", "taught", "rested", "took_s")


@dataclass(frozen=True)
class SavedRollout:
    """The rollout of a step that was begun before a checkpoint, and is trained on after it."""

    step: int
    draws: list[list[int]]
    """See `Draft`."""
    rollout: Rollout | None
    """None where it is not complete."""
    done: Mapping[int, list[Episode]]
    """Of one that is not complete, the episodes of prompts that are, by number."""

    @property
    def oldest(self) -> int:
        """The oldest version of weights that sampled a token of it; its step where nothing is sampled yet."""
        episodes = self.rollout.episodes if self.rollout else [one for own in self.done.values() for one in own]
        versions = (version for one in episodes for _, turn in one.turns for version in turn.versions)
        return min(versions, default=self.step)


def save_rollouts(rollouts: Sequence[SavedRollout], folder: Path) -> None:
    """Write a file for each rollout to `folder`. Raises OSError where one cannot be written."""
    for one in rollouts:
        try:
            rows = list(_rows_of(one))
        except (TypeError, ValueError) as error:
            cause = f"its messages or rows are not JSON: {error}"
            raise OSError(f"the rollout of step {one.step} cannot be saved: {cause}") from error
        numbers = one.rollout and {name: getattr(one.rollout, name) for name in _NUMBERS}
        known = {"step": one.step, "draws": one.draws, "complete": numbers}
        schema = _SCHEMA.with_metadata({"rollout": json.dumps(known)})
        file = folder / f"rollout-{one.step:08d}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows, schema), file, compression="zstd")


def load_rollouts(folder: Path) -> list[SavedRollout]:
    """Return the rollouts that were written to `folder`, without the times of their episodes."""
    return [_load(file) for file in sorted(folder.glob("rollout-*.parquet"))]


def _load(file: Path) -> SavedRollout:
    table = parquet.read_table(file)
    known = json.loads(table.schema.metadata[b"rollout"])
    step, numbers = known["step"], known["complete"]
    # Files of earlier versions do not say which positions were passed over.
    draws = known["draws"] if "draws" in known else [[position] for position in known["positions"]]
    episodes: dict[bool, list[Episode]] = {False: [], True: []}
    done: dict[int, list[Episode]] = {}
    for row in table.to_pylist():
        kept = episodes[row["is_dropped"]] if row["prompt"] is None else done.setdefault(row["prompt"], [])
        kept.append(_episode(row))
    if numbers is None:
        return SavedRollout(step, draws, None, done)
    taught = tuple(numbers.pop("taught"))
    rollout = Rollout(episodes[False], taught=taught, dropped=tuple(episodes[True]), **numbers)
    return SavedRollout(step, draws, rollout, {})


def _rows_of(saved: SavedRollout) -> Iterator[dict[str, Any]]:
    if saved.rollout is not None:
        yield from _rows(saved.rollout.episodes, None, dropped=False)
        yield from _rows(saved.rollout.dropped, None, dropped=True)
    else:
        for number, episodes in saved.done.items():
            yield from _rows(episodes, number, dropped=False)


def _rows(episodes: Iterable[Episode], prompt: int | None, dropped: bool) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt,
            "is_dropped": dropped,
            "problem": _problem(one),
            "tokens": one.tokens,
            "prompt_length": one.prompt_length,
            "turns": [
                {
                    "start": start,
                    "length": len(turn.tokens),
                    "logprobs": turn.logprobs,
                    "finish_reason": turn.finish_reason,
                    "versions": turn.versions,
                    "routed_experts": _written(turn.routed_experts),
                }
                for start, turn in one.turns
            ],
            "said": json.dumps(one.said, default=str),
            "reward": one.reward,
            "reward_parts": json.dumps(dict(one.reward_parts)),
            "ending": one.ending,
            "is_left_out": one.is_left_out,
        }
        for one in episodes
    ]


def _written(array: np.ndarray | None) -> bytes | None:
    if array is None:
        return None
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _read(file: bytes | None) -> np.ndarray | None:
    return None if file is None else np.load(io.BytesIO(file))


def _problem(episode: Episode) -> str:
    one = episode.problem
    return json.dumps([one.messages, one.answer, one.metadata, one.tools, episode.own_prompt], default=str)


def _episode(row: dict[str, Any]) -> Episode:
    messages, answer, metadata, tools, own_prompt = json.loads(row["problem"])
    tokens = row["tokens"]
    turns = [
        (
            turn["start"],
            Completion(
                tuple(tokens[turn["start"] : turn["start"] + turn["length"]]),
                tuple(turn["logprobs"]),
                turn["finish_reason"],
                tuple(turn["versions"]),
                _read(turn.get("routed_experts")),
            ),
        )
        for turn in row["turns"]
    ]
    return Episode(
        Problem(tuple(messages), answer, metadata, tuple(tools)),
        tokens,
        row["prompt_length"],
        turns,
        json.loads(row["said"]),
        row["reward"],
        row["ending"],
        reward_parts=json.loads(row["reward_parts"]),
        is_left_out=row["is_left_out"],
        own_prompt=None if own_prompt is None else tuple(own_prompt),
    )

"""A rollout in a checkpoint: everything that training on it needs, to the bit."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.rollout import Rollout

FILE = "rollout.parquet"

_TURN = pa.struct(
    [
        ("start", pa.int64()),
        ("length", pa.int64()),
        ("logprobs", pa.list_(pa.float64())),
        ("finish_reason", pa.string()),
        ("version", pa.int64()),
    ]
)
_SCHEMA = pa.schema(
    [
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


def save_rollout(rollout: Rollout, folder: Path) -> None:
    """Write the rollout to a file in `folder`. Raises OSError where it cannot be written."""
    try:
        rows = [*_rows(rollout.episodes, dropped=False), *_rows(rollout.dropped, dropped=True)]
    except (TypeError, ValueError) as error:
        raise OSError(f"the next rollout cannot be saved: its messages or rows are not JSON: {error}") from error
    numbers = {name: getattr(rollout, name) for name in _NUMBERS}
    schema = _SCHEMA.with_metadata({"rollout": json.dumps(numbers)})
    parquet.write_table(pa.Table.from_pylist(rows, schema), folder / FILE, compression="zstd")


def load_rollout(folder: Path) -> Rollout | None:
    """Return the rollout that was written to `folder`, without the times of its episodes; None where there is none."""
    if not (folder / FILE).exists():
        return None
    table = parquet.read_table(folder / FILE)
    numbers = json.loads(table.schema.metadata[b"rollout"])
    episodes: dict[bool, list[Episode]] = {False: [], True: []}
    for row in table.to_pylist():
        episodes[row["is_dropped"]].append(_episode(row))
    taught = tuple(numbers.pop("taught"))
    return Rollout(episodes[False], taught=taught, dropped=tuple(episodes[True]), **numbers)


def _rows(episodes: Iterable[Episode], dropped: bool) -> list[dict[str, Any]]:
    return [
        {
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
                    "version": turn.version,
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
                turn["version"],
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

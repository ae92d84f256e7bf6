"""Rollouts in flight in a checkpoint. Each process writes the episodes that it keeps, a row group for each prompt."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.generation.interface import Completion, Unfinished
from nemo_rl_lite.rollout.episode import Episode, Failure, Sampled
from nemo_rl_lite.rollout.mixture import Place
from nemo_rl_lite.rollout.rollout import EpisodeStore
from nemo_rl_lite.rollout.segments import Branch, History, Segment

_COUNTED = pa.struct([("version", pa.int32()), ("count", pa.int32())])
_TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("length", pa.int32()),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("versions", pa.list_(_COUNTED)),
        # A .npy file.
        ("routed_experts", pa.binary()),
    ]
)
_BRANCH = pa.struct(
    [
        ("tokens", pa.list_(pa.int32())),
        ("prompt_length", pa.int64()),
        # JSON: the messages before the first turn, the tools, and the messages after it.
        ("messages", pa.string()),
        ("turns", pa.list_(_TURN)),
    ]
)
_FAILURE = pa.struct([(name, pa.string()) for name in ("kind", "text", "details", "shown")])
_SAVED_SCHEMA = pa.schema(
    [
        # The number of the prompt in the rollout.
        ("prompt", pa.int64()),
        # JSON: messages, answer, metadata, tools, the agent's own prompt and tools or null, and the source.
        ("problem", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("prompt_length", pa.int64()),
        ("turns", pa.list_(_TURN)),
        ("said", pa.string()),
        ("reward", pa.float64()),
        ("length_penalty", pa.float64()),
        ("reward_parts", pa.string()),
        ("metrics", pa.string()),
        ("ending", pa.string()),
        ("is_left_out", pa.bool_()),
        ("branches", pa.list_(_BRANCH)),
        ("order", pa.list_(pa.int32())),
        ("turn_rewards", pa.list_(pa.float64())),
        # True in a prompt whose episodes are not all done. The columns below tell how to continue each.
        ("is_begun", pa.bool_()),
        ("stage", pa.string()),
        ("failure", _FAILURE),
        # The known tokens of the next turn, which follow `tokens`, and the environment's snapshot.
        ("next", pa.list_(pa.int32())),
        ("next_turn", _TURN),
        ("state", pa.string()),
        ("state_bytes", pa.binary()),
        # Sampled tokens, and the oldest version of the weights that sampled one.
        ("generated", pa.int64()),
        ("oldest", pa.int64()),
    ]
)
_STATE = b"rollout"


@dataclass(frozen=True)
class SavedGroup:
    """The episodes of a prompt, in a file that any process can read."""

    file: Path
    row_group: int
    is_begun: bool = False
    """True if not all episodes are done."""
    generated: int = 0
    """Number of sampled tokens."""
    oldest: int | None = None
    """The oldest version of the weights that sampled a token; None without tokens."""

    def read(self) -> list[Episode] | None:
        """Return the episodes, without their spans. None: the file is gone, as its checkpoint was removed."""
        try:
            metadata = _metadata(self.file, self.file.stat().st_mtime_ns)
            rows = parquet.ParquetFile(self.file, metadata=metadata).read_row_group(self.row_group).to_pylist()
        except FileNotFoundError:
            return None
        return [_episode(row) for row in rows]


@dataclass(frozen=True)
class RolloutState:
    """State of a rollout that started before a checkpoint and is trained on after it."""

    step: int
    draws: list[list[Place]]
    """See `PendingRollout`."""
    noted: int = 0
    """See `Sampler.finish`. With it, all prompts of `draws` are part of the rollout."""
    spent_s: float = 0.0
    """Seconds since the first request."""


@dataclass(frozen=True)
class SavedRollout:
    """A rollout in a checkpoint."""

    state: RolloutState
    groups: Mapping[int, SavedGroup]
    """Prompts that were finished or begun, by number."""

    @property
    def oldest(self) -> int | None:
        """The oldest version of the weights that sampled a token; None without tokens."""
        return min((one.oldest for one in self.groups.values() if one.oldest is not None), default=None)


Writing = Callable[[], list[Path]]
"""Waits for files, and returns them. It raises OSError."""


def begin_save(
    folder: Path,
    state: RolloutState,
    groups: Mapping[int, Sequence[Sampled]],
    store: EpisodeStore | None,
    save_begun: Callable[[Path], Writing] = lambda file: list,
) -> Callable[[], None]:
    """Let rollout workers write their episodes of `groups`, the finished prompts by number. Return a function that
    waits for them and completes the rollout. It raises OSError. `save_begun` starts to write the unfinished prompts to
    files whose names begin with that of its argument."""
    here = {number: own for number, own in groups.items() if all(isinstance(one, Episode) for one in own)}
    records = {number: own for number, own in groups.items() if number not in here}
    name = f"rollout-{state.step:08d}"
    written = store.save(folder / name, records) if store is not None and records else list  # pyrefly: ignore
    begun = save_begun(folder / f"{name}-begun")

    def end() -> None:
        known = vars(state) | {"parts": [part.name for part in (*written(), *begun())]}
        save_groups(folder / f"{name}.parquet", here, known)  # pyrefly: ignore

    return end


def save_groups(
    file: Path,
    groups: Mapping[int, Sequence[Episode]],
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write the episodes of prompts, by number. Raises OSError."""
    schema = _SAVED_SCHEMA.with_metadata({_STATE: json.dumps(state)})
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for number, episodes in groups.items():
            is_begun = any(episode.stage != "done" for episode in episodes)
            try:
                rows = [_saved_row(number, episode) | {"is_begun": is_begun} for episode in episodes]
            except (TypeError, ValueError) as error:
                cause = f"its messages or rows cannot be written as JSON: {error}"
                raise OSError(f"{file.name} cannot be saved: {cause}") from error
            writer.write_table(pa.Table.from_pylist(rows, schema))


def load_groups(file: Path) -> dict[int, SavedGroup]:
    """Return the groups of a file by the numbers of their prompts. Raises OSError or pyarrow.ArrowException."""
    opened, columns = parquet.ParquetFile(file), ["prompt", "is_begun", "generated", "oldest"]
    found = dict[int, SavedGroup]()
    for place in range(opened.num_row_groups):
        samples = opened.read_row_group(place, columns=columns).to_pylist()
        generated = sum(row["generated"] for row in samples)
        oldest = min((row["oldest"] for row in samples if row["oldest"] is not None), default=None)
        found[samples[0]["prompt"]] = SavedGroup(file, place, samples[0]["is_begun"], generated, oldest)
    return found


def load_rollouts(folder: Path) -> list[SavedRollout]:
    """Return the rollouts in a checkpoint's folder. Raises what `load_groups` raises."""
    found = []
    for file in sorted(folder.glob("rollout-????????.parquet")):
        known = json.loads(parquet.read_schema(file).metadata[_STATE])
        files = [file, *(folder / part for part in known.pop("parts"))]
        groups = {number: group for one in files for number, group in load_groups(one).items()}
        found.append(SavedRollout(RolloutState(**known), groups))
    return found


@lru_cache(maxsize=8)
def _metadata(file: Path, _: int) -> parquet.FileMetaData:
    """Return a file's metadata, of which it has a part per prompt. The time of its change tells versions apart."""
    return parquet.read_metadata(file)


def _saved_row(prompt: int, episode: Episode) -> dict[str, Any]:
    problem = episode.problem
    own = [episode.own_prompt, episode.own_tools, problem.source]
    asked = [problem.messages, problem.answer, problem.metadata, problem.tools, *own]
    begun, state = episode.history.begun, episode.state
    versions = [*episode.versions, *(version for version, _ in (begun.versions if begun else ()))]
    return {
        "prompt": prompt,
        "problem": json.dumps(asked, default=str),
        "tokens": episode.tokens,
        "prompt_length": episode.prompt_length,
        "turns": _saved_turns(episode),
        "said": json.dumps(episode.said, default=str),
        "reward": episode.reward,
        "length_penalty": episode.length_penalty,
        "reward_parts": json.dumps(dict(episode.reward_parts)),
        "metrics": json.dumps(dict(episode.metrics)),
        "ending": episode.ending,
        "is_left_out": episode.is_left_out,
        "branches": [
            {
                "tokens": one.tokens,
                "prompt_length": one.prompt_length,
                "messages": json.dumps([one.prompt, one.tools, one.said], default=str),
                "turns": _saved_turns(one),
            }
            for one in episode.branches
        ],
        "order": episode.order,
        "turn_rewards": episode.turn_rewards,
        "stage": episode.stage,
        "failure": None if episode.failure is None else vars(episode.failure),
        "next": None if begun is None else begun.tokens,
        "next_turn": None if begun is None else _saved_turn(0, begun),
        "state": state if isinstance(state, str) else None,
        "state_bytes": state if isinstance(state, bytes) else None,
        "generated": episode.known_tokens,
        "oldest": min(versions, default=None),
    }


def _saved_turns(segment: Segment) -> list[dict[str, Any]]:
    return [_saved_turn(start, turn) for start, turn in segment.turns]


def _saved_turn(start: int, turn: Completion) -> dict[str, Any]:
    return {
        "start": start,
        "length": len(turn.tokens),
        "logprobs": turn.logprobs,
        "finish_reason": turn.finish_reason,
        "versions": [{"version": version, "count": count} for version, count in turn.versions],
        "routed_experts": None if turn.routed_experts is None else _array_bytes(turn.routed_experts),
    }


def _array_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _episode(row: dict[str, Any]) -> Episode:
    messages, answer, metadata, tools, own_prompt, own_tools, source = json.loads(row["problem"])
    text = row.get("state")
    begun = None if row.get("next_turn") is None else Unfinished(**vars(_turn(row["next"], row["next_turn"])))
    return Episode(
        Problem(tuple(messages), answer, metadata, tuple(tools), source),
        row["tokens"],
        row["prompt_length"],
        _turns(row),
        json.loads(row["said"]),
        row["reward"],
        row["ending"],
        reward_parts=json.loads(row["reward_parts"]),
        metrics=json.loads(row.get("metrics", "{}")),
        is_left_out=row["is_left_out"],
        own_prompt=None if own_prompt is None else tuple(own_prompt),
        own_tools=None if own_tools is None else tuple(own_tools),
        length_penalty=row["length_penalty"],
        branches=list(map(_branch, row["branches"])),
        order=row["order"],
        turn_rewards=row["turn_rewards"],
        history=History(begun=begun),
        stage=row.get("stage", "done"),
        failure=None if row.get("failure") is None else Failure(**row["failure"]),
        state=row.get("state_bytes") if text is None else text,
    )


def _branch(row: Mapping[str, Any]) -> Branch:
    prompt, tools, said = json.loads(row["messages"])
    return Branch(row["tokens"], row["prompt_length"], tuple(prompt), tuple(tools), _turns(row), said)


def _turns(row: Mapping[str, Any]) -> list[tuple[int, Completion]]:
    return [(turn["start"], _turn(row["tokens"], turn)) for turn in row["turns"]]


def _turn(tokens: Sequence[int], turn: Mapping[str, Any]) -> Completion:
    return Completion(
        np.array(tokens[turn["start"] : turn["start"] + turn["length"]], np.int32),
        np.array(turn["logprobs"], np.float32),
        turn["finish_reason"],
        tuple((run["version"], run["count"]) for run in turn["versions"]),
        None if turn["routed_experts"] is None else np.load(io.BytesIO(turn["routed_experts"])),
    )

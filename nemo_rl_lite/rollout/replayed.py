"""Rollouts of a finished run, read from its sample files, as the source of another run."""

import json
import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.rollout.collector import Show
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import shape_rewards
from nemo_rl_lite.rollout.segments import Branch
from nemo_rl_lite.rollout.store import ROLLOUTS, read_rollout


class SavedRollouts:
    """`RolloutSource` that samples nothing: a step gets the rollout that the run in a folder had in this step.

    Rewards are shaped again, so the keys of filtering and penalties count. Replaced prompts of dynamic sampling are not
    in the files. Episodes have no times.
    """

    def __init__(self, run: Path, options: GRPOConfig, most: int, limits: Mapping[str, int]):
        """`most`, `limits`: see `shape_rewards`."""
        self._run, self._options, self._most, self._limits = run, options, most, limits

    def take(self, step: int, show: Show) -> Rollout:
        """See `RolloutSource.take`. Raises LauncherError: the run has not saved all samples of the step."""
        episodes, options = self._episodes(step), self._options
        samples = options.num_generations_per_prompt
        wanted = options.num_prompts_per_step * samples
        if len(episodes) != wanted:
            rule = f"has {len(episodes)} of {wanted} samples of step {step}"
            raise LauncherError(f"{self._run / ROLLOUTS} {rule}; a replay needs a run with logger.log_samples=null")
        rollout = Rollout(
            episodes,
            samples,
            reward_errors=sum(one.reward is None for one in episodes),
            environment_errors=sum(one.ending == "error" for one in episodes),
            taught=(True,) * options.num_prompts_per_step,
            # No engine has sampled: 0 tokens/s.
            took_s=math.inf,
            turn_discount=options.turn_discount if options.credit == "turn" else None,
        )
        shape_rewards(rollout, options, self._most, self._limits)
        return rollout

    def _episodes(self, step: int) -> list[Episode]:
        file = self._run / ROLLOUTS / f"step-{step:08d}-train.parquet"
        try:
            return [episode_of(row) for row in read_rollout(file, tokens=True)]
        except (OSError, pa.ArrowException) as error:
            raise LauncherError(f"the rollout of step {step} cannot be read: {error}") from error

    def take_again(self, step: int, show: Show) -> Rollout:
        return self.take(step, show)

    def finish_generation(self) -> dict[str, float]:
        return {}

    def wait_until_idle(self, show: Show) -> None: ...

    def publish(self, step: int) -> dict[str, float]:
        return {}

    def held_out(self, step: int, show: Show) -> Rollout:
        raise NotImplementedError("a run without engines has no validations")

    def save(self, folder: Path) -> Mapping[str, Any]:
        return {}

    def close(self) -> None: ...


def episode_of(row: Mapping[str, Any]) -> Episode:
    """Return the episode of a row of a sample file with all columns, without spans and routed experts. Raises KeyError:
    a column is missing."""
    whole = {"start": 0, "length": len(row["token_ids"]), "prompt_tokens": row["prompt_tokens"]}
    segments = row["segments"] or [whole]
    turns = [_turns(row, one) for one in segments]
    order = [place for _, place in sorted((turn, place) for place, own in enumerate(turns) for turn in own)]
    last = order[-1] if order else 0
    # Of the other segments, the file has prompt and later messages in one list.
    chats = [
        [row["prompt"], row["turns"]] if place == last else [one["messages"], []] for place, one in enumerate(segments)
    ]
    (prompt, said), *_ = messages = [[list(map(_message, part)) for part in chat] for chat in chats]
    tokens = [row["token_ids"][one["start"] : one["start"] + one["length"]] for one in segments]
    tools = tuple(json.loads(row["tools"] or "[]"))
    return Episode(
        Problem(tuple(prompt), row["answer"], tools=tools, source=row["source"] or ""),
        tokens[0],
        segments[0]["prompt_tokens"],
        [*turns[0].values()],
        said,
        row["reward"],
        row["ending"],
        reward_parts=json.loads(row["reward_parts"] or "{}"),
        metrics=json.loads(row.get("metrics") or "{}"),
        length_penalty=row["length_penalty"],
        branches=[
            Branch(tokens[place], one["prompt_tokens"], tuple(asked), tools, [*turns[place].values()], answered)
            for place, (one, (asked, answered)) in enumerate(zip(segments, messages, strict=True))
            if place
        ],
        order=order,
        turn_rewards=row["turn_rewards"] or [],
    )


def _turns(row: Mapping[str, Any], segment: Mapping[str, Any]) -> dict[int, tuple[int, Completion]]:
    """Return a segment's turns by their number in the episode."""
    start, end = segment["start"], segment["start"] + segment["length"]
    runs = [run for run in row["versions"] if start <= run["start"] < end]
    return {turn: _turn(row, list(own), start) for turn, own in groupby(runs, lambda run: run["turn"])}


def _turn(row: Mapping[str, Any], runs: list[Mapping[str, int]], start: int) -> tuple[int, Completion]:
    """Return a turn, with its place in the segment that begins at `start`."""
    own = slice(runs[0]["start"], runs[-1]["start"] + runs[-1]["length"])
    tokens, logprobs = row["token_ids"][own], row["generation_logprobs"][own]
    versions = tuple((run["version"], run["length"]) for run in runs)
    found = Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), "stop", versions)
    return own.start - start, found


def _message(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": saved["role"], "content": saved["content"], **json.loads(saved["other"] or "{}")}

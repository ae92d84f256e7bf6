"""Episodes. Shapes: T turns, B episodes.

An episode is its first segment, and has the others in `branches`. Only an agent makes others (`segments.py`).
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.losses.advantages import returns_to_go
from nemo_rl_lite.losses.batch import OF_TOKENS, TokenRow
from nemo_rl_lite.observability.timer import unix_time
from nemo_rl_lite.rewards.registry import checked_metrics
from nemo_rl_lite.rollout.segments import Branch, History, RowCounts, Segment, Start, longest_start

Ending = Literal["stop", "length", "turns", "error"]
"""Ended by policy, environment or agent; truncated; no turn left; environment or agent failed."""

Activity = Literal["generate", "environment", "reward"]

Stage = Literal["play", "score", "done"]
"""Stage of an episode, which is played, then scored, and then done."""

Advantage = float | np.ndarray
"""Advantage of an episode, or of each of its turns."""


@dataclass(frozen=True)
class Failure:
    """Failure of an episode's reward, or of its environment or agent."""

    kind: Literal["reward", "play"]
    text: str
    details: str
    shown: str
    """The end of the response, and the problem's answer."""


@dataclass
class Span:
    """A wait of an episode: for a response of the engine `place`, for its environment or agent, or for its reward.
    Times are seconds of `time.perf_counter()`; `end` is None while the wait lasts."""

    what: Activity
    begin: float
    end: float | None = None
    place: int = 0

    @property
    def seconds(self) -> float:
        return (time.perf_counter() if self.end is None else self.end) - self.begin


class _Judged:
    """Properties that follow from an episode's reward."""

    reward: float | None
    length_penalty: float
    is_left_out: bool
    failure: Failure | None

    @property
    def is_late(self) -> bool:
        """True if the reward has failed and is 0, because of a timeout."""
        return self.failure is not None and self.failure.kind == "reward" and self.reward is not None

    @property
    def shaped_reward(self) -> float | None:
        """The reward with the length penalty, for training."""
        return None if self.reward is None else self.reward + self.length_penalty

    @property
    def is_trained(self) -> bool:
        return self.reward is not None and not self.is_left_out


@dataclass
class EpisodeRecord(_Judged):
    """Summary of an episode that a rollout worker keeps. Its properties are those of the `Episode`."""

    worker: int
    """Rank of the rollout worker."""
    number: int
    """Number of the episode there."""
    rows: tuple[RowCounts, ...]
    """Counts of the training rows."""
    prompt_tokens: int
    generated: int
    turn_count: int
    last_turn_tokens: int
    waits: Mapping[Activity, float]
    """Seconds of waits."""
    began: float | None
    """Unix time of the first wait."""
    no_experts: np.ndarray | None
    """See `Episode.no_experts`."""
    reward: float | None
    turn_rewards: Sequence[float]
    reward_parts: Mapping[str, float]
    metrics: Mapping[str, float]
    ending: Ending
    is_left_out: bool = False
    length_penalty: float = 0.0
    source: str = ""
    """Name of the problem's source in a mixture."""
    failure: Failure | None = None
    resumed: int = 0
    """See `Episode.resumed`."""

    @classmethod
    def of(cls, episode: "Episode", worker: int, number: int) -> "EpisodeRecord":
        """Return the record of an episode that `worker` keeps by this number."""
        return cls(
            worker,
            number,
            rows=tuple(one.row_counts for one in episode.row_segments),
            prompt_tokens=episode.prompt_tokens,
            generated=episode.generated,
            turn_count=episode.turn_count,
            last_turn_tokens=episode.last_turn_tokens,
            waits={what: episode.seconds(what) for what in get_args(Activity)},
            began=episode.began,
            no_experts=episode.no_experts,
            reward=episode.reward,
            turn_rewards=episode.turn_rewards,
            reward_parts=episode.reward_parts,
            metrics=episode.metrics,
            ending=episode.ending,
            is_left_out=episode.is_left_out,
            length_penalty=episode.length_penalty,
            source=episode.source,
            failure=episode.failure,
            resumed=episode.resumed,
        )

    @property
    def length(self) -> int:
        return sum(one.length for one in self.rows)

    @property
    def row_count(self) -> int:
        return len(self.rows)

    @property
    def versions(self) -> Mapping[int, int]:
        return _versions(self.rows)

    def seconds(self, what: Activity) -> float:
        return self.waits[what]


@dataclass
class Episode(_Judged, Segment):
    """A conversation with a reward: its first segment (`tokens`, `prompt_length`, `turns`, `said`), and branches."""

    problem: Problem
    tokens: list[int]
    prompt_length: int
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    reward: float | None = None
    """The sum of the environment's rewards so far, later the final reward. None if there is none."""
    ending: Ending = "stop"
    spans: list[Span] = field(default_factory=list)
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The unweighted terms of a reward that is a sum, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that environment or agent reported, by name."""
    is_left_out: bool = False
    """True if the episode is excluded from the loss although it has a reward."""
    own_prompt: tuple[Message, ...] | None = None
    """The prompt's messages if they differ from the problem's."""
    own_tools: tuple[Tool, ...] | None = None
    """The offered tools if they differ from the problem's."""
    length_penalty: float = 0.0
    """Added to the reward in training; at most 0."""
    branches: list[Branch] = field(default_factory=list)
    """The segments after the first."""
    order: list[int] = field(default_factory=list)
    """Place of each turn's segment in `segments`, in the order in which the turns ended."""
    turn_rewards: list[float] = field(default_factory=list)
    """The rewards of the turns so far that environment or agent gave, in order; empty if they gave none by turn."""
    refused: list[str] = field(default_factory=list, compare=False)
    """Errors of the agent's requests that were refused, in order."""
    history: History = field(default_factory=History, compare=False, repr=False)
    stage: Stage = "play"
    failure: Failure | None = None
    resumed: int = field(default=0, compare=False)
    """Sampled tokens that this run took from the unfinished prompts of a checkpoint."""
    state: str | bytes | None = None
    """Snapshot of its environment after the last answered turn, if that offers one: JSON text or bytes."""

    @property
    def source(self) -> str:
        """Name of the problem's source in a mixture."""
        return self.problem.source

    @property
    def segments(self) -> list[Segment]:
        return [self, *self.branches]

    @property
    def row_segments(self) -> list[Segment]:
        """The segments that are training rows: those with turns, or else the first."""
        return [one for one in self.segments if one.turns] or [self] if self.branches else [self]

    @property
    def last(self) -> Segment:
        """The segment with the last turn; the first without one."""
        return self.segments[self.order[-1]] if self.branches and self.order else self

    def start_of(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Start:
        """Return the beginning of a request's messages that the episode has; see `Segment.note` for their form."""
        return longest_start(self.segments, messages, tools)

    def open(
        self, start: Start, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> Segment:
        """Return the segment for a response to a request's messages: the one that they continue, or a new one. They
        have the tokens of `start`, and then `tokens`."""
        if start.segment is not None and start.continues:
            return start.segment
        if start.segment is None and not self.turns and not self.history.is_busy:
            self.begin(tokens, messages, tools)
            return self
        self.branches.append(start.branch(tokens, messages, tools, len(self.segments)))
        return self.branches[-1]

    def add_turn(self, completion: Completion, text: str, segment: Segment | None = None) -> None:
        """Add an assistant turn to a segment, by default the first. A truncated one is its last."""
        segment = segment or self
        segment.extend(completion, text)
        self.order.append(segment.history.number)
        self.ending = completion.finish_reason

    def sort_last_turns(self, segments: Sequence[Segment]) -> None:
        """Put the last turns of these segments, which may have ended in another order, into this order."""
        numbers = [one.history.number for one in segments]
        places = sorted(len(self.order) - 1 - self.order[::-1].index(number) for number in numbers)
        for place, number in zip(places, numbers, strict=True):
            self.order[place] = number
        self.ending = self.last.turns[-1][1].finish_reason

    def note_metrics(self, source: str, metrics: Any) -> None:
        """Add what `source` reports; the same names replace earlier ones. Raises what `checked_metrics` raises."""
        self.metrics = {**self.metrics, **checked_metrics(source, metrics)}

    def copied(self, resumes: bool) -> "Episode":
        """Return a copy that does not change if this episode is played on. Without `resumes`, an episode in play is
        copied without its turns, because it begins again."""
        if self.stage == "play" and not resumes:
            return Episode(self.problem, [], 0)
        copies = {name: list(getattr(self, name)) for name in ("tokens", "turns", "branches", "order", "turn_rewards")}
        return replace(
            self, **copies, said=[dict(one) for one in self.said], history=History(begun=self.history.so_far)
        )

    def end(self) -> None:
        """Note that no turn follows."""
        for one in self.segments:
            one.history.conversation.ended = True

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first turn of the first segment."""
        return self.problem.messages if self.own_prompt is None else self.own_prompt

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt of the first segment offers."""
        return self.problem.tools if self.own_tools is None else self.own_tools

    @property
    def response(self) -> str:
        """Text of the last assistant turn; empty without one."""
        return next((said["content"] for said in reversed(self.last.said) if said["role"] == "assistant"), "")

    @property
    def length(self) -> int:
        """Number of tokens of all rows."""
        return sum(len(one.tokens) for one in self.row_segments)

    @property
    def row_count(self) -> int:
        """Number of training rows."""
        return len(self.row_segments)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first turn, of all rows."""
        return sum(one.prompt_length for one in self.row_segments)

    @property
    def generated(self) -> int:
        """Number of sampled tokens."""
        return self.sampled_count + sum(one.sampled_count for one in self.branches)

    @property
    def known_tokens(self) -> int:
        """Number of sampled tokens, with those of the next turn that a checkpoint had."""
        begun = self.history.begun
        return self.generated + (0 if begun is None else len(begun.tokens))

    @property
    def turn_count(self) -> int:
        """Number of assistant turns."""
        return len(self.turns) + sum(len(one.turns) for one in self.branches)

    @property
    def last_turn_tokens(self) -> int:
        """Number of tokens of the last assistant turn."""
        turns = self.last.turns
        return len(turns[-1][1].tokens) if turns else 0

    @property
    def versions(self) -> Mapping[int, int]:
        """Number of sampled tokens by version of the weights."""
        return _versions([one.row_counts for one in self.row_segments])

    @property
    def no_experts(self) -> np.ndarray | None:
        """Routed experts of 0 tokens, [0, layers, k]; None if no engine reported any."""
        reported = (turn.routed_experts for one in self.segments for _, turn in one.turns)
        return next((experts[:0].copy() for experts in reported if experts is not None), None)

    @property
    def began(self) -> float | None:
        """Unix time of the first wait; None without one."""
        return unix_time(self.spans[0].begin) if self.spans else None

    @contextmanager
    def waiting(self, what: Activity) -> Iterator[Span]:
        """Record a wait for `what` in a span."""
        span = Span(what, time.perf_counter())
        self.spans.append(span)
        try:
            yield span
        finally:
            span.end = time.perf_counter()

    @property
    def waits_for(self) -> Activity | None:
        """The wait that began last and has not ended."""
        spans = self.spans if self.branches else self.spans[-1:]
        return next((span.what for span in reversed(spans) if span.end is None), None)

    def seconds(self, what: Activity) -> float:
        """Seconds that the episode waited for `what`, over all turns."""
        return sum(span.seconds for span in self.spans if span.what == what)

    def token_advantages(self, advantages: np.ndarray, segment: Segment) -> np.ndarray:
        """Return the advantage of each token of a segment from those of all turns, float32; 0 for tokens that were not
        sampled there."""
        found = np.zeros(len(segment.tokens), OF_TOKENS["token_advantages"])
        owners = [self.segments[place] for place in self.order]
        own = [advantage for owner, advantage in zip(owners, advantages, strict=False) if owner is segment]
        for (start, completion), advantage in zip(segment.turns, own, strict=True):
            found[start : start + len(completion.tokens)] = advantage
        return found

    def row(
        self, advantage: Advantage, version: int, no_experts: np.ndarray | None = None, number: int = 0
    ) -> TokenRow:
        """Return a training row for a policy of this version, by its number in `row_segments`. The mask selects the
        tokens of a trained episode that were sampled in this segment. `no_experts`: routed experts of 0 tokens, if the
        engines report them."""
        segment = self.row_segments[number]
        mask, ages = (np.zeros(len(segment.tokens), OF_TOKENS[name]) for name in ("mask", "ages"))
        for start, length, sampled_by in segment.sampled_runs():
            own = slice(start, start + length)
            mask[own], ages[own] = self.is_trained, version - sampled_by
        tokens, logprobs = np.asarray(segment.tokens, OF_TOKENS["tokens"]), segment.generation_logprobs()
        shaped = self.shaped_reward
        if isinstance(advantage, np.ndarray):
            of_episode, of_tokens = None, self.token_advantages(advantage, segment)
        else:
            of_episode, of_tokens = 0.0 if shaped is None else advantage, None
        return TokenRow(
            tokens,
            mask,
            logprobs,
            of_episode,
            ages,
            0.0 if shaped is None else shaped,
            token_advantages=of_tokens,
            routed_experts=segment.routed_experts(no_experts),
        )


def rewards_by_turn(episode: "Sampled", shaped: bool = True) -> np.ndarray:
    """Return the reward of each turn. The last turn has all that no other has: that of the reward function, and with
    `shaped` the length penalty. NaN if the reward failed, with one entry at least."""
    if episode.reward is None:
        return np.full(max(episode.turn_count, 1), math.nan)
    rewards = np.zeros(episode.turn_count)
    rewards[: len(episode.turn_rewards)] = episode.turn_rewards
    rewards[-1] += episode.reward - sum(episode.turn_rewards) + (episode.length_penalty if shaped else 0.0)
    return rewards


def reward_tensor(rewards: Iterable[float | None]) -> Tensor:
    """Return rewards as float64 [B], with NaN for a failed one."""
    return torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)


def returns_of(episodes: Sequence["Sampled"], turn_discount: float | None, shaped: bool = True) -> Tensor:
    """Return the returns to go of the episodes' turns, [T, B]; see `returns_to_go`. Without a discount, the rewards of
    the episodes, [1, B]. NaN marks a failed reward. `shaped`: with length penalties."""
    if turn_discount is None:
        return reward_tensor(one.shaped_reward if shaped else one.reward for one in episodes)[None]
    return returns_to_go([rewards_by_turn(one, shaped) for one in episodes], turn_discount)


def _versions(rows: Sequence[RowCounts]) -> Mapping[int, int]:
    if len(rows) == 1:
        return rows[0].versions
    found = Counter[int]()
    for one in rows:
        found.update(one.versions)
    return found


Sampled = Episode | EpisodeRecord
"""An episode, here or in a rollout worker."""

"""Sampled sequences: an episode, a rollout of episodes, and pass@k over problems. Shapes: P problems, B episodes."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.losses.advantages import reward_shares
from nemo_rl_lite.losses.batch import NO_EXPERT, OF_TOKENS, TokenRow, TokenRows
from nemo_rl_lite.observability.sinks import Sample, spread, text_of

Ending = Literal["stop", "length", "turns", "error"]
"""Ended by policy, environment or agent; cut for lack of room; no turn left; environment or agent failed."""

Activity = Literal["generate", "environment", "reward"]


@dataclass
class Span:
    """A wait of an episode: for a response from the engine `place`, its environment (or agent), or its reward. Times
    are seconds of `time.perf_counter()`; there is no end while it lasts."""

    what: Activity
    begin: float
    end: float | None = None
    place: int = 0

    @property
    def seconds(self) -> float:
        return (time.perf_counter() if self.end is None else self.end) - self.begin


@dataclass
class Episode:
    """A sequence that grows turn by turn; `tokens` are always exactly as they were sampled."""

    problem: Problem
    tokens: list[int]
    """The prompt, and everything after it."""
    prompt_length: int
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    """The assistant's turns, each with its place in `tokens`."""
    said: list[Message] = field(default_factory=list)
    """All messages after the prompt, by the assistant, and by the environment or the agent."""
    reward: float | None = None
    """The sum of the environment's rewards so far; once the episode is judged, its reward. None: there is none."""
    ending: Ending = "stop"
    spans: list[Span] = field(default_factory=list)
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The terms of a reward that is a weighted sum, by name, before their weights."""
    is_left_out: bool = False
    """True if it is kept out of the loss although it has a reward."""
    own_prompt: tuple[Message, ...] | None = None
    """The prompt's messages, if they are not the problem's."""
    length_penalty: float = 0.0
    """Added to the reward in training, at most 0."""

    def begin(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Replace the prompt, before the first turn."""
        self.tokens, self.prompt_length, self.own_prompt = list(tokens), len(tokens), tuple(messages)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add the assistant's turn; one that was cut is the last."""
        self.turns.append((len(self.tokens), completion))
        self.tokens += completion.tokens
        self.said.append({"role": "assistant", "content": text})
        self.ending = completion.finish_reason

    def add_messages(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Add the environment's messages, and the tokens from the assistant's last turn to its next."""
        self.tokens += tokens
        self.said += messages

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first turn."""
        return self.problem.messages if self.own_prompt is None else self.own_prompt

    @property
    def response(self) -> str:
        """Text of the assistant's last turn; empty without one."""
        return next((said["content"] for said in reversed(self.said) if said["role"] == "assistant"), "")

    @property
    def generated(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(completion.tokens) for _, completion in self.turns)

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
        return self.spans[-1].what if self.spans and self.spans[-1].end is None else None

    def seconds(self, what: Activity) -> float:
        """Seconds that the episode waited for `what`, in all its turns together."""
        return sum(span.seconds for span in self.spans if span.what == what)

    @property
    def shaped_reward(self) -> float | None:
        """The reward that training sees."""
        return None if self.reward is None else self.reward + self.length_penalty

    @property
    def is_trained(self) -> bool:
        return self.reward is not None and not self.is_left_out

    def row(self, advantage: float, version: int, experts: tuple[int, ...] | None = None) -> TokenRow:
        """Return the row to train on with a policy of this version. The loss is on the sampled tokens, if the episode
        is trained on. `experts`: (layers, k) of the experts that the engines report."""
        length = len(self.tokens)
        mask, logprobs, ages = (np.zeros(length, OF_TOKENS[name]) for name in ("mask", "generation_logprobs", "ages"))
        for start, completion in self.turns:
            own = slice(start, start + len(completion.tokens))
            mask[own], logprobs[own] = self.is_trained, completion.logprobs
            ages[own] = version - np.asarray(completion.versions, OF_TOKENS["ages"])
        tokens = np.asarray(self.tokens, OF_TOKENS["tokens"])
        shaped = self.shaped_reward
        reward, own = (0.0, 0.0) if shaped is None else (shaped, advantage)
        return TokenRow(tokens, mask, logprobs, own, ages, reward, routed_experts=self._experts(experts))

    def _experts(self, shape: tuple[int, ...] | None) -> np.ndarray | None:
        """Experts of each token, [tokens, *shape], from the turn that read it first, whose logprobs are trained on.
        `NO_EXPERT` for the last token, which no engine has read."""
        if shape is None:
            return None
        found, known = np.full((len(self.tokens), *shape), NO_EXPERT, OF_TOKENS["routed_experts"]), 0
        for _, completion in self.turns:
            if completion.routed_experts is not None:
                found[known : len(completion.routed_experts)] = completion.routed_experts[known:]
                known = len(completion.routed_experts)
        return found


@dataclass
class Rollout:
    """Judged episodes, a prompt's samples next to each other."""

    episodes: list[Episode]
    samples_per_prompt: int
    reward_errors: int
    """Number of these episodes without a reward, and of those whose environment or agent failed."""
    environment_errors: int = 0
    taught: tuple[bool, ...] = ()
    """True for each prompt whose rewards differ, in data order, up to the last kept. The next rollout follows it."""
    rested: int = 0
    """Number of prompts that were skipped by their cooldown."""
    took_s: float = 0.0
    """Seconds from its first request to its last reward."""
    engines_idle_s: float | None = None
    """Seconds without a request in the engines since the last rollout was taken; None if they share the policy's
    devices."""
    dropped: tuple[Episode, ...] = ()
    """Episodes of prompts that were replaced because all their rewards are the same, and then of those no longer
    needed."""

    @property
    def rewards_B(self) -> Tensor:
        """The episodes' rewards in training, float64; NaN where the reward failed."""
        return _rewards(episode.shaped_reward for episode in self.episodes)

    @property
    def sampled(self) -> list[Episode]:
        """Episodes of the prompts that are kept, and of those that were replaced. Prompts no longer needed are left
        out: they come again, and time decides which of them are complete."""
        replaced = len(self.taught) * self.samples_per_prompt - len(self.episodes)
        return [*self.episodes, *self.dropped[: max(replaced, 0)]]

    def parts_NB(self, weights: Mapping[str, float]) -> Tensor:
        """Return the rewards by part, float64, [parts + 1, B]: the parts that `weights` names, unweighted, and the
        rest, such as a length penalty. NaN marks a missing part and, in the last row, a failed reward."""
        rows = [[episode.reward_parts.get(name, math.nan) for episode in self.episodes] for name in weights]
        rest = [
            math.nan
            if episode.reward is None
            # Added up as the reward was, so that nothing is left over without another term.
            else episode.reward
            - sum(weights[name] * part for name, part in episode.reward_parts.items())
            + episode.length_penalty
            for episode in self.episodes
        ]
        return torch.tensor([*rows, rest], dtype=torch.float64)

    def leave_out_truncated(self) -> None:
        """Keep truncated responses out of the loss; they stay in the baseline."""
        for episode in self.episodes:
            episode.is_left_out = episode.ending == "length"

    @property
    def generated(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(episode.generated for episode in self.episodes)

    def rows(self, advantages: Sequence[float], version: int) -> TokenRows:
        """Return the episodes to train on by a policy of this version, with an advantage each."""
        each = zip(self.episodes, advantages, strict=True)
        turns = (turn for one in self.episodes for _, turn in one.turns)
        experts = next((turn.routed_experts.shape[1:] for turn in turns if turn.routed_experts is not None), None)
        return TokenRows.of([episode.row(advantage, version, experts) for episode, advantage in each])

    def metrics(self) -> dict[str, float]:
        """Rollout metrics under NeMo-RL's names: rewards of all sampled prompts before shaping, and the rest of the
        episodes that are kept."""
        samples, generated = len(self.episodes), self.generated
        turns = [len(episode.turns) for episode in self.episodes]
        endings = [episode.ending for episode in self.episodes]
        prompt_tokens = sum(episode.prompt_length for episode in self.episodes)
        total = sum(len(episode.tokens) for episode in self.episodes)
        trained = [episode.generated for episode in self.episodes if episode.is_trained]
        valid, dropped = float(sum(map(bool, trained))), sum(episode.generated for episode in self.dropped)
        return self._reward_metrics() | {
            "mean_prompt_length": prompt_tokens / samples,
            "mean_gen_tokens_per_sample": generated / samples,
            "max_gen_tokens_per_sample": float(max(episode.generated for episode in self.episodes)),
            "mean_env_tokens_per_sample": (total - prompt_tokens - generated) / samples,
            "mean_total_tokens_per_sample": total / samples,
            "total_num_tokens": float(total),
            "avg_turns_per_sample": sum(turns) / samples,
            "max_turns_per_sample": float(max(turns)),
            "natural_termination_rate": endings.count("stop") / samples,
            "truncation_rate": endings.count("length") / samples,
            "max_turns_reached_rate": endings.count("turns") / samples,
            "reward_errors": float(self.reward_errors),
            "environment_errors": float(self.environment_errors),
            "filtered_prompts": len(self.taught) - samples / self.samples_per_prompt,
            "rested_prompts": float(self.rested),
            "dropped_tokens": float(dropped),
            "useful_tokens_share": generated / max(generated + dropped, 1),
            "left_out_samples": float(sum(episode.is_left_out for episode in self.episodes)),
            "global_valid_seqs": valid,
            "global_valid_toks": float(sum(trained)),
            "num_valid_samples": valid,
        }

    def _reward_metrics(self) -> dict[str, float]:
        sampled, parts = self.sampled, dict[str, list[float]]()
        for episode in sampled:
            for name, part in episode.reward_parts.items():
                parts.setdefault(f"reward/{name}", []).append(part)
        rewards_S = _rewards(episode.reward for episode in sampled)
        penalties = [episode.length_penalty for episode in self.episodes if episode.reward is not None]
        return {
            "reward": rewards_S.nanmean().item(),
            "filtered_reward": _rewards(episode.reward for episode in self.episodes).nanmean().item(),
            "length_penalty": sum(penalties) / max(len(penalties), 1),
            **{name: sum(values) / len(values) for name, values in parts.items()},
            **reward_shares(rewards_S.view(-1, self.samples_per_prompt)),
        }

    def ages(self, version: int) -> dict[str, float]:
        """Staleness in steps, from the weights that sampled a token to those of `version`, with which the step that
        trains on it begins: the mean over tokens, and the most."""
        ages = [version - own for one in self.episodes for _, turn in one.turns for own in turn.versions]
        mean = sum(ages) / max(len(ages), 1)
        return {"trajectory_age_mean": mean, "trajectory_age_max": float(max(ages, default=0))}

    def seconds(self) -> dict[str, float]:
        """Seconds that an episode waited for its responses, its environment (or agent) and its reward: mean and most.
        Seconds that engines waited for requests."""
        found = {what: [one.seconds(what) for one in self.episodes] for what in get_args(Activity)}
        means = {f"{what}_mean": sum(seconds) / len(seconds) for what, seconds in found.items()}
        idle = {} if self.engines_idle_s is None else {"engines_idle": self.engines_idle_s}
        return means | {f"{what}_max": max(seconds) for what, seconds in found.items()} | idle

    def samples(self, count: int) -> list[Sample]:
        """Choose `count` samples to show to people, from the worst reward to the best."""
        judged = [(one, one.reward) for one in self.episodes if one.reward is not None]
        shown = [judged[place] for place in spread([reward for _, reward in judged], count)]
        return [Sample(text_of(one.prompt), text_of(one.said), reward) for one, reward in shown]


def _rewards(rewards: Iterable[float | None]) -> Tensor:
    """Return rewards as float64, with NaN for None."""
    return torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)


RESAMPLES = 2000
_SEED, _TAILS = 0, (2.5, 97.5)
# The sums of a reward's terms are not exact.
_ROUNDING = 1e-6


def passes(rewards: np.ndarray, least: float = 1.0) -> np.ndarray:
    """Return True if each reward is at least `least`; NaN, of a reward that failed, is not."""
    return rewards >= least - _ROUNDING


def pass_at_k(passed_P: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Estimate for each problem, without bias, the probability that at least one of `k` responses passes:
    1 - C(n - c, k) / C(n, k), where c of n `samples` passed (Chen et al. 2021). float64 [P].

    Raises:
        ValueError: `k` is not between 1 and `samples`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} is not between 1 and {samples}")
    failed_P, taken_k = samples - np.asarray(passed_P), np.arange(k)
    return 1.0 - np.prod(np.maximum(failed_P[:, None] - taken_k, 0) / (samples - taken_k), axis=1)


def ks(samples: int) -> list[int]:
    """Return 1, 2, 4, ... and `samples` itself."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()))})


def interval(sums_P: Sequence[float] | np.ndarray, counts_P: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of sum(sums) / sum(counts): percentiles of a bootstrap over problems, with a fixed seed.
    Resamples without any count are left out."""
    table_P2 = np.stack([np.asarray(sums_P, np.float64), np.asarray(counts_P, np.float64)], axis=1)
    source, found = np.random.default_rng(_SEED), []
    for _ in range(RESAMPLES):
        total, count = table_P2[source.integers(len(table_P2), size=len(table_P2))].sum(axis=0)
        if count:
            found.append(total / count)
    low, high = np.percentile(found, _TAILS)
    return float(low), float(high)

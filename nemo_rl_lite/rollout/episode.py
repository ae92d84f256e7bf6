"""Episodes, rollouts of episodes, and pass@k over problems. Shapes: P problems, B episodes."""

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
from nemo_rl_lite.losses.batch import OF_TOKENS, TokenRow, TokenRows
from nemo_rl_lite.observability.sinks import Sample, spread, text_of

Ending = Literal["stop", "length", "turns", "error"]
"""Ended by policy, environment or agent; truncated; no turn left; environment or agent failed."""

Activity = Literal["generate", "environment", "reward"]


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


@dataclass
class Episode:
    """A sequence that grows turn by turn. Sampled tokens are never tokenized again."""

    problem: Problem
    tokens: list[int]
    """Prompt and all later tokens."""
    prompt_length: int
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    """The assistant turns, each with its position in `tokens`."""
    said: list[Message] = field(default_factory=list)
    """All messages after the prompt."""
    reward: float | None = None
    """The sum of the environment's rewards so far, later the final reward. None if there is none."""
    ending: Ending = "stop"
    spans: list[Span] = field(default_factory=list)
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The unweighted terms of a reward that is a sum, by name."""
    is_left_out: bool = False
    """True if the episode is excluded from the loss although it has a reward."""
    own_prompt: tuple[Message, ...] | None = None
    """The prompt's messages if they differ from the problem's."""
    length_penalty: float = 0.0
    """Added to the reward in training; at most 0."""

    def begin(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Replace the prompt, before the first turn."""
        self.tokens, self.prompt_length, self.own_prompt = list(tokens), len(tokens), tuple(messages)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add an assistant turn. A truncated one is the last."""
        self.turns.append((len(self.tokens), completion))
        self.tokens += completion.tokens.tolist()
        self.said.append({"role": "assistant", "content": text})
        self.ending = completion.finish_reason

    def add_messages(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Add messages of the environment, with the tokens up to the next assistant turn."""
        self.tokens += tokens
        self.said += messages

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first turn."""
        return self.problem.messages if self.own_prompt is None else self.own_prompt

    @property
    def response(self) -> str:
        """Text of the last assistant turn; empty without one."""
        return next((said["content"] for said in reversed(self.said) if said["role"] == "assistant"), "")

    @property
    def generated(self) -> int:
        """Number of sampled tokens."""
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
        """Seconds that the episode waited for `what`, over all turns."""
        return sum(span.seconds for span in self.spans if span.what == what)

    @property
    def shaped_reward(self) -> float | None:
        """The reward with the length penalty, for training."""
        return None if self.reward is None else self.reward + self.length_penalty

    @property
    def is_trained(self) -> bool:
        return self.reward is not None and not self.is_left_out

    def row(self, advantage: float, version: int, no_experts: np.ndarray | None = None) -> TokenRow:
        """Return the training row for a policy of this version. The mask selects the sampled tokens of a trained
        episode. `no_experts`: routed experts of 0 tokens, if the engines report them."""
        mask, ages = (np.zeros(len(self.tokens), OF_TOKENS[name]) for name in ("mask", "ages"))
        for start, length, sampled_by in self.sampled_runs():
            own = slice(start, start + length)
            mask[own], ages[own] = self.is_trained, version - sampled_by
        tokens, logprobs = np.asarray(self.tokens, OF_TOKENS["tokens"]), self.generation_logprobs()
        shaped = self.shaped_reward
        reward, own = (0.0, 0.0) if shaped is None else (shaped, advantage)
        return TokenRow(tokens, mask, logprobs, own, ages, reward, routed_experts=self._experts(no_experts))

    def sampled_runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of tokens that one version of the weights sampled: position, number of tokens, version."""
        for start, completion in self.turns:
            for version, length in completion.versions:
                yield start, length, version
                start += length

    def generation_logprobs(self) -> np.ndarray:
        """Return the engines' logprob of each token, float32; 0 for tokens that they did not sample."""
        logprobs = np.zeros(len(self.tokens), OF_TOKENS["generation_logprobs"])
        for start, completion in self.turns:
            logprobs[start : start + len(completion.logprobs)] = completion.logprobs
        return logprobs

    def _experts(self, no_experts: np.ndarray | None) -> np.ndarray | None:
        """Return the routed experts of all tokens that an engine has read, from the first turn that read each. No
        engine has read the last token."""
        if no_experts is None:
            return None
        parts, known = [no_experts], 0
        for _, completion in self.turns:
            if completion.routed_experts is not None:
                parts.append(completion.routed_experts[known:])
                known = len(completion.routed_experts)
        return np.concatenate(parts)


@dataclass
class Rollout:
    """Scored episodes. The samples of a prompt are adjacent."""

    episodes: list[Episode]
    samples_per_prompt: int
    reward_errors: int
    """Number of episodes whose reward failed."""
    environment_errors: int = 0
    """Number of episodes whose environment or agent failed."""
    taught: tuple[bool, ...] = ()
    """True for each sampled prompt with mixed rewards, in data order, up to the last kept prompt."""
    rested: int = 0
    """Number of prompts skipped by their cooldown."""
    took_s: float = 0.0
    """Seconds from the first request to the last reward."""
    engines_idle_s: float | None = None
    """Seconds in which the engines had no request since the previous rollout; None in synchronous runs."""
    dropped: tuple[Episode, ...] = ()
    """Episodes of replaced prompts, whose rewards are all equal, and then of surplus prompts."""
    advantages: Sequence[float] | None = None
    """Advantage of each episode; None before training and outside it."""

    @property
    def rewards_B(self) -> Tensor:
        """The episodes' rewards in training, float64. NaN marks a failed reward."""
        return _rewards(episode.shaped_reward for episode in self.episodes)

    @property
    def sampled(self) -> list[Episode]:
        """Episodes of kept and replaced prompts. Surplus prompts are excluded: they will be sampled again, and timing
        decides which of them are complete."""
        replaced = len(self.taught) * self.samples_per_prompt - len(self.episodes)
        return [*self.episodes, *self.dropped[: max(replaced, 0)]]

    def parts_NB(self, weights: Mapping[str, float]) -> Tensor:
        """Return the unweighted reward parts named in `weights`, and the rest, such as a length penalty: float64,
        [parts + 1, B]. NaN marks a missing part and, in the last row, a failed reward."""
        rows = [[episode.reward_parts.get(name, math.nan) for episode in self.episodes] for name in weights]
        rest = [
            math.nan
            if episode.reward is None
            # Add in the same order as the reward, so that rounding leaves no rest.
            else episode.reward
            - sum(weights[name] * part for name, part in episode.reward_parts.items())
            + episode.length_penalty
            for episode in self.episodes
        ]
        return torch.tensor([*rows, rest], dtype=torch.float64)

    def leave_out_truncated(self) -> None:
        """Exclude truncated responses from the loss; they stay in the baseline."""
        for episode in self.episodes:
            episode.is_left_out = episode.ending == "length"

    @property
    def generated(self) -> int:
        """Number of sampled tokens."""
        return sum(episode.generated for episode in self.episodes)

    def rows(self, advantages: Sequence[float], version: int) -> TokenRows:
        """Return the training rows for a policy of this version, with an advantage per episode."""
        each = zip(self.episodes, advantages, strict=True)
        turns = (turn for one in self.episodes for _, turn in one.turns)
        no_experts = next((turn.routed_experts[:0] for turn in turns if turn.routed_experts is not None), None)
        return TokenRows.of([episode.row(advantage, version, no_experts) for episode, advantage in each])

    def metrics(self) -> dict[str, float]:
        """Return rollout metrics under NeMo-RL's names: unshaped rewards of all sampled prompts, all else of kept
        episodes."""
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
        """Return mean and maximum staleness over tokens: steps from the weights that sampled a token to `version`, with
        which its training step begins."""
        runs = [(version - own, count) for one in self.episodes for _, count, own in one.sampled_runs()]
        mean = sum(age * count for age, count in runs) / max(sum(count for _, count in runs), 1)
        return {"trajectory_age_mean": mean, "trajectory_age_max": float(max((age for age, _ in runs), default=0))}

    def seconds(self) -> dict[str, float]:
        """Return mean and maximum seconds that episodes waited for responses, environments (or agents) and rewards, and
        the seconds that engines were idle."""
        found = {what: [one.seconds(what) for one in self.episodes] for what in get_args(Activity)}
        means = {f"{what}_mean": sum(seconds) / len(seconds) for what, seconds in found.items()}
        idle = {} if self.engines_idle_s is None else {"engines_idle": self.engines_idle_s}
        return means | {f"{what}_max": max(seconds) for what, seconds in found.items()} | idle

    def samples(self, count: int) -> list[Sample]:
        """Choose `count` samples to show, from the lowest reward to the highest."""
        judged = [(one, one.reward) for one in self.episodes if one.reward is not None]
        shown = [judged[place] for place in spread([reward for _, reward in judged], count)]
        return [Sample(text_of(one.prompt), text_of(one.said), reward) for one, reward in shown]


def _rewards(rewards: Iterable[float | None]) -> Tensor:
    return torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)


RESAMPLES = 2000
_SEED, _TAILS = 0, (2.5, 97.5)
# Tolerance for rounding in sums of reward terms.
_ROUNDING = 1e-6


def passes(rewards: np.ndarray, least: float = 1.0) -> np.ndarray:
    """Return True for each reward of at least `least`. NaN, a failed reward, does not pass."""
    return rewards >= least - _ROUNDING


def pass_at_k(passed_P: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Return the unbiased estimate of pass@k for each problem: 1 - C(n - c, k) / C(n, k), where c of n `samples` passed
    (Chen et al. 2021). float64 [P]. Raises ValueError: `k` is not between 1 and `samples`."""
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} is not between 1 and {samples}")
    failed_P, taken_k = samples - np.asarray(passed_P), np.arange(k)
    return 1.0 - np.prod(np.maximum(failed_P[:, None] - taken_k, 0) / (samples - taken_k), axis=1)


def ks(samples: int) -> list[int]:
    """Return 1, 2, 4, ... and `samples` itself."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()))})


def interval(sums_P: Sequence[float] | np.ndarray, counts_P: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of sum(sums) / sum(counts) over problems, with a fixed seed. Resamples with a
    count of 0 are skipped."""
    table_P2 = np.stack([np.asarray(sums_P, np.float64), np.asarray(counts_P, np.float64)], axis=1)
    source, found = np.random.default_rng(_SEED), []
    for _ in range(RESAMPLES):
        total, count = table_P2[source.integers(len(table_P2), size=len(table_P2))].sum(axis=0)
        if count:
            found.append(total / count)
    low, high = np.percentile(found, _TAILS)
    return float(low), float(high)

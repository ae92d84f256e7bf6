"""Rollouts of scored episodes, and pass@k over problems. Shapes: P problems, G samples of each, B episodes, T turns."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.losses.advantages import reward_shares
from nemo_rl_lite.losses.batch import RowBatch, TokenRows, episode_numbers
from nemo_rl_lite.observability.sinks import Sample, spread, text_of
from nemo_rl_lite.rollout.episode import (
    Activity,
    Advantage,
    Episode,
    EpisodeRecord,
    Sampled,
    returns_of,
    reward_tensor,
    rewards_by_turn,
)

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class SampleFile:
    """The samples of a rollout in the run's folder."""

    folder: Path
    step: int
    split: Split
    samples_per_prompt: int
    began: float | None
    """Unix time of the rollout's first wait."""


class EpisodeStore(Protocol):
    """The episodes of records. Raises WorkerError: a rollout worker has failed or died."""

    def rows(self, records: Sequence[EpisodeRecord], advantages: Sequence[Advantage], version: int) -> RowBatch:
        """See `Rollout.rows`."""
        ...

    def fetch(self, records: Sequence[EpisodeRecord]) -> list[Episode]:
        """Return the episodes of the records."""
        ...

    def write(
        self, target: SampleFile, records: Sequence[EpisodeRecord], advantages: Sequence[Advantage | None]
    ) -> Callable[[], list[str]]:
        """Start to write the samples of a rollout's first records, with their advantages. Return a function that waits
        for it, and returns errors of file systems."""
        ...

    def save(self, file: Path, groups: Mapping[int, Sequence[EpisodeRecord]]) -> Callable[[], list[Path]]:
        """Start to write the episodes of prompts, by number, for a checkpoint. Return a function that waits for it and
        returns the files, whose names begin with that of `file`. Groups of workers that die are missing. It raises
        OSError."""
        ...

    def release(self, records: Sequence[EpisodeRecord]) -> None:
        """Forget the episodes of the records."""
        ...

    def has(self, record: EpisodeRecord) -> bool:
        """Return whether the worker that played the episode lives, as far as is known."""
        ...

    def look_for_losses(self) -> None:
        """Ask all rollout workers whether they live."""
        ...


@dataclass
class Rollout:
    """Scored episodes. The samples of a prompt are adjacent."""

    episodes: Sequence[Sampled]
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
    """Seconds from the first request to the last reward, without pauses of the engines."""
    engines_idle_s: float | None = None
    """Seconds in which the engines had no request since the previous rollout; None in synchronous runs."""
    dropped: tuple[Sampled, ...] = ()
    """Episodes of replaced prompts, whose rewards are all equal, and then of surplus prompts."""
    store: EpisodeStore | None = None
    """Store of the records' episodes; None if all are here."""
    turn_discount: float | None = None
    """Discount of later turns' rewards if each turn has its own advantage; None if the episode has one."""
    advantages: Sequence[Advantage] | None = None
    """Advantage of each episode; None before training and outside it."""
    progress: Mapping[str, float] = field(default_factory=dict)
    """Weights and epochs of the sources of a mixture, as metrics."""

    @property
    def rewards_B(self) -> Tensor:
        """The episodes' rewards in training, float64. NaN marks a failed reward."""
        return reward_tensor(episode.shaped_reward for episode in self.episodes)

    @property
    def returns_TPG(self) -> Tensor:
        """The returns to go in training, float64, for G samples of each prompt; see `returns_of`."""
        return self._by_prompt(returns_of(self.episodes, self.turn_discount))

    def _by_prompt(self, returns_TB: Tensor) -> Tensor:
        return returns_TB.view(len(returns_TB), -1, self.samples_per_prompt)

    def spread_over_turns(self, advantages_TPG: Tensor) -> list[Advantage]:
        """Return the advantage of each episode, or those of its turns, with one entry at least."""
        advantages_TB = advantages_TPG.flatten(1)
        if self.turn_discount is None:
            return advantages_TB[0].tolist()
        each = zip(self.episodes, advantages_TB.T.numpy(), strict=True)
        return [advantages_T[: max(episode.turn_count, 1)].copy() for episode, advantages_T in each]

    @property
    def sampled(self) -> list[Sampled]:
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

    @property
    def resumed_tokens(self) -> int:
        """Number of sampled tokens from the unfinished prompts of a checkpoint."""
        return sum(episode.resumed for episode in self.episodes)

    @property
    def records(self) -> list[EpisodeRecord]:
        """The episodes that rollout workers keep."""
        return [one for one in self.episodes if isinstance(one, EpisodeRecord)]

    def rows(self, advantages: Sequence[Advantage], version: int) -> RowBatch:
        """Return the training rows for a policy of this version, with an advantage per episode. The rows of an episode
        are adjacent."""
        if self.store is not None:
            return self.store.rows(self.records, advantages, version)
        each = list(zip(self.whole(), advantages, strict=True))
        no_experts = next((found for one, _ in each if (found := one.no_experts) is not None), None)
        counts = [episode.row_count for episode, _ in each]
        rows = [
            episode.row(advantage, version, no_experts, number)
            for (episode, advantage), count in zip(each, counts, strict=True)
            for number in range(count)
        ]
        return replace(TokenRows.of(rows), episodes=episode_numbers(counts))

    def row_sources(self, rows: RowBatch) -> list[str]:
        """Return the source of each row of `rows`, which are this rollout's."""
        numbers = range(len(rows)) if rows.episodes is None else rows.episodes.tolist()
        return [self.episodes[number].source for number in numbers]

    def whole(self, places: Sequence[int] | None = None) -> list[Episode]:
        """Return all episodes, or those at `places`, from wherever they are."""
        chosen = self.episodes if places is None else [self.episodes[place] for place in places]
        return fetched(chosen, self.store)

    @property
    def is_lost(self) -> bool:
        """True if a rollout worker has died with some of the episodes."""
        store = self.store
        return store is not None and not all(map(store.has, self.records))

    def has_died(self) -> bool:
        """Ask the rollout workers whether one has died with some of the episodes."""
        if self.store is not None:
            self.store.look_for_losses()
        return self.is_lost

    def release(self) -> None:
        """Let rollout workers forget the episodes."""
        if self.store is not None:
            self.store.release([one for one in (*self.episodes, *self.dropped) if isinstance(one, EpisodeRecord)])

    def metrics(self) -> dict[str, float]:
        """Return rollout metrics under NeMo-RL's names: unshaped rewards of all sampled prompts, all else of kept
        episodes."""
        samples, generated = len(self.episodes), self.generated
        turns = [episode.turn_count for episode in self.episodes]
        segments = [episode.row_count for episode in self.episodes]
        endings = [episode.ending for episode in self.episodes]
        prompt_tokens = sum(episode.prompt_tokens for episode in self.episodes)
        total = sum(episode.length for episode in self.episodes)
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
            "avg_segments_per_sample": sum(segments) / samples,
            "max_segments_per_sample": float(max(segments)),
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
        sampled = self.sampled
        rewards_S = reward_tensor(episode.reward for episode in sampled)
        penalties = [episode.length_penalty for episode in self.episodes if episode.reward is not None]
        by_turn: dict[str, float] = {}
        if self.turn_discount is not None:
            early = [float(rewards_by_turn(one)[:-1].sum()) for one in sampled if one.reward is not None]
            by_turn["early_reward"] = sum(early) / max(len(early), 1)
        return by_turn | {
            "reward": rewards_S.nanmean().item(),
            "filtered_reward": reward_tensor(episode.reward for episode in self.episodes).nanmean().item(),
            "length_penalty": sum(penalties) / max(len(penalties), 1),
            **_means("reward", [one.reward_parts for one in sampled]),
            **self.episode_metrics(),
            **reward_shares(self._by_prompt(returns_of(sampled, self.turn_discount, shaped=False))),
        }

    def episode_metrics(self) -> dict[str, float]:
        """Return the mean of each metric of environments and agents, over the sampled episodes that report it."""
        return _means("episode", [one.metrics for one in self.sampled])

    def ages(self, version: int) -> dict[str, float]:
        """Return mean and maximum staleness over tokens: steps from the weights that sampled a token to `version`, with
        which its training step begins."""
        tokens = Counter[int]()
        for episode in self.episodes:
            tokens.update(episode.versions)
        total = sum((version - own) * count for own, count in tokens.items())
        mean = total / max(tokens.total(), 1)
        return {"trajectory_age_mean": mean, "trajectory_age_max": float(version - min(tokens, default=version))}

    def seconds(self) -> dict[str, float]:
        """Return mean and maximum seconds that episodes waited for responses, environments (or agents) and rewards, and
        the seconds that engines were idle."""
        found = {what: [one.seconds(what) for one in self.episodes] for what in get_args(Activity)}
        means = {f"{what}_mean": sum(seconds) / len(seconds) for what, seconds in found.items()}
        idle = {} if self.engines_idle_s is None else {"engines_idle": self.engines_idle_s}
        return means | {f"{what}_max": max(seconds) for what, seconds in found.items()} | idle

    def samples(self, count: int) -> list[Sample]:
        """Choose `count` samples to show, from the lowest reward to the highest."""
        judged = [(place, one.reward) for place, one in enumerate(self.episodes) if one.reward is not None]
        shown = [judged[index] for index in spread([reward for _, reward in judged], count)]
        found = zip(self.whole([place for place, _ in shown]), shown, strict=True)
        return [Sample(text_of(one.last.prompt), text_of(one.last.said), reward) for one, (_, reward) in found]


def _means(prefix: str, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the episodes that have it."""
    found = dict[str, list[float]]()
    for own in values:
        for name, value in own.items():
            found.setdefault(f"{prefix}/{name}", []).append(value)
    return {name: sum(each) / len(each) for name, each in found.items()}


def fetched(episodes: Sequence[Sampled], store: EpisodeStore | None) -> list[Episode]:
    """Return the episodes, from wherever they are."""
    here = [one for one in episodes if isinstance(one, Episode)]
    records = [one for one in episodes if isinstance(one, EpisodeRecord)]
    return [*here, *store.fetch(records)] if store is not None and records else here


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

"""Sampled and judged episodes, as the loop, people and trackers see them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from nemo_rl_lite.losses.batch import TokenRows
from nemo_rl_lite.observability.sink import Sample, spread, text_of
from nemo_rl_lite.rollout.episode import Activity, Episode


@dataclass
class Rollout:
    """Judged episodes, those of a prompt next to each other."""

    episodes: list[Episode]
    samples_per_prompt: int
    reward_errors: int
    environment_errors: int = 0
    taught: tuple[bool, ...] = ()
    """Of each prompt up to the last one that is kept, in the order of the data, whether its rewards differ. The next
    rollout begins behind it."""
    rested: int = 0
    """Prompts of the data that were passed over on the way to those of `taught`, because they taught nothing
    earlier."""
    took_s: float = 0.0
    """Seconds from its first request to its last reward."""
    engines_idle_s: float | None = None
    """Seconds in which no engine had a request, since the rollout before was taken; None where engines and policy take
    turns anyway."""
    dropped: tuple[Episode, ...] = ()
    """Episodes of prompts that were replaced because all their rewards are the same, or were not needed any more."""

    @property
    def rewards_B(self) -> Tensor:
        """The episodes' rewards, float64; NaN where the reward failed."""
        rewards = [math.nan if episode.reward is None else episode.reward for episode in self.episodes]
        return torch.tensor(rewards, dtype=torch.float64)

    def parts_NB(self, weights: Mapping[str, float]) -> Tensor:
        """The episodes' rewards part by part, float64, [parts + 1, B]: those that `weights` names, without their
        weight; in the last row what else there is, such as a punishment for length. NaN where a part is not there;
        in the last row, where the reward failed."""
        rows = [[episode.reward_parts.get(name, math.nan) for episode in self.episodes] for name in weights]
        rest = [
            math.nan
            if episode.reward is None
            # Added up as the reward was, so that nothing is left over where there is nothing else.
            else episode.reward - sum(weights[name] * part for name, part in episode.reward_parts.items())
            for episode in self.episodes
        ]
        return torch.tensor([*rows, rest], dtype=torch.float64)

    def leave_out_truncated(self) -> None:
        """Keep truncated responses out of the loss; they stay in the baseline."""
        for episode in self.episodes:
            episode.is_left_out = episode.ending == "length"

    @property
    def generated(self) -> int:
        """Tokens that the policy sampled."""
        return sum(episode.generated for episode in self.episodes)

    def rows(self, advantages: Sequence[float], version: int) -> TokenRows:
        """The episodes to train on, with an advantage each, by a policy of this version. Those whose reward failed have
        no token with a loss."""
        each = zip(self.episodes, advantages, strict=True)
        turns = (turn for one in self.episodes for _, turn in one.turns)
        experts = next((turn.routed_experts.shape[1:] for turn in turns if turn.routed_experts is not None), None)
        return TokenRows.of([episode.row(advantage, version, experts) for episode, advantage in each])

    def metrics(self) -> dict[str, float]:
        """Rollout metrics under NeMo-RL's names."""
        samples, generated = len(self.episodes), self.generated
        turns = [len(episode.turns) for episode in self.episodes]
        endings = [episode.ending for episode in self.episodes]
        prompt_tokens = sum(episode.prompt_length for episode in self.episodes)
        total = sum(len(episode.tokens) for episode in self.episodes)
        trained = [episode.generated for episode in self.episodes if episode.is_trained]
        valid, dropped = float(sum(map(bool, trained))), sum(episode.generated for episode in self.dropped)
        return {
            "reward": self.rewards_B.nanmean().item(),
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
        } | self._parts()

    def ages(self, version: int) -> dict[str, float]:
        """How many steps of the run, one rollout each, lie between the weights that sampled a token and those of
        `version`, with which the step that trains on it begins: the mean over tokens, and the most."""
        ages = [version - own for one in self.episodes for _, turn in one.turns for own in turn.versions]
        mean = sum(ages) / max(len(ages), 1)
        return {"trajectory_age_mean": mean, "trajectory_age_max": float(max(ages, default=0))}

    def _parts(self) -> dict[str, float]:
        """The mean of each part of the reward, before its weight."""
        found: dict[str, list[float]] = {}
        for episode in self.episodes:
            for name, part in episode.reward_parts.items():
                found.setdefault(f"reward/{name}", []).append(part)
        return {name: sum(parts) / len(parts) for name, parts in found.items()}

    def seconds(self) -> dict[str, float]:
        """How long an episode waited for its responses, its environment (or agent) and its reward: mean and longest;
        and how long engines waited for requests."""
        found = {what: [one.seconds(what) for one in self.episodes] for what in get_args(Activity)}
        means = {f"{what}_mean": sum(seconds) / len(seconds) for what, seconds in found.items()}
        idle = {} if self.engines_idle_s is None else {"engines_idle": self.engines_idle_s}
        return means | {f"{what}_max": max(seconds) for what, seconds in found.items()} | idle

    def samples(self, count: int) -> list[Sample]:
        """`count` samples to show to people, from the worst reward to the best."""
        judged = [(one, one.reward) for one in self.episodes if one.reward is not None]
        shown = [judged[place] for place in spread([reward for _, reward in judged], count)]
        return [Sample(text_of(one.prompt), text_of(one.said), reward) for one, reward in shown]

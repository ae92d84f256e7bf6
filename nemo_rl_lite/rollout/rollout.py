"""Problems -> sampled and judged episodes, whatever the engine."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion, Generation, Sampling
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.observability.samples import Sample, spread, text_of
from nemo_rl_lite.rewards.judge import Judge
from nemo_rl_lite.rewards.registry import RewardError, WrongReward
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.prompts import check_length
from nemo_rl_lite.rollout.turns import Turns

log = logging.getLogger(__name__)

# Far from the seeds of other steps, which count up by one.
_SEEDS_BETWEEN_TURNS = 500_009


@dataclass(frozen=True)
class Rollout:
    """Judged episodes, those of a prompt next to each other."""

    episodes: list[Episode]
    samples_per_prompt: int
    reward_errors: int

    @property
    def rewards_B(self) -> Tensor:
        """The episodes' rewards, float64; NaN where the reward failed."""
        rewards = [math.nan if episode.reward is None else episode.reward for episode in self.episodes]
        return torch.tensor(rewards, dtype=torch.float64)

    @property
    def generated(self) -> int:
        """Tokens that the policy sampled."""
        return sum(episode.generated for episode in self.episodes)

    def rows(self, advantages: Sequence[float]) -> list[TokenRow]:
        """The episodes to train on, with an advantage each. Those whose reward failed have no token with a loss."""
        return [episode.row(advantage) for episode, advantage in zip(self.episodes, advantages, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Rollout metrics under NeMo-RL's names."""
        samples, generated = len(self.episodes), self.generated
        turns = [len(episode.turns) for episode in self.episodes]
        endings = [episode.ending for episode in self.episodes]
        prompt_tokens = sum(episode.prompt_length for episode in self.episodes)
        total = sum(len(episode.tokens) for episode in self.episodes)
        trained = [episode.generated for episode in self.episodes if episode.reward is not None]
        valid = float(sum(map(bool, trained)))
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
            "global_valid_seqs": valid,
            "global_valid_toks": float(sum(trained)),
            "num_valid_samples": valid,
        }

    def samples(self, count: int) -> list[Sample]:
        """`count` samples to show to people, from the worst reward to the best."""
        judged = [(one, one.reward) for one in self.episodes if one.reward is not None]
        shown = [judged[place] for place in spread([reward for _, reward in judged], count)]
        return [Sample(text_of(one.problem.messages), text_of(one.said), reward) for one, reward in shown]


class RolloutCollector:
    """Samples episodes from an engine and judges them. With `turns`, an environment answers between the turns."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        judge: Judge,
        max_length: int,
        max_error_share: float,
        turns: Turns | None = None,
    ):
        """`max_error_share`: the largest share of a rollout's samples whose reward may fail."""
        self._max_error_share = max_error_share
        self._generation, self._tokenizer, self._judge, self._turns = generation, tokenizer, judge, turns
        self._max_length = max_length

    def collect(self, problems: Sequence[Problem], sampling: Sampling) -> Rollout:
        """`sampling.samples_per_prompt` responses to each problem.

        Raises:
            DataError: a prompt that leaves no room for the response, a reward that fails on too many samples or returns
                what is no reward, or an environment that fails.
        """
        prompts = [self._tokenizer.prompt(problem.messages) for problem in problems]
        for problem, prompt in zip(problems, prompts, strict=True):
            check_length(problem, len(prompt), sampling.max_new_tokens, self._max_length)
        episodes = [
            Episode(problem, list(prompt), len(prompt))
            for problem, prompt in zip(problems, prompts, strict=True)
            for _ in range(sampling.samples_per_prompt)
        ]
        self._add_turn(episodes, self._generation.generate(prompts, sampling))
        if self._turns:
            self._add_further_turns(self._turns, episodes, sampling)
        return Rollout(episodes, sampling.samples_per_prompt, self._judge_all(episodes))

    def _add_turn(self, episodes: Sequence[Episode], completions: Sequence[Completion]) -> None:
        for episode, completion in zip(episodes, completions, strict=True):
            episode.add_turn(completion, self._tokenizer.text(completion.tokens))

    def _add_further_turns(self, turns: Turns, episodes: Sequence[Episode], sampling: Sampling) -> None:
        """Generate each turn for all unfinished episodes at once."""
        room, unfinished = self._max_length - sampling.max_new_tokens, episodes
        while unfinished := [one for one in unfinished if turns.continues(one, self._tokenizer, room)]:
            seed = (sampling.seed + _SEEDS_BETWEEN_TURNS * len(unfinished[0].turns)) % 2**31
            one_each = replace(sampling, samples_per_prompt=1, seed=seed)
            self._add_turn(unfinished, self._generation.generate([list(one.tokens) for one in unfinished], one_each))

    def _judge_all(self, episodes: Sequence[Episode]) -> int:
        """Give a reward to each episode that has none. Returns how many could not be computed; those are left without
        one, are logged and show as a metric."""
        judged = [episode for episode in episodes if episode.reward is None]
        verdicts = self._judge([episode.response for episode in judged], [episode.problem for episode in judged])
        errors: list[RewardError] = []
        for episode, verdict in zip(judged, verdicts, strict=True):
            if not isinstance(verdict, RewardError):
                episode.reward = verdict
                continue
            sample = f"{episode.response[-200:]!r} (answer {episode.problem.answer!r})"
            if isinstance(verdict, WrongReward):
                raise DataError(f"reward.name: {verdict}; the response was {sample}")
            errors.append(verdict)
            if len(errors) == 1:
                log.warning("the reward failed on %s: %s", sample, verdict, exc_info=verdict)
        if len(errors) > self._max_error_share * len(judged):
            raise DataError(
                f"the reward failed on {len(errors)} of {len(judged)} samples, and at most the share "
                f"reward.max_error_share = {self._max_error_share:g} may fail; first with {errors[0]}"
            )
        return len(errors)

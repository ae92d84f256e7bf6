"""Problems -> sampled sequences with masks, logprobs and rewards. Knows neither Ray nor an engine's make."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_rl_lite.data.problems import Message, Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion, Generation, Sampling
from nemo_rl_lite.observability.samples import Sample, spread, text_of
from nemo_rl_lite.rewards.judge import Judge
from nemo_rl_lite.rollout.episode import Ending, Episode, as_tensors
from nemo_rl_lite.rollout.prompts import check_length
from nemo_rl_lite.rollout.turns import Turns

log = logging.getLogger(__name__)

# Apart from the seeds of other steps, which count up by one.
_SEEDS_BETWEEN_TURNS = 500_009


@dataclass(frozen=True)
class Rollout:
    """B = prompts x samples sequences, samples of a prompt beside each other, right-padded to T tokens."""

    tokens_BT: Tensor
    mask_BT: Tensor
    """1 where a token was generated, else 0 (float32). With an environment, several runs of 1 in a row."""
    generation_logprobs_BT: Tensor
    """The engine's logprobs of generated tokens, else 0 (float32, nats)."""
    lengths_B: Tensor
    """Tokens of each sequence, prompt and everything after it (int64)."""
    rewards_B: Tensor
    problems: list[Problem]
    """One for each sequence."""
    samples_per_prompt: int
    prompt_lengths: list[int]
    """Tokens; one for each sequence."""
    completions: list[Completion]
    """What was generated in each sequence, all turns together."""
    responses: list[str]
    """The assistant's last turn in each sequence."""
    turns: list[list[Message]]
    """What was said in each sequence since the prompt, by the assistant and by the environment."""
    endings: list[Ending]
    reward_errors: int

    def metrics(self) -> dict[str, float]:
        """Rollout metrics under NeMo-RL's names."""
        lengths = [len(completion.tokens) for completion in self.completions]
        turns = [sum(message["role"] == "assistant" for message in said) for said in self.turns]
        samples, generated, prompt_tokens = len(lengths), sum(lengths), sum(self.prompt_lengths)
        total = int(self.lengths_B.sum())
        return {
            "reward": self.rewards_B.mean().item(),
            "mean_prompt_length": prompt_tokens / samples,
            "mean_gen_tokens_per_sample": generated / samples,
            "max_gen_tokens_per_sample": float(max(lengths)),
            "mean_env_tokens_per_sample": (total - prompt_tokens - generated) / samples,
            "mean_total_tokens_per_sample": total / samples,
            "total_num_tokens": float(total),
            "avg_turns_per_sample": sum(turns) / samples,
            "max_turns_per_sample": float(max(turns)),
            "natural_termination_rate": self.endings.count("stop") / samples,
            "truncation_rate": self.endings.count("length") / samples,
            "max_turns_reached_rate": self.endings.count("turns") / samples,
            "reward_errors": float(self.reward_errors),
        }

    def samples(self, count: int) -> list[Sample]:
        """`count` samples to show to people, from the worst reward to the best."""
        rewards = self.rewards_B.tolist()
        return [
            Sample(text_of(self.problems[row].messages), text_of(self.turns[row]), rewards[row])
            for row in spread(rewards, count)
        ]


class RolloutCollector:
    """Samples from an engine and judges what comes back. With `turns`, an environment answers in between."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        judge: Judge,
        max_length: int,
        turns: Turns | None = None,
    ):
        self._generation, self._tokenizer, self._judge, self._turns = generation, tokenizer, judge, turns
        self._max_length = max_length

    def collect(self, problems: Sequence[Problem], sampling: Sampling) -> Rollout:
        """`sampling.samples_per_prompt` responses to each problem.

        Raises:
            DataError: a prompt that leaves no room for the response, a reward that fails on every sample, or an
                environment that fails.
        """
        prompts = [self._tokenizer.prompt(problem.messages) for problem in problems]
        for problem, prompt in zip(problems, prompts, strict=True):
            check_length(problem, prompt, sampling.max_new_tokens, self._max_length)
        episodes = [
            Episode(problem, list(prompt), len(prompt))
            for problem, prompt in zip(problems, prompts, strict=True)
            for _ in range(sampling.samples_per_prompt)
        ]
        self._add_turn(episodes, self._generation.generate(prompts, sampling))
        if self._turns:
            self._add_further_turns(self._turns, episodes, sampling)
        rewards_B, errors = self._rewards(episodes)
        tokens_BT, mask_BT, logprobs_BT, lengths_B = as_tensors(episodes, self._tokenizer.padding_token)
        return Rollout(
            tokens_BT=tokens_BT,
            mask_BT=mask_BT,
            generation_logprobs_BT=logprobs_BT,
            lengths_B=lengths_B,
            rewards_B=rewards_B,
            problems=[episode.problem for episode in episodes],
            samples_per_prompt=sampling.samples_per_prompt,
            prompt_lengths=[episode.prompt_length for episode in episodes],
            completions=[episode.completion() for episode in episodes],
            responses=[episode.response for episode in episodes],
            turns=[episode.said for episode in episodes],
            endings=[episode.ending for episode in episodes],
            reward_errors=errors,
        )

    def _add_turn(self, episodes: Sequence[Episode], completions: Sequence[Completion]) -> None:
        for episode, completion in zip(episodes, completions, strict=True):
            episode.add_turn(completion, self._tokenizer.text(completion.tokens))

    def _add_further_turns(self, turns: Turns, episodes: Sequence[Episode], sampling: Sampling) -> None:
        """Each turn is generated for all episodes that go on at once."""
        room, going = self._max_length - sampling.max_new_tokens, episodes
        while going := [episode for episode in going if turns.go_on(episode, self._tokenizer, room)]:
            seed = (sampling.seed + _SEEDS_BETWEEN_TURNS * len(going[0].turns)) % 2**31
            one_each = replace(sampling, samples_per_prompt=1, seed=seed)
            self._add_turn(going, self._generation.generate([list(episode.tokens) for episode in going], one_each))

    def _rewards(self, episodes: Sequence[Episode]) -> tuple[Tensor, int]:
        """Rewards, and how many could not be computed; those count as 0, are logged and show as a metric."""
        judged = [episode for episode in episodes if episode.reward is None]
        verdicts = self._judge([episode.response for episode in judged], [episode.problem for episode in judged])
        errors: list[str] = []
        for episode, verdict in zip(judged, verdicts, strict=True):
            if isinstance(verdict, float) and math.isfinite(verdict):
                episode.reward = verdict
                continue
            errors.append(str(verdict) if isinstance(verdict, Exception) else f"the reward is {verdict}")
            if len(errors) == 1:
                shown, answer = episode.response[-200:], episode.problem.answer
                traceback = verdict if isinstance(verdict, Exception) else None
                log.warning("the reward failed on %r (answer %r): %s", shown, answer, errors[0], exc_info=traceback)
        if errors and len(errors) == len(judged):
            raise DataError(f"the reward failed on all {len(errors)} samples, first with {errors[0]}")
        return torch.tensor([episode.reward or 0.0 for episode in episodes]), len(errors)

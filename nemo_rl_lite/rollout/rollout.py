"""Problems -> sampled sequences with masks, logprobs and rewards. Knows neither Ray nor an engine's make."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion, Generation, Sampling
from nemo_rl_lite.rewards.registry import Reward

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollout:
    """B = prompts x samples sequences, samples of a prompt beside each other, right-padded to T tokens."""

    tokens_BT: Tensor
    mask_BT: Tensor
    """1 where a token was generated, else 0 (float32)."""
    generation_logprobs_BT: Tensor
    """The engine's logprobs of generated tokens, else 0 (float32, nats)."""
    rewards_B: Tensor
    problems: list[Problem]
    """One for each sequence."""
    prompt_lengths: list[int]
    """Tokens; one for each sequence."""
    completions: list[Completion]
    responses: list[str]
    reward_errors: int

    def metrics(self) -> dict[str, float]:
        """Rollout metrics under NeMo-RL's names."""
        lengths = [len(completion.tokens) for completion in self.completions]
        samples = len(lengths)
        prompt_tokens = sum(self.prompt_lengths)
        stopped = sum(completion.finish_reason == "stop" for completion in self.completions)
        total = prompt_tokens + sum(lengths)
        return {
            "reward": self.rewards_B.mean().item(),
            "mean_prompt_length": prompt_tokens / samples,
            "mean_gen_tokens_per_sample": sum(lengths) / samples,
            "max_gen_tokens_per_sample": float(max(lengths)),
            "mean_total_tokens_per_sample": total / samples,
            "total_num_tokens": float(total),
            "natural_termination_rate": stopped / samples,
            "truncation_rate": 1 - stopped / samples,
            "reward_errors": float(self.reward_errors),
        }


class RolloutCollector:
    """Samples from an engine and judges what comes back."""

    def __init__(self, generation: Generation, tokenizer: ChatTokenizer, reward: Reward, max_length: int):
        self._generation, self._tokenizer, self._reward = generation, tokenizer, reward
        self._max_length = max_length

    def collect(self, problems: Sequence[Problem], sampling: Sampling) -> Rollout:
        """`sampling.samples_per_prompt` responses to each problem.

        Raises:
            DataError: a prompt that leaves no room for the response.
        """
        prompts = [self._tokenizer.prompt(problem.messages) for problem in problems]
        for problem, prompt in zip(problems, prompts, strict=True):
            check_length(problem, prompt, sampling.max_new_tokens, self._max_length)
        completions = self._generation.generate(prompts, sampling)
        responses = [self._tokenizer.text(completion.tokens) for completion in completions]
        samples = range(sampling.samples_per_prompt)
        problem_of_each = [problem for problem in problems for _ in samples]
        prompt_of_each = [prompt for prompt in prompts for _ in samples]
        rewards_B, errors = self._judge(responses, problem_of_each)
        tokens_BT, mask_BT, logprobs_BT = self._pad(prompt_of_each, completions)
        return Rollout(
            tokens_BT=tokens_BT,
            mask_BT=mask_BT,
            generation_logprobs_BT=logprobs_BT,
            rewards_B=rewards_B,
            problems=problem_of_each,
            prompt_lengths=[len(prompt) for prompt in prompt_of_each],
            completions=completions,
            responses=responses,
            reward_errors=errors,
        )

    def _judge(self, responses: Sequence[str], problems: Sequence[Problem]) -> tuple[Tensor, int]:
        """Rewards, and how many could not be computed; those count as 0, are logged and show as a metric."""
        rewards: list[float] = []
        errors: list[str] = []
        for response, problem in zip(responses, problems, strict=True):
            try:
                reward = self._reward(response, problem.answer)
                if not math.isfinite(reward):
                    raise ValueError(f"the reward is {reward}")
            except Exception as error:  # a user's function may raise anything
                if not errors:
                    log.warning("the reward failed on %r (answer %r)", response, problem.answer, exc_info=True)
                errors.append(f"{type(error).__name__}: {error}")
                reward = 0.0
            rewards.append(reward)
        if len(errors) == len(rewards):
            raise DataError(f"the reward failed on all {len(errors)} samples, first with {errors[0]}")
        return torch.tensor(rewards), len(errors)

    def _pad(self, prompts: Sequence[list[int]], completions: Sequence[Completion]) -> tuple[Tensor, Tensor, Tensor]:
        rows = list(zip(prompts, completions, strict=True))
        length = max(len(prompt) + len(completion.tokens) for prompt, completion in rows)
        tokens_BT = torch.full((len(rows), length), self._tokenizer.padding_token)
        mask_BT, logprobs_BT = torch.zeros(len(rows), length), torch.zeros(len(rows), length)
        for row, (prompt, completion) in enumerate(rows):
            start, stop = len(prompt), len(prompt) + len(completion.tokens)
            tokens_BT[row, :stop] = torch.tensor([*prompt, *completion.tokens])
            mask_BT[row, start:stop] = 1.0
            logprobs_BT[row, start:stop] = torch.tensor(completion.logprobs)
        return tokens_BT, mask_BT, logprobs_BT


def check_prompts(problems: Sequence[Problem], tokenizer: ChatTokenizer, config: Config) -> None:
    """Raises DataError: a prompt that leaves no room for the response."""
    for problem in problems:
        prompt = tokenizer.prompt(problem.messages)
        check_length(problem, prompt, config.generation.max_new_tokens, config.policy.max_total_sequence_length)


def check_length(problem: Problem, prompt: Sequence[int], max_new_tokens: int, max_length: int) -> None:
    """Raises DataError: `prompt` leaves no room for `max_new_tokens` within `max_length` tokens."""
    if len(prompt) + max_new_tokens > max_length:
        start = problem.messages[-1]["content"][:60]
        raise DataError(
            f"a prompt of {len(prompt)} tokens and generation.max_new_tokens = {max_new_tokens} exceed "
            f"policy.max_total_sequence_length = {max_length}: {start!r}. Raise the limit or drop the prompt."
        )

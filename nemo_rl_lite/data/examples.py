"""Chats with the assistant's response as batches of tokens. Shapes: B sequences, T tokens."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from nemo_rl_lite.algorithms.losses import Batch
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.data.conversations import with_responses
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.data.sources import training_set, validation_set
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoder:
    """Problems, whose answers are responses, to tokens."""

    tokenizer: ChatTokenizer
    max_length: int
    too_long: Literal["error", "drop"]

    def batch(self, problems: Sequence[Problem]) -> Batch:
        """`tokens` [B, T], right-padded; `mask` [B, T], 1.0 where a token belongs to the response or ends it, else 0.0;
        `lengths` [B], tokens of each sequence.

        Raises:
            DataError: a chat is longer than `policy.max_total_sequence_length`, or has no place in the chat template.
        """
        pairs = [self._encode(problem) for problem in problems]
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        tokens_BT = torch.full((len(pairs), max(lengths)), self.tokenizer.padding_token)
        mask_BT = torch.zeros(tokens_BT.shape)
        for row, (prompt, response) in enumerate(pairs):
            self._check_length(problems[row], lengths[row])
            tokens_BT[row, : lengths[row]] = torch.tensor([*prompt, *response])
            mask_BT[row, len(prompt) : lengths[row]] = 1.0
        return {"tokens": tokens_BT, "mask": mask_BT, "lengths": torch.tensor(lengths)}

    def fits(self, problem: Problem) -> bool:
        prompt, response = self._encode(problem)
        return len(prompt) + len(response) <= self.max_length

    def check(self, problems: Sequence[Problem], source: str) -> None:
        """Raises DataError: a chat is too long and not to be dropped, or has no place in the chat template; naming the
        source and the problem's number there, from 1 on."""
        for number, problem in enumerate(problems, start=1):
            try:
                prompt, response = self._encode(problem)
                if self.too_long == "error":
                    self._check_length(problem, len(prompt) + len(response))
            except DataError as error:
                raise DataError(f"{source}, problem {number}: {error}") from None

    def _encode(self, problem: Problem) -> tuple[list[int], list[int]]:
        return self.tokenizer.prompt(problem.messages), self.tokenizer.reply(problem.messages, problem.answer)

    def _check_length(self, problem: Problem, length: int) -> None:
        if length > self.max_length:
            raise DataError(
                f"prompt and response are {length} tokens, policy.max_total_sequence_length = {self.max_length}: "
                f"{problem.messages[-1]['content'][:60]!r}. Raise the limit, or data.too_long=drop."
            )


@dataclass(frozen=True)
class TrainingExamples:
    """Training batches in order: `batch(step)` for every step from 0 on, epoch after epoch."""

    problems: TrainingSet
    encoder: Encoder
    batch_size: int

    @property
    def steps_per_epoch(self) -> int | None:
        """Whole batches in one pass over the data; None where it is generated without end."""
        return len(self.problems.finite()) // self.batch_size or None

    def batch(self, step: int) -> Batch:
        """The same batch for the same step, whatever came before."""
        return self.encoder.batch([self.problems.problem(position) for position in self._positions(step)])

    def _positions(self, step: int) -> range:
        epoch, place = divmod(step, self.steps_per_epoch) if self.steps_per_epoch else (0, step)
        first = epoch * len(self.problems.finite()) + place * self.batch_size
        return range(first, first + self.batch_size)


def training_examples(config: Config, encoder: Encoder) -> TrainingExamples:
    """The training chats of a configuration.

    Raises:
        DataError: a chat cannot be used, or there are too few for one batch.
    """
    data, batch_size = with_responses(config.data), config.policy.train_global_batch_size
    problems = training_set(data, config.algorithm.seed)
    source, count = data.train_path or data.path or data.name, len(problems.finite())
    encoder.check(problems.finite(), source)
    if encoder.too_long == "drop":
        problems = problems.only(encoder.fits)
        _tell_of_dropped(source, count, len(problems.finite()))
    if count and len(problems.finite()) < batch_size:
        rule = f"chats do not fill a batch of policy.train_global_batch_size = {batch_size}; make it smaller"
        raise DataError(f"{source}: {len(problems.finite())} {rule}")
    return TrainingExamples(problems, encoder, batch_size)


def validation_examples(config: Config, encoder: Encoder) -> Batch | None:
    """The held-out chats, at most `algorithm.max_val_samples`, as one batch; None where there are none.

    Raises:
        DataError: a chat cannot be used.
    """
    data = with_responses(config.data)
    problems = validation_set(data, config.algorithm.max_val_samples)
    source = data.validation_path or data.path or data.name
    encoder.check(problems, source)
    fitting = [problem for problem in problems if encoder.fits(problem)]
    _tell_of_dropped(source, len(problems), len(fitting))
    if problems and not fitting:
        raise DataError(f"{source}: no chat is left to validate on; raise policy.max_total_sequence_length")
    return encoder.batch(fitting) if fitting else None


def _tell_of_dropped(source: str, before: int, after: int) -> None:
    if after < before:
        rule = "longer than policy.max_total_sequence_length"
        log.warning("%s: %d of %d chats are %s and were dropped", source, before - after, before, rule)

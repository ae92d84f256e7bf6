"""Encode chats and pairs of chats as rows of tokens; a pair's rows are neighbours, the chosen one first."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.data.formats import Conversation, Example, format_of
from nemo_rl_lite.data.problems import TrainingSet
from nemo_rl_lite.data.sources import training_set, validation_set
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.losses.batch import TokenRow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoder:
    """Turns conversations into tokens."""

    tokenizer: ChatTokenizer
    max_length: int
    too_long: Literal["error", "drop", "truncate"]

    def rows(self, examples: Sequence[Example]) -> list[TokenRow]:
        """Return a row for each conversation, in their order.

        Raises:
            DataError: a chat is longer than `policy.max_total_sequence_length`, or has no place in the chat template.
        """
        rows = []
        for example in examples:
            reward = None if example.label is None else float(example.label)
            for said in example.conversations:
                tokens, trained = self.tokenizer.conversation(said)
                if self.too_long == "error" and len(tokens) > self.max_length:
                    raise DataError(self._too_long(said, len(tokens)))
                rows.append(TokenRow(tokens[: self.max_length], trained[: self.max_length], reward=reward))
        return rows

    def fits(self, example: Example) -> bool:
        """Return whether no conversation is too long or, where chats are truncated, each keeps a trained token."""
        for said in example.conversations:
            tokens, trained = self.tokenizer.conversation(said)
            cut = trained[: self.max_length] if self.too_long == "truncate" else ()
            if len(tokens) > self.max_length and not any(cut):
                return False
        return True

    def longer(self, examples: Sequence[Example]) -> int:
        """Return how many examples are longer than `policy.max_total_sequence_length`.

        Raises:
            DataError: a chat is too long where that is an error, or has no place in the chat template.
        """
        longer: list[tuple[int, Example, Conversation]] = []
        for example in examples:
            try:
                counted = [(len(self.tokenizer.conversation(one)[0]), one) for one in example.conversations]
            except DataError as error:
                raise DataError(f"{example.where}: {error}") from None
            count, said = max(counted, key=lambda one: one[0])
            if count > self.max_length:
                longer.append((count, example, said))
        if longer and self.too_long == "error":
            count, example, said = max(longer, key=lambda one: one[0])
            told = f"{example.where}: {self._too_long(said, count)}"
            if len(longer) > 1:
                told += f" Of the {len(longer)} rows that are too long, none was found to be longer."
            raise DataError(told)
        return len(longer)

    def _too_long(self, said: Conversation, count: int) -> str:
        asked = said.messages[max(said.first_trained - 1, 0)]["content"]
        return (
            f"prompt and response are {count} tokens, policy.max_total_sequence_length = {self.max_length}: "
            f"{asked[:60]!r}. Raise the limit, or data.too_long=drop, or data.too_long=truncate."
        )


@dataclass(frozen=True)
class TrainingExamples:
    """Training batches in order: `rows(step)` for every step from 0 on, epoch after epoch."""

    examples: TrainingSet[Example]
    encoder: Encoder
    batch_size: int

    @property
    def steps_per_epoch(self) -> int | None:
        """Whole batches in one pass over the data; None where it is generated without end."""
        return len(self.examples.finite()) // self.batch_size or None

    def rows(self, step: int) -> list[TokenRow]:
        """Return the global batch of a step: the same for the same step, whatever came before."""
        epoch, place = divmod(step, self.steps_per_epoch) if self.steps_per_epoch else (0, step)
        first = epoch * len(self.examples.finite()) + place * self.batch_size
        return self.encoder.rows([self.examples.problem(first + number) for number in range(self.batch_size)])


def training_examples(config: Config, encoder: Encoder) -> TrainingExamples:
    """Return the training set of a configuration.

    Raises:
        DataError: an example cannot be used, or there are too few for one batch.
    """
    kind, batch_size = format_of(config), config.policy.train_global_batch_size
    examples = training_set(config.data, config.algorithm.seed, kind)
    source, count = config.data.train_path or config.data.path or config.data.name, len(examples.finite())
    if unanswered := sum(example.unanswered for example in examples.finite()):
        rule = "go on after the assistant's last message; that end is not trained on"
        log.warning("%s: %d of %d %s %s", source, unanswered, count, kind.name, rule)
    if longer := encoder.longer(examples.finite()):
        examples = examples.only(encoder.fits)
        _warn_of_long_ones(f"{source}: {longer} of {count} {kind.name}", count - len(examples.finite()))
    if not count:
        # A generated task: none of its examples has been checked.
        examples = examples if encoder.too_long == "error" else examples.only(encoder.fits)
        first = examples.problem(0)
        encoder.longer([first])
        if not encoder.fits(first):
            raise DataError(f"{source}: too long for policy.max_total_sequence_length = {encoder.max_length}")
    elif (left := len(examples.finite())) < batch_size:
        limit = f"policy.max_total_sequence_length = {encoder.max_length}"
        fix = f"raise {limit}, which the other {count - left} exceed" if left < count else "make it smaller"
        rule = f"{kind.name} do not fill a batch of policy.train_global_batch_size = {batch_size}"
        raise DataError(f"{source}: {left} {rule}; {fix}")
    return TrainingExamples(examples, encoder, batch_size)


def validation_examples(config: Config, encoder: Encoder, training: Sequence[Example] = ()) -> list[TokenRow]:
    """Return the held-out rows of at most `algorithm.max_val_samples` examples; there may be none. A warning says how
    many of them are among the `training` examples.

    Raises:
        DataError: an example cannot be used.
    """
    kind = format_of(config)
    examples = validation_set(config.data, config.algorithm.max_val_samples, kind, training)
    source = config.data.validation_path or config.data.train_path or config.data.path or config.data.name
    longer = encoder.longer(examples)
    fitting = list(filter(encoder.fits, examples)) if longer else examples
    if longer:
        _warn_of_long_ones(f"{source}: {longer} of {len(examples)} {kind.name}", len(examples) - len(fitting))
    if examples and not fitting:
        rule = f"none of the {kind.name} is left to validate on; raise policy.max_total_sequence_length"
        raise DataError(f"{source}: {rule}")
    return encoder.rows(fitting)


def _warn_of_long_ones(which: str, dropped: int) -> None:
    log.warning("%s are longer than policy.max_total_sequence_length; %d were dropped", which, dropped)

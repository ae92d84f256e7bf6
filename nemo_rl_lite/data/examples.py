"""Encode chats and preference pairs as rows of tokens. The rows of a pair are adjacent, the chosen one first."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sources import ONLY, naming_source, source_configs, source_weights
from nemo_rl_lite.data.formats import Conversation, Example, format_of
from nemo_rl_lite.data.mixture import MixedSet, items_per_epoch
from nemo_rl_lite.data.problems import LeftOut, TrainingSet
from nemo_rl_lite.data.sources import training_set, validation_set
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.losses.batch import TokenRow

log = logging.getLogger(__name__)

_TOO_LONG = LeftOut("are too long")
_SAME = LeftOut("prefer neither response (their tokens are the same)")


@dataclass(frozen=True)
class Encoder:
    """Tokenizes conversations."""

    tokenizer: ChatTokenizer
    max_length: int
    too_long: Literal["error", "drop", "truncate"]

    def rows(self, examples: Sequence[Example]) -> list[TokenRow]:
        """Return a row for each conversation, in order. Raises DataError: a chat exceeds
        `policy.max_total_sequence_length`, or does not fit the chat template."""
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
        """Return whether an example can be trained on: see `check`."""
        return self._left_out(list(map(self.tokenizer.conversation, example.conversations))) is None

    def check(self, examples: Sequence[Example]) -> tuple[int, Counter[LeftOut]]:
        """Count the examples that exceed `policy.max_total_sequence_length`, and those left out for each reason. Raises
        DataError: a chat is too long and `too_long` is "error", or it does not fit the chat template."""
        longer, left_out = list[tuple[int, Example, Conversation]](), Counter[LeftOut]()
        for example in examples:
            try:
                rows = list(map(self.tokenizer.conversation, example.conversations))
            except DataError as error:
                raise DataError(f"{example.where}: {error}") from None
            counted = zip((len(tokens) for tokens, _ in rows), example.conversations, strict=True)
            count, said = max(counted, key=lambda one: one[0])
            if count > self.max_length:
                longer.append((count, example, said))
            if (why := self._left_out(rows)) is not None:
                left_out[why] += 1
        if longer and self.too_long == "error":
            count, example, said = max(longer, key=lambda one: one[0])
            told = f"{example.where}: {self._too_long(said, count)}"
            if len(longer) > 1:
                told += f" It is the longest of {len(longer)} rows that are too long."
            raise DataError(told)
        return len(longer), left_out

    def _left_out(self, rows: Sequence[tuple[list[int], list[bool]]]) -> LeftOut | None:
        """Return why an example is left out, or None. A conversation may be too long, or truncation may remove all its
        trained tokens. The two rows of a pair may be equal."""
        for tokens, trained in rows:
            cut = trained[: self.max_length] if self.too_long == "truncate" else ()
            if len(tokens) > self.max_length and not any(cut):
                return _TOO_LONG
        kept = [tokens[: self.max_length] for tokens, _ in rows]
        return _SAME if len(kept) > 1 and kept[0] == kept[1] else None

    def _too_long(self, said: Conversation, count: int) -> str:
        asked = said.messages[max(said.first_trained - 1, 0)]["content"]
        return (
            f"prompt and response have {count} tokens, policy.max_total_sequence_length = {self.max_length}: "
            f"{asked[:60]!r}. Raise the limit, or set data.too_long=drop or data.too_long=truncate."
        )


@dataclass(frozen=True)
class TrainingExamples:
    """Training batches: `rows(step)` for every step from 0, epoch after epoch."""

    examples: TrainingSet[Example]
    encoder: Encoder
    batch_size: int
    per_epoch: int
    """Examples per epoch; 0 for endless data."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Full batches per epoch; None for endless data."""
        return self.per_epoch // self.batch_size or None

    def rows(self, step: int) -> list[TokenRow]:
        """Return the global batch of a step. It depends on nothing but the step."""
        epoch, place = divmod(step, self.steps_per_epoch) if self.steps_per_epoch else (0, step)
        first = epoch * self.per_epoch + place * self.batch_size
        return self.encoder.rows([self.examples.problem(first + number) for number in range(self.batch_size)])


def training_examples(config: Config, encoder: Encoder) -> TrainingExamples:
    """Return the training batches of a configuration. Raises DataError: an example cannot be used, or there are fewer
    than one batch."""
    batch_size, weights = config.policy.train_global_batch_size, source_weights(config)
    found, reasons = dict[str, TrainingSet[Example]](), list[str]()
    for name, source, own in _each_source(config, encoder):
        with naming_source(name):
            found[name], reason = _training_set(source, own)
        reasons += [reason] if reason else []
        # Only sources with `truncate` still have rows that are too long.
        encoder = own if own.too_long == "truncate" else encoder
    per_epoch = items_per_epoch({name: len(one.finite()) for name, one in found.items()}, weights)
    if 0 < per_epoch < batch_size:
        raise _too_few(config, per_epoch, " and ".join(reasons))
    examples = MixedSet(found, weights, batch_size) if config.data.sources else found[ONLY]
    return TrainingExamples(examples, encoder, batch_size, per_epoch)


def _each_source(config: Config, encoder: Encoder) -> Iterator[tuple[str, Config, Encoder]]:
    """Yield name, configuration and encoder of each source."""
    for name, source in source_configs(config).items():
        yield name, source, encoder if name == ONLY else replace(encoder, too_long=source.data.too_long)


def _training_set(source: Config, encoder: Encoder) -> tuple[TrainingSet[Example], str]:
    """Return the examples of a source that can be trained on, and why others are left out; empty if none is."""
    kind = format_of(source)
    examples = training_set(source.data, source.algorithm.seed, kind)
    shown, count = _name(source), len(examples.finite())
    if unanswered := sum(example.unanswered for example in examples.finite()):
        rule = "continue after the assistant's last message; the rest is not trained on"
        log.warning("%s: %d of %d %s %s", shown, unanswered, count, kind.name, rule)
    longer, left_out = encoder.check(examples.finite())
    _warn(shown, f"of {count} {kind.name}", longer, left_out)
    if left_out:
        examples = examples.only(encoder.fits)
    if not count:
        # A generated task: no example has been checked yet.
        examples = examples if encoder.too_long == "error" else examples.only(encoder.fits)
        _, left_out = encoder.check([examples.problem(0)])
        if left_out:
            raise DataError(f"{shown}: its {kind.name} {_reasons(left_out, encoder)}")
    why = _reasons(left_out, encoder) if left_out else ""
    if count and not examples.finite():
        raise _too_few(source, 0, why)
    return examples, why


def _too_few(source: Config, count: int, why_others: str) -> DataError:
    size = source.policy.train_global_batch_size
    rule = f"{format_of(source).name} do not fill a batch of policy.train_global_batch_size = {size}"
    why = f"the others {why_others}" if why_others else "make it smaller"
    return DataError(f"{_name(source)}: {count} {rule}; {why}")


def _name(source: Config) -> str:
    return source.data.train_path or source.data.path or source.data.name


def validation_examples(config: Config, encoder: Encoder, training: Sequence[Example] = ()) -> list[TokenRow]:
    """Return the held-out rows of at most `algorithm.max_val_samples` examples of each source; there may be none. Log
    how many are also `training` examples. Raises DataError: an example cannot be used."""
    found = list[TokenRow]()
    for name, source, own in _each_source(config, encoder):
        with naming_source(name):
            found += _validation_rows(source, own, training)
    return found


def _validation_rows(source: Config, encoder: Encoder, training: Sequence[Example]) -> list[TokenRow]:
    kind = format_of(source)
    examples = validation_set(source.data, source.algorithm.max_val_samples, kind, training)
    shown = source.data.validation_path or _name(source)
    longer, left_out = encoder.check(examples)
    _warn(shown, f"of {len(examples)} {kind.name}", longer, left_out)
    fitting = list(filter(encoder.fits, examples)) if left_out else examples
    if examples and not fitting:
        raise DataError(f"{shown}: no {kind.name} are left to validate on: they {_reasons(left_out, encoder)}")
    return encoder.rows(fitting)


def _warn(source: str, of_all: str, longer: int, left_out: Counter[LeftOut]) -> None:
    if longer:
        rule = "are longer than policy.max_total_sequence_length"
        log.warning("%s: %d %s %s; %d were dropped", source, longer, of_all, rule, left_out[_TOO_LONG])
    if same := left_out[_SAME]:
        log.warning("%s: %d %s %s and were left out", source, same, of_all, _SAME)


def _reasons(left_out: Counter[LeftOut], encoder: Encoder) -> str:
    reasons = " and ".join(f"{why} ({count})" for why, count in left_out.items())
    is_cut = _TOO_LONG in left_out or encoder.too_long == "truncate"
    fix = f"raise policy.max_total_sequence_length = {encoder.max_length}" if is_cut else "add pairs that differ"
    return f"{reasons}; {fix}"

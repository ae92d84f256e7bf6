"""What is odd about the rows of a whole file or split: each may be meant, and is told. This module imports nothing
heavy."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from nemo_rl_lite.config.sections.data import DataConfig
from nemo_rl_lite.data.columns import cut_number, is_number
from nemo_rl_lite.data.formats import REWARD_COLUMN, Example, has_whole_chats
from nemo_rl_lite.data.problems import Asked, LeftOut, Problem
from nemo_rl_lite.data.rows import Row

log = logging.getLogger(__name__)

# Fewer rows than this are alike by chance.
_FEW = 8
# The columns in which published pairs say how good each response is.
_SCORES = ("score_chosen", "score_rejected")


def note_odd(
    config: DataConfig,
    rows: Sequence[tuple[str, Row]],
    kept: Sequence[Asked],
    left_out: Mapping[LeftOut, int],
    reads_answers: bool,
) -> None:
    """Warn of what is odd about the rows, of which `kept` are used. `left_out`: how many are not, and why.
    `reads_answers`: as `RowFormat` has it."""
    if not kept:
        return
    for why, count in left_out.items():
        log.warning("%d of %d rows %s and were left out", count, len(rows), why)
    for text in (
        *_of_the_system_prompt(config, rows, kept),
        *_of_repetitions(config, kept, usual=REWARD_COLUMN in rows[0][1] or has_whole_chats(config, rows[0][1])),
        *_of_single_rows(kept),
        *_of_scores(rows),
        *(_of_cut_numbers(config, rows) if reads_answers else ()),
    ):
        log.warning("%s", text)


def note_trained_on(training: Sequence[Asked], held_out: Sequence[Asked], source: str) -> None:
    """Warn where items of validation, which `source` holds, are trained on."""
    trained = {(_asked(one), _answered(one)) for one in training}
    count = sum((_asked(one), _answered(one)) in trained for one in held_out)
    if count:
        log.warning("%s: %d of the %d rows for validation are trained on, too", source, count, len(held_out))


def _of_the_system_prompt(config: DataConfig, rows: Sequence[tuple[str, Row]], kept: Sequence[Asked]) -> Iterator[str]:
    (first, columns), system = rows[0], config.system_prompt
    if system and not any(one.messages and one.messages[0]["content"] == system for one in kept):
        yield f"data.system_prompt is not used: all rows from {first} on have a system message of their own"
    if system and (named := [name for name in columns if f"{{{name}}}" in system]):
        yield f"data.system_prompt has {{{named[0]}}} as it stands: only data.prompt_template fills in columns"


def _of_repetitions(config: DataConfig, kept: Sequence[Asked], usual: bool) -> Iterator[str]:
    """Prompts or answers that say the same in many rows, which a wrong column does. Pairs are left out: several for a
    prompt, and the same response to several, are usual. So are several chats that begin alike where `usual`: samples of
    a prompt, and columns of whole chats; of these only copies are told, unless all rows have one prompt."""
    if len(kept) < _FEW or _is_compared(kept[0]):
        return
    answers = defaultdict[str, set[str]](set)
    for one in kept:
        answers[_asked(one)].add(_answered(one))
    repeated = len(kept) - len(answers)
    if usual and isinstance(kept[0], Example) and len(answers) > 1:
        copies = len(kept) - sum(map(len, answers.values()))
        if copies > len(kept) / 4:
            rule = f"{copies} of {len(kept)} rows have the prompt and the response of another row"
            yield f"{rule}: is a file read twice, or are samples alike?"
    elif repeated > len(kept) / 4:
        prompt, other = max(answers.items(), key=lambda item: len(item[1]))
        different = f" with {len(other)} different answers" if len(other) > 1 else ""
        key = next(
            (f"data.{name}" for name in ("messages_column", "prompt_template") if getattr(config, name)),
            "data.prompt_column",
        )
        rule = f"{repeated} of {len(kept)} rows ask what another row asks, such as {prompt[-60:]!r}{different}"
        yield f"{rule}: does {key} leave out a column?"
    said = {answer for found in answers.values() for answer in found}
    if len(said) == 1 and config.answer_column is not None:
        rule = f"all {len(kept)} rows have the same answer, {said.pop()[:60]!r}"
        yield f"{rule}: is it the right column, and the right group of data.answer_pattern?"


def _of_single_rows(kept: Sequence[Asked]) -> Iterator[str]:
    examples = [one for one in kept if isinstance(one, Example)]
    odd = {
        "have no message of the user": [one for one in kept if not _has_a_user(one)],
        "have a response that repeats the prompt": [one for one in examples if _repeats_the_prompt(one)],
        "have two messages of the assistant in a row": [one for one in examples if _speaks_twice(one)],
    }
    for rule, found in odd.items():
        if found:
            yield f"{len(found)} of {len(kept)} rows {rule}, such as the one that asks {_asked(found[0])[-60:]!r}"


def _of_scores(rows: Sequence[tuple[str, Row]]) -> Iterator[str]:
    chosen, rejected = ([row.get(name) for _, row in rows] for name in _SCORES)
    pairs = zip(chosen, rejected, strict=True)
    worse = [one for one, other in pairs if is_number(one) and is_number(other) and one < other]
    if worse:
        rule = "score_chosen is less than score_rejected"
        yield f"{rule} in {len(worse)} of {len(rows)} rows: are data.chosen_column and data.rejected_column exchanged?"


def _of_cut_numbers(config: DataConfig, rows: Sequence[tuple[str, Row]]) -> Iterator[str]:
    if cut := [found for _, row in rows if (found := cut_number(config, row))]:
        part, whole = cut[0]
        rule = f"data.answer_pattern takes {part} out of {whole}, and so a part of a number in {len(cut)} of"
        yield f"{rule} {len(rows)} rows; [-\\d,.]+ takes all of it"


def _is_compared(one: Asked) -> bool:
    """Whether it is a pair, or a response with a label."""
    return isinstance(one, Example) and (len(one.conversations) > 1 or one.label is not None)


def _asked(one: Asked) -> str:
    return "\n".join(message["content"] for message in one.messages)


def _answered(one: Asked) -> str:
    if isinstance(one, Problem):
        return one.answer
    said = one.conversations if isinstance(one, Example) else ()
    return "\n".join(message["content"] for each in said for message in each.messages[each.first_trained :])


def _has_a_user(one: Asked) -> bool:
    return any(message["role"] in ("user", "tool") for message in one.messages)


def _repeats_the_prompt(one: Example) -> bool:
    """Whether the responses begin with the last message of the prompt and go on after it."""
    asked = one.messages[-1]["content"].strip()
    said = [each.messages[each.first_trained]["content"].strip() for each in one.conversations]
    return all(text.startswith(asked) and len(text) > len(asked) for text in said)


def _speaks_twice(one: Example) -> bool:
    roles = [[message["role"] for message in each.messages] for each in one.conversations]
    return any(("assistant", "assistant") in pairwise(each) for each in roles)

"""Check that prompts leave room for a response."""

import logging
from collections.abc import Sequence

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError

log = logging.getLogger(__name__)


def fitting_prompts(
    training: TrainingSet, validation: Sequence[Problem], tokenizer: ChatTokenizer, config: Config
) -> tuple[TrainingSet, list[Problem]]:
    """Keep the training and validation problems whose prompts leave room for the response.

    Raises:
        DataError: a prompt leaves no room and `data.too_long` is `error`, or no prompt leaves room.
    """
    max_new_tokens, max_length = config.generation.max_new_tokens, config.policy.max_total_sequence_length

    def length(problem: Problem) -> int:
        return len(tokenizer.prompt(problem.messages, problem.tools))

    if config.data.too_long == "error":
        for problem in [*validation, *training.finite()]:
            check_length(problem, length(problem), max_new_tokens, max_length)
        return training, list(validation)

    def fits(problem: Problem) -> bool:
        return length(problem) + max_new_tokens <= max_length

    kept, kept_validation = training.only(fits), [problem for problem in validation if fits(problem)]
    _report("training", len(training.finite()), len(kept.finite()), max_length - max_new_tokens)
    _report("validation", len(validation), len(kept_validation), max_length - max_new_tokens)
    return kept, kept_validation


def check_length(problem: Problem, tokens: int, max_new_tokens: int, max_length: int) -> None:
    """Raise DataError where a prompt of `tokens` tokens leaves no room for `max_new_tokens` within `max_length`."""
    if tokens + max_new_tokens > max_length:
        start = problem.messages[-1]["content"][:60]
        raise DataError(
            f"a prompt of {tokens} tokens and generation.max_new_tokens = {max_new_tokens} exceed "
            f"policy.max_total_sequence_length = {max_length}: {start!r}. Raise the limit, lower "
            "generation.max_new_tokens, or leave such prompts out: data.too_long=drop."
        )


def _report(what: str, count: int, kept: int, room: int) -> None:
    if kept < count:
        log.warning("%d of %d %s problems dropped: their prompts exceed %d tokens", count - kept, count, what, room)
    if count and not kept:
        raise DataError(
            f"all {count} {what} prompts exceed {room} tokens: raise policy.max_total_sequence_length, or lower "
            "generation.max_new_tokens"
        )

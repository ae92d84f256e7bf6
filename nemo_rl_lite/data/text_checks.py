"""Checks of the texts of rows against a model's tokenizer and chat template."""

import logging
import re
from collections.abc import Sequence
from itertools import islice

from nemo_rl_lite.data.formats import Example
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError, Violation

log = logging.getLogger(__name__)

# The number of rows that are looked at.
_LOOKED_AT = 500


def check_texts(tokenizer: ChatTokenizer, training: TrainingSet[Problem] | TrainingSet[Example]) -> None:
    """Warn of special tokens that rows have as text, and of system messages that the chat template leaves out.

    Raises:
        ConfigError: the chat template leaves out what the user says.
    """
    if tokenizer.leaves_out("user"):
        rule, fix = "has a chat template that leaves out what the user says", "correct its chat_template"
        raise ConfigError([Violation("policy.model_name", None, rule, fix)])
    items = list(islice(training.finite(), _LOOKED_AT))
    special = re.compile("|".join(map(re.escape, sorted(tokenizer.special_tokens, key=len, reverse=True))) or "(?!)")
    if found := [part for one in items if (part := next(filter(None, map(special.search, _texts(one))), None))]:
        rule = "have special tokens of the model as text, which the chat template writes already"
        log.warning(
            "%d of %d rows %s, such as %r in %r", len(found), len(items), rule, found[0][0], found[0].string[:60]
        )
    if tokenizer.leaves_out("system") and any(_has_a_system_message(one) for one in [training.problem(0), *items]):
        log.warning("the model's chat template leaves out system messages, which the data or data.system_prompt has")


def check_stop_strings(tokenizer: ChatTokenizer, stop_strings: Sequence[str]) -> None:
    """Raise ConfigError where a stop string is a special token, which the text of a response never has."""
    for text in stop_strings:
        token = tokenizer.special_tokens.get(text)
        if token is not None and token not in tokenizer.end_tokens:
            key, rule = "generation.stop_strings", "is a special token, which the text of a response never has"
            raise ConfigError([Violation(key, text, rule, f"generation.stop_token_ids=[{token}], and no such string")])


def _texts(one: Problem | Example) -> list[str]:
    """Return the texts of a row's messages, and its answer."""
    chats = [one.messages] if isinstance(one, Problem) else [each.messages for each in one.conversations]
    answers = [one.answer] if isinstance(one, Problem) else []
    return [*(message["content"] for chat in chats for message in chat), *answers]


def _has_a_system_message(one: Problem | Example) -> bool:
    return any(message["role"] == "system" for message in one.messages)

"""Tokenize chats with a model's chat template, detokenize responses, and check rows against the tokenizer."""

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nemo_rl_lite.data.chat_template import ChatTemplate
from nemo_rl_lite.data.formats import Conversation, Example
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.data.tool_format import WrittenCall
from nemo_rl_lite.data.tools import Tool, checked_calls
from nemo_rl_lite.errors import ConfigError, DataError, Violation

log = logging.getLogger(__name__)

_RESIZE = "resize the model's embedding to its tokenizer (resize_token_embeddings of transformers)"
# Number of chat starts whose tokens are kept.
_STARTS = 64
# Number of rows whose texts are checked.
_CHECKED = 500


def load_tokenizer(folder: Path) -> Any:
    """Load a Hugging Face tokenizer. Raises ConfigError: the folder's files cannot be used."""
    from transformers import AutoTokenizer

    # Newer Mistral models have a second tokenizer, in mistral-common's format and without a chat template. transformers
    # prefers it unless asked to correct the split pattern of the first.
    mistral = (folder / "tekken.json").exists()
    if mistral and not (folder / "tokenizer.json").exists():
        fix = "use a copy of the model with tokenizer.json and a chat template"
        raise _unusable(folder, "its only tokenizer, tekken.json, has no chat template", fix)
    options = {"fix_mistral_regex": True} if mistral else {}
    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # a broken file raises errors of many libraries
        raise _unusable(folder, f"the tokenizer cannot be read: {type(error).__name__}: {error}") from error


def _unusable(folder: Path, rule: str, fix: str = "correct the file, or copy the model's folder again") -> ConfigError:
    return ConfigError([Violation("policy.model_name", str(folder), rule, fix)])


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template."""

    def __init__(
        self,
        model_path: Path,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        template_file: str | None = None,
    ):
        """`template_kwargs`: template variables in addition to the messages; `template_file`: a template that replaces
        the folder's.

        Raises:
            ConfigError: the tokenizer or the template cannot be used, or the template ignores one of
                `template_kwargs`.
            OSError: `template_file` cannot be read.
        """
        from jinja2 import TemplateSyntaxError

        self._model_path = model_path
        self._tokenizer = tokenizer = load_tokenizer(model_path)
        if template_file is not None:
            tokenizer.chat_template = Path(template_file).expanduser().read_text()
        if tokenizer.chat_template is None:
            log.warning("%s has no chat template: messages are joined by newlines", model_path)
        if tokenizer.eos_token_id is None:
            fix = "set eos_token in its tokenizer_config.json"
            raise _unusable(model_path, "the tokenizer names no end token", fix)
        try:
            self.template = ChatTemplate(tokenizer, template_kwargs)
            options = self.template.options if template_kwargs else ()
        except TemplateSyntaxError as error:
            raise _unusable(model_path, f"the chat template is broken: line {error.lineno}: {error.message}") from None
        except ValueError as error:
            raise _unusable(model_path, str(error)) from None
        if unread := [name for name in template_kwargs if name not in options]:
            key, value = f"policy.tokenizer.chat_template_kwargs.{unread[0]}", template_kwargs[unread[0]]
            fix = f"leave it out, or one that it reads: {', '.join(options)}" if options else "leave it out"
            raise ConfigError([Violation(key, value, "the model's chat template does not read this", fix)])
        self._model_tokens = _vocabulary_size(model_path)
        # The samples of a group begin with the same text, also those of agents.
        self._start = lru_cache(maxsize=_STARTS)(self._tokenized_start)
        if beyond := [token for token in self.end_tokens if token >= self._model_tokens]:
            raise _unusable(model_path, self._beyond(beyond[0]), _RESIZE)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """See `ChatTemplate.end_tokens`."""
        return self.template.end_tokens

    @property
    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    @cached_property
    def highest_token(self) -> int:
        """The highest token id that a prompt may have."""
        return max(self.vocabulary.values())

    @cached_property
    def longest_token(self) -> int:
        """Maximum number of characters of a token, which bounds the tokens of a text from below."""
        return max(map(len, self.vocabulary))

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return {one.content: token for token, one in added if one.special and one.content.strip()}

    @property
    def takes_tools(self) -> bool:
        """True if the chat template renders tools, and calls in a known format."""
        return self.template.tool_format is not None

    @property
    def call_marker(self) -> str:
        """Return the text before each call; empty if a call is the whole response."""
        return self.template.tool_format.marker if self.template.tool_format else ""

    @cached_property
    def call_token(self) -> int | None:
        """The special token before each call; None if the marker is plain text."""
        return self.special_tokens.get(self.call_marker.split()[0]) if self.call_marker else None

    def check_tools(self) -> None:
        """Raise ConfigError if the chat template does not support tools."""
        if not self.takes_tools:
            rule = (
                f"offers tools, but the chat template of policy.model_name = {self._model_path} does not render them, "
                "or its call format is unknown (docs/environments.md lists the known ones)"
            )
            needs_none = "environment=python environment.kwargs.call=block, which needs none"
            fix = f"a model whose template supports tools, such as Qwen3, or {needs_none}"
            raise ConfigError([Violation("environment.name", None, rule, fix)])

    def tool_calls(self, tokens: Sequence[int] | np.ndarray, tools: Sequence[Tool], turn: int) -> list[dict[str, Any]]:
        """Return the calls in a response, as `checked_calls` describes them; `turn` counts the episode's responses."""
        return checked_calls(self.written_calls(tokens)[1], tools, turn)

    def written_calls(self, tokens: Sequence[int] | np.ndarray) -> tuple[str, list[WrittenCall]]:
        """Return the text of a response before its first call, and the unchecked calls."""
        found = self.template.tool_format
        if found is None:
            return "", []
        sampled = np.asarray(tokens).tolist()
        if sampled and sampled[-1] in self.end_tokens:
            del sampled[-1]
        # In some models, call markers are special tokens. Calls within the reasoning do not count.
        text = self._tokenizer.decode(sampled, skip_special_tokens=False)
        thoughts, end, answer = text.rpartition("</think>")
        return thoughts + end + found.text_before(answer), found.find(answer)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a chat, up to the start of the assistant turn. Raises DataError: the chat template
        cannot render the chat."""
        return list(self._start(self.template.prompt(messages, tools)))

    def conversation(self, said: Conversation) -> tuple[list[int], list[bool]]:
        """Return the token ids of a chat, and a mask of the trained ones: those of trained messages and their end
        tokens. Raises DataError: the template does not render the chat as prompts, responses and end tokens."""
        tokens, trained = list[int](), list[bool]()
        end_token, end = self.template.turn_end
        done = ""
        for index in said.trained():
            before = self.template.prompt(said.messages[:index], said.tools)
            turn = self.template.turn(said, index, before)
            if not before.startswith(done):
                raise DataError(
                    "the model's chat template renders earlier assistant turns differently when a turn follows "
                    f"(data.train_on=last trains on the last one only): {before!r}"
                )
            asked = self._tokens(before[len(done) :]) if done else self._start(before)
            response = [*self._tokens(turn), end_token]
            tokens += [*asked, *response]
            trained += [False] * len(asked) + [True] * len(response)
            done = before + turn + end
        return tokens, trained

    def between_turns(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the token ids between two assistant turns, with `messages`. If the generated `last_token` is the end
        token, it is not repeated.

        Raises:
            DataError: the chat template cannot render these messages after an assistant turn.
        """
        rest = self.template.between_turns(messages)
        already = self._tokenizer.decode([last_token]) if self.template.exists else ""
        return self._tokens(rest.removeprefix(already))

    def continuation(
        self, messages: Sequence[Message], known: int, last_token: int, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Return the token ids of a chat after its first `known` messages, up to the start of the next turn.

        The last known message is an assistant turn. Further assistant messages have the tokens of their text.
        `last_token`: see `between_turns`.

        Raises:
            DataError: the chat template cannot render these messages.
        """
        tokens, (end_token, _) = list[int](), self.template.turn_end
        for index in range(known, len(messages)):
            if messages[index]["role"] == "assistant":
                said = Conversation(tuple(messages), index, tuple(tools))
                turn = self.template.turn(said, index, self.template.prompt(messages[:index], tools))
                tokens += [*self.between_turns(messages[known:index], last_token), *self._tokens(turn), end_token]
                known, last_token = index + 1, end_token
        return tokens + self.between_turns(messages[known:], last_token)

    def opening(self, text: str) -> list[int]:
        """Return the token ids of a plain text that begins a sequence, with the special tokens that the tokenizer adds,
        except an end token."""
        tokens = self._known(self._tokenizer(text)["input_ids"])
        added = tokens[-1:] == [self._tokenizer.eos_token_id] and not text.endswith(self._tokenizer.eos_token)
        return tokens[:-1] if added else tokens

    def text(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of a response, without special tokens."""
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)

    def piece(self, token: int) -> str:
        """Return the text of one token, which may be special."""
        return self._tokenizer.decode([token])

    def _tokenized_start(self, text: str) -> tuple[int, ...]:
        """Return the token ids of the start of a chat. A template writes the special tokens itself."""
        return tuple(self._tokens(text) if self.template.exists else self.opening(text))

    def _tokens(self, text: str) -> list[int]:
        return self._known(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens as a list. Raises DataError: one is beyond the model's vocabulary."""
        if tokens and (highest := max(tokens)) >= self._model_tokens:
            raise DataError(f"{self._beyond(highest)}; {_RESIZE}, or leave out rows with that token")
        return list(tokens)

    def _beyond(self, token: int) -> str:
        size = f"vocab_size = {self._model_tokens} of policy.model_name = {self._model_path}"
        return f"the tokenizer's token {self.piece(token)!r} ({token}) is beyond {size}"


def _vocabulary_size(folder: Path) -> int:
    """Return the model's vocabulary size from config.json; without one there is no limit."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or sys.maxsize


def check_texts(tokenizer: ChatTokenizer, training: TrainingSet[Problem] | TrainingSet[Example]) -> None:
    """Warn of special tokens in the rows' texts, and of system messages and tools that the template omits. Raises
    ConfigError: the chat template omits user messages."""
    if tokenizer.template.leaves_out("user"):
        rule, fix = "has a chat template that omits user messages", "correct its chat_template"
        raise ConfigError([Violation("policy.model_name", None, rule, fix)])
    items = list(islice(training.finite(), _CHECKED))
    special = re.compile("|".join(map(re.escape, sorted(tokenizer.special_tokens, key=len, reverse=True))) or "(?!)")
    if found := [part for one in items if (part := next(filter(None, map(special.search, _texts(one))), None))]:
        rule = "have special tokens of the model as text, which the chat template writes itself"
        log.warning(
            "%d of %d rows %s, such as %r in %r", len(found), len(items), rule, found[0][0], found[0].string[:60]
        )
    if tokenizer.template.leaves_out("system") and any(
        message["role"] == "system" for one in (training.problem(0), *items) for message in one.messages
    ):
        log.warning("the model's chat template omits system messages, which the data or data.system_prompt has")
    offered = [one.conversations[0].tools for one in items if isinstance(one, Example) and one.conversations[0].tools]
    if offered and tokenizer.template.leaves_out_tools(offered[0]):
        rule = "rows have tools, which the model's chat template omits"
        log.warning("%d of %d %s", len(offered), len(items), rule)


def check_stop_strings(tokenizer: ChatTokenizer, stop_strings: Sequence[str]) -> None:
    """Raise ConfigError if a stop string is a special token, which never appears in a response's text."""
    for text in stop_strings:
        token = tokenizer.special_tokens.get(text)
        if token is not None and token not in tokenizer.end_tokens:
            key, rule = "generation.stop_strings", "is a special token, which never appears in a response's text"
            raise ConfigError([Violation(key, text, rule, f"generation.stop_token_ids=[{token}], and no such string")])


def _texts(one: Problem | Example) -> list[str]:
    if isinstance(one, Problem):
        return [*(message["content"] for message in one.messages), one.answer]
    return [message["content"] for each in one.conversations for message in each.messages]

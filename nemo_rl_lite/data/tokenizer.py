"""Turn chats into token ids and token ids into text, and check texts against a model's tokenizer."""

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_rl_lite.data.chat_template import ChatTemplate
from nemo_rl_lite.data.formats import Conversation, Example
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.data.tool_format import WrittenCall
from nemo_rl_lite.data.tools import Tool, checked_calls
from nemo_rl_lite.errors import ConfigError, DataError, Violation

log = logging.getLogger(__name__)

_RESIZE = "resize the model's embedding to its tokenizer (resize_token_embeddings of transformers)"
# Rows whose texts are checked.
_CHECKED = 500


def load_tokenizer(folder: Path) -> Any:
    """Load a Hugging Face tokenizer. Raises ConfigError: the folder's files cannot be used."""
    from transformers import AutoTokenizer

    # Newer models of Mistral have a second tokenizer in their folder, in the format of mistral-common. transformers
    # takes that one, without a chat template, unless it is told to correct the split pattern of the first.
    mistral = (folder / "tekken.json").exists()
    if mistral and not (folder / "tokenizer.json").exists():
        fix = "take a copy of the model with tokenizer.json and a chat template"
        raise _unusable(folder, "tekken.json is its only tokenizer, and has no chat template", fix)
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
        """`template_kwargs`: what the chat template is given in addition to the messages; `template_file`: a file with
        a template to use instead of the folder's own.

        Raises:
            ConfigError: the folder's tokenizer or the chat template cannot be used, or the template does not read one
                of `template_kwargs`.
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
        if beyond := [token for token in self.end_tokens if token >= self._model_tokens]:
            raise _unusable(model_path, self._beyond(beyond[0]), _RESIZE)
        self.highest_token: int = max(self.vocabulary.values())
        """The highest token id; all from 0 to it may be in a prompt."""
        self.longest_token: int = max(map(len, self.vocabulary))
        """Most characters of a token, so that n tokens are at most n times as many characters."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response: see `ChatTemplate.end_tokens`."""
        return self.template.end_tokens

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, by their texts."""
        return self._tokenizer.get_vocab()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by their texts."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {one.content: token for token, one in added if one.special and one.content.strip()}

    @property
    def takes_tools(self) -> bool:
        """True if the chat template offers tools, and writes calls in a known format."""
        return self.template.tool_format is not None

    @property
    def call_marker(self) -> str:
        """Return the text before each call; empty where a call is the whole response."""
        return self.template.tool_format.marker if self.template.tool_format else ""

    def check_tools(self) -> None:
        """Raise ConfigError where the tokenizer does not take tools."""
        if not self.takes_tools:
            rule = (
                f"offers tools, and the chat template of policy.model_name = {self._model_path} does not write them, "
                "or writes calls in a way that is not known (docs/environments.md lists the known ones)"
            )
            needs_none = "environment=python environment.kwargs.call=block, which needs none"
            fix = f"a model whose template takes tools, such as Qwen3, or {needs_none}"
            raise ConfigError([Violation("environment.name", None, rule, fix)])

    def tool_calls(self, tokens: Sequence[int], tools: Sequence[Tool], turn: int) -> list[dict[str, Any]]:
        """Return the calls in a response, as `checked_calls` describes them; `turn` counts the episode's responses."""
        return checked_calls(self.written_calls(tokens)[1], tools, turn)

    def written_calls(self, tokens: Sequence[int]) -> tuple[str, list[WrittenCall]]:
        """Return the text of a response before its first call, and the calls as they are written."""
        found = self.template.tool_format
        if found is None:
            return "", []
        sampled = list(tokens[:-1] if tokens and tokens[-1] in self.end_tokens else tokens)
        # Markers of calls are special tokens in some models. What a model considers while it thinks is no call.
        text = self._tokenizer.decode(sampled, skip_special_tokens=False)
        thoughts, end, answer = text.rpartition("</think>")
        return thoughts + end + found.text_before(answer), found.find(answer)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a chat, up to the start of the assistant's turn.

        Raises:
            DataError: the model's chat template cannot write the chat.
        """
        return self._start(self.template.prompt(messages, tools))

    def conversation(self, said: Conversation) -> tuple[list[int], list[bool]]:
        """Return the token ids of a chat up to the end of its last message, and for each whether it is trained on: what
        the chat template writes for a trained message, and the end token after it.

        Raises:
            DataError: the template does not write the chat as prompts, responses and end tokens.
        """
        tokens, trained = list[int](), list[bool]()
        end_token, end = self.template.turn_end
        done = ""
        for index in said.trained():
            before = self.template.prompt(said.messages[:index], said.tools)
            turn = self.template.turn(said, index, before)
            if not before.startswith(done):
                raise DataError(
                    "the model's chat template writes the assistant's earlier turns otherwise when a turn follows "
                    f"(data.train_on=last trains on the last alone): {before!r}"
                )
            asked = self._tokens(before[len(done) :]) if done else self._start(before)
            response = [*self._tokens(turn), end_token]
            tokens += [*asked, *response]
            trained += [False] * len(asked) + [True] * len(response)
            done = before + turn + end
        return tokens, trained

    def between_turns(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the token ids from the end of an assistant turn, through `messages`, to the start of its next turn. Of
        the generated tokens only `last_token` matters: an end token that is already there is not repeated.

        Raises:
            DataError: the model's chat template cannot write these messages after an assistant's turn.
        """
        rest = self.template.between_turns(messages)
        already = self._tokenizer.decode([last_token]) if self.template.exists else ""
        return self._tokens(rest.removeprefix(already))

    def opening(self, text: str) -> list[int]:
        """Return the token ids of a text without a template that begins a sequence, with the tokenizer's own special
        tokens. The end token that some add, too, would end it before the response."""
        tokens = self._known(self._tokenizer(text)["input_ids"])
        added = tokens[-1:] == [self._tokenizer.eos_token_id] and not text.endswith(self._tokenizer.eos_token)
        return tokens[:-1] if added else tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def piece(self, token: int) -> str:
        """Return the text of one token, also of a special one."""
        return self._tokenizer.decode([token])

    def _start(self, text: str) -> list[int]:
        """Return the token ids of the start of a chat. A template writes all special tokens itself."""
        return self._tokens(text) if self.template.exists else self.opening(text)

    def _tokens(self, text: str) -> list[int]:
        return self._known(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens as a list. Raises DataError: the model has no row for one."""
        if tokens and (highest := max(tokens)) >= self._model_tokens:
            raise DataError(f"{self._beyond(highest)}; {_RESIZE}, or leave out rows with that token")
        return list(tokens)

    def _beyond(self, token: int) -> str:
        size = f"vocab_size = {self._model_tokens} of policy.model_name = {self._model_path}"
        return f"the tokenizer's token {self.piece(token)!r} ({token}) is beyond {size}"


def _vocabulary_size(folder: Path) -> int:
    """Return the number of tokens that the model has rows for, by its config.json; without one there is no limit."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or sys.maxsize


def check_texts(tokenizer: ChatTokenizer, training: TrainingSet[Problem] | TrainingSet[Example]) -> None:
    """Warn of special tokens that rows have as text, and of system messages and tools that the template leaves out.

    Raises:
        ConfigError: the chat template leaves out what the user says.
    """
    if tokenizer.template.leaves_out("user"):
        rule, fix = "has a chat template that leaves out what the user says", "correct its chat_template"
        raise ConfigError([Violation("policy.model_name", None, rule, fix)])
    items = list(islice(training.finite(), _CHECKED))
    special = re.compile("|".join(map(re.escape, sorted(tokenizer.special_tokens, key=len, reverse=True))) or "(?!)")
    if found := [part for one in items if (part := next(filter(None, map(special.search, _texts(one))), None))]:
        rule = "have special tokens of the model as text, which the chat template writes already"
        log.warning(
            "%d of %d rows %s, such as %r in %r", len(found), len(items), rule, found[0][0], found[0].string[:60]
        )
    if tokenizer.template.leaves_out("system") and any(
        message["role"] == "system" for one in (training.problem(0), *items) for message in one.messages
    ):
        log.warning("the model's chat template leaves out system messages, which the data or data.system_prompt has")
    offered = [one.conversations[0].tools for one in items if isinstance(one, Example) and one.conversations[0].tools]
    if offered and tokenizer.template.leaves_out_tools(offered[0]):
        rule = "rows have tools, which the model's chat template leaves out"
        log.warning("%d of %d %s", len(offered), len(items), rule)


def check_stop_strings(tokenizer: ChatTokenizer, stop_strings: Sequence[str]) -> None:
    """Raise ConfigError where a stop string is a special token, which the text of a response never has."""
    for text in stop_strings:
        token = tokenizer.special_tokens.get(text)
        if token is not None and token not in tokenizer.end_tokens:
            key, rule = "generation.stop_strings", "is a special token, which the text of a response never has"
            raise ConfigError([Violation(key, text, rule, f"generation.stop_token_ids=[{token}], and no such string")])


def _texts(one: Problem | Example) -> list[str]:
    """Return the texts of a row's messages, and its answer."""
    if isinstance(one, Problem):
        return [*(message["content"] for message in one.messages), one.answer]
    return [message["content"] for each in one.conversations for message in each.messages]

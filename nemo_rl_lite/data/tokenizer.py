"""Turn chats into token ids and token ids into text."""

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_rl_lite.data.conversations import Conversation
from nemo_rl_lite.data.problems import Message
from nemo_rl_lite.data.tool_format import ToolFormat, sample_call, tool_format
from nemo_rl_lite.data.tools import Tool, checked_calls
from nemo_rl_lite.errors import ConfigError, DataError, Violation

log = logging.getLogger(__name__)

# This placeholder stands for an assistant turn where only the text after it matters.
_TURN = "THE-TURN"


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template."""

    def __init__(self, model_path: Path):
        """Raises ConfigError where the folder's tokenizer or its chat template cannot be used."""
        from transformers import AutoTokenizer

        self._model_path = model_path
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        except Exception as error:  # a broken file raises errors of many libraries
            raise self._unusable(f"the tokenizer cannot be read: {type(error).__name__}: {error}") from error
        self._tokenizer = tokenizer
        if self._tokenizer.chat_template is None:
            log.warning("%s has no chat template: messages are joined by newlines", model_path)

        if tokenizer.eos_token_id is None:
            raise self._unusable("the tokenizer names no end token", "set eos_token in its tokenizer_config.json")
        self._turn_end = self._end_of_turn()
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self.highest_token: int = max(tokenizer.get_vocab().values())
        """The highest token id; all from 0 to it may be in a prompt."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response: the tokenizer's own, and the one that the chat template writes after an
        assistant's turn, which is another one in Gemma and in Qwen's base models."""
        return tuple(sorted({self._tokenizer.eos_token_id, self._turn_end[0]}))

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, by their texts."""
        return self._tokenizer.get_vocab()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by their texts."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {one.content: token for token, one in added if one.special and one.content.strip()}

    def unknown(self, text: str) -> list[str]:
        """Return the characters of a text for which there is no token; none where all texts can be written."""
        unknown = self._tokenizer.unk_token_id
        if unknown is None or unknown not in self._tokens(text):
            return []
        return [letter for letter in dict.fromkeys(text) if unknown in self._tokens(letter)]

    def leaves_out(self, role: str) -> bool:
        """Return whether the chat template writes nothing of what this role says before the assistant's turn."""
        turns = [{"role": role, "content": _TURN}, *([] if role == "user" else [{"role": "user", "content": "-"}])]
        try:
            return self._has_template and _TURN not in self._written(turns, (), True)
        except Exception:  # a template may raise anything; the run's own messages will show it
            return False

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """The fewest tokens that these messages can have, by their number of characters alone: a text of 100 MB would
        take many times its size to be tokenized."""
        return sum(len(message.get("content") or "") for message in messages) // self._longest_token

    def length(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self._tokens(text))

    @cached_property
    def _tool_format(self) -> ToolFormat | None:
        return tool_format(self._written) if self._has_template else None

    def check_tools(self) -> None:
        """Raise ConfigError where the chat template cannot offer tools, or writes calls in a way that is not known."""
        if self._tool_format is None:
            rule = (
                f"offers tools, and the chat template of policy.model_name = {self._model_path} does not write them, "
                "or writes calls in a way that is not known (docs/rollouts.md lists the known ones)"
            )
            needs_none = "environment=python environment.kwargs.call=block, which needs none"
            fix = f"a model whose template takes tools, such as Qwen3, or {needs_none}"
            raise ConfigError([Violation("environment.name", None, rule, fix)])

    def tool_calls(self, tokens: Sequence[int], tools: Sequence[Tool], turn: int) -> list[dict[str, Any]]:
        """Return the calls in a response, as `checked_calls` describes them; `turn` counts the episode's responses."""
        if self._tool_format is None:
            return []
        sampled = list(tokens[:-1] if tokens and tokens[-1] in self.end_tokens else tokens)
        # Markers of calls are special tokens in some models. What a model considers while it thinks is no call.
        text = self._tokenizer.decode(sampled, skip_special_tokens=False).rpartition("</think>")[2]
        return checked_calls(self._tool_format.find(text), tools, turn)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a chat, up to the start of the assistant's turn.

        Raises:
            DataError: the model's chat template cannot write the chat.
        """
        if self._tokenizer.chat_template is None:
            return self.opening(_joined(messages, self._tokenizer.eos_token))
        try:
            encoded = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=True, return_dict=True
            )
        except Exception as error:  # a template may raise anything
            raise DataError(f"the model's chat template cannot write this chat: {error}") from None
        return list(encoded["input_ids"])

    def conversation(self, said: Conversation) -> tuple[list[int], list[bool]]:
        """Return the token ids of a chat up to the end of its last message, and for each whether it is trained on: what
        the chat template writes for a trained message, and the end token after it.

        Raises:
            DataError: the template does not write the chat as prompts, responses and end tokens.
        """
        tokens, trained = list[int](), list[bool]()
        done = ""
        for index in said.trained():
            before = self._rendered(said, index, prompt=True)
            turn = self._turn(said, index, before)
            if not before.startswith(done):
                raise DataError(
                    "the model's chat template writes the assistant's earlier turns otherwise when a turn follows "
                    f"(data.train_on=last trains on the last alone): {before!r}"
                )
            end_token, end = self._turn_end
            asked = self._tokens(before[len(done) :]) if done or self._has_template else self.opening(before)
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
        if self._tokenizer.chat_template is None:
            return self._tokens("".join(f"\n{message['content']}" for message in messages))
        rest = self._after_calls(messages)
        if rest is None:
            turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _TURN}, *messages]
            try:
                whole = self._written(turns, (), True)
            except Exception as error:  # a template may raise anything
                roles = ", ".join(message["role"] for message in messages)
                rule = f"the model's chat template cannot write messages of the role {roles}: {error}"
                raise DataError(rule) from None
            _, found, rest = whole.rpartition(_TURN)
            if not found:
                raise DataError(f"the model's chat template leaves out the assistant's earlier turns: {whole!r}")
        return self._tokens(rest.removeprefix(self._tokenizer.decode([last_token])))

    def _after_calls(self, messages: Sequence[Message]) -> str | None:
        """Return the text from the end token of a turn with calls, through `messages` that answer them, to the start of
        the next turn. Many templates write a tool's answer only after a call. None where there are no such messages, or
        the template does not write that many calls."""
        answers = [message for message in messages if "tool_call_id" in message]
        if self._tool_format is None or not answers:
            return None
        calls = [sample_call(one["tool_call_id"], one.get("name", ""), _TURN) for one in answers]
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            turn = self._written(turns, (), False).rpartition(_TURN)[2]
            _, found, rest = self._written([*turns, *messages], (), True).rpartition(_TURN)
        except Exception:  # a template may raise anything
            return None
        call_end = turn.partition(self._turn_end[1])[0]
        return rest.removeprefix(call_end) if found and rest.startswith(call_end) else None

    def opening(self, text: str) -> list[int]:
        """The tokens of a text that begins a sequence, such as a chat without a template, with the special tokens that
        the tokenizer itself adds there. The end token that some add too would end it before the response."""
        tokens = list(self._tokenizer(text)["input_ids"])
        added = tokens[-1:] == [self._tokenizer.eos_token_id] and not text.endswith(self._tokenizer.eos_token)
        return tokens[:-1] if added else tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def piece(self, token: int) -> str:
        """Return the text of one token, also of a special one."""
        return self._tokenizer.decode([token])

    def _unusable(self, rule: str, fix: str = "correct the file, or copy the model's folder again") -> ConfigError:
        return ConfigError([Violation("policy.model_name", str(self._model_path), rule, fix)])

    @property
    def _has_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def _rendered(self, said: Conversation, count: int, prompt: bool) -> str:
        """Return the text of the first `count` messages; with `prompt`, up to the next assistant turn."""
        messages = list(said.messages[:count])
        if not self._has_template:
            return _joined(messages, self._tokenizer.eos_token)
        try:
            return self._written(messages, said.tools, prompt)
        except Exception as error:  # a template may raise anything
            raise DataError(f"the model's chat template cannot write this chat: {error}") from None

    def _written(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> str:
        """Return what the chat template writes. It may raise anything."""
        return self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=prompt, tokenize=False
        )

    def _turn(self, said: Conversation, index: int, before: str) -> str:
        """Return the text between `before`, the prompt, and the end token of the message `index`."""
        message, (_, end) = said.messages[index], self._turn_end
        called = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if not self._has_template:
            if called:
                raise DataError("a model without a chat template cannot be trained on tool calls")
            return message["content"]
        whole = self._rendered(said, index + 1, prompt=False)
        if not whole.startswith(before):
            raise DataError(f"the model's chat template changes the prompt when the response follows: {whole!r}")
        turn, found, _ = whole[len(before) :].rpartition(end)
        if not found or message["content"].strip() not in turn:
            raise DataError(
                f"the model's chat template does not write the response and then its end token {end}: {whole!r}"
            )
        if missing := [name for name in called if name not in turn]:
            raise DataError(f"the model's chat template does not write the call of {missing[0]}: {turn!r}")
        return turn

    def _end_of_turn(self) -> tuple[int, str]:
        """The id and the text of the first special token after an assistant's turn; the tokenizer's end token where the
        template writes none."""
        from jinja2 import TemplateSyntaxError

        tokenizer = self._tokenizer
        own = tokenizer.eos_token_id, tokenizer.eos_token
        if not self._has_template:
            return own
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _TURN}]
        try:
            whole = tokenizer.apply_chat_template(turns, tokenize=False)
        except TemplateSyntaxError as error:
            raise self._unusable(f"the chat template is broken: line {error.lineno}: {error.message}") from None
        except Exception:  # a template may raise anything; the run's own messages will show it
            return own
        _, found, rest = whole.rpartition(_TURN)
        special = {*tokenizer.all_special_ids, *(i for i, one in tokenizer.added_tokens_decoder.items() if one.special)}
        special -= {tokenizer.unk_token_id, tokenizer.bos_token_id}
        ends = (token for token in self._tokens(rest) if token in special) if found else iter(())
        return next(((token, tokenizer.convert_ids_to_tokens(token)) for token in ends), own)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _joined(messages: Sequence[Message], end: str) -> str:
    """Join the messages for a model without a chat template: each on a new line, except the assistant's, which follow
    the message that they answer and end with the end token."""
    spoken = [message["role"] == "assistant" for message in messages]
    between = ["", *("" if assistant else "\n" for assistant in spoken[1:])]
    ends = (end if assistant else "" for assistant in spoken)
    return "".join(
        before + message["content"] + after for before, message, after in zip(between, messages, ends, strict=True)
    )

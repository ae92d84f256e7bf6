"""Turn chats into token ids and token ids into text."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_lite.data.conversations import Conversation
from nemo_rl_lite.data.problems import Message
from nemo_rl_lite.errors import ConfigError, DataError, Violation

log = logging.getLogger(__name__)

# This placeholder stands for an assistant turn where only the text after it matters.
_TURN = "THE-TURN"


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template."""

    def __init__(self, model_path: Path):
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self._tokenizer = tokenizer
        if self._tokenizer.chat_template is None:
            log.warning("%s has no chat template: messages are joined by newlines", model_path)

        if tokenizer.eos_token_id is None:
            rule, fix = "the tokenizer names no end token", "set eos_token in the folder's tokenizer_config.json"
            raise ConfigError([Violation("policy.model_name", str(model_path), rule, fix)])

    @property
    def end_token(self) -> int:
        return self._tokenizer.eos_token_id

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat, up to the start of the assistant's turn."""
        if self._tokenizer.chat_template is None:
            return self._tokenizer(_joined(messages, self._tokenizer.eos_token))["input_ids"]
        encoded = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
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
            # The tokenizer adds special tokens at the start where there is no template to write them.
            asked = self._tokenizer(before[len(done) :], add_special_tokens=not done and not self._has_template)
            response = [*self._tokens(turn), self.end_token]
            tokens += [*asked["input_ids"], *response]
            trained += [False] * len(asked["input_ids"]) + [True] * len(response)
            done = before + turn + self._tokenizer.eos_token
        return tokens, trained

    def between_turns(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the token ids from the end of an assistant turn, through `messages`, to the start of its next turn. Of
        the generated tokens only `last_token` matters: an end token that is already there is not repeated.

        Raises:
            DataError: the model's chat template cannot write these messages after an assistant's turn.
        """
        if self._tokenizer.chat_template is None:
            return self._tokens("".join(f"\n{message['content']}" for message in messages))
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _TURN}, *messages]
        try:
            whole = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the model's chat template cannot write messages of the role {roles}: {error}") from None
        _, found, rest = whole.rpartition(_TURN)
        if not found:
            raise DataError(f"the model's chat template leaves out the assistant's earlier turns: {whole!r}")
        return self._tokens(rest.removeprefix(self._tokenizer.decode([last_token])))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    @property
    def _has_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def _rendered(self, said: Conversation, count: int, prompt: bool) -> str:
        """Return the text of the first `count` messages; with `prompt`, up to the next assistant turn."""
        messages = list(said.messages[:count])
        if not self._has_template:
            return _joined(messages, self._tokenizer.eos_token)
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=list(said.tools) or None, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # a template may raise anything
            raise DataError(f"the model's chat template cannot write this chat: {error}") from None

    def _turn(self, said: Conversation, index: int, before: str) -> str:
        """Return the text between `before`, the prompt, and the end token of the message `index`."""
        message, end = said.messages[index], self._tokenizer.eos_token
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

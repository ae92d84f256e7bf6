"""Chats to token ids and token ids to text."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_lite.data.problems import Message
from nemo_rl_lite.errors import ConfigError, DataError, Violation

log = logging.getLogger(__name__)

# Stands for a turn of the assistant's where only what follows it is of interest.
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

    @property
    def padding_token(self) -> int:
        """What fills rows of a batch; the end token where the tokenizer names no other."""
        return self._tokenizer.eos_token_id if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, up to where the assistant's turn begins."""
        if self._tokenizer.chat_template is None:
            return self._tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
        encoded = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def reply(self, messages: Sequence[Message], response: str) -> list[int]:
        """Token ids of what the assistant says to `prompt(messages)`: the response as the chat template writes it, and
        the end token.

        Raises:
            DataError: the template does not write the whole chat as the prompt, the response and the end token.
        """
        if self._tokenizer.chat_template is None:
            return [*self._tokens(response), self.end_token]
        prompt = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        answered = [*messages, {"role": "assistant", "content": response}]
        whole = self._tokenizer.apply_chat_template(answered, tokenize=False)
        end = self._tokenizer.eos_token
        turn, found, _ = whole[len(prompt) :].rpartition(end)
        if not whole.startswith(prompt):
            raise DataError(f"with the response, the model's chat template writes the prompt otherwise: {whole!r}")
        if not found or response.strip() not in turn:
            raise DataError(
                f"the model's chat template does not write the response and then its end token {end}: {whole!r}"
            )
        return [*self._tokens(turn), self.end_token]

    def between_turns(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Token ids from the end of an assistant's turn, through `messages`, to where its next turn begins. What was
        generated is not needed for it, but for `last_token`: an end token that is there already is not repeated.

        Raises:
            DataError: the model's chat template cannot write these messages after an assistant's turn.
        """
        if self._tokenizer.chat_template is None:
            return self._tokens("".join(f"\n{message['content']}" for message in messages))
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _TURN}, *messages]
        try:
            whole = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template raises what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the model's chat template cannot write messages of the role {roles}: {error}") from None
        _, found, rest = whole.rpartition(_TURN)
        if not found:
            raise DataError(f"the model's chat template leaves out the assistant's earlier turns: {whole!r}")
        return self._tokens(rest.removeprefix(self._tokenizer.decode([last_token])))

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a response, special tokens left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

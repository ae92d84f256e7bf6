"""Chats to token ids and token ids to text."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_lite.data.problems import Message
from nemo_rl_lite.errors import ConfigError, Violation

log = logging.getLogger(__name__)


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

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a response, special tokens left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

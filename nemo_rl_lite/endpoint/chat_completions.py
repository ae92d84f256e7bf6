"""OpenAI's chat completions: a response to a conversation, which may call the tools that the request offers."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from nemo_rl_lite.data.messages import Message, read_messages
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.data.tools import Tool, callable_tools, checked_calls
from nemo_rl_lite.endpoint.protocol import Answer, Asked, RefusedError, answer_body
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion

# Mistral's templates take no other length.
_ID_LETTERS = 9


class ChatRequest(Asked):
    """The parameters of a chat completion."""

    source = "messages"

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, gt=0)
    logprobs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        """How long a response may be, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def chat(self) -> tuple[Message, ...]:
        """The messages. Raises RefusedError: they are no chat that the policy can answer."""
        try:
            messages = read_messages(self.messages, "messages")
        except DataError as error:
            raise RefusedError(400, str(error), "messages") from None
        if messages[-1]["role"] == "assistant":
            raise RefusedError(400, "messages: the last one is the assistant's, which has to answer it", "messages")
        return messages

    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model may call. Raises RefusedError: they are no functions, or one has to be called."""
        if self.tool_choice not in (None, "auto", "none"):
            rule = 'nothing makes the engines write a call; leave it out, or choose "auto" or "none"'
            raise RefusedError(
                400, f"tool_choice = {self.tool_choice!r:.60} is not supported here: {rule}", "tool_choice"
            )
        try:
            tools = callable_tools(self.tools or (), "tools")
        except DataError as error:
            raise RefusedError(400, str(error), "tools") from None
        return () if self.tool_choice == "none" else tools

    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        """See `Asked.prompts`. It is one. Raises RefusedError also where the tokenizer does not take the tools."""
        tools = self.offered()
        if tools and not tokenizer.takes_tools:
            rule = (
                "the model's chat template does not write them, or writes calls in a way that is not known "
                "(docs/rollouts.md lists the known ones)"
            )
            fix = "describe the tools in a message, or name another template with policy.tokenizer.chat_template"
            raise RefusedError(400, f"tools: {rule}: {fix}", "tools")
        try:
            return (tuple(tokenizer.prompt(self.chat(), tools)),)
        except DataError as error:
            raise RefusedError(400, str(error), "messages") from None

    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        """See `Asked.body`."""
        tools = self.offered()
        choices = [
            {
                **self._said(completion, tokenizer, tools),
                "logprobs": {"content": _logprobs(completion, tokenizer)} if self.logprobs else None,
            }
            for completion in answer.completions
        ]
        (prompt,) = answer.prompts
        own = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "prompt_token_ids": list(prompt)}
        return answer_body(answer, choices, model) | own

    def chunk(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Asked.chunk`."""
        choices = [
            {name: value for name, value in choice.items() if name != "message"} | {"delta": _delta(choice["message"])}
            for choice in body["choices"]
        ]
        return {**body, "object": "chat.completion.chunk", "choices": choices}

    def _said(self, completion: Completion, tokenizer: ChatTokenizer, tools: Sequence[Tool]) -> dict[str, Any]:
        """The message of a response, with its calls of `tools`, and why it ended where that is a call. As in vLLM a
        response is text where one of its calls cannot be read, and whether calls fit the tools is for the client to
        say."""
        before, written = tokenizer.written_calls(completion.tokens) if tools else ("", [])
        if not written or any(call.trouble for call in written):
            return {"message": {"role": "assistant", "content": self.text(completion, tokenizer)}}
        calls = checked_calls(written, tools, turn=0)[: 1 if self.parallel_tool_calls is False else None]
        message = {"content": before.rstrip() or None, "tool_calls": [_written(call["function"]) for call in calls]}
        return {"message": {"role": "assistant", **message}, "finish_reason": "tool_calls"}


def _written(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call as OpenAI writes it, with the arguments as text."""
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    identity = uuid.uuid4().hex[:_ID_LETTERS]
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _delta(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the delta of a chunk, whose calls are numbered."""
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _logprobs(completion: Completion, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    pieces = [tokenizer.piece(token) for token in completion.tokens]
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, completion.logprobs, strict=True)
    ]

"""OpenAI's chat completions and text completions, with vLLM's token ids."""

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.serving.exchange import Event, Exchange, ShownText
from nemo_rl_lite.serving.protocol import (
    Answer,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    RefusedError,
    Reply,
    read_request,
)


@dataclass
class _Sent:
    """The sent part of a choice."""

    shown: ShownText
    tokens: int = 0


class _OpenAIExchange[Asked: ApiRequest](Exchange[Asked]):
    """Common part of chat completions and text completions."""

    kind: ClassVar[type[Any]]
    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object: ClassVar[str]
    stream_end = "data: [DONE]\n\n"

    def __init__(self, asked: Asked, tokenizer: ChatTokenizer, model: str):
        super().__init__(asked, tokenizer, model)
        self._sent: dict[int, _Sent] = {}
        # Whether the first chunks were sent.
        self._is_open = False
        self._id, self._created = f"{self.id_prefix}-{uuid.uuid4().hex}", int(time.time())

    @classmethod
    def read(cls, content: Any, tokenizer: ChatTokenizer, model: str) -> Exchange[Asked]:
        return cls(read_request(cls.kind, content), tokenizer, model)

    @staticmethod
    def refusal(refused: RefusedError) -> dict[str, Any]:
        return openai_refusal(refused)

    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the answer. `system_fingerprint` is the newest step whose weights sampled the responses."""
        return self._head(self.object_name) | {
            "system_fingerprint": f"step-{max(one.versions[-1][0] for one in answer.completions)}",
            "choices": [
                {"index": index, "token_ids": one.tokens.tolist(), **self._choice(answer, index)}
                for index, one in enumerate(answer.completions)
            ],
            "usage": _usage(answer),
        }

    def begun(self, index: int, so_far: Completion) -> Iterator[Event]:
        sent = self._sent_of(index)
        if text := sent.shown.more(so_far):
            yield from self._opening(so_far)
            yield self._chunk(index, self._delta(text), so_far, self._tokens(sent, so_far))

    def ended(self, answer: Answer) -> Iterator[Event]:
        """See `Exchange.ended`. The usage follows if it was requested."""
        yield from self._opening(answer.completions[0])
        for index, completion in enumerate(answer.completions):
            sent, choice = self._sent_of(index), self._choice(answer, index)
            rest = {"finish_reason": choice["finish_reason"], **self._tokens(sent, completion)}
            yield self._chunk(index, self._last_delta(choice, sent.shown), completion, rest)
        if (self.asked.stream_options or {}).get("include_usage"):
            yield {**self._head(self.chunk_object), "choices": [], "usage": _usage(answer)}

    @abstractmethod
    def _choice(self, answer: Answer, index: int) -> dict[str, Any]:
        """Return a choice without its index and token ids."""

    @abstractmethod
    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        """Return the logprobs of a choice; None if not requested."""

    def _opening_delta(self) -> Mapping[str, Any]:
        """Return the content of a choice's first chunk, before its text."""
        return {}

    @abstractmethod
    def _delta(self, text: str) -> Mapping[str, Any]:
        """Return the content of a chunk with more text."""

    @abstractmethod
    def _last_delta(self, choice: Mapping[str, Any], shown: ShownText) -> Mapping[str, Any]:
        """Return the content of the last chunk of a choice."""

    def _sent_of(self, index: int) -> _Sent:
        return self._sent.setdefault(index, _Sent(ShownText(self.asked, self._tokenizer)))

    def _opening(self, so_far: Completion) -> Iterator[Event]:
        """Yield the first chunk of each choice, which has the role, if nothing was sent yet. OpenAI's client needs the
        choices in their order."""
        if not self._is_open and (opening := self._opening_delta()):
            for index in range(self.asked.n or 1):
                yield self._chunk(index, opening, so_far, {})
        self._is_open = True

    def _tokens(self, sent: _Sent, so_far: Completion) -> dict[str, Any]:
        """Return the ids and logprobs of the unsent tokens."""
        first, sent.tokens = sent.tokens, len(so_far.tokens)
        new = replace(
            so_far,
            tokens=so_far.tokens[first:],
            logprobs=so_far.logprobs[first:],
            top_logprobs=so_far.top_logprobs[first:],
        )
        return {"token_ids": new.tokens.tolist(), "logprobs": self._logprobs(new)}

    def _chunk(self, index: int, delta: Mapping[str, Any], so_far: Completion, rest: Mapping[str, Any]) -> Event:
        choice = {"index": index, "finish_reason": None, **delta, **rest}
        fingerprint = f"step-{so_far.versions[-1][0]}"
        return {**self._head(self.chunk_object), "system_fingerprint": fingerprint, "choices": [choice]}

    def _head(self, object_name: str) -> dict[str, Any]:
        return {"id": self._id, "object": object_name, "created": self._created, "model": self._model}


class ChatExchange(_OpenAIExchange[ChatRequest]):
    """`POST /v1/chat/completions`."""

    kind, id_prefix = ChatRequest, "chatcmpl"
    object_name, chunk_object = "chat.completion", "chat.completion.chunk"

    def body(self, answer: Answer) -> dict[str, Any]:
        (prompt,) = answer.prompts
        return super().body(answer) | {"prompt_token_ids": list(prompt)}

    def _choice(self, answer: Answer, index: int) -> dict[str, Any]:
        completion, reply = answer.completions[index], answer.replies[index]
        reason = "tool_calls" if reply.calls else completion.finish_reason
        return {"message": _message(reply), "finish_reason": reason, "logprobs": self._logprobs(completion)}

    def _opening_delta(self) -> Mapping[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta(self, text: str) -> Mapping[str, Any]:
        return {"delta": {"content": text}}

    def _last_delta(self, choice: Mapping[str, Any], shown: ShownText) -> Mapping[str, Any]:
        message = choice["message"]
        rest = shown.rest(message["content"] or "")
        delta: dict[str, Any] = {"content": rest} if rest else {}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        return {"delta": delta}

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if not self.asked.logprobs and not self.asked.top_logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            piece = self._tokenizer.piece(token)
            return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}

        sampled = _sampled(completion)
        tops = _top_logprobs(completion, self.asked.most_likely)
        content = [
            {**entry(*one), "top_logprobs": [entry(*pair) for pair in top]}
            for one, top in zip(sampled, tops, strict=True)
        ]
        return {"content": content}


class CompletionExchange(_OpenAIExchange[CompletionRequest]):
    """`POST /v1/completions`."""

    kind, id_prefix, object_name, chunk_object = CompletionRequest, "cmpl", "text_completion", "text_completion"

    def _choice(self, answer: Answer, index: int) -> dict[str, Any]:
        completion, each = answer.completions[index], len(answer.completions) // len(answer.prompts)
        return {
            "text": answer.replies[index].text,
            "finish_reason": completion.finish_reason,
            "logprobs": self._logprobs(completion),
            "prompt_token_ids": list(answer.prompts[index // each]),
        }

    def _delta(self, text: str) -> Mapping[str, Any]:
        return {"text": text}

    def _last_delta(self, choice: Mapping[str, Any], shown: ShownText) -> Mapping[str, Any]:
        return {"text": shown.rest(choice["text"]), "prompt_token_ids": choice["prompt_token_ids"]}

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        sampled = [(self._tokenizer.piece(token), logprob) for token, logprob in _sampled(completion)]
        pieces = [piece for piece, _ in sampled]
        # As in OpenAI's API, the sampled token is there too, also if it is less likely.
        tops = [
            {self._tokenizer.piece(token): logprob for token, logprob in top} | {piece: logprob}
            for top, (piece, logprob) in zip(_top_logprobs(completion, self.asked.most_likely), sampled, strict=True)
        ]
        return {
            "tokens": pieces,
            "token_logprobs": completion.logprobs.tolist(),
            "top_logprobs": tops if self.asked.logprobs else None,
            "text_offset": list(accumulate(map(len, pieces[:-1]), initial=0)),
        }


def openai_refusal(refused: RefusedError) -> dict[str, Any]:
    """Return OpenAI's body of a rejection."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def written_arguments(call: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON text."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _message(reply: Reply) -> dict[str, Any]:
    if not reply.calls:
        return {"role": "assistant", "content": reply.text}
    functions = [{"name": call["function"]["name"], "arguments": written_arguments(call)} for call in reply.calls]
    calls = [{**call, "function": function} for call, function in zip(reply.calls, functions, strict=True)]
    return {"role": "assistant", "content": reply.text or None, "tool_calls": calls}


def _usage(answer: Answer) -> dict[str, int]:
    asked, said = answer.usage
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _top_logprobs(completion: Completion, count: int) -> Sequence[Sequence[tuple[int, float]]]:
    """Return the `count` most likely tokens of each position. An engine that reports none was greedy, so that the
    sampled token is the most likely one."""
    if completion.top_logprobs or not count:
        return completion.top_logprobs or [()] * len(completion.tokens)
    return [[pair] for pair in _sampled(completion)]


def _sampled(completion: Completion) -> list[tuple[int, float]]:
    """Return each sampled token with its logprob."""
    return list(zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True))

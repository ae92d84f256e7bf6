"""A stream has the tokens as they are made, and the same answer as without a stream."""

import pytest

from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.serving.openai_completions import ChatExchange
from nemo_rl_lite.serving.protocol import ChatRequest
from tests.unit.rollout.script import Letters


def test_a_chat_comes_token_by_token(openai, echo):
    asked = {"model": "runs/own", "messages": [{"role": "user", "content": "abcd"}]}
    chunks = list(openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *parts, usage = chunks
    deltas = [part.choices[0].delta for part in parts]
    assert (deltas[0].role, [delta.content for delta in deltas]) == ("assistant", ["", "a", "b", "c", "d", None])
    assert [part.choices[0].finish_reason for part in parts] == [None] * 5 + ["stop"]
    assert [token for part in parts for token in getattr(part.choices[0], "token_ids", [])] == [97, 98, 99, 100, 0]
    assert usage.choices == [] and usage.usage.total_tokens == 10
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].object == "chat.completion.chunk"


def test_a_stream_never_shows_a_part_of_a_stop_string(openai, echo):
    asked = [{"role": "user", "content": "abcabd"}]
    stream = openai.chat.completions.create(model="own", messages=asked, stop=["abd"], stream=True)
    assert [part.choices[0].delta.content or "" for part in stream] == ["", "abc", ""]


def test_each_choice_of_a_stream_has_its_index(openai, echo):
    stream = openai.completions.create(model="own", prompt=["ab|", "c|"], n=2, stream=True)
    said = dict.fromkeys(range(4), "")
    for part in stream:
        said[part.choices[0].index] += part.choices[0].text
    assert said == {0: "ab", 1: "ab", 2: "c", 3: "c"}


def test_a_stream_that_is_refused_has_a_status(openai, echo):
    with pytest.raises(Exception, match="temperature = 3") as refused:
        openai.completions.create(model="own", prompt="ab|", temperature=3, stream=True)
    assert refused.value.status_code == 400


class Bytes(Letters):
    """One token a byte."""

    def text(self, tokens):
        return bytes(token for token in tokens if token).decode(errors="replace")


def test_half_of_a_character_waits_for_the_rest():
    exchange, tokens = ChatExchange(ChatRequest(messages=[]), Bytes(), "own"), tuple("né".encode())
    so_far = [Completion(tokens[:count], (0.0,) * count, "length", (0,) * count) for count in (1, 2, 3)]
    told = [[chunk["choices"][0]["delta"]["content"] for chunk in exchange.begun(0, one)] for one in so_far]
    assert told == [["", "n"], [], ["é"]]


def test_choices_open_in_their_order_as_openais_client_needs():
    exchange, tokens = ChatExchange(ChatRequest(messages=[], n=3), Bytes(), "own"), tuple(b"b")
    chunks = [chunk["choices"][0] for chunk in exchange.begun(1, Completion(tokens, (0.0,), "length", (0,)))]
    assert [(one["index"], one["delta"]["content"]) for one in chunks] == [(0, ""), (1, ""), (2, ""), (1, "b")]

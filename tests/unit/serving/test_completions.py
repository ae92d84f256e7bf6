"""Several answers to a request, its own stop strings, and completions of texts and token ids, over a real port."""

from dataclasses import replace

import pytest
from openai import BadRequestError

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.generation.interface import ServedOptions
from tests.unit.serving.served import SPEAKER, Client, Echo, answering


def test_several_answers_have_seeds_of_their_own(openai, echo):
    said = openai.chat.completions.create(model="own", messages=[{"role": "user", "content": "ab"}], n=3, seed=7)
    assert [(one.index, one.message.content) for one in said.choices] == [(0, "ab"), (1, "ab"), (2, "ab")]
    assert sorted(one.seed for one in echo.asked) == [7, 8, 9]
    assert said.usage.prompt_tokens == 3 and said.usage.completion_tokens == 9


def test_an_answer_ends_before_the_requests_own_stop_string(openai, echo):
    asked = [{"role": "user", "content": "abcd"}]
    said = openai.chat.completions.create(model="own", messages=asked, stop=["d", "bc"]).choices[0]
    assert said.message.content == "a" and said.token_ids == [97, 98, 99, 100, 0]
    assert echo.asked[0].sampling.stop_strings == ("d", "bc")


@pytest.mark.parametrize("prompt", ["abc|", [97, 98, 99, 124]])
def test_a_completion_continues_a_text_or_token_ids(openai, echo, prompt):
    said = openai.completions.create(model="own", prompt=prompt, n=2, max_tokens=9, temperature=0, logprobs=1, stop="c")
    first, second = said.choices
    assert (first.text, first.finish_reason, second.index, second.text) == ("ab", "stop", 1, "ab")
    assert first.logprobs.tokens == ["a", "b", "c", "\0"] and first.logprobs.text_offset == [0, 1, 2, 3]
    assert first.logprobs.token_logprobs == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert first.logprobs.top_logprobs[0] == {"a": -1 / 8} and first.token_ids == [97, 98, 99, 0]
    assert said.object == "text_completion" and second.prompt_token_ids == [97, 98, 99, 124]
    sampling = echo.asked[0].sampling
    assert (sampling.stop_strings, sampling.max_new_tokens, sampling.temperature) == (("c",), 9, 0)


@pytest.mark.parametrize("prompts", [["ab|", "c|"], [[97, 98, 124], [99, 124]], ["ab|", [99, 124]]])
def test_several_prompts_have_several_answers_each(openai, echo, prompts):
    said = openai.completions.create(model="own", prompt=prompts, n=2, seed=7)
    assert [(one.index, one.text) for one in said.choices] == [(0, "ab"), (1, "ab"), (2, "c"), (3, "c")]
    assert [len(one.prompt_token_ids) for one in said.choices] == [3, 3, 2, 2]
    assert said.usage.prompt_tokens == 5 and said.usage.completion_tokens == 2 * 3 + 2 * 2
    assert [one.seed for one in echo.asked] == [7, 8, 7, 8]


def test_a_completion_has_the_usual_sampling_and_may_be_a_stream(openai, echo):
    chunks = [
        chunk.choices[0] for chunk in openai.completions.create(model="own", prompt="ab|", stream=True, logprobs=0)
    ]
    assert [chunk.text for chunk in chunks] == ["a", "b", ""] and chunks[0].logprobs.tokens == ["a"]
    assert echo.asked[0].sampling.temperature == 1 and echo.asked[0].sampling.stop_strings == ()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"prompt": ["ab", {}]}, "prompt: must be a text, a list of token ids"),
        ({"prompt": []}, "prompt: has no tokens"),
        ({"prompt": [97, 128]}, "prompt: 128 is not a token id (0 to 127)"),
        ({"stop": ["x", ""]}, "stop.1: String should have at least 1 character"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        ({"presence_penalty": 3}, "presence_penalty: Input should be less than or equal to 2"),
        ({"response_format": {"type": "json_schema"}}, "response_format = {'type': 'json_schema'}: it must be"),
        ({"echo": True, "logprobs": 0}, "echo = True is not supported here: prepend the prompt"),
        (
            {"tools": [{"name": "add"}]},
            "is not supported here: use /chat/completions",
        ),
        ({"suffix": "end"}, "suffix = 'end' is not supported here: leave it out"),
    ],
)
def test_what_a_completion_cannot_have_is_refused(endpoint, echo, parameters, said):
    with Client(endpoint) as client:
        refused = client.post("/completions", json={"prompt": "ab|", **parameters})
    assert refused.status_code == 400 and said in refused.json()["error"]["message"] and not echo.asked


def test_a_request_has_penalties_a_schema_and_the_most_likely_tokens(openai, echo):
    asked = {"model": "own", "messages": [{"role": "user", "content": "ab"}]}
    schema = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "object"}}}
    said = openai.chat.completions.create(
        **asked,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.5,
        frequency_penalty=-1,
        response_format=schema,
        extra_body={"repetition_penalty": 1.2},
    )
    options = echo.asked[0].sampling.options
    assert options == ServedOptions(0.5, -1.0, 1.2, 2, '{"type": "object"}')
    first = said.choices[0].logprobs.content[0]
    assert (first.token, first.logprob) == ("a", -1 / 8)
    assert [(one.token, one.logprob) for one in first.top_logprobs] == [("X", 0.0), ("Y", -1.0)]
    openai.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert echo.asked[1].sampling.options == ServedOptions(json_schema='{"type": "object"}')
    text = openai.completions.create(model="own", prompt="ab|", logprobs=1).choices[0]
    assert text.logprobs.top_logprobs[0] == {"X": 0.0, "a": -1 / 8}


def test_what_the_engine_rejects_is_refused_and_the_next_request_is_not(openai, echo):
    asked = {"model": "own", "messages": [{"role": "user", "content": "ab"}]}
    wrong = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "unheard-of"}}}
    with pytest.raises(BadRequestError, match="the grammar is invalid") as refused:
        openai.chat.completions.create(**asked, response_format=wrong)
    assert refused.value.param == "response_format"
    assert openai.chat.completions.create(**asked).choices[0].message.content == "ab"


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_an_engine_without_options_refuses_them(endpoint, parameters, name):
    echo = Echo()
    with answering(endpoint, echo, replace(SPEAKER, engine=ENGINES["transformers"])), Client(endpoint) as client:
        refused = client.post("/completions", json={"prompt": "ab|", **parameters})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name and not echo.asked
        usual = {"prompt": "ab|", "logprobs": 1, "temperature": 0, "presence_penalty": 0, "repetition_penalty": 1}
        assert client.post("/completions", json=usual).status_code == 200

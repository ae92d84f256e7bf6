"""A model's tools over a real port: what the model is offered, its calls, and the answers that it gets."""

import json
from contextlib import contextmanager

import httpx
import pytest
from openai import BadRequestError, OpenAI
from tokenizers import AddedToken

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.serving.openai_completions import ChatExchange
from nemo_rl_lite.serving.protocol import ChatRequest
from nemo_rl_lite.serving.public import ResponderConfig
from nemo_rl_lite.serving.server import Endpoint, bound_socket
from tests.unit.rollout.test_tool_turns import HERMES, LLAMA, TAGS, template, tokenizer_of
from tests.unit.serving.served import LOCAL, Streaming, answering

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS, "strict": True}}
ASKED = {"role": "user", "content": "1+1?"}
LONGEST = 4000


class Speaking(Streaming):
    """A model that says the same to each request, and a client of its endpoint."""

    def __init__(self, tokenizer, endpoint):
        super().__init__()
        self.tokenizer, self.said, self.ending, self.asked = tokenizer, "", "stop", []
        self.endpoint = endpoint
        web = httpx.Client(trust_env=False)
        self.client = OpenAI(base_url=endpoint.url, api_key=endpoint.token, http_client=web, max_retries=0)

    def work(self, submitted, aborted):
        self.asked += submitted.values()
        tokens = (*self.tokenizer._tokens(self.said), *self.tokenizer.end_tokens[:1])
        said = Completion(tokens, (-0.5,) * len(tokens), self.ending, (0,) * len(tokens))
        return self.reported(submitted, dict.fromkeys(submitted, said))

    def ask(self, *messages, tools=(ADD,), **parameters):
        return self.client.chat.completions.create(
            model="own", messages=messages or [ASKED], tools=list(tools), **parameters
        )

    @property
    def prompt(self) -> str:
        """The text that the model was last asked to continue."""
        return self.tokenizer._tokenizer.decode(self.asked[-1].prompt)


@contextmanager
def speaking(folder, name, end):
    """A model with a chat template of TRL's, and one token a letter."""
    tokenizer = tokenizer_of(folder, template(name), end)
    sampling = Sampling(1.0, 1.0, None, 100, tokenizer.end_tokens, ())
    with bound_socket(LOCAL) as bound, Endpoint(bound, tokenizer, ["own"], LONGEST, "my-key").running() as endpoint:
        model = Speaking(tokenizer, endpoint)
        with model.client, answering(endpoint, model, ResponderConfig(tokenizer, sampling, LONGEST, ENGINES["vllm"])):
            yield model


def hermes(name: str = "add") -> str:
    return HERMES.replace("NAME", name)


@pytest.mark.parametrize(
    ("name", "end", "call"),
    [
        ("qwen3_instruct_2507.jinja", "<|im_end|>", HERMES),
        ("qwen3_5_nothink.jinja", "<|im_end|>", TAGS),
        ("llama3_1.jinja", "<|eot_id|>", LLAMA),
    ],
)
def test_a_call_and_its_answer_are_the_templates_own_rendering(tmp_path, name, end, call):
    with speaking(tmp_path, name, end) as model:
        model.said = call.replace("NAME", "add")
        (choice,) = model.ask().choices
        (called,) = choice.message.tool_calls
        assert '"description": "adds"' in model.prompt and "strict" not in model.prompt
        assert (choice.finish_reason, choice.message.content, called.type) == ("tool_calls", None, "function")
        assert called.function.name == "add" and json.loads(called.function.arguments) == {"a": 41}
        first = [*model.asked[0].prompt, *choice.token_ids]
        model.said = "42"
        answer = {"role": "tool", "tool_call_id": called.id, "content": "42"}
        final = model.ask(ASKED, choice.message.model_dump(exclude_none=True), answer)
        assert final.choices[0].message.content == "42" and final.choices[0].finish_reason == "stop"
        assert final.choices[0].message.tool_calls is None
        assert list(model.asked[1].prompt[: len(first)]) == first, "the call is written as it was sampled"


def test_several_calls_have_ids_of_their_own_and_the_text_before_them_stays(model):
    # A tool that is not there, and arguments that do not fit, are for the client to see.
    model.said = f"Let me see.\n{hermes()}\n{hermes('sub')}"
    choices = model.ask(n=2).choices
    calls = [call for choice in choices for call in choice.message.tool_calls]
    assert [call.function.name for call in calls] == ["add", "sub"] * 2
    assert len({call.id for call in calls}) == 4 and {len(call.id) for call in calls} == {9}
    assert choices[0].message.content == "Let me see."
    (first,) = model.ask(parallel_tool_calls=False).choices[0].message.tool_calls
    assert first.function.name == "add"


def test_the_chunk_of_a_stream_numbers_its_calls(model):
    model.said = hermes() + hermes()
    opening, last = (chunk.choices[0] for chunk in model.ask(stream=True))
    assert opening.delta.role == "assistant" and opening.finish_reason is None
    assert [(call.index, call.function.name) for call in last.delta.tool_calls] == [(0, "add"), (1, "add")]
    assert last.finish_reason == "tool_calls" and last.delta.content is None


def test_a_stream_shows_the_text_before_a_call_and_not_the_call(model):
    model.said, shown = f"Let me < see.\n{hermes()}", []
    exchange = ChatExchange(ChatRequest(messages=[ASKED], tools=[ADD]), model.tokenizer, "own")
    tokens = model.tokenizer._tokens(model.said)
    for count in range(1, len(tokens)):
        so_far = Completion(tuple(tokens[:count]), (0.0,) * count, "length", (0,) * count)
        shown += [chunk["choices"][0]["delta"]["content"] for chunk in exchange.begun(0, so_far)]
    assert len(shown) > 10 and "".join(shown) == "Let me < see."


def test_a_stream_shows_nothing_after_a_special_token_that_starts_a_call(model):
    tokenizer = model.tokenizer
    tokenizer._tokenizer.add_tokens([AddedToken("<tool_call>", special=True)])
    exchange = ChatExchange(ChatRequest(messages=[ASKED], tools=[ADD]), tokenizer, "own")
    tokens = tokenizer._tokens("a ") + tokenizer._tokens(hermes())
    assert tokenizer.call_token == tokens[2]
    shown = []
    for count in range(1, len(tokens)):
        so_far = Completion(tuple(tokens[:count]), (0.0,) * count, "length", (0,) * count)
        shown += [chunk["choices"][0]["delta"]["content"] for chunk in exchange.begun(0, so_far)]
    assert "".join(shown) == "a"


@pytest.mark.parametrize(
    ("said", "ending"),
    [
        (f'{hermes()}<tool_call>{{"name": "add"', "length"),
        ("<tool_call>add(1)</tool_call>", "stop"),
        (f"<think>{hermes()}</think>No.", "stop"),
    ],
)
def test_a_call_that_cannot_be_read_or_is_only_considered_is_text(model, said, ending):
    model.said, model.ending = said, ending
    (choice,) = model.ask().choices
    assert choice.message.content == said and choice.message.tool_calls is None and choice.finish_reason == ending


@pytest.mark.parametrize("kept", [TAGS.index("<parameter") + 3, TAGS.index("</function") + 4, len(TAGS) - 3])
def test_a_tagged_call_without_its_end_is_text_if_the_response_was_cut_off(tmp_path, kept):
    with speaking(tmp_path, "qwen3_5_nothink.jinja", "<|im_end|>") as model:
        model.said = TAGS.replace("NAME", "add")[: kept - len("NAME") + len("add")]
        is_whole = "</function>" in model.said
        (ended,) = model.ask().choices
        assert ended.finish_reason == "tool_calls", "models forget the end"
        model.ending = "length"
        (cut,) = model.ask().choices
        assert cut.finish_reason == ("tool_calls" if is_whole else "length")
        assert (cut.message.content, cut.message.tool_calls is None) == (None if is_whole else model.said, not is_whole)


@pytest.mark.parametrize(
    ("parameters", "param", "said"),
    [
        (
            {"tool_choice": "required"},
            "tool_choice",
            "'required' is not supported here: use ",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "tools: a tool has no name"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(model, parameters, param, said):
    with pytest.raises(BadRequestError) as refused:
        model.ask(**parameters)
    assert said in refused.value.message and refused.value.param == param and not model.asked


@pytest.mark.parametrize(("name", "end"), [("llama3.jinja", "<|eot_id|>"), ("gemma4.jinja", "<turn|>")])
def test_a_template_without_tools_is_named(tmp_path, name, end):
    with speaking(tmp_path, name, end) as model:
        with pytest.raises(BadRequestError, match="tools: the model's chat template does not write tools") as refused:
            model.ask()
        assert "environment.name" not in refused.value.message and not model.asked
        assert model.ask(tools=()).choices[0].message.content == ""

"""OpenAI's Responses API over a real port, asked by OpenAI's client."""

import json

import pytest
from openai import APIStatusError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from nemo_rl_lite.serving.openai_responses import ResponsesExchange
from nemo_rl_lite.serving.protocol import RefusedError
from tests.unit.rollout.script import Letters, completion
from tests.unit.serving.test_tools import PARAMETERS, hermes

ADD = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS, "strict": True}
EVENT = TypeAdapter(ResponseStreamEvent)


def ask(model, asked="1+1?", **parameters):
    return model.client.responses.create(model="own", input=asked, **parameters)


def test_a_text_is_answered_by_a_message(model):
    model.said = "two"
    said = ask(model, instructions="Be brief.", max_output_tokens=9, metadata={"a": "b"})
    Response.model_validate(said.to_dict())
    assert (said.output_text, said.status, said.model, said.store) == ("two", "completed", "own", False)
    assert (said.usage.input_tokens, said.usage.output_tokens) == (len(model.asked[0].prompt), 4)
    assert model.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>")
    assert model.asked[0].sampling.max_new_tokens == 9
    model.ending = "length"
    cut = ask(model)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream_has_the_events_of_a_message_and_a_call(model):
    model.said = f"Let me see.\n{hermes()}"
    events = list(ask(model, stream=True, tools=[ADD]))
    for event in events:
        EVENT.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 5 and kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]
    with model.client.responses.stream(model="own", input="1+1?", tools=[ADD]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    said, called = final.output
    assert said.content[0].text == "Let me see." and json.loads(called.arguments) == {"a": 41}
    assert called.name == "add" and final.usage.input_tokens == len(model.asked[1].prompt)


def test_a_stream_of_only_a_call_has_no_message(model):
    model.said = f"\n\n{hermes()}"
    added = [event.item.type for event in ask(model, stream=True, tools=[ADD]) if "added" in event.type]
    assert added == ["function_call"]


def test_outputs_of_calls_continue_the_conversation_in_the_templates_form(model):
    model.said = f"Both.{hermes()}{hermes('sub')}"
    first = ask(model, tools=[ADD])
    _, *calls = first.output
    assert len({call.call_id for call in calls}) == 2 and first.output_text == "Both."
    outputs = [{"type": "function_call_output", "call_id": one.call_id, "output": "!"} for one in calls]
    outputs[1]["output"] = [{"type": "input_text", "text": "?"}]
    model.said = "done"
    items = [{"role": "user", "content": "1+1?"}, *(one.to_dict() for one in first.output), *outputs]
    assert ask(model, items, tools=[ADD]).output_text == "done"
    before, _, after = model.prompt.partition("Both.")
    assert before.endswith("<|im_start|>assistant\n") and after.count("<tool_call>") == 2
    assert "<tool_response>\n!\n</tool_response>\n<tool_response>\n?\n</tool_response><|im_end|>" in after


def test_what_codex_sends_is_taken(model):
    model.said = "hi"
    texts = [{"type": "input_text", "text": text} for text in "abcd"]
    said = ask(
        model,
        [
            {"type": "message", "id": "msg_1", "role": "developer", "content": texts[:1]},
            {"type": "message", "role": "developer", "content": texts[1:2]},
            {"type": "message", "role": "user", "content": texts[2:3]},
            {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "e"}]},
            {"type": "message", "role": "user", "content": texts[3:]},
        ],
        tools=[ADD, {"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": []}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="a-key",
        text={"verbosity": "low"},
        extra_body={"client_metadata": {"a": "b"}},
    )
    assert said.output_text == "hi" and "web_search" not in model.prompt
    assert model.prompt.startswith("<|im_start|>system\na\n\nb\n\n# Tools")
    assert "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\ne<|im_end|>\n<|im_start|>user\nd" in model.prompt


def test_structured_output_has_its_schema(model):
    form = {"type": "json_schema", "name": "own", "schema": PARAMETERS, "strict": True}
    ask(model, text={"format": form})
    assert json.loads(model.asked[0].sampling.options.json_schema) == PARAMETERS


def test_a_stream_that_fails_ends_with_a_failed_response():
    exchange = ResponsesExchange.read({"input": "1+1?", "stream": True}, Letters(), "own")
    for event in [*exchange.begun(0, completion("a")), failed := exchange.failed(RefusedError(503, "asleep"))]:
        EVENT.validate_python(event)
    assert failed["response"]["error"] == {"code": "server_error", "message": "asleep"}
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 5)


@pytest.mark.parametrize(
    ("parameters", "param", "said"),
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id",
            "no response is stored; send the whole conversation",
        ),
        ({"background": True}, "background", "wait for the response"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "content of type 'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "an item of type 'item_reference'"),
        ({"input": "a" * 5000}, "input", "exceed"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "the engines cannot force a call"),
        ({"text": {"format": {"type": "grammar"}}}, "response_format", "must be"),
        ({"text": {"format": "json"}}, "text.format", "valid dictionary"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "image"}]}]}, "input", "content of type 'image'"),
        ({"input": [{"type": "reasoning", "summary": 3}]}, "input", "content of type 3"),
    ],
)
def test_what_is_not_done_is_refused(model, parameters, param, said):
    with pytest.raises(APIStatusError) as refused:
        model.client.responses.create(**{"model": "own", "input": "1+1?", **parameters})
    assert refused.value.status_code == 400 and refused.value.param == param
    assert said in refused.value.message and not model.asked

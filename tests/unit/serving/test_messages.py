"""Anthropic's Messages API over a real port, asked by Anthropic's client."""

import pytest
from anthropic import Anthropic, APIStatusError, AuthenticationError, DefaultHttpxClient, types
from pydantic import TypeAdapter

from tests.unit.serving.test_tools import ASKED, PARAMETERS, hermes

ADD = {"name": "add", "description": "adds", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}
EVENT = TypeAdapter(types.RawMessageStreamEvent)


@pytest.fixture
def client(model):
    url, web = model.endpoint.url.removesuffix("/v1"), DefaultHttpxClient(trust_env=False)
    with Anthropic(base_url=url, api_key=model.endpoint.token, http_client=web, max_retries=0) as client:
        yield client


def ask(client, *messages, **parameters):
    own = {"model": "own", "max_tokens": 90, "messages": messages or [ASKED], **parameters}
    return client.messages.create(**own)


def test_an_answer_is_a_message_and_the_system_prompt_comes_first(model, client):
    model.said = "two"
    said = ask(client, system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be right."}])
    types.Message.model_validate(said.to_dict())
    assert [block.to_dict() for block in said.content] == [{"type": "text", "text": "two"}]
    assert (said.stop_reason, said.stop_sequence, said.model) == ("end_turn", None, "own")
    assert (said.usage.input_tokens, said.usage.output_tokens) == (len(model.asked[0].prompt), 4)
    assert model.prompt.startswith("<|im_start|>system\nBe brief.\n\nBe right.<|im_end|>")


def test_a_stream_has_the_events_of_a_message_with_text_and_a_call(model, client):
    model.said = f"Let me see.\n{hermes()}"
    events = list(ask(client, stream=True, tools=[ADD]))
    for event in events:
        EVENT.validate_python(event.to_dict())
    kinds = [event.type for event in events]
    text, call = ["content_block_delta"] * kinds[2:].index("content_block_stop"), ["content_block_delta"]
    assert len(text) > 5, "the text comes in pieces"
    block = [["content_block_start", *deltas, "content_block_stop"] for deltas in (text, call)]
    assert kinds == ["message_start", *block[0], *block[1], "message_delta", "message_stop"]
    with client.messages.stream(model="own", max_tokens=90, messages=[ASKED], tools=[ADD]) as stream:
        assert "".join(stream.text_stream) == "Let me see."
        final = stream.get_final_message()
    (said, called) = final.content
    assert (called.type, called.name, called.input, final.stop_reason) == ("tool_use", "add", {"a": 41}, "tool_use")
    assert final.usage.input_tokens == len(model.asked[1].prompt) and said.text == "Let me see."


def test_results_of_calls_continue_the_conversation_in_the_templates_form(model, client):
    model.said = f"Both.{hermes()}{hermes('sub')}"
    first = ask(client, tools=[ADD])
    calls = [block for block in first.content if block.type == "tool_use"]
    assert len({call.id for call in calls}) == 2
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"{place}!"} for place, call in enumerate(calls)
    ]
    results[1]["content"] = [{"type": "text", "text": "1!"}]
    model.said = "done"
    turn = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    ask(client, ASKED, turn, {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]}, tools=[ADD])
    before, _, after = model.prompt.partition("Both.")
    assert before.endswith("<|im_start|>assistant\n") and after.count("<tool_call>") == 2
    assert "<tool_response>\n0!\n</tool_response>\n<tool_response>\n1!\n</tool_response><|im_end|>" in after
    assert after.endswith("<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")
    assert model.asked[1].sampling.max_new_tokens == 90


def test_one_call_and_no_call_can_be_asked_for(model, client):
    model.said = hermes() * 2
    first = ask(client, tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in first.content] == ["tool_use"]
    assert ask(client, tools=[ADD], tool_choice={"type": "none"}).content[0].type == "text"


def test_what_claude_code_sends_is_taken(model, client):
    model.said = "hi"
    said = ask(
        client,
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}],
        },
        {"role": "system", "content": "The date is new."},
        system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}],
        max_tokens=8000,
        metadata={"user_id": "me"},
        thinking={"type": "adaptive"},
        extra_body={
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "temperature": 1,
        },
        extra_query={"beta": "true"},
        extra_headers={"anthropic-beta": "claude-code-20250219", "Authorization": "Bearer my-key"},
    )
    assert said.content[0].text == "hi"
    assert (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\n\nb\n\nThe date is new.<|im_end|>"
        in model.prompt
    )
    assert "billing" not in model.prompt and model.asked[0].sampling.max_new_tokens == 100, "the run's limit holds"


def test_the_ending_is_told(model, client):
    model.said = "one, two, three"
    said = ask(client, stop_sequences=["three", ", tw"])
    assert (said.stop_reason, said.stop_sequence, said.content[0].text) == ("stop_sequence", ", tw", "one")
    model.ending = "length"
    assert ask(client).stop_reason == "max_tokens"


def test_tokens_are_counted_as_in_the_prompt(model, client):
    parameters = {"model": "own", "messages": [ASKED], "tools": [ADD], "system": "Be brief."}
    counted = client.messages.count_tokens(**parameters).input_tokens
    assert not model.asked and counted == client.messages.create(**parameters, max_tokens=9).usage.input_tokens


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("parameters", "status", "kind", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "content of type 'image'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}
                ]
            },
            400,
            "invalid_request_error",
            "content of type 'image' in a tool result is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": 42}]}]},
            400,
            "invalid_request_error",
            "content 42 in a tool result is not supported",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            400,
            "invalid_request_error",
            "input_schema",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "any"}}, 400, "invalid_request_error", "the engines cannot force"),
        ({"extra_body": {"temperature": 3}}, 400, "invalid_request_error", "temperature = 3"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": "2"}]},
            400,
            "invalid_request_error",
            "the last message",
        ),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "invalid_request_error", "prompt is too long: "),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences.0: "),
        ({"model": "claude"}, 404, "not_found_error", "unknown model 'claude'"),
    ],
)
def test_errors_have_the_apis_form(model, client, parameters, status, kind, said):
    for stream in (False, True):
        with pytest.raises(APIStatusError) as refused:
            ask(client, **{"messages": [ASKED], **parameters}, stream=stream)
        body = refused.value.body
        assert refused.value.status_code == status and (body["type"], body["error"]["type"]) == ("error", kind)
        assert said in body["error"]["message"] and not model.asked


def test_a_key_is_needed(model, client):
    with pytest.raises(AuthenticationError, match="x-api-key: KEY"):
        ask(client.with_options(api_key="other"))

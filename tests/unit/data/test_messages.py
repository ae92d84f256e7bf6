"""Messages of other formats are read as what they mean."""

import dataclasses
import json
from functools import cache

import pytest

from nemo_rl_lite.data.formats import to_chat, to_labelled, to_pair, to_problem
from nemo_rl_lite.data.messages import read_messages
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.data.test_conversations import said, trained_texts

ADD = {"name": "add", "arguments": {"x": 1}}
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "call {{ c.function.name }} {{ c.function.arguments.x }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def sharegpt(*turns: tuple[str, object]) -> list[dict]:
    return [{"from": role, "value": value} for role, value in turns]


def calls(message: dict) -> list[tuple[str, object]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@cache
def composed(algorithm: str):
    return compose_config([f"algorithm={algorithm}"]).data


def data(algorithm: str, **changes: object):
    return dataclasses.replace(composed(algorithm), **changes)


@pytest.mark.parametrize("role", ["function_call", "tool_call", "tool_calls"])
@pytest.mark.parametrize(
    ("value", "content", "expected"),
    [
        (json.dumps(ADD), "", [ADD]),
        (ADD, "", [ADD]),
        (json.dumps([ADD, {"name": "now"}]), "", [ADD, {"name": "now", "arguments": {}}]),
        (json.dumps({"name": "add", "arguments": '{"x": 1}'}), "", [ADD]),
        (json.dumps({"name": "add", "parameters": {"x": 1}}), "", [ADD]),
        (json.dumps({"name": "add", "arguments": ""}), "", [ADD | {"arguments": {}}]),
        ("<think>\nhm</think>\n" + json.dumps(ADD), "<think>\nhm</think>", [ADD]),
    ],
)
def test_a_turn_of_calls_has_tool_calls(role, value, content, expected):
    chat = sharegpt(("human", "1+1?"), (role, value), ("observation", "2"), ("gpt", "2"))
    for turns in (chat, [{"role": one["from"], "content": one["value"]} for one in chat]):
        _, call, answer, last = read_messages(turns, "row 1")
        assert (call["role"], call["content"]) == ("assistant", content)
        assert calls(call) == [(one["name"], one["arguments"]) for one in expected]
        first = call["tool_calls"][0]
        assert len(first["id"]) == 9 and first["id"].isalnum()
        assert answer == {"role": "tool", "content": "2", "name": "add", "tool_call_id": first["id"]}
        assert last == {"role": "assistant", "content": "2"}


@pytest.mark.parametrize("role", ["observation", "function", "function_response", "tool_response", "tool_result"])
def test_answers_of_tools_name_the_calls_in_their_order(role):
    asked = ("function_call", json.dumps([ADD, {"name": "now", "arguments": {}}]))
    _, call, *answers = read_messages(sharegpt(("human", "?"), asked, (role, "2"), (role, "noon")), "row 1")
    assert [one["tool_call_id"] for one in answers] == [one["id"] for one in call["tool_calls"]]
    assert [(one["role"], one["name"]) for one in answers] == [("tool", "add"), ("tool", "now")]


@pytest.mark.parametrize("role", ["gpt", "chatgpt", "model", "assistant"])
def test_names_of_the_assistant(role):
    assert read_messages(sharegpt(("human", "1"), (role, "2")), "row 1") == tuple(said("u:1", "a:2"))


@pytest.mark.parametrize("content", [{"content": None}, {"content": "let me see"}, {}])
@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_openais_older_function_call_is_a_tool_call(content, arguments):
    call = {"role": "assistant", **content, "function_call": {"name": "add", "arguments": arguments}}
    answer = {"role": "function", "name": "add", "content": "2"}
    _, first, second = read_messages([*said("u:1"), call, answer], "row 1")
    assert calls(first) == [("add", {"x": 1})] and first["content"] == (content.get("content") or "")
    assert second["role"] == "tool" and second["tool_call_id"] == first["tool_calls"][0]["id"]


def test_the_call_that_a_tool_answers_is_named_by_text():
    answer = {"role": "tool", "content": "2", "tool_call_id": ["a"]}
    with pytest.raises(DataError, match=r"row 1, message 2: its tool_call_id must be text, found \['a'\]"):
        read_messages([*said("u:1"), answer], "row 1")


def test_what_arrow_writes_for_no_call_is_none():
    turns = [*said("u:1"), {"role": "assistant", "content": "2", "function_call": {"name": None, "arguments": None}}]
    assert read_messages(turns, "row 1")[1] == {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (("function_call", "add(1)"), "its function call is not JSON .*; write {.name.: .* the role assistant"),
        (("function_call", "[]"), "its list of function calls is empty"),
        (("function_call", "[1]"), "a tool call needs the name of a function, found 1"),
        (("function_call", '{"x": 1}'), "a tool call needs the name of a function"),
        (("function_call", None), "a tool call needs the name of a function, found None"),
        (
            ("function_call", '{"name": "add", "arguments": [1]}'),
            r"the arguments of add must be an object, found \[1\]",
        ),
        (("gpt", None), r"its content \(value\) must be text, found NoneType"),
        (("observation", {"a": 1}), r"its content \(value\) must be text, found dict"),
    ],
)
def test_what_is_wrong_with_a_turn_is_said(turn, words):
    with pytest.raises(DataError, match=rf"^row 1, message 2: {words}"):
        read_messages(sharegpt(("human", "?"), turn), "row 1")


def test_calls_are_trained_on_as_the_template_writes_them(tmp_path):
    row = {"conversations": sharegpt(("human", "?"), ("function_call", json.dumps(ADD)), ("observation", "2"))}
    whole, runs = trained_texts(tmp_path, to_chat(data("sft"), row, "row 1"), CALLS)
    assert runs == ["call add 1<eos>"] and whole == "[user]?<eos>[assistant]call add 1<eos>"


TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [{"type": "function", "function": TOOL}]])
@pytest.mark.parametrize("nested", [False, True])
def test_system_and_tools_beside_a_chat_are_its_own(tools, nested):
    row: dict = {"conversations": sharegpt(("human", "one?"), ("gpt", "un")), "system": "In French.", "tools": tools}
    row, name = ({"chat": row}, "chat.conversations") if nested else (row, None)
    config = data("sft", messages_column=name, system_prompt="another")
    (found,) = to_chat(config, row, "row 1").conversations
    assert found.messages[0] == {"role": "system", "content": "In French."} and found.trained() == [2]
    assert found.tools == ({"type": "function", "function": TOOL},)


def test_system_and_tools_of_other_rows_are_read():
    more = {"system": "brief", "tools": [TOOL]}
    config = data("dpo")
    rows = [
        to_pair(config, {"prompt": "1", "chosen": "2", "rejected": "3", **more}, "row 1"),
        to_pair(config, {"chosen": said("u:1", "a:2"), "rejected": said("u:1", "a:3"), **more}, "row 1"),
        to_labelled(data("kto"), {"prompt": "1", "completion": "2", "label": True, **more}, "row 1"),
        to_chat(data("sft"), {"prompt": "1", "answer": "2", **more}, "row 1"),
        to_chat(data("sft"), {"messages": said("u:1", "a:2"), **more}, "row 1"),
    ]
    for one in rows:
        for each in one.conversations:
            assert [message["content"] for message in each.messages[:2]] == ["brief", "1"] and each.trained() == [2]
            assert each.tools == ({"type": "function", "function": TOOL},)
    assert to_problem(data("grpo"), {"prompt": "1", "answer": "2", **more}, "row 1").messages[0]["content"] == "brief"
    named = data("grpo", prompt_template="{prompt}")
    assert len(to_problem(named, {"prompt": "1", "answer": "2", **more}, "row 1").messages) == 1


@pytest.mark.parametrize("nothing", [None, "", " ", []])
def test_an_empty_system_and_no_tools_are_none(nothing):
    row = {"messages": said("u:1", "a:2"), "system": nothing, "tools": nothing}
    (found,) = to_chat(data("sft", system_prompt="brief"), row, "row 1").conversations
    assert found.messages[0]["content"] == "brief" and found.tools == ()


def test_a_chats_own_system_message_comes_before_the_column():
    row = {"conversations": sharegpt(("system", "own"), ("human", "1"), ("gpt", "2")), "system": "column"}
    (found,) = to_chat(data("sft"), row, "row 1").conversations
    assert [message["content"] for message in found.messages] == ["own", "1", "2"]


@pytest.mark.parametrize("tools", ["not JSON", "7", '{"name": "f"}', [1]])
def test_tools_that_are_none_are_named(tools):
    row = {"messages": said("u:1", "a:2"), "tools": tools}
    with pytest.raises(DataError, match=r"^row 1: column 'tools' (is not JSON|must be a list of tools)"):
        to_chat(data("sft"), row, "row 1")
    # Beside a prompt the column is something else.
    to_chat(data("sft"), {"prompt": "1", "answer": "2", "tools": tools}, "row 1")


def test_functions_of_openais_older_format_are_tools():
    (found,) = to_chat(data("sft"), {"messages": said("u:1", "a:2"), "functions": [TOOL]}, "row 1").conversations
    assert found.tools == ({"type": "function", "function": TOOL},)


def test_a_pair_of_single_messages_answers_the_chat_beside_it():
    better, worse = sharegpt(("gpt", "2"), ("gpt", "3"))
    row = {"conversations": sharegpt(("human", "1")), "chosen": better, "rejected": worse}
    pair = to_pair(data("dpo"), row, "row 1")
    assert [[one["content"] for one in each.messages] for each in pair.conversations] == [["1", "2"], ["1", "3"]]


CHAT = said("s:s", "u:1+1?")
AS_TEXT = [
    json.dumps(CHAT),
    json.dumps(CHAT, indent=2) + "\n",
    str(CHAT),
    f" {CHAT}".replace(", {", "\n {"),
    json.dumps(CHAT[1]),
    json.dumps(sharegpt(("human", "1+1?"))),
    json.dumps({"messages": CHAT}),
    json.dumps(json.dumps(CHAT)),
    json.dumps([{"content": [{"type": "text", "text": "1"}], "role": "user"}]),
]


@pytest.mark.parametrize("text", AS_TEXT)
def test_messages_written_as_text_are_refused(text):
    words = r"^row 1.*holds its messages as JSON text; write the list itself into the row"
    pair = {"prompt": "1", "chosen": text, "rejected": "2"}
    for algorithm, read, row in (
        ("grpo", to_problem, {"prompt": text, "answer": "2"}),
        ("sft", to_chat, {"prompt": text, "answer": "2"}),
        ("sft", to_chat, {"prompt": "1", "answer": text}),
        ("sft", to_chat, {"messages": text}),
        ("dpo", to_pair, pair),
        ("dpo", to_pair, pair | {"chosen": "1", "rejected": text}),
        ("dpo", to_pair, {"context": text, "response1": "1", "response2": "2", "overall_preference": 1}),
        ("kto", to_labelled, {"prompt": text, "completion": "2", "label": True}),
    ):
        with pytest.raises(DataError, match=words):
            read(data(algorithm), row, "row 1")


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2] backwards",
        "[{'a': 1}]",
        '{"role": "admin", "content": 1}',
        AS_TEXT[0] + " Who speaks?",
        'Read [{"role": "user", "content": "1"}]',
        '[{"name": "f", "arguments": {"role": 1}}]',
        "[",
        "{}",
    ],
)
def test_other_text_is_a_prompt(text):
    assert to_problem(data("grpo"), {"prompt": text, "answer": "2"}, "row 1").messages[0]["content"] == text


def test_text_that_is_meant_can_be_the_content_of_a_message_or_a_template():
    row = {"prompt": [{"role": "user", "content": AS_TEXT[0]}], "text": AS_TEXT[0], "answer": "2"}
    for config in (data("grpo"), data("grpo", prompt_template="{text}")):
        assert to_problem(config, row, "row 1").messages == ({"role": "user", "content": AS_TEXT[0]},)

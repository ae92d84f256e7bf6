"""Rows of whole chats are read, and the right tokens are trained on."""

import dataclasses
import json

import pytest

from nemo_rl_lite.data.examples import training_examples
from nemo_rl_lite.data.formats import Example, to_chat
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.models.embedded import build_tokenizer
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.data.test_examples import CHATML, encoder

TOOLS = (
    "{% if tools %}tools {{ tools | length }};{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}call {{ c.function.name }} {{ c.function.arguments.a }}"
    "{% endfor %}{% endif %}{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Like Qwen3's and DeepSeek's templates, this one leaves thoughts out of all turns but the last.
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('/')[-1] }}")


def said(*turns: str) -> list[dict]:
    """Return messages by turns; s, u or a before a colon is the role."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def chat(messages: object, tools: object = None, **changes: object) -> Example:
    config = dataclasses.replace(compose_config(["algorithm=sft"]).data, messages_column="messages", **changes)
    return to_chat(config, {"messages": messages, "tools": tools}, "f.jsonl, row 3")


def trained_texts(folder, example, template: str = CHATML) -> tuple[str, list[str]]:
    """Return the whole text, and the texts of consecutive trained tokens."""
    tokenizer = encoder(folder, template).tokenizer
    tokens, trained = tokenizer.conversation(example.conversations[0])
    decode, runs = build_tokenizer().decode, [[]]
    for token, mark in zip(tokens, trained, strict=True):
        runs = [*runs[:-1], [*runs[-1], token]] if mark else [*runs, []] if runs[-1] else runs
    return decode(tokens), [decode(run) for run in runs if run]


TURNS = said("s:be brief", "u:2+2", "a:4", "u:and 1", "a:5", "u:bye")


@pytest.mark.parametrize(("which", "expected"), [("all", ["4<eos>", "5<eos>"]), ("last", ["5<eos>"])])
def test_all_of_the_assistants_turns_are_trained_on_or_its_last(which, expected, tmp_path):
    example = chat(TURNS, train_on=which)
    whole, runs = trained_texts(tmp_path, example)
    assert runs == expected
    # Messages that the assistant does not answer are left out.
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    expected_text = tokenizer.apply_chat_template(TURNS[:-1], tokenize=False).removesuffix("\n")
    assert whole == expected_text.replace("\n", "<unk>")
    assert [message["content"] for message in example.messages] == (
        ["be brief", "2+2"] if which == "all" else ["be brief", "2+2", "4", "and 1"]
    )


def test_a_template_that_forgets_can_train_the_last_turn_alone(tmp_path):
    turns = said("u:2+2", "a:12/4", "u:and 1", "a:13/5")
    with pytest.raises(DataError, match=r"earlier assistant turns differently .*data.train_on=last"):
        trained_texts(tmp_path, chat(turns), FORGETFUL)
    last = chat(turns, train_on="last")
    whole, runs = trained_texts(tmp_path, last, FORGETFUL)
    assert runs == ["13/5<eos>"] and "12/4" not in whole


def test_tool_calls_are_trained_on_and_their_answers_are_not(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 7})}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "5"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "70", "tool_call_id": "1"},
        {"role": "assistant", "content": "it is 70"},
    ]
    schema = {"type": "function", "function": {"name": "add"}}
    for tools in ([schema, schema], json.dumps([schema, schema])):
        whole, runs = trained_texts(tmp_path, chat(messages, tools, tools_column="tools"), TOOLS)
        assert runs == ["call add 7<eos>", "it is 70<eos>"] and whole.startswith("tools 2;[user]2+5<eos>")
    assert not trained_texts(tmp_path, chat(messages), TOOLS)[0].startswith("tools")


def test_what_arrow_adds_to_a_row_is_not_written(tmp_path):
    """Parquet gives each row the fields of all rows."""
    call = {"id": "7", "type": "function", "function": {"name": "add", "arguments": {"a": 7, "b": None}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None, "reasoning_content": "hm"}
    (conversation,) = chat(
        [*said("u:1"), message], [{"function": {"name": "f", "x": None}}], tools_column="tools"
    ).conversations
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "7", "type": "function", "function": {"name": "add", "arguments": {"a": 7}}}],
    }
    assert conversation.tools == ({"function": {"name": "f"}},)


def test_without_a_template_turns_follow_each_other_in_lines(tmp_path):
    whole, runs = trained_texts(tmp_path, chat(said("u:1", "a:2", "u:3", "a:4")), None)
    assert runs == ["2<eos>", "4<eos>"] and whole == "12<eos><unk>34<eos>"


def test_the_systems_prompt_comes_first_unless_there_is_one(tmp_path):
    alone = chat(said("u:1", "a:2"), system_prompt="hello")
    assert alone.messages[0] == {"role": "system", "content": "hello"}
    assert chat(said("s:own", "u:1", "a:2"), system_prompt="hello").messages[0]["content"] == "own"
    # A prompt of messages with a response in another column is the same chat.
    config = dataclasses.replace(compose_config(["algorithm=sft"]).data, system_prompt="hello")
    row = {"prompt": said("s:own", "u:1"), "answer": "2"}
    assert [message["role"] for message in to_chat(config, row, "row 1").messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("text", "a list of {role, content} messages is needed, found str"),
        (json.dumps(TURNS), "column 'messages': holds its messages as JSON text"),
        (said("u:1"), "no message of the assistant"),
        (said("s:0", "a:1", "u:2", "a:3"), "begins with the assistant, without a prompt"),
        ([{"role": "bot", "content": "1"}], "message 1: its role must be one of .* found 'bot'"),
        (
            [*said("u:1"), {"role": "user", "content": [{"type": "image_url"}]}],
            "2: only parts of type text",
        ),
        (
            [*said("u:1"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "message 2: the arguments of f are not JSON",
        ),
    ],
)
def test_rows_that_are_no_chat_are_named(messages, words):
    with pytest.raises(DataError, match=rf"^f.jsonl, row 3.*{words}"):
        chat(messages)


def test_chats_that_are_too_long_are_cut_and_counted(tmp_path, caplog):
    rows = [{"messages": said("u:1", "a:short")}] * 3
    rows += [{"messages": said("u:2", f"a:{'long ' * 20}")}, {"messages": said(f"u:{'x' * 90}", "a:y")}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"data.train_path={tmp_path / 'train.jsonl'}", "data.messages_column=messages", "data.shuffle=false"]
    sizes = ["policy.train_global_batch_size=4", "policy.train_micro_batch_size=4", "data.validation_fraction=0.0"]
    off = ["algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=0"]
    config = compose_config(["algorithm=sft", "data=file", *overrides, *sizes, *off])
    cutting = encoder(tmp_path, max_length=40, too_long="truncate")
    examples = training_examples(config, cutting)
    assert "2 of 5 chats are longer" in caplog.text and "1 were dropped" in caplog.text
    row = examples.rows(0)[3]
    assert len(row.tokens) == 40 and any(row.mask)
    prompt = len(ChatTokenizer(tmp_path).prompt(said("u:2")))
    assert row.mask == [False] * prompt + [True] * (40 - prompt)


def test_messages_in_sharegpts_format_are_read():
    chat = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "2+2"},
        {"from": "gpt", "value": "4"},
    ]
    (said,) = to_chat(compose_config(["algorithm=sft"]).data, {"conversations": chat}, "row 1").conversations
    assert [message["role"] for message in said.messages] == ["system", "user", "assistant"]
    with pytest.raises(DataError, match=r"message 1: its role must be one of .*, found 'martian'"):
        to_chat(compose_config(["algorithm=sft"]).data, {"conversations": [{"from": "martian", "value": "4"}]}, "row 1")


@pytest.mark.parametrize(("which", "expected"), [("all", ["4<eos>", "6<eos>"]), ("last", ["6<eos>"])])
def test_messages_of_weight_0_are_read_and_not_trained_on(which, expected, tmp_path):
    messages = said("u:1", "a:4", "u:2", "a:5", "u:3", "a:6", "u:7", "a:8")
    for place, weight in ((1, 1), (3, 0), (7, 0)):
        messages[place]["weight"] = weight
    example = chat(messages, train_on=which)
    whole, runs = trained_texts(tmp_path, example)
    assert runs == expected and "5<eos>" in whole and not example.unanswered
    sharegpt = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2", "weight": 0}]
    with pytest.raises(DataError, match="no message of the assistant to train on: they have weight 0"):
        chat(sharegpt)

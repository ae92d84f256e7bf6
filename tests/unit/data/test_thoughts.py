"""Thoughts of the assistant are trained on, or an error says why they are not."""

import json

import pytest

from nemo_rl_lite.data.examples import training_examples
from nemo_rl_lite.data.formats import to_chat
from nemo_rl_lite.data.messages import read_messages
from nemo_rl_lite.errors import DataError
from tests.unit.data.test_conversations import said
from tests.unit.data.test_examples import CHATML, SMALL, encoder, sft_config
from tests.unit.data.test_messages import CALLS, data

TEMPLATE = (
    "{%% for m in messages %%}[{{ m.role }}]%s<eos>{%% endfor %%}"
    "{%% if add_generation_prompt %%}[assistant]%s{%% endif %%}"
)
# As Qwen3's: thoughts are cut out of the content and written again, with the template's own line ends.
_CUT = (
    "{% set c = m.content %}{% set r = m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_WRITTEN = _CUT + "{% if m.role == 'assistant' %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}"
QWEN = TEMPLATE % (_WRITTEN, "")
# As Qwen3's of 2507, whose prompt begins the thoughts.
OPENED = TEMPLATE % (_WRITTEN, "<think>\n")
# As Qwen3.8's, which read the field alone.
FIELD, FIELD_OPENED = (
    one.replace(_CUT, "{% set c, r = m.content, m.reasoning_content or '' %}") for one in (QWEN, OPENED)
)
# As DeepSeek's, which leaves out all thoughts.
FORGETFUL = TEMPLATE % (_CUT + "{{ c }}", "")
# As gpt-oss's, which reads another field.
CHANNELS = TEMPLATE % ("{% if m.thinking %}<analysis>{{ m.thinking }}<final>{% endif %}{{ m.content }}", "")
LLAMA = (
    "{% for m in messages %}<|header|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header|>\n\n{% endif %}"
)
GEMMA = CHATML.replace("{{ m.role }}", "{{ 'model' if m.role == 'assistant' else m.role }}").replace(
    "[assistant]", "[model]"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<eos>"
    "{% endif %}{% endfor %}"
)
WRITERS = [(QWEN, "<think>\ntwo\n</think>\n\n4"), (OPENED, "two\n</think>\n\n4"), (CHANNELS, "<analysis>two<final>4")]
FIELDS = [
    {"reasoning_content": "two", "content": "4"},
    {"reasoning": "two", "content": "4"},
    {"thinking": "two", "content": "4"},
    {"thought": "two", "content": "4"},
    {"reasoning_details": [{"type": "reasoning.text", "text": "two"}], "content": "4"},
    {"reasoning": "two", "reasoning_details": [{"type": "reasoning.summary", "summary": "2"}], "content": "4"},
    {"reasoning": "two", "reasoning_content": "two\n", "thinking": "", "content": "4"},
    {"content": [{"type": "thinking", "thinking": "two", "signature": "s"}, {"type": "text", "text": "4"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "two"}]}, {"type": "text", "text": "4"}]},
    {"content": [{"type": "reasoning", "text": "two"}, {"type": "text", "text": "4", "thinking": None}]},
]


def turn(folder, template: str | None, *messages: dict) -> str:
    """Return what is trained on of the last message."""
    (chat,) = to_chat(data("sft", train_on="last"), {"messages": list(messages)}, "row 1").conversations
    written = encoder(folder, template).tokenizer.template
    return written.turn(chat, len(messages) - 1, written.prompt(chat.messages[:-1], chat.tools))


def answer(**fields: object) -> dict:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    ("fields", "template", "expected"),
    [*((fields, *WRITERS[0]) for fields in FIELDS), *((FIELDS[0], *writer) for writer in WRITERS[1:])],
)
def test_thoughts_by_any_name_are_trained_on(tmp_path, template, expected, fields):
    asked = said("u:2+2?")
    assert turn(tmp_path, template, *asked, answer(**fields)).replace("two\n\n<", "two\n<") == expected
    sharegpt = {"from": "gpt", "value": fields["content"], **{k: v for k, v in fields.items() if k != "content"}}
    assert read_messages([*asked, sharegpt], "row 1") == read_messages([*asked, answer(**fields)], "row 1")


@pytest.mark.parametrize("template", [CHATML, LLAMA, GEMMA, MISTRAL, FORGETFUL, None])
@pytest.mark.parametrize(
    "fields",
    [
        FIELDS[-1],
        {"thinking": "two", "content": ""},
        {"reasoning": "4", "content": "4"},
        {"reasoning": "a", "content": "a\n"},
    ],
)
def test_thoughts_that_the_template_leaves_out_are_an_error(tmp_path, template, fields):
    words = "(does not write|without a chat template cannot be trained on) reasoning_content"
    with pytest.raises(DataError, match=rf"{words}.*write it into the content.*, or leave it out$"):
        turn(tmp_path, template, *said("u:2+2?"), answer(**fields))


def test_thoughts_that_cannot_be_read_are_told_once(caplog):
    encrypted = [{"type": "reasoning.encrypted", "data": "x"}]
    row = [{"role": "assistant", "content": "4", "reasoning_details": encrypted}] * 2
    assert all("reasoning_content" not in one for one in read_messages(row, "row 1"))
    assert ["reasoning_details" in record.message for record in caplog.records] == [True]


def test_thoughts_that_are_in_the_content_too_are_written_once(tmp_path):
    twice = answer(reasoning_content="two\n", content="<think>\ntwo</think>4")
    assert turn(tmp_path, CHATML, *said("u:2+2?"), twice) == twice["content"]
    assert turn(tmp_path, QWEN, *said("u:2+2?"), twice) == "<think>\ntwo\n</think>\n\n4"


@pytest.mark.parametrize("content", ["two", ""])
def test_blank_thoughts_are_none(tmp_path, content):
    fields = {"reasoning_content": " \n", "reasoning": "", "thinking": None, "content": "4" + content}
    assert turn(tmp_path, CHATML, *said("u:2+2?"), answer(**fields)) == "4" + content


@pytest.mark.parametrize(
    "content",
    [
        "<think>\ntwo\n</think>\n\n4",
        "<think>two</think>4",
        "<think>\ntwo\n</think>\n4",
        "\n<think> two </think> 4\n",
        "two</think>4",
        "<think></think>4",
        "<think>a</think>",
        "<think>\n\ntwo\n\nthree\n</think>4 5\n6",
        "4",
    ],
)
@pytest.mark.parametrize("template", [CHATML, QWEN, OPENED])
def test_tags_in_the_content_are_trained_on_whatever_their_blanks(tmp_path, template, content):
    prefix = "<think>" if template == OPENED else ""
    written = "".join((prefix + turn(tmp_path, template, *said("u:2+2?"), answer(content=content))).split())
    thoughts, _, rest = "".join(content.split()).rpartition("</think>")
    expected = f"<think>{thoughts.removeprefix('<think>')}</think>{rest}"
    assert written == ("".join(content.split()) if template == CHATML else expected)


@pytest.mark.parametrize(
    ("template", "content", "words"),
    [
        (FORGETFUL, "<think>two</think>4", "does not write the reasoning before </think>: '4'; name one that does"),
        (FORGETFUL, "two</think>4", "does not write the reasoning before </think>"),
        (FORGETFUL, "<think>two</think>", "does not write the reasoning before </think>: ''"),
        (QWEN, "<think>a</think>b</think>c", "does not write the reasoning before </think>"),
        (OPENED, "<think>two 4", "adds more reasoning before it.*; end the reasoning with </think>"),
        (FORGETFUL, '<think>{"a": 1}</think>{"b": {}}', r"does not write the reasoning before </think>: '{.b.: {}}'"),
        (
            QWEN,
            "<think>two 4",
            "adds more reasoning before it.*; end the reasoning with </think>, or leave out the row",
        ),
        (
            FIELD,
            "<think>two</think>4",
            "adds more reasoning before it.*; write the reasoning into the field reasoning",
        ),
        (FIELD_OPENED, "<think>two</think>4", "adds more reasoning before it.*; write the reasoning into the field"),
        (TEMPLATE % ("{{ m.content }}", "<think>\n"), "4", r"'<think>\\n' becomes '4<eos>'; name another with"),
    ],
)
def test_what_a_template_makes_of_tags_is_said(tmp_path, template, content, words):
    with pytest.raises(DataError, match=words):
        turn(tmp_path, template, *said("u:2+2?"), answer(content=content))


@pytest.mark.parametrize("content", ["<think>two</think>4", "<think>\ntwo</think>4", "<think>two"])
def test_a_prompt_that_begins_the_thoughts_may_end_their_line(tmp_path, content):
    template = TEMPLATE % ("{{ m.content }}", "<think>\n")
    written = turn(tmp_path, template, *said("u:2+2?"), answer(content=content))
    assert written == content.removeprefix("<think>").removeprefix("\n")


def test_text_may_speak_of_tags_and_be_cut_as_the_row_has_it(tmp_path):
    for template, content in ((QWEN, "the <think> tag"), (CHATML, "<think>two")):
        assert turn(tmp_path, template, *said("u:2+2?"), answer(content=content)).endswith(content)


def test_earlier_thoughts_are_not_trained_on_and_may_be_left_out(tmp_path):
    earlier = answer(reasoning_content="two", content="4")
    assert turn(tmp_path, CHATML, *said("u:2+2?"), earlier, *said("u:and 1?", "a:5")) == "5"


def test_thoughts_before_a_call_are_written(tmp_path):
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    with pytest.raises(DataError, match="does not write reasoning_content"):
        turn(tmp_path, CALLS, *said("u:?"), answer(content="", reasoning="two", tool_calls=[call]))
    braces = CALLS.replace("call {{ c.function.name }} {{ c.function.arguments.x }}", "{{ c.function | tojson }}")
    with pytest.raises(DataError, match="does not write reasoning_content"):
        turn(tmp_path, braces, *said("u:?"), answer(content="", reasoning="two", tool_calls=[call]))
    thinking = CALLS.replace("{{ m.content }}", "{{ m.reasoning }}{{ m.content }}")
    assert (
        turn(tmp_path, thinking, *said("u:?"), answer(content="", thinking="two", tool_calls=[call])) == "twocall add 1"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking": "2", "reasoning": "3", "content": "4"}, "its fields reasoning and thinking differ"),
        (
            {"content": [{"type": "text", "text": "4"}, {"type": "thinking", "thinking": "2"}]},
            "only parts of type text",
        ),
        ({"content": [{"type": "thinking", "thinking": 2}]}, "only parts of type text"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}]}, "only parts of type text"),
    ],
)
def test_thoughts_that_are_no_text_are_named(fields, words):
    with pytest.raises(DataError, match=f"^row 1, message 2: {words}"):
        read_messages([*said("u:1"), answer(**fields)], "row 1")


def test_thoughts_of_another_type_are_ignored(caplog):
    for thoughts in ({"reasoning": {"text": "two"}}, {"thinking": True}):
        messages = read_messages([*said("u:1"), answer(**thoughts, content="4")], "row 1")
        assert messages[1] == {"role": "assistant", "content": "4"}
    assert "field 'reasoning' that is not text" in caplog.text and "field 'thinking'" in caplog.text


def test_the_row_is_named(tmp_path):
    rows = [{"messages": said("u:1", "a:2")}] * 4 + [{"messages": [*said("u:1"), answer(reasoning="a", content="2")]}]
    with pytest.raises(DataError, match=r"train.jsonl, row 5: .* does not write reasoning_content"):
        training_examples(sft_config(tmp_path, json.loads(json.dumps(rows)), *SMALL), encoder(tmp_path))

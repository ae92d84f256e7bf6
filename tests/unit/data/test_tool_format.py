"""Calls are found in the formats of real chat templates, which TRL has copies of, and in two that are written here."""

import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from nemo_rl_lite.data.tool_format import (
    LONGEST,
    MOST_CALLS,
    JSONCalls,
    NamedCalls,
    TaggedCalls,
    WrittenCall,
    tool_format,
)

TEMPLATES = Path(find_spec("trl").origin).parent / "chat_templates"
# As in Mistral's tokenizers of version 3 and of version 11.
_MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[AVAILABLE_TOOLS]{{ tools | tojson if tools else '' }}"
    "[/AVAILABLE_TOOLS][INST]{{ m.content }}[/INST]{% else %}{{ m.content }}CALLS</s>{% endif %}{% endfor %}"
)
MISTRAL_3 = _MISTRAL.replace(
    "CALLS",
    "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ ', ' if not loop.first else '' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]{% endif %}",
)
MISTRAL_11 = _MISTRAL.replace(
    "CALLS",
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}"
    "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)


def format_of(template: str):
    template = (TEMPLATES / template).read_text() if template.endswith(".jinja") else template

    def render(messages, tools, prompt):
        rendered, _ = render_jinja_template(
            [list(messages)],
            tools=list(tools) or None,
            chat_template=template,
            add_generation_prompt=prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        return rendered[0]

    return tool_format(render)


HERMES = JSONCalls("<tool_call>", "name", "arguments")
CODER = TaggedCalls("<tool_call>\n<function=", "<parameter=", ">", "</parameter>", "</function>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen2_5.jinja", HERMES),
        ("qwen3.jinja", HERMES),
        ("llama3_1.jinja", JSONCalls("", "name", "parameters")),
        ("qwen3_5_think.jinja", CODER),
        ("nemotron_3_nano.jinja", CODER),
        (
            "glm4moe.jinja",
            TaggedCalls("<tool_call>", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"),
        ),
        (MISTRAL_3, JSONCalls("[TOOL_CALLS]", "name", "arguments")),
        (MISTRAL_11, NamedCalls("[TOOL_CALLS]", "[ARGS]")),
        # No tools in the prompt, and calls in a format that is not known.
        ("llama3.jinja", None),
        ("deepseek_r1_distill.jinja", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_format_is_read_off_the_template(template, expected):
    assert format_of(template) == expected


LLAMA = JSONCalls("", "name", "parameters")
MISTRAL = NamedCalls("[TOOL_CALLS]", "[ARGS]")
CALL = WrittenCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("own", "text", "calls"),
    [
        (HERMES, 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [CALL]),
        (HERMES, '<tool_call>{"name": "now"}', [WrittenCall("now", {})]),
        (HERMES, "no call, but {braces}", []),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [CALL]),
        # An argument may have line ends, and may quote a call.
        (
            HERMES,
            '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>"}}',
            [WrittenCall("add", {"a": "<tool_call>"})],
        ),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}', [CALL]),
        (LLAMA, '{"sum": 3}', []),
        (
            JSONCalls("[TOOL_CALLS]", "name", "arguments"),
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
            [CALL],
        ),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', [CALL, CALL]),
        (
            CODER,
            "<tool_call>\n<function=add>\n<parameter=a>\nx\ny\n</parameter>\n<parameter=b>1</parameter></function>",
            [WrittenCall("add", {"a": "x\ny", "b": "1"}, is_text=True)],
        ),
        (CODER, "<tool_call><function=now></function></tool_call>", [WrittenCall("now", {}, is_text=True)]),
    ],
)
def test_calls_are_found(own, text, calls):
    assert own.find(text) == calls


@pytest.mark.parametrize(
    ("own", "text", "trouble"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}', "not valid JSON: Expecting"),
        (HERMES, '<tool_call>{"tool": "add"}</tool_call>', 'an object with "name" and "arguments"'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}', "the arguments must be an object"),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
        (MISTRAL, "[TOOL_CALLS]add(1)", r"\[ARGS\] has to follow"),
        (CODER, "<tool_call><function=add><parameter=a>1", "<parameter=NAME>VALUE</parameter>"),
        (CODER, "<tool_call><function=>", "the tool's name has to follow"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(own, text, trouble):
    (call,) = own.find(text)
    with pytest.raises(ValueError, match=trouble):
        raise ValueError(call.trouble)


def test_brackets_without_end_are_a_mistake_of_the_model_and_no_error_of_the_run():
    found = JSONCalls("<tool_call>", "name", "arguments").find("<tool_call>" + "[" * 100_000)
    assert found and "not valid JSON" in found[0].trouble


GLM = TaggedCalls("<tool_call>", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>")
FORMATS = {
    "hermes": (HERMES, ("<tool_call>", '{"name": "f", "arguments": {"a": "')),
    "llama": (LLAMA, ('{"name": "f", "parameters": {"a": "',)),
    "mistral list": (JSONCalls("[TOOL_CALLS]", "name", "arguments"), ("[TOOL_CALLS]", "[", '{"name": "f"}, ')),
    "mistral": (MISTRAL, ("[TOOL_CALLS]", "f", "[ARGS]", '{"a": "')),
    "coder": (CODER, ("<tool_call>", "\n<function=", "f", ">\n<parameter=", "a", ">", "1\n", "</parameter>")),
    "one tag": (
        TaggedCalls("<function=", "<parameter=", ">", "</parameter>", "</function>"),
        ("<function=", "f>\n", "<parameter="),
    ),
    "glm": (GLM, ("<tool_call>", "f\n", "<arg_key>", "a", "</arg_key>", "\n", "<arg_value>", "1", "</arg_value>")),
}
SEPARATORS = (
    *(" ", "\n", "\t", "\r\n", " \n", "\u00a0", "x", "1", "-", "é", "<", ">", "</", "<|", "<|a|>", "<|im_end|>", "&"),
    *(
        "{",
        "}",
        "[",
        "]",
        "{}",
        "[]",
        "{[",
        '"',
        "'",
        '""',
        '"," ',
        '":"',
        "\\",
        '\\"',
        "\\\\",
        "\\u",
        ",",
        ":",
        '{"a":',
        '[{"',
    ),
    *("1e9", "true,", "```", "$", "\x00", '{"name": "f", "arguments": {}}', '{"name": "', '"name" "parameters"'),
)
LENGTH = 2**16


@pytest.mark.parametrize("name", FORMATS)
def test_the_time_is_linear_whatever_a_model_writes(name):
    own, pieces = FORMATS[name]
    tags = ["".join(pieces[begin:end]) for begin in range(len(pieces)) for end in range(begin + 1, len(pieces) + 1)]
    starts = ["".join(pieces[:end]) for end in range(len(pieces) + 1)]
    slowest = {}
    for unit in (*SEPARATORS, *tags, *(f"{tag} \n" for tag in tags)):
        for start in starts:
            text = start + unit * (LENGTH // len(unit))
            began = time.process_time()
            own.find(text)
            own.text_before(text)
            slowest[time.process_time() - began] = (start, unit)
    assert max(slowest) < 0.25, slowest[max(slowest)]


@pytest.mark.parametrize("own", [HERMES, MISTRAL, CODER, GLM])
def test_a_response_has_a_largest_length_and_number_of_calls(own):
    one = f"{own.marker}{{" if own in (HERMES, MISTRAL) else f"{own.marker}f"
    found = own.find(one * (MOST_CALLS + 5))
    assert len(found) == MOST_CALLS + 1 and "at most 256 calls" in found[-1].trouble
    (call,) = own.find(one + " " * LONGEST)
    assert "at most 1048576 characters" in call.trouble
    assert own.find("no call" + " " * LONGEST) == []

"""Calls are held against the schemas of the tools, which rows may have themselves."""

import json
import pickle
import re
import time

import pytest

from nemo_rl_lite.data.formats import problems
from nemo_rl_lite.data.sources import training_set
from nemo_rl_lite.data.tool_format import JSONCalls, TaggedCalls, WrittenCall
from nemo_rl_lite.data.tools import callable_tools, checked_calls
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
WEATHER, NOW = callable_tools([FLAT, {"function": {"name": "now"}}], "tools")


def checked(name, arguments, **others):
    (call,) = checked_calls([WrittenCall(name, arguments, **others)], [WEATHER, NOW], turn=2)
    assert call["id"] == "call02000" and call["type"] == "function"
    return call.get("error") or call["function"]


def test_calls_that_fit_are_in_openais_format():
    assert checked("weather", {"city": "Rome"}) == {"name": "weather", "arguments": {"city": "Rome"}}
    assert checked("weather", {"city": "12", "days": "3"}, is_text=True)["arguments"] == {"city": "12", "days": 3}
    assert checked("weather", {"city": "a", "country": "NaN", "zip": '"\\ud800"'}, is_text=True)["arguments"] == {
        "city": "a",
        "country": "NaN",
        "zip": '"\\ud800"',
    }
    assert checked("now", {})["arguments"] == {}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("wether", {}), "there is no tool 'wether'; the tools are: weather, now"),
        (("weather", {}), "the arguments: 'city' is a required property"),
        (("weather", {"city": 7}), "the argument city: 7 is not of type 'string'"),
    ],
)
def test_calls_that_do_not_fit_say_why(call, error):
    assert checked(*call).startswith(error)
    assert checked("weather", {}, trouble="the call is broken") == "the call is broken"
    assert "'three' is not of type 'integer'" in checked("weather", {"city": "a", "days": "three"}, is_text=True)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "x"}, "must be a list of functions"),
        ([{"type": "function"}], "a tool has no name"),
        ([{"name": "x", "parameters": {"type": "int"}}], "the parameters of the tool x are not a JSON schema: 'int'"),
    ],
)
def test_what_is_no_tool_is_an_error(tools, message):
    with pytest.raises(DataError, match=message):
        callable_tools(tools, "tools")


def test_a_rows_tools_come_before_those_of_the_environment(tmp_path):
    """A row of NeMo Gym, whose prompt and tools are fields of a structure, and which has no answer."""
    asked = {"input": [{"role": "user", "content": "?"}], "tools": [FLAT]}
    rows = [{"gym": asked}, {"gym": {**asked, "tools": None}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["prompt_column=gym.input", "tools_column=gym.tools", "answer_column=null", "shuffle=false"]
    given = [
        "data=file",
        f"data.train_path={tmp_path / 'rows.jsonl'}",
        *(f"data.{key}" for key in keys),
        "algorithm.val_at_start=false",
    ]
    judged = ["environment=calculator", "reward=format", "reward.kwargs.pattern=.*"]
    config = compose_config([*given, "algorithm.val_at_end=false", "algorithm.val_period=0", *judged])
    training = training_set(config.data, 1, problems([NOW]))
    own, common = training.problem(0), training.problem(1)
    assert own.tools == (WEATHER,) and common.tools == (NOW,)
    assert own.answer == "" and own.messages == ({"role": "user", "content": "?"},)
    rows[0]["gym"]["tools"] = [{"type": "function"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(DataError, match=r"row 1, column 'gym.tools': a tool has no name"):
        training_set(config.data, 1, problems())


@pytest.mark.parametrize("schema", [True, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"enum": ["2024"]}])
def test_a_text_that_fits_its_schema_stays_text(schema):
    parameters = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "year", "parameters": parameters}}
    (call,) = checked_calls([WrittenCall("year", {"x": "2024"}, is_text=True)], [tool], 0)
    assert call["function"]["arguments"] == {"x": "2024"} and "error" not in call


def test_a_schema_is_not_fetched(monkeypatch):
    fetched = []
    monkeypatch.setattr("urllib.request.urlopen", lambda request, *_: fetched.append(request))
    tool = {"type": "function", "function": {"name": "year", "parameters": {"$ref": "http://127.0.0.1/schema"}}}
    (call,) = checked_calls([WrittenCall("year", {"x": 1})], [tool], 0)
    assert "the tool's schema cannot be used" in call["error"] and not fetched


LONG = "a" * 2**16


@pytest.mark.parametrize(
    ("schema", "value", "trouble"),
    [
        ({"type": "string", "pattern": "^(a+)+$"}, "a" * 60 + "b", "does not match"),
        ({"type": "string", "pattern": "^(a|aa)+$"}, LONG, ""),
        ({"type": "string", "pattern": r"^\d{3}-\d{4}$"}, "555-1234", ""),
        ({"type": "string", "pattern": r"^\d{3}-\d{4}$"}, "555-123x", "'555-123x' does not match"),
        # What the linear engine does not know is for the tool to judge.
        ({"type": "string", "pattern": "^(?=.*[A-Z])x"}, "y", ""),
        ({"type": "object", "patternProperties": {"^(a+)+$": {"type": "string"}}}, {"a" * 60 + "b": 1}, ""),
        ({"type": "object", "patternProperties": {"^a": {"type": "string"}}}, {"ab": 1}, "x.ab: 1 is not of type"),
        (
            {"type": "object", "patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
            {"a" * 60 + "b": 1},
            "unexpected|not match",
        ),
        ({"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False}, {"ab": 1}, ""),
        ({"type": "array", "uniqueItems": True}, [{"a": number} for number in range(10_000)], ""),
        ({"type": "array", "uniqueItems": True}, [{"a": 1}, {"a": 1}], "occurs twice"),
        ({"type": "array", "items": {"type": "integer"}}, ["a"] * 30_000, "is not of type 'integer'"),
        ({"type": "integer"}, LONG, "x: '" + "a" * 299),
    ],
)
def test_a_call_is_checked_in_linear_time(schema, value, trouble):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}},
    }
    began = time.process_time()
    (call,) = checked_calls([WrittenCall("f", {"x": value})], [tool], 0)
    assert time.process_time() - began < 5
    assert re.search(trouble, call.get("error", "")) and bool(trouble) == ("error" in call)
    assert len(call.get("error", "")) < 400


def test_the_name_of_a_missing_tool_is_shortened():
    (call,) = checked_calls([WrittenCall(LONG)], [NOW], 0)
    assert len(call["error"]) < 400


@pytest.mark.parametrize("depth", [90, 110, 900, 20_000])
@pytest.mark.parametrize("is_text", [False, True])
def test_arguments_that_no_process_can_be_sent_are_a_mistake_of_the_model(depth, is_text):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
    nested = "[" * depth + "]" * depth
    text = f"<f=f><p=y>{nested}</p>" if is_text else f'<call>{{"name": "f", "arguments": {{"x": {nested}}}}}'
    own = TaggedCalls("<f=", "<p=", ">", "</p>", "</f>") if is_text else JSONCalls("<call>", "name", "arguments")
    (call,) = checked_calls(own.find(text), [tool], 0)
    # What is no JSON stays text.
    assert pickle.dumps(call) and ("error" in call) == (depth > 100 and not (is_text and depth > 10_000))

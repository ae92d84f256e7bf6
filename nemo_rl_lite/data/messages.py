"""Read the messages of a chat. This module imports nothing heavy."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from nemo_rl_lite.errors import DataError

log = logging.getLogger(__name__)
Message = dict[str, Any]
"""Role and content. An assistant's may have tool calls, and weight 0 where it is not trained on. A tool's message names
the call that it answers."""
ROLES = ("system", "developer", "user", "assistant", "tool")
# The usual names of a column that holds whole chats.
CHAT_COLUMNS = ("messages", "conversations")
# The fields for the thoughts before an answer; messages are read with the first one alone.
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
# Optional fields of a tool's message: the tool, and the call that it answers.
_MORE = ("name", "tool_call_id")
# Names of roles in ShareGPT's format and in OpenAI's older one, and of turns that hold tool calls as JSON.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"} | dict.fromkeys(
    ("observation", "function", "function_response", "tool_response", "tool_result"), "tool"
)
_CALLERS = ("function_call", "tool_call", "tool_calls")
# Messages as JSON, as Python or as NumPy writes them: a list, one message, or the structure of a whole chat; maybe
# written twice, so that quotes are escaped. The whole text is one.
_QUOTE = r"""\\*["']"""
_CHAT_START = re.compile(
    rf"""\s*"?\s*(?:\[\s*\{{|\{{\s*{_QUOTE}(?:role|content|from|value|{"|".join(CHAT_COLUMNS)}){_QUOTE}\s*:)"""
)
_CHAT_ROLE = re.compile(
    rf"{_QUOTE}(?:role|from){_QUOTE}\s*:\s*{_QUOTE}(?:{'|'.join((*ROLES, *_ROLES, *_CALLERS))}){_QUOTE}"
)
_CHAT_CONTENT = re.compile(rf"{_QUOTE}(?:content|value){_QUOTE}\s*:")


def read_messages(value: object, where: str) -> tuple[Message, ...]:
    """Read messages in OpenAI's format (a role, content that is text or parts that are text, thoughts, tool calls and
    weight of the assistant) or in ShareGPT's (`from` and `value`).

    Raises:
        DataError: the value has another format.
    """
    if isinstance(value, str):
        refuse_chat_as_text(value, where)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{where}: a list of {{role, content}} messages is needed, found {found}")
    return _linked([_message(one, number, f"{where}, message {number}") for number, one in enumerate(value, start=1)])


def refuse_chat_as_text(text: str, where: str) -> None:
    """Raise DataError where a text is nothing but messages written as JSON, which a model would see as they are."""
    is_whole = _CHAT_START.match(text) and text.rstrip(' \n\r\t"').endswith(("]", "}"))
    if is_whole and _CHAT_ROLE.search(text) and _CHAT_CONTENT.search(text):
        rule = "holds its messages as JSON text; write the list itself into the row"
        raise DataError(f"{where}: {rule} (text that is meant as it is can be the content of a message)")


def _message(value: object, number: int, where: str) -> Message:
    value = _in_openais_format(value, number, where) if isinstance(value, Mapping) else {}
    role, calls = value.get("role"), value.get("tool_calls")
    if role not in ROLES:
        raise DataError(f"{where}: its role must be one of {', '.join(ROLES)}, found {role!r}")
    if calls and not (isinstance(calls, Sequence) and not isinstance(calls, str) and role == "assistant"):
        raise DataError(f"{where}: tool_calls must be a list, and the assistant's")
    content, thoughts = value.get("content"), _thoughts(value, where) if role == "assistant" else []
    if isinstance(content, Sequence) and not isinstance(content, str):
        content, more = _parts(content, role, where)
        thoughts += more
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        found = type(content).__name__ if "content" in value else f"the fields {', '.join(map(str, value))} alone"
        field = "content (value)" if "from" in value else "content"
        raise DataError(f"{where}: its {field} must be text, found {found}")
    more = {key: value[key] for key in _MORE if value.get(key) is not None}
    # Some write the thoughts twice.
    repeated = "".join(content.split()).startswith("".join(f"<think>{''.join(thoughts)}</think>".split()))
    thought = {THOUGHTS[0]: "\n".join(thoughts)} if thoughts and not repeated else {}
    called = {"tool_calls": [_call(call, where) for call in calls]} if calls else {}
    return {"role": role, "content": content, **thought, **more, **called, **_untrained(value, where)}


def _in_openais_format(value: Mapping[str, Any], number: int, where: str) -> Mapping[str, Any]:
    """Return a message of ShareGPT's format, or of OpenAI's older one, as one of OpenAI's."""
    if value.get("role") is None and {"from", "value"} <= value.keys():
        value = {**value, "role": value["from"], "content": value["value"]}
    role, content = value.get("role"), value.get("content")
    function = without_nulls(value.get("function_call"))
    if role in _CALLERS:
        role, before, end, written = "assistant", *_after_thoughts(content)
        value = {**value, "content": before + end, "tool_calls": _written_calls(written, number, where)}
    elif function and not value.get("tool_calls"):
        value = {**value, "tool_calls": _written_calls(function, number, where)}
    return {**value, "role": _ROLES.get(str(role), role)}


def _after_thoughts(content: object) -> tuple[str, str, Any]:
    """Return the thoughts that a turn of calls begins with, their end, and the calls."""
    return content.rpartition("</think>") if isinstance(content, str) else ("", "", content)


def _written_calls(written: Any, number: int, where: str) -> list[Any]:
    """Return the calls that message `number` holds as JSON: one, or a list. They get ids, which templates may need."""
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except (ValueError, RecursionError) as error:
            fix = 'write {"name": ..., "arguments": {...}} or a list of these, or give the turn the role assistant'
            raise DataError(f"{where}: its function call is not JSON ({error}); {fix}") from None
    calls = written if isinstance(written, list) else [written]
    if not calls:
        raise DataError(f"{where}: its list of function calls is empty")
    ids = (f"call{number:03d}{place:02d}" for place in range(len(calls)))
    return [{"id": one, **call} if isinstance(call, Mapping) else call for one, call in zip(ids, calls, strict=False)]


def _linked(messages: list[Message]) -> tuple[Message, ...]:
    """Name the call that each tool's message answers, where it does not: the next one of those before it."""
    waiting, linked = list[dict[str, Any]](), list[Message]()
    for message in messages:
        waiting = waiting if message["role"] == "tool" else message.get("tool_calls", [])
        if waiting and message["role"] == "tool":
            call, *waiting = waiting
            if "id" in call and "tool_call_id" not in message:
                message = {**message, "name": call["function"]["name"], "tool_call_id": call["id"]}
        linked.append(message)
    return tuple(linked)


def _thoughts(value: Mapping[str, Any], where: str) -> list[str]:
    """Return the thoughts in the fields of an assistant's message, without those that are the same."""
    given = {key: value[key] for key in THOUGHTS if value.get(key)}
    if not given and (details := _details(value.get("reasoning_details"))):
        given = {"reasoning_details": details}
    if other := [key for key, thoughts in given.items() if not isinstance(thoughts, str)]:
        _note_other_thoughts(other[0])
        given = {key: thoughts for key, thoughts in given.items() if key not in other}
    different = {thoughts.strip(): thoughts for thoughts in given.values() if thoughts.strip()}
    if len(different) > 1:
        raise DataError(f"{where}: its fields {' and '.join(given)} differ; leave one of them")
    return list(different.values())


def _details(details: object) -> str:
    """Return the text of OpenRouter's `reasoning_details`, which has parts that are text, a summary or encrypted."""
    parts = [part for part in details if isinstance(part, Mapping)] if isinstance(details, list) else []
    texts = [part.get("text") or part.get("summary") for part in parts]
    found = "\n".join(text for text in texts if isinstance(text, str) and text.strip())
    if parts and not found:
        _tell_of_unreadable_details()
    return found


@cache
def _note_other_thoughts(key: str) -> None:
    log.warning("messages have a field '%s' that is not text: it is ignored", key)


@cache
def _tell_of_unreadable_details() -> None:
    log.warning("messages have reasoning_details without text (encrypted): they are trained on without these thoughts")


def _parts(parts: Sequence[object], role: str, where: str) -> tuple[str, list[str]]:
    """Return the text and the thoughts of content that is a list of parts."""
    text, thoughts = "", list[str]()
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        thinks = kind in ("thinking", "reasoning") and role == "assistant"
        found = None
        if isinstance(part, Mapping) and (kind == "text" or thinks):
            fields = ("thinking", "reasoning", "text") if thinks else ("text",)
            found = next((part[key] for key in fields if part.get(key) is not None), None)
            found = _parts(found, "", where)[0] if thinks and isinstance(found, list) else found
        if not isinstance(found, str) or (thinks and text.strip()):
            rule = "only parts of the type text are read, and thinking of the assistant before them"
            raise DataError(f"{where}: {rule}, found {part!r:.80}")
        if thinks:
            thoughts += [found] if found.strip() else []
        else:
            text += found
    return text, thoughts


def _untrained(value: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the field `weight` where it keeps an assistant's message out of the training, else nothing."""
    if value.get("train") is not None:
        raise DataError(f"{where}: the field 'train' is not read; write 'weight': 0 to not train on a message")
    weight = value.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"{where}: its weight must be 0 or 1, found {weight!r}")
    if weight == 1 and value["role"] != "assistant":
        raise DataError(f"{where}: has weight 1, and only messages of the assistant are trained on")
    return {"weight": 0} if weight == 0 and value["role"] == "assistant" else {}


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call needs the name of a function, found {call!r:.80}")
    # Llama writes `parameters`.
    arguments = next((function[key] for key in ("arguments", "parameters") if function.get(key) is not None), {})
    if isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    elif isinstance(arguments, str):
        # OpenAI writes arguments as text, but chat templates need an object.
        try:
            arguments = writable(json.loads(arguments))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: the arguments of {function['name']} are not JSON ({error})") from None
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: the arguments of {function['name']} must be an object, found {arguments!r:.80}")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    arguments = without_nulls(arguments)
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def writable(value: Any) -> Any:
    """Return a value that was read from JSON, if it can be written again: Python also reads NaN and half a character.

    Raises:
        ValueError, RecursionError: the value has one of them, or is nested too deeply.
    """
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def without_nulls(value: Any) -> Any:
    """Remove null fields, which Parquet and the hub add where another row has a value."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value

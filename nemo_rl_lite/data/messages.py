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
"""Role and content. An assistant message may have tool calls, and weight 0 if it is not trained on. A tool message
names the call that it answers."""
ROLES = ("system", "developer", "user", "assistant", "tool")
# Usual names of columns with whole chats.
CHAT_COLUMNS = ("messages", "conversations")
# Fields for the reasoning before an answer; messages are converted to the first.
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
# Optional fields of a tool message: the tool, and the call that it answers.
_MORE = ("name", "tool_call_id")
# Roles in ShareGPT's and OpenAI's older format, and roles of turns that hold tool calls as JSON.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"} | dict.fromkeys(
    ("observation", "function", "function_response", "tool_response", "tool_result"), "tool"
)
_CALLERS = ("function_call", "tool_call", "tool_calls")
# Text that is messages in JSON, Python or NumPy notation: a list, one message or a whole chat. Quotes may be escaped.
_QUOTE = r"""\\*["']"""
_CHAT_START = re.compile(
    rf"""\s*"?\s*(?:\[\s*\{{|\{{\s*{_QUOTE}(?:role|content|from|value|{"|".join(CHAT_COLUMNS)}){_QUOTE}\s*:)"""
)
_CHAT_ROLE = re.compile(
    rf"{_QUOTE}(?:role|from){_QUOTE}\s*:\s*{_QUOTE}(?:{'|'.join((*ROLES, *_ROLES, *_CALLERS))}){_QUOTE}"
)
_CHAT_CONTENT = re.compile(rf"{_QUOTE}(?:content|value){_QUOTE}\s*:")


def read_messages(value: object, where: str) -> tuple[Message, ...]:
    """Read messages in OpenAI's format or in ShareGPT's (`from` and `value`). Content is text, or text parts. Assistant
    messages may have reasoning, tool calls and a weight. Raises DataError: the value has another format."""
    if isinstance(value, str):
        refuse_chat_as_text(value, where)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{where}: a list of {{role, content}} messages is needed, found {found}")
    return _linked([_message(one, number, f"{where}, message {number}") for number, one in enumerate(value, start=1)])


def refuse_chat_as_text(text: str, where: str) -> None:
    """Raise DataError if a text is only messages written as JSON: the model would see the JSON."""
    is_whole = _CHAT_START.match(text) and text.rstrip(' \n\r\t"').endswith(("]", "}"))
    if is_whole and _CHAT_ROLE.search(text) and _CHAT_CONTENT.search(text):
        rule = "holds its messages as JSON text; write the list itself into the row"
        raise DataError(f"{where}: {rule} (to keep the text, make it the content of a message)")


def _message(value: object, number: int, where: str) -> Message:
    value = _in_openais_format(value, number, where) if isinstance(value, Mapping) else {}
    role, calls = value.get("role"), value.get("tool_calls")
    if role not in ROLES:
        raise DataError(f"{where}: its role must be one of {', '.join(ROLES)}, found {role!r}")
    if calls and not (isinstance(calls, Sequence) and not isinstance(calls, str) and role == "assistant"):
        raise DataError(f"{where}: tool_calls must be a list in an assistant message")
    content, thoughts = value.get("content"), _thoughts(value, where) if role == "assistant" else []
    if isinstance(content, Sequence) and not isinstance(content, str):
        content, more = _parts(content, role, where)
        thoughts += more
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        found = type(content).__name__ if "content" in value else f"only the fields {', '.join(map(str, value))}"
        field = "content (value)" if "from" in value else "content"
        raise DataError(f"{where}: its {field} must be text, found {found}")
    more = {key: value[key] for key in _MORE if value.get(key) is not None}
    if nested := next((key for key, own in more.items() if isinstance(own, Mapping | list)), None):
        raise DataError(f"{where}: its {nested} must be text, found {more[nested]!r:.80}")
    # Some datasets write the reasoning twice.
    repeated = "".join(content.split()).startswith("".join(f"<think>{''.join(thoughts)}</think>".split()))
    thought = {THOUGHTS[0]: "\n".join(thoughts)} if thoughts and not repeated else {}
    called = {"tool_calls": [_call(call, where) for call in calls]} if calls else {}
    return {"role": role, "content": content, **thought, **more, **called, **_untrained(value, where)}


def _in_openais_format(value: Mapping[str, Any], number: int, where: str) -> Mapping[str, Any]:
    """Convert a message of ShareGPT's or OpenAI's older format to OpenAI's format."""
    if value.get("role") is None and {"from", "value"} <= value.keys():
        value = {**value, "role": value["from"], "content": value["value"]}
    role, content = value.get("role"), value.get("content")
    function = without_nulls(value.get("function_call"))
    if role in _CALLERS:
        # Reasoning may precede the calls.
        before, end, written = content.rpartition("</think>") if isinstance(content, str) else ("", "", content)
        role = "assistant"
        value = {**value, "content": before + end, "tool_calls": _written_calls(written, number, where)}
    elif function and not value.get("tool_calls"):
        value = {**value, "tool_calls": _written_calls(function, number, where)}
    return {**value, "role": _ROLES.get(str(role), role)}


def _written_calls(written: Any, number: int, where: str) -> list[Any]:
    """Return the calls that message `number` holds as JSON: one or a list. They get ids, which templates may need."""
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
    """Link each tool message to its call, and name the tool. Without an id it answers the next call before it."""
    waiting, linked, names = list[dict[str, Any]](), list[Message](), dict[str, str]()
    for message in messages:
        waiting = waiting if message["role"] == "tool" else message.get("tool_calls", [])
        if waiting and message["role"] == "tool":
            call, *waiting = waiting
            if "id" in call and "tool_call_id" not in message:
                message = {**message, "name": call["function"]["name"], "tool_call_id": call["id"]}
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        called = names.get(message.get("tool_call_id", ""))
        linked.append({"name": called, **message} if called else message)
    return tuple(linked)


def _thoughts(value: Mapping[str, Any], where: str) -> list[str]:
    """Return the distinct reasoning texts of an assistant message."""
    given = {key: value[key] for key in THOUGHTS if value.get(key)}
    if not given and (details := _details(value.get("reasoning_details"))):
        given = {"reasoning_details": details}
    if other := [key for key, thoughts in given.items() if not isinstance(thoughts, str)]:
        _warn_once(f"messages have a field '{other[0]}' that is not text: it is ignored")
        given = {key: thoughts for key, thoughts in given.items() if key not in other}
    different = {thoughts.strip(): thoughts for thoughts in given.values() if thoughts.strip()}
    if len(different) > 1:
        raise DataError(f"{where}: its fields {' and '.join(given)} differ; keep one of them")
    return list(different.values())


def _details(details: object) -> str:
    """Return the text of OpenRouter's `reasoning_details`, whose parts are text, a summary or encrypted."""
    parts = [part for part in details if isinstance(part, Mapping)] if isinstance(details, list) else []
    texts = [part.get("text") or part.get("summary") for part in parts]
    found = "\n".join(text for text in texts if isinstance(text, str) and text.strip())
    if parts and not found:
        _warn_once("messages have reasoning_details without text (encrypted): they are trained on without them")
    return found


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _parts(parts: Sequence[object], role: str, where: str) -> tuple[str, list[str]]:
    """Return the text and the reasoning of content that is a list of parts."""
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
            rule = "only parts of type text are read, after thinking parts of the assistant"
            raise DataError(f"{where}: {rule}, found {part!r:.80}")
        if thinks:
            thoughts += [found] if found.strip() else []
        else:
            text += found
    return text, thoughts


def _untrained(value: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the field `weight` if it excludes an assistant message from training, else nothing."""
    if value.get("train") is not None:
        raise DataError(f"{where}: the field 'train' is not read; 'weight': 0 excludes a message from training")
    weight = value.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"{where}: its weight must be 0 or 1, found {weight!r}")
    if weight == 1 and value["role"] != "assistant":
        raise DataError(f"{where}: has weight 1, but only assistant messages are trained on")
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
    """Return a value read from JSON if it can be written again. Raises ValueError, RecursionError: it has NaN or half
    of a surrogate pair, or is nested too deeply."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def without_nulls(value: Any) -> Any:
    """Remove null fields, which Parquet adds where other rows have a value."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value

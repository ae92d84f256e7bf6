"""Read the messages of a chat. This module imports nothing heavy."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_lite.errors import DataError

Message = dict[str, Any]
"""Role and content. An assistant's may have tool calls, and weight 0 where it is not trained on. A tool's message names
the call that it answers."""
ROLES = ("system", "developer", "user", "assistant", "tool")
# The usual names of a column that holds whole chats.
CHAT_COLUMNS = ("messages", "conversations")
# Optional fields of a message: the thoughts before an answer; for a tool's answer, the tool and the call.
_MORE = ("reasoning_content", "name", "tool_call_id")
# Whether a message is trained on: OpenAI's field, which is read, and one that others write.
_OF_TRAINING = ("weight", "train")
# ShareGPT's names of roles.
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def read_messages(value: object, where: str) -> tuple[Message, ...]:
    """Read messages in OpenAI's format (a role, content that is text or parts that are text, tool calls and
    weight of the assistant) or in ShareGPT's (`from` and `value`).

    Raises:
        DataError: the value has another format.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        raise DataError(f"{where}: holds its messages as JSON text; write the list itself into the row")
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{where}: a list of {{role, content}} messages is needed, found {found}")
    return tuple(_message(one, f"{where}, message {number}") for number, one in enumerate(value, start=1))


def _message(value: object, where: str) -> Message:
    if isinstance(value, Mapping) and "role" not in value and {"from", "value"} <= value.keys():
        named = {"role": _SHAREGPT.get(str(value["from"]), value["from"]), "content": value["value"]}
        value = named | {key: value[key] for key in _OF_TRAINING if key in value}
    if not isinstance(value, Mapping) or value.get("role") not in ROLES:
        role = value.get("role") if isinstance(value, Mapping) else None
        raise DataError(f"{where}: its role must be one of {', '.join(ROLES)}, found {role!r}")
    content, calls = value.get("content"), value.get("tool_calls")
    if isinstance(content, Sequence) and not isinstance(content, str):
        for part in content:
            if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise DataError(f"{where}: only parts of the type text are read, found {part!r:.80}")
        content = "".join(part["text"] for part in content)
    if calls and not (isinstance(calls, Sequence) and not isinstance(calls, str) and value["role"] == "assistant"):
        raise DataError(f"{where}: tool_calls must be a list, and the assistant's")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        found = type(content).__name__ if "content" in value else f"the fields {', '.join(map(str, value))} alone"
        raise DataError(f"{where}: its content must be text, found {found}")
    more = {key: value[key] for key in _MORE if value.get(key) is not None}
    called = {"tool_calls": [_call(call, where) for call in calls]} if calls else {}
    return {"role": value["role"], "content": content, **more, **called, **_untrained(value, where)}


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
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # OpenAI writes arguments as text, but chat templates need an object.
        try:
            arguments = writable(json.loads(arguments))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: the arguments of {function['name']} are not JSON ({error})") from None
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

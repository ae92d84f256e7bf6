"""Make chats to train on, from rows and from problems. This module imports nothing heavy."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_lite.config.schema import DataConfig
from nemo_rl_lite.data.columns import column, to_problem
from nemo_rl_lite.data.problems import Message, Problem, with_system
from nemo_rl_lite.data.rows import Row
from nemo_rl_lite.errors import DataError

# Optional fields of a message: the thoughts before an answer; for a tool's answer, the tool and the call.
_MORE = ("reasoning_content", "name", "tool_call_id")
_USUAL = ("messages", "conversations")
# ShareGPT's names of roles.
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """A chat that ends with the assistant. Assistant messages from index `first_trained` on are trained on. `tools` are
    the JSON schemas of the functions that the assistant may call."""

    messages: tuple[Message, ...]
    first_trained: int
    tools: tuple[Mapping[str, Any], ...] = ()

    def trained(self) -> list[int]:
        """Return the indices of the messages that are trained on."""
        later = range(self.first_trained, len(self.messages))
        return [index for index in later if self.messages[index]["role"] == "assistant"]


@dataclass(frozen=True)
class Example:
    """One conversation, or the chosen and the rejected conversation of a pair. `where` names the example in errors, by
    file and row."""

    conversations: tuple[Conversation, ...]
    where: str

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages before the first trained one: the prompt."""
        first = self.conversations[0]
        return first.messages[: first.first_trained]


def to_chat(config: DataConfig, row: Row, where: str) -> Example:
    """Return the example of a row: the messages of `data.messages_column`, or a prompt and its response, or, where
    there is no prompt, the messages of a column of a usual name; `where` names the row in errors.

    Raises:
        DataError: the row lacks a column, one has a wrong type, or the row has nothing to train on.
    """
    name = config.messages_column or _usual_column(config, row)
    if name is None:
        problem = to_problem(with_responses(config), row, where)
        if not problem.answer.strip():
            raise DataError(f"{where}: the response is empty")
        return Example((answered(problem.messages, problem.answer),), where)
    messages = with_system(read_messages(column(row, name, where), f"{where}, column '{name}'"), config.system_prompt)
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken:
        raise DataError(f"{where}: column '{name}' has no message of the assistant to train on")
    first = spoken[0 if config.train_on == "all" else -1]
    if all(message["role"] in ("system", "developer") for message in messages[: spoken[0]]):
        raise DataError(f"{where}: column '{name}' begins with the assistant, without a prompt")
    return Example((Conversation(messages[: spoken[-1] + 1], first, _tools(config, row, where)),), where)


def _usual_column(config: DataConfig, row: Row) -> str | None:
    """The column of messages in a row that has no prompt."""
    if config.prompt_template is not None or config.prompt_column in row:
        return None
    return next((name for name in _USUAL if isinstance(row.get(name), Sequence)), None)


def chat_of(problem: Problem) -> Example:
    """Make a chat of a task's problem, with its answer as the response. Raises DataError: the problem has no answer."""
    where = "a problem of the task"
    if not problem.answer:
        raise DataError(f"{where} {problem.metadata.get('task', '')} has no answer to train on")
    return Example((answered(problem.messages, problem.answer),), where)


def answered(messages: Sequence[Message], response: str) -> Conversation:
    """Return the prompt's messages followed by the response, which is trained on."""
    return Conversation((*messages, {"role": "assistant", "content": response}), len(messages))


def with_responses(config: DataConfig) -> DataConfig:
    """Return the same data configuration with the whole text of `data.response_column` as the answer."""
    name = config.response_column or config.answer_column
    return dataclasses.replace(config, answer_column=name, answer_pattern=None)


def read_messages(value: object, where: str) -> tuple[Message, ...]:
    """Read messages in OpenAI's format (a role, content that is text or parts that are text, tool calls of the
    assistant) or in ShareGPT's (`from` and `value`).

    Raises:
        DataError: the value has another format.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: a list of {{role, content}} messages is needed, found {type(value).__name__}")
    return tuple(_message(one, f"{where}, message {number}") for number, one in enumerate(value, start=1))


def _message(value: object, where: str) -> Message:
    if isinstance(value, Mapping) and "role" not in value and {"from", "value"} <= value.keys():
        value = {"role": _SHAREGPT.get(value["from"], value["from"]), "content": value["value"]}
    if not isinstance(value, Mapping) or value.get("role") not in ROLES:
        role = value.get("role") if isinstance(value, Mapping) else None
        raise DataError(f"{where}: its role must be one of {', '.join(ROLES)}, found {role!r}")
    content, calls = value.get("content"), value.get("tool_calls")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_text_part(part, where) for part in content)
    if calls and not (isinstance(calls, Sequence) and not isinstance(calls, str) and value["role"] == "assistant"):
        raise DataError(f"{where}: tool_calls must be a list, and the assistant's")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{where}: its content must be text, found {type(content).__name__}")
    more = {key: value[key] for key in _MORE if value.get(key) is not None}
    called = {"tool_calls": [_call(call, where) for call in calls]} if calls else {}
    return {"role": value["role"], "content": content, **more, **called}


def _text_part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise DataError(f"{where}: only parts of the type text can be trained on, found {part!r:.80}")


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call needs the name of a function, found {call!r:.80}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # OpenAI writes arguments as text, but chat templates need an object.
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: the arguments of {function['name']} are not JSON ({error.msg})") from None
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    arguments = _without_nulls(arguments)
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    """Remove null fields, which Parquet and the hub add where another row has a value."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _tools(config: DataConfig, row: Row, where: str) -> tuple[Mapping[str, Any], ...]:
    if config.tools_column is None or not row.get(config.tools_column):
        return ()
    tools = row[config.tools_column]
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: column '{config.tools_column}' is not JSON ({error.msg})") from None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: column '{config.tools_column}' must be a list of tools as JSON schemas")
    return tuple(map(_without_nulls, tools))

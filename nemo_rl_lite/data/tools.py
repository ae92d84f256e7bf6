"""Tools that the assistant may call: their JSON schemas, and whether a call fits them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from nemo_rl_lite.data.messages import without_nulls, writable
from nemo_rl_lite.data.rows import Row, find_column
from nemo_rl_lite.data.tool_format import WrittenCall
from nemo_rl_lite.errors import DataError

if TYPE_CHECKING:
    # Takes most of the start of a process of user code.
    from nemo_rl_lite.config.schema import DataConfig

# Number of errors of a call to choose from, and maximum characters of the chosen one.
_MOST_ERRORS, _LONGEST_ERROR = 50, 300
# Maximum nesting of a call's arguments.
_DEEPEST, _TOO_DEEP = 100, "the arguments are nested too deeply"
# A function in OpenAI's format: {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}.
Tool = Mapping[str, Any]


def row_tools(config: "DataConfig", row: Row, where: str) -> tuple[Tool, ...]:
    """Return the tools in a row's column `data.tools_column`; none if it is null or missing. Raises DataError: the
    column does not hold tools."""
    name = config.tools_column
    tools = None if name is None else find_column(row, name)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            fix = "write the tools as a list, or rename the column"
            raise DataError(f"{where}: column '{name}' is not JSON ({error.msg}); {fix}") from None
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: column '{name}' must be a list of tools as JSON schemas")
    return tuple(_in_openais_format(without_nulls(tool)) for tool in tools)


def _in_openais_format(tool: dict[str, Any]) -> Tool:
    """Return a tool with the field `function`, which ShareGPT's format and OpenAI's Responses API omit."""
    if "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def callable_tools(tools: object, where: str) -> tuple[Tool, ...]:
    """Return tools whose calls can be checked. Tools of OpenAI's Responses API get the field `function`. Raises
    DataError: one has no name, or its parameters are not a JSON schema; `where` begins the message."""
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where} must be a list of functions in OpenAI's format, found {tools!r:.80}")
    return tuple(_callable(tool, where) for tool in tools)


def _callable(tool: Tool, where: str) -> Tool:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool has no name: {tool!r:.80}")
    name, parameters = function["name"], function.get("parameters") or {"type": "object", "properties": {}}
    is_object = isinstance(parameters, Mapping)
    if trouble := _schema_error(json.dumps(parameters, default=str)) if is_object else "they are not an object":
        raise DataError(f"{where}: the parameters of the tool {name} are not a JSON schema: {trouble}")
    own = {"name": name, "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": own}


@lru_cache(maxsize=1024)
def _schema_error(schema: str) -> str:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(json.loads(schema))
    except SchemaError as error:
        return error.message
    except RecursionError:
        return "they are nested too deeply"
    return ""


def checked_calls(written: Sequence[WrittenCall], tools: Sequence[Tool], turn: int) -> list[dict[str, Any]]:
    """Return calls in OpenAI's format, with arguments as an object. An invalid call has a field `error`, a sentence for
    the model, and may lack name and arguments. `turn` makes the ids unique in an episode."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    return [_checked(call, functions, f"call{turn:02d}{number:03d}") for number, call in enumerate(written)]


def _checked(call: WrittenCall, functions: Mapping[str, Any], identity: str) -> dict[str, Any]:
    function, arguments, trouble = functions.get(call.name), call.arguments, call.trouble
    if not trouble and function is None:
        trouble = f"there is no tool {call.name[:_LONGEST_ERROR]!r}; the tools are: {', '.join(functions)}"
    elif function is not None and not trouble:
        arguments = _typed(arguments, function["parameters"]) if call.is_text else arguments
        deep = _is_deep(arguments)
        arguments, trouble = ({}, _TOO_DEEP) if deep else (arguments, _misfit(arguments, function["parameters"]))
    named = {"name": call.name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": named} | ({"error": trouble} if trouble else {})


def _is_deep(value: Any) -> bool:
    """Return whether a value is nested too deeply to be pickled."""
    level = [value]
    for _ in range(_DEEPEST):
        nested = [one for one in level if isinstance(one, dict | list)]
        level = [child for one in nested for child in (one.values() if isinstance(one, dict) else one)]
    return bool(level)


def _typed(arguments: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parse as JSON the arguments that do not fit their schemas as text."""
    found, schemas = dict[str, Any](arguments), parameters.get("properties") or {}
    for name, text in arguments.items():
        if name not in schemas or _misfit(text, schemas[name]):
            with suppress(ValueError, RecursionError):
                found[name] = writable(json.loads(text))
    return found


def _misfit(arguments: Any, parameters: Any) -> str:
    """Return why the arguments do not fit the schema, or ""."""
    from jsonschema.exceptions import best_match
    from referencing import Registry

    try:
        # An empty registry keeps jsonschema from fetching referenced schemas.
        errors = _linear_validator()(parameters, registry=Registry()).iter_errors(arguments)
        error = best_match(islice(errors, _MOST_ERRORS))
    except Exception as unusable:  # a schema may reference missing ones
        return f"the tool's schema cannot be used: {unusable}"
    if error is None:
        return ""
    place = ".".join(map(str, error.absolute_path))
    message = error.message if len(error.message) <= _LONGEST_ERROR else f"{error.message[:_LONGEST_ERROR]}..."
    return f"the argument {place}: {message}" if place else f"the arguments: {message}"


@cache
def _linear_validator() -> Any:
    """Return jsonschema's validator without checks that may take exponential or quadratic time: it runs on model output
    in the launcher's event loop."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    usual = Draft202012Validator.VALIDATORS["additionalProperties"]

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not _has(wanted, instance):
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
        for name, value in instance.items() if isinstance(instance, dict) else ():
            for one, own in wanted.items():
                if _has(one, name):
                    yield from validator.descend(value, own, path=name, schema_path=one)

    def additional_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        patterns = schema.get("patternProperties", ())
        if isinstance(instance, dict) and patterns:
            instance = {name: own for name, own in instance.items() if not any(_has(one, name) for one in patterns)}
            schema = {**schema, "patternProperties": {}}
        yield from usual(validator, wanted, instance, schema)

    def unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> Iterator[Any]:
        items = instance if wanted and isinstance(instance, list) else []
        if len({json.dumps(one, sort_keys=True) for one in items}) < len(items):
            yield ValidationError("an item of the list occurs twice")

    own = {"pattern": pattern, "patternProperties": pattern_properties}
    return extend(
        Draft202012Validator, {**own, "additionalProperties": additional_properties, "uniqueItems": unique_items}
    )


def _has(pattern: str, text: str) -> bool:
    """Search for a pattern in linear time (RE2). Patterns that RE2 does not support always match."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return pc.match_substring_regex(pa.scalar(text), pattern=pattern).as_py()  # pyrefly: ignore[missing-attribute]
    except pa.ArrowInvalid:
        return True

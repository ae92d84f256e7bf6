"""Find tool calls in responses. The format is derived from the chat template's output, so no list of models is needed.

This runs in the launcher's event loop, so it takes linear time for any response.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile
from typing import Any

from nemo_rl_lite.data.messages import Message, writable

# Renders messages and tools; the flag adds the start of the next assistant turn.
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], str]

# Placeholders to find in the rendered text.
_TURN, _NAME, _KEYS, _VALUES = "THE-TURN", "the_tool", ("the_first", "the_second"), ("value 1", "value 2")
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_PARAMETERS = {"type": "object", "properties": {key: {"type": "string", "description": "."} for key in _KEYS}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": ".", "parameters": _PARAMETERS}}
_ASKED: Message = {"role": "user", "content": "-"}
# Models write raw newlines in strings.
_JSON = json.JSONDecoder(strict=False)
# Maximum characters and calls of a response. Beyond them, one call carries an error.
LONGEST, MOST_CALLS = 2**20, 256


@dataclass(frozen=True)
class WrittenCall:
    """A call as the model wrote it, unchecked."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    """Reason that it cannot be read. It then has no arguments, and maybe no name."""
    is_text: bool = False
    """True if all arguments are texts, because the format has no types."""
    is_open: bool = False
    """True if the text that ends a call is missing, so that a truncated response may lack arguments."""


@dataclass(frozen=True)
class ToolFormat(ABC):
    """A format of calls. `marker` precedes each call; it is empty if a call is the whole response."""

    marker: str

    def find(self, text: str) -> list[WrittenCall]:
        """Return the calls in a response, in order."""
        found = list(islice(self._calls(text[:LONGEST]), MOST_CALLS + 1))
        if found and len(text) > LONGEST:
            return [WrittenCall("", trouble=f"a response with calls has at most {LONGEST} characters")]
        if len(found) > MOST_CALLS:
            found[-1] = WrittenCall("", trouble=f"a response has at most {MOST_CALLS} calls; the others are not read")
        return found

    @abstractmethod
    def _calls(self, text: str) -> Iterator[WrittenCall]: ...

    def text_before(self, text: str) -> str:
        """Return the text of a response before its first call."""
        return re.split(_loose(self.marker), text, maxsplit=1)[0] if self.marker else ""


@dataclass(frozen=True)
class JSONCalls(ToolFormat):
    """One JSON object per call, or a list of them, after a marker: Hermes, Qwen, Mistral. Without a marker the whole
    response is the call: Llama 3."""

    name_key: str
    arguments_key: str

    def _calls(self, text: str) -> Iterator[WrittenCall]:
        if not self.marker:
            text = re.sub(r"^\s*(<\|\w+\|>\s*)*", "", text)
            # A final answer may be an object, too.
            if text.startswith("{") and all(f'"{key}"' in text for key in (self.name_key, self.arguments_key)):
                calls, _ = self._calls_at(text, 0)
                yield from calls
            return
        marker, place = re.compile(_loose(self.marker) + r"\s*"), 0
        while begin := marker.search(text, place):
            # Continue after the call: its arguments may quote a marker.
            calls, place = self._calls_at(text, begin.end())
            yield from calls

    def _calls_at(self, text: str, place: int) -> tuple[Iterator[WrittenCall], int]:
        """Return the calls that begin at a position, and their end."""
        try:
            value, end = _JSON.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            return iter([WrittenCall("", trouble=_not_json(error, place))]), place
        return map(self._call, value if isinstance(value, list) else [value]), end

    def _call(self, value: object) -> WrittenCall:
        if isinstance(value, dict) and isinstance(value.get(self.name_key), str):
            return _with_arguments(value[self.name_key], value.get(self.arguments_key, {}))
        return WrittenCall("", trouble=f'a call is an object with "{self.name_key}" and "{self.arguments_key}"')


@dataclass(frozen=True)
class NamedCalls(ToolFormat):
    """A marker, the name, and the arguments as a JSON object: newer models of Mistral and DeepSeek."""

    middle: str

    def _calls(self, text: str) -> Iterator[WrittenCall]:
        return map(self._call, re.split(_loose(self.marker), text)[1:])

    def _call(self, text: str) -> WrittenCall:
        name, found, rest = text.partition(self.middle)
        if not found:
            return WrittenCall(name.strip()[:64], trouble=f"{self.middle} has to follow the tool's name")
        try:
            arguments, _ = _JSON.raw_decode(rest.lstrip())
        except (ValueError, RecursionError) as error:
            return WrittenCall(name.strip(), trouble=_not_json(error, 0))
        return _with_arguments(name.strip(), arguments)


@dataclass(frozen=True)
class TaggedCalls(ToolFormat):
    """A marker, the name, and each argument between tags: Qwen3-Coder, Qwen3.5, GLM, Nemotron 3."""

    opening: str
    middle: str
    closing: str
    ending: str
    """Text after the last argument."""

    def _calls(self, text: str) -> Iterator[WrittenCall]:
        return map(self._call, re.split(_loose(self.marker), text)[1:])

    def _call(self, text: str) -> WrittenCall:
        named = re.match(r"\s*([\w.-]+)", text)
        if not named:
            return WrittenCall("", trouble=f"the tool's name has to follow {self.marker}")
        opening, middle, closing = (re.compile(_loose(tag)) for tag in (self.opening, self.middle, self.closing))
        arguments, begin, last = dict[str, str](), opening.search(text, named.end()), named.end()
        # Search tag by tag: one pattern for the whole argument takes cubic time if a tag is missing.
        while begin:
            between = middle.search(text, begin.end())
            end = closing.search(text, between.end()) if between else None
            following = opening.search(text, begin.end())
            if not between or not end or (following and following.start() < end.start()):
                trouble = f"an argument is written as {self.opening}NAME{self.middle}VALUE{self.closing}"
                return WrittenCall(named[1], trouble=trouble)
            value = text[between.end() : end.start()].removeprefix("\n").removesuffix("\n")
            arguments[text[begin.end() : between.start()].strip()] = value
            begin, last = following, end.end()
        is_open = not re.compile(_loose(self.ending)).search(text, last)
        return WrittenCall(named[1], arguments, is_text=True, is_open=is_open)


def tool_format(render: Render) -> ToolFormat | None:
    """Return a template's call format; None if it renders no tools, or if the format is unknown."""
    try:
        if _NAME not in render([_ASKED], [_TOOL], True):
            return None
        turns = [_turn(render, content, calls=1) for content in (_TURN, "")]
    except Exception:  # a template may raise anything
        return None
    try:
        turns.append(_turn(render, "", calls=2).partition(_VALUES[1])[2])
    except Exception:  # some templates render one call only
        turns.append("")
    found = _read(*turns)
    expected = WrittenCall(_NAME, _ARGUMENTS, is_text=isinstance(found, TaggedCalls))
    return found if found and found.find(turns[0]) == [expected] else None


def sample_call(identity: str, name: str, value: str) -> dict[str, Any]:
    """Return a call with the argument `value`, to find the end of a rendered call."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": {_KEYS[0]: value}}}


def _turn(render: Render, content: str, calls: int) -> str:
    """Return the rendered text of an assistant turn with calls, after its `content`."""
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    called = [{"id": f"call0000{number}", "type": "function", "function": function} for number in range(calls)]
    whole = render([_ASKED, {"role": "assistant", "content": content, "tool_calls": called}], [_TOOL], False)
    if content and content in whole:
        return whole.rpartition(content)[2]
    same = common_start(render([_ASKED], [_TOOL], True), whole)
    # A prompt that ends in <think> and a turn that begins with <tool_call> share the start of a tag.
    return whole[min(len(same), same.rfind("<") if same.rfind("<") > same.rfind(">") else len(same)) :]


def _read(turn: str, bare: str, later: str) -> ToolFormat | None:
    """Derive the format from three texts: a turn with content, one without, and the rest of a turn with two calls after
    the first call's arguments."""
    if _NAME not in turn:
        return None
    for begin in (found.start() for found in re.finditer(r"\{", turn)):
        try:
            value, _ = _JSON.raw_decode(turn[begin:])
        except ValueError:
            continue
        keys = {json.dumps(one, sort_keys=True): key for key, one in value.items()}
        if (name := keys.get(json.dumps(_NAME))) and (own := keys.get(json.dumps(_ARGUMENTS, sort_keys=True))):
            # In the other text, the object that contains the name begins here.
            before = bare[: bare.rfind("{", 0, bare.find(_NAME))]
            return JSONCalls(_common_end(turn[:begin], before).strip().rstrip("[ \n"), name, own)
        if value == _ARGUMENTS:
            return NamedCalls(_marker(turn, bare, later), turn[:begin].rpartition(_NAME)[2].strip())
    if any(value not in turn for value in _VALUES):
        return None
    places = (_NAME, _KEYS[0], _VALUES[0], _KEYS[1])
    to_key, to_value, to_next = (turn.partition(one)[2].partition(other)[0] for one, other in pairwise(places))
    opening = _common_end(to_key, to_next)
    opening = opening[max(opening.rfind("<"), 0) :].strip()
    closing = to_next.rpartition(opening)[0].strip() if opening else ""
    ending = turn.partition(_VALUES[1])[2].partition(closing)[2].partition(">")
    known = opening and closing and to_value.strip() and ending[1]
    tags = (opening, to_value.strip(), closing, "".join(ending[:2]).strip())
    return TaggedCalls(_marker(turn, bare, later), *tags) if known else None


def _marker(*turns: str) -> str:
    """Return the common text before every call's name."""
    found = ""
    for before in [turn.partition(_NAME)[0] for turn in turns if _NAME in turn]:
        found = _common_end(found, before) if found else before
    return found.strip()


def _common_end(one: str, other: str) -> str:
    return common_start(one[::-1], other[::-1])[::-1]


def common_start(one: str, other: str) -> str:
    return "".join(letter for letter, _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


def _with_arguments(name: str, arguments: Any) -> WrittenCall:
    """Return a call whose name and arguments were read from JSON."""
    try:
        # Some models encode the object twice.
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        writable([name, arguments])
    except (ValueError, RecursionError) as error:
        return WrittenCall(name, trouble=f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return WrittenCall(name, trouble="the arguments must be an object")
    return WrittenCall(name, arguments)


def _loose(text: str) -> str:
    """Return a pattern for the text with any whitespace between its words."""
    return r"\s*".join(map(re.escape, text.split()))


def _not_json(error: Exception, begin: int) -> str:
    at = f" (character {error.pos - begin + 1})" if isinstance(error, json.JSONDecodeError) else ""
    return f"the call is not valid JSON: {str(error).partition(': line ')[0]}{at}"

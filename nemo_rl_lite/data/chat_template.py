"""Render chats with a model's chat template."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nemo_rl_lite.data.formats import Conversation
from nemo_rl_lite.data.messages import THOUGHTS, Message
from nemo_rl_lite.data.tool_format import ToolFormat, common_start, sample_call, tool_format
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.errors import DataError

# Placeholder for an assistant turn, to find the text after it.
_TURN = "THE-TURN"
# Names that every template gets, in addition to the arguments of `apply_chat_template`.
_ALWAYS = {"messages", "raise_exception", "strftime_now"}
_QUESTION = {"role": "user", "content": "-"}
# Tags around reasoning in the content of a message.
_THINK, _THOUGHT = "<think>", "</think>"
_OTHER_TEMPLATE = "name one that does with policy.tokenizer.chat_template"


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer. Without a template, messages are joined by newlines."""

    def __init__(self, tokenizer: Any, given: Mapping[str, Any]):
        """`given`: template variables in addition to the messages. Raises jinja2.TemplateSyntaxError."""
        self._tokenizer, self._given = tokenizer, dict(given)
        self.exists = tokenizer.chat_template is not None
        self.turn_end = self._end_of_turn()
        """Id and text of the token that ends an assistant turn."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response: the tokenizer's end token, and the token that the template writes after an
        assistant turn. These differ in Gemma and in Qwen's base models."""
        return tuple(sorted({self._tokenizer.eos_token_id, self.turn_end[0]}))

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Format of tool calls; None if the template writes none, or if the format is unknown."""
        return tool_format(self._written) if self.exists else None

    @property
    def options(self) -> list[str]:
        """The optional variables that the template reads. Raises ValueError: none of several templates is the
        default."""
        from nemo_rl_lite.compat.transformers import template_variables

        if not self.exists:
            return []
        known = inspect.signature(self._tokenizer.apply_chat_template).parameters
        read = template_variables(self._tokenizer.get_chat_template())
        return sorted(read - known.keys() - _ALWAYS - self._tokenizer.special_tokens_map.keys())

    def leaves_out(self, role: str) -> bool:
        """Return whether the template omits messages of this role."""
        turns = [{"role": role, "content": _TURN}, *([] if role == "user" else [_QUESTION])]
        try:
            return self.exists and _TURN not in self._written(turns, (), True)
        except Exception:  # a template may raise anything; real messages will raise it again
            return False

    def leaves_out_tools(self, tools: Sequence[Tool]) -> bool:
        """Return whether the template omits all tools."""
        names = [str(tool.get("function", tool).get("name", "")) for tool in tools]
        try:
            written = self._written([_QUESTION], tools, True) if self.exists else ""
        except Exception:  # a template may raise anything; real messages will raise it again
            return False
        return not any(name in written for name in names)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text of a chat, up to the start of the assistant turn. Raises DataError: the template cannot
        render the chat."""
        return self._text(messages, tools, prompt=True)

    def turn(self, said: Conversation, index: int, before: str) -> str:
        """Return the text of the message `index`: from the prompt `before` to its end token. Raises DataError: the
        template does not render the chat as prompt, response and end token."""
        message, (_, end) = said.messages[index], self.turn_end
        if not self.exists:
            return _plain(message)
        whole = self._text(said.messages[: index + 1], said.tools, prompt=False)
        bare, opened = before.rstrip(), before.rstrip().endswith(_THINK)
        if opened and whole.startswith(bare):
            # The prompt opens the reasoning; the row may lack the newline after the tag.
            whole = before + whole[len(bare) :].removeprefix(before[len(bare) :])
        if not whole.startswith(before):
            same = len(common_start(before, whole))
            raise DataError(
                "the model's chat template changes the prompt when the response follows: "
                f"{before[same:]!r:.80} becomes {whole[same:]!r:.80}; name another with policy.tokenizer.chat_template"
            )
        turn, found, _ = whole[len(before) :].rpartition(end)
        if not found:
            rule = f"does not write the response and then its end token {end}"
            raise DataError(f"the model's chat template {rule}: {whole!r}; {_OTHER_TEMPLATE}")
        _check_written(message, turn, opened)
        return turn

    def between_turns(self, messages: Sequence[Message]) -> str:
        """Return the text between two assistant turns: the end token, `messages` and the start of the next turn. Raises
        DataError: the template cannot render these messages after an assistant turn."""
        if not self.exists:
            return "".join(f"\n{message['content']}" for message in messages)
        rest = self._after_calls(messages)
        if rest is not None:
            return rest
        try:
            whole = self._written([_QUESTION, {"role": "assistant", "content": _TURN}, *messages], (), True)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages)
            rule = f"the model's chat template cannot render messages of the role {roles}: {error}"
            raise DataError(rule) from None
        _, found, rest = whole.rpartition(_TURN)
        if not found:
            raise DataError(f"the model's chat template omits earlier assistant turns: {whole!r}")
        return rest

    def _after_calls(self, messages: Sequence[Message]) -> str | None:
        """Do as `between_turns` after a turn with the calls that `messages` answer, which many templates require.
        Return None without such messages, or if the template cannot render that many calls."""
        answers = [message for message in messages if "tool_call_id" in message]
        if self.tool_format is None or not answers:
            return None
        calls = [sample_call(one["tool_call_id"], one.get("name", ""), _TURN) for one in answers]
        turns = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            turn = self._written(turns, (), False).rpartition(_TURN)[2]
            _, found, rest = self._written([*turns, *messages], (), True).rpartition(_TURN)
        except Exception:  # a template may raise anything
            return None
        call_end = turn.partition(self.turn_end[1])[0]
        return rest.removeprefix(call_end) if found and rest.startswith(call_end) else None

    def _end_of_turn(self) -> tuple[int, str]:
        """Return the first special token after an assistant turn, or else the tokenizer's end token."""
        from jinja2 import TemplateSyntaxError

        tokenizer = self._tokenizer
        own = tokenizer.eos_token_id, tokenizer.eos_token
        if not self.exists:
            return own
        try:
            whole = self._written([_QUESTION, {"role": "assistant", "content": _TURN}], (), False)
        except TemplateSyntaxError:
            raise
        except Exception:  # a template may raise anything; real messages will raise it again
            return own
        _, found, rest = whole.rpartition(_TURN)
        special = {*tokenizer.all_special_ids, *(i for i, one in tokenizer.added_tokens_decoder.items() if one.special)}
        special -= {tokenizer.unk_token_id, tokenizer.bos_token_id}
        after = tokenizer(rest, add_special_tokens=False)["input_ids"] if found else ()
        ends = (token for token in after if token in special)
        return next(((token, tokenizer.convert_ids_to_tokens(token)) for token in ends), own)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> str:
        if not self.exists:
            return self._joined(messages)
        try:
            return self._written(messages, tools, prompt)
        except Exception as error:  # a template may raise anything
            fix = self._without_system(messages, tools, prompt)
            raise DataError(f"the model's chat template cannot render this chat: {error}{fix}") from None

    def _without_system(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> str:
        """Return a fix if the template can render the chat without its system messages, else ""."""
        others = [message for message in messages if message["role"] not in ("system", "developer")]
        try:
            if len(others) == len(messages) or not others:
                return ""
            self._written(others, tools, prompt)
        except Exception:  # a template may raise anything
            return ""
        fix = "leave out data.system_prompt and the rows' system messages"
        return f"; {fix}, or name a template that renders them with policy.tokenizer.chat_template"

    def _joined(self, messages: Sequence[Message]) -> str:
        """Join messages by newlines. Assistant messages follow the prompt directly and end with the end token."""
        text = ""
        for place, message in enumerate(messages):
            is_turn = message["role"] == "assistant"
            before = "" if is_turn or not place else "\n"
            text += before + message["content"] + (self._tokenizer.eos_token if is_turn else "")
        return text

    def _written(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> str:
        return self._tokenizer.apply_chat_template(
            list(map(_with_thoughts, messages)),
            tools=list(tools) or None,
            add_generation_prompt=prompt,
            tokenize=False,
            **self._given,
        )


def _with_thoughts(message: Message) -> Message:
    """Give the reasoning all of its usual field names; the template may read any of them."""
    return message | dict.fromkeys(THOUGHTS, message[THOUGHTS[0]]) if THOUGHTS[0] in message else message


def _plain(message: Message) -> str:
    """Return the content of a message. Raises DataError: it has more than content."""
    if "tool_calls" in message:
        raise DataError("a model without a chat template cannot be trained on tool calls")
    if THOUGHTS[0] in message:
        fix = "write it into the content, or leave it out"
        raise DataError(f"a model without a chat template cannot be trained on {THOUGHTS[0]}; {fix}")
    return message["content"]


def _check_written(message: Message, turn: str, opened: bool) -> None:
    """Raise DataError if a turn lacks the message's reasoning, content or calls. Whitespace may differ. `opened`: the
    prompt opens the reasoning."""
    written, whole = _without_blanks(turn), _without_blanks(message["content"])
    content = whole.removeprefix(_THINK) if opened else whole
    before, _, answer = content.rpartition(_THOUGHT)
    if before and content not in written and answer in written:
        raise _unwritten(f"the reasoning before {_THOUGHT}", turn, "leave it out")
    if content not in written:
        raise _unwritten("the response", turn)
    if whole.startswith(_THINK) and THOUGHTS[0] not in message and written.count(_THOUGHT) > whole.count(_THOUGHT):
        rule = f"the response begins with {_THINK}, and the model's chat template adds more reasoning before it"
        fix = f"write the reasoning into the field {THOUGHTS[0]}"
        fix = fix if _THOUGHT in whole else f"end the reasoning with {_THOUGHT}, or leave out the row"
        raise DataError(f"{rule}: {turn!r:.300}; {fix}")
    # If the content repeats the reasoning, it must be there twice.
    others = written.rpartition(content)[0] if content else written
    if _without_blanks(message.get(THOUGHTS[0], "")) not in others:
        fix = f"write it into the content as {_THINK}...{_THOUGHT}, or leave it out"
        raise _unwritten(THOUGHTS[0], turn, fix)
    called = (call["function"]["name"] for call in message.get("tool_calls", ()))
    if missing := next((name for name in called if name not in turn), None):
        raise _unwritten(f"the call of {missing}", turn, "leave out the rows with tool calls")


def _unwritten(what: str, turn: str, fix: str = "") -> DataError:
    """Return the error for a turn that lacks a part."""
    fixes = _OTHER_TEMPLATE + (f", or {fix}" if fix else "")
    return DataError(f"the model's chat template does not write {what}: {turn!r:.300}; {fixes}")


def _without_blanks(text: str) -> str:
    return "".join(text.split())

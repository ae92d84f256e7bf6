"""Text that a model's chat template writes around the messages of a chat."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nemo_rl_lite.data.formats import Conversation
from nemo_rl_lite.data.messages import THOUGHTS, Message
from nemo_rl_lite.data.tool_format import ToolFormat, common_start, sample_call, tool_format
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.errors import DataError

# This placeholder stands for an assistant turn where only the text after it matters.
_TURN = "THE-TURN"
# What a template is always given in addition to arguments of `apply_chat_template`: the functions that it may call.
_ALWAYS = {"messages", "raise_exception", "strftime_now"}
_QUESTION = {"role": "user", "content": "-"}
# The tags around thoughts in the content of a message.
_THINK, _THOUGHT = "<think>", "</think>"
_OTHER_TEMPLATE = "name one that does with policy.tokenizer.chat_template"


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer; a model without one has its messages joined by newlines."""

    def __init__(self, tokenizer: Any, given: Mapping[str, Any]):
        """`given`: what the template gets in addition to the messages. Raises jinja2.TemplateSyntaxError: the template
        is broken."""
        self._tokenizer, self._given = tokenizer, dict(given)
        self.exists = tokenizer.chat_template is not None
        self.turn_end = self._end_of_turn()
        """The id and the text of the token that ends an assistant's turn."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response: the tokenizer's own, and the one that the template writes after an
        assistant's turn, which is another one in Gemma and in Qwen's base models."""
        return tuple(sorted({self._tokenizer.eos_token_id, self.turn_end[0]}))

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Format of tool calls; None if the template writes none, or in an unknown format."""
        return tool_format(self._written) if self.exists else None

    @property
    def options(self) -> list[str]:
        """The names that the template reads, besides those that it is always given. Raises ValueError: there are
        several templates, and none is the default."""
        from nemo_rl_lite.compat.transformers import template_variables

        if not self.exists:
            return []
        known = inspect.signature(self._tokenizer.apply_chat_template).parameters
        read = template_variables(self._tokenizer.get_chat_template())
        return sorted(read - known.keys() - _ALWAYS - self._tokenizer.special_tokens_map.keys())

    def leaves_out(self, role: str) -> bool:
        """Return whether the template writes nothing of what this role says before the assistant's turn."""
        turns = [{"role": role, "content": _TURN}, *([] if role == "user" else [_QUESTION])]
        try:
            return self.exists and _TURN not in self._written(turns, (), True)
        except Exception:  # a template may raise anything; the run's own messages will show it
            return False

    def leaves_out_tools(self, tools: Sequence[Tool]) -> bool:
        """Return whether the template writes the name of none of the tools."""
        names = [str(tool.get("function", tool).get("name", "")) for tool in tools]
        try:
            written = self._written([_QUESTION], tools, True) if self.exists else ""
        except Exception:  # a template may raise anything; the run's own messages will show it
            return False
        return not any(name in written for name in names)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text of a chat, up to the start of the assistant's turn.

        Raises:
            DataError: the template cannot write the chat.
        """
        return self._text(messages, tools, prompt=True)

    def turn(self, said: Conversation, index: int, before: str) -> str:
        """Return the text between `before`, the prompt, and the end token of the message `index`.

        Raises:
            DataError: the template does not write the chat as prompt, response and end token.
        """
        message, (_, end) = said.messages[index], self.turn_end
        if not self.exists:
            return _plain(message)
        whole = self._text(said.messages[: index + 1], said.tools, prompt=False)
        bare, opened = before.rstrip(), before.rstrip().endswith(_THINK)
        if opened and whole.startswith(bare):
            # The prompt has begun the thoughts; the row may lack the line end after their tag.
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
        """Return the text from the end of an assistant turn, its end token included, through `messages`, to the start
        of its next turn.

        Raises:
            DataError: the template cannot write these messages after an assistant's turn.
        """
        if not self.exists:
            return "".join(f"\n{message['content']}" for message in messages)
        rest = self._after_calls(messages)
        if rest is not None:
            return rest
        try:
            whole = self._written([_QUESTION, {"role": "assistant", "content": _TURN}, *messages], (), True)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages)
            rule = f"the model's chat template cannot write messages of the role {roles}: {error}"
            raise DataError(rule) from None
        _, found, rest = whole.rpartition(_TURN)
        if not found:
            raise DataError(f"the model's chat template leaves out the assistant's earlier turns: {whole!r}")
        return rest

    def _after_calls(self, messages: Sequence[Message]) -> str | None:
        """Do as `between_turns` after a turn with the calls that `messages` answer, which many templates require. None
        if there are no such messages, or the template does not write that many calls."""
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
        """Return the first special token after an assistant's turn; where there is none, the tokenizer's end token."""
        from jinja2 import TemplateSyntaxError

        tokenizer = self._tokenizer
        own = tokenizer.eos_token_id, tokenizer.eos_token
        if not self.exists:
            return own
        try:
            whole = self._written([_QUESTION, {"role": "assistant", "content": _TURN}], (), False)
        except TemplateSyntaxError:
            raise
        except Exception:  # a template may raise anything; the run's own messages will show it
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
            raise DataError(f"the model's chat template cannot write this chat: {error}{fix}") from None

    def _without_system(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> str:
        """Return a fix where the template would write the chat without its system messages; else nothing."""
        others = [message for message in messages if message["role"] not in ("system", "developer")]
        try:
            if len(others) == len(messages) or not others:
                return ""
            self._written(others, tools, prompt)
        except Exception:  # a template may raise anything
            return ""
        fix = "leave out data.system_prompt and the rows' system messages"
        return f"; {fix}, or name a template that writes them with policy.tokenizer.chat_template"

    def _joined(self, messages: Sequence[Message]) -> str:
        """Join messages without a template: each on a new line, except the assistant's, which follow the message that
        they answer and end with the end token."""
        text = ""
        for place, message in enumerate(messages):
            is_turn = message["role"] == "assistant"
            before = "" if is_turn or not place else "\n"
            text += before + message["content"] + (self._tokenizer.eos_token if is_turn else "")
        return text

    def _written(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> str:
        """Return what the template writes. It may raise anything."""
        return self._tokenizer.apply_chat_template(
            list(map(_with_thoughts, messages)),
            tools=list(tools) or None,
            add_generation_prompt=prompt,
            tokenize=False,
            **self._given,
        )


def _with_thoughts(message: Message) -> Message:
    """Name the thoughts by all of their names, one of which the template may read."""
    return message | dict.fromkeys(THOUGHTS, message[THOUGHTS[0]]) if THOUGHTS[0] in message else message


def _plain(message: Message) -> str:
    """Return the text of a turn without a template. Raises DataError: the message has more than text."""
    if "tool_calls" in message:
        raise DataError("a model without a chat template cannot be trained on tool calls")
    if THOUGHTS[0] in message:
        fix = "write them into the content, or leave them out"
        raise DataError(f"a model without a chat template cannot be trained on thoughts ({THOUGHTS[0]}); {fix}")
    return message["content"]


def _check_written(message: Message, turn: str, opened: bool) -> None:
    """Raise DataError where a turn lacks the message's thoughts, text or calls. Templates write blanks of their own.
    `opened`: the prompt has begun the thoughts."""
    written, whole = _without_blanks(turn), _without_blanks(message["content"])
    content = whole.removeprefix(_THINK) if opened else whole
    before, _, answer = content.rpartition(_THOUGHT)
    if before and content not in written and answer in written:
        raise _unwritten(f"the thoughts before {_THOUGHT}", turn, "leave out what stands before it")
    if content not in written:
        raise _unwritten("the response", turn)
    if whole.startswith(_THINK) and THOUGHTS[0] not in message and written.count(_THOUGHT) > whole.count(_THOUGHT):
        rule = f"the response begins with {_THINK}, and the model's chat template writes other thoughts before it"
        fix = f"write the thoughts into the field {THOUGHTS[0]}"
        fix = fix if _THOUGHT in whole else f"end the thoughts with {_THOUGHT}, or leave out the row"
        raise DataError(f"{rule}: {turn!r:.300}; {fix}")
    # Where the answer repeats the thoughts, they must be there twice.
    others = written.rpartition(content)[0] if content else written
    if _without_blanks(message.get(THOUGHTS[0], "")) not in others:
        fix = f"write them into the content as {_THINK}...{_THOUGHT}, or leave them out"
        raise _unwritten(f"the thoughts ({THOUGHTS[0]})", turn, fix)
    called = (call["function"]["name"] for call in message.get("tool_calls", ()))
    if missing := next((name for name in called if name not in turn), None):
        raise _unwritten(f"the call of {missing}", turn, "leave out the rows with tool calls")


def _unwritten(what: str, turn: str, fix: str = "") -> DataError:
    """Return the error of a turn that lacks something."""
    fixes = _OTHER_TEMPLATE + (f", or {fix}" if fix else "")
    return DataError(f"the model's chat template does not write {what}: {turn!r:.300}; {fixes}")


def _without_blanks(text: str) -> str:
    return "".join(text.split())

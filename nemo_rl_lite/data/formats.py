"""The formats of rows that an algorithm trains on: problems, chats, preference pairs, labelled responses.

A pair's layout follows from its columns:

- prompt, chosen, rejected: the prompt text or messages, each continuation text or messages;
- chosen, rejected: whole chats that begin with the same messages (UltraFeedback binarized, HH-RLHF as messages);
- conversations or messages, chosen, rejected: the prompt, each continuation one message (LLaMA-Factory);
- context, completions: completions with ranks, the lowest rank being the best (NeMo-RL);
- context, response1, response2, overall_preference: negative where the first is better (HelpSteer3).

A labelled response has a prompt, a completion (each text or messages) and a label, true or false, as in TRL.
This module imports nothing heavy.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_rl_lite.config.algorithms import algorithm_of
from nemo_rl_lite.config.schema import Config, DataConfig
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.messages import CHAT_COLUMNS, Message, read_messages, refuse_chat_as_text
from nemo_rl_lite.data.problems import LeftOut, Problem, Prompted, chat, with_system
from nemo_rl_lite.data.rows import Row, column, filled, find_column, is_number, shown_columns, text_of
from nemo_rl_lite.data.tools import Tool, callable_tools, row_tools
from nemo_rl_lite.errors import DataError

# Columns of saved rollouts. Samples that ended in one of these ways may lack their end token.
_REWARD, _ENDING, _CUT = "reward", "ending", ("length", "error")
# The usual name of a column of labelled responses.
_COMPLETION = "completion"
_NEITHER = LeftOut("prefer neither response")
_WITH_COMMAS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Conversation:
    """A chat that ends with the assistant. Assistant messages from index `first_trained` on are trained on, except
    those of weight 0. `tools` are the JSON schemas of the functions that the assistant may call."""

    messages: tuple[Message, ...]
    first_trained: int
    tools: tuple[Tool, ...] = ()

    def trained(self) -> list[int]:
        """Return the indices of the messages that are trained on."""
        later = range(self.first_trained, len(self.messages))
        return [index for index in later if _is_trained(self.messages[index])]


@dataclass(frozen=True)
class Example:
    """One conversation, or the chosen and the rejected conversation of a pair."""

    conversations: tuple[Conversation, ...]
    where: str
    """Names the example in errors, by file and row."""
    unanswered: bool = False
    """The row's chat continued after the assistant's last message; that end is left out."""
    label: bool | None = None
    """True if a labelled response is desirable."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages before the first trained one: the prompt."""
        first = self.conversations[0]
        return first.messages[: first.first_trained]


def to_problem(config: DataConfig, row: Row, where: str) -> Problem:
    """Return the problem of a row; `where` names the row in errors.

    Raises:
        DataError: the row lacks a column, or one has a wrong type or does not match `data.answer_pattern`.
    """
    if config.prompt_template is not None:
        # A text, whatever it holds.
        prompt = [{"role": "user", "content": filled(config.prompt_template, row, where)}]
    elif config.prompt_column not in row and (chats := [name for name in CHAT_COLUMNS if name in row]):
        rule = f"no column '{config.prompt_column}', but '{chats[0]}', as of whole chats: algorithm=sft trains on those"
        raise DataError(f"{where}: {rule}")
    else:
        prompt = column(row, config.prompt_column, where)
    answer = text_of(row, config.answer_column, where) if config.answer_column is not None else ""
    if config.answer_pattern is not None:
        found = re.search(config.answer_pattern, answer)
        if not found or found[1] is None:
            rule = f"data.answer_pattern is not in column '{config.answer_column}', which ends {answer[-60:]!r}"
            raise DataError(f"{where}: {rule}")
        answer = found[1].strip()
        answer = answer.replace(",", "") if _WITH_COMMAS.fullmatch(answer) else answer
    if answer.isspace() or (not answer and config.answer_pattern is not None):
        raise DataError(f"{where}: the answer in column '{config.answer_column}' is nothing but blanks")
    return Problem(chat(prompt, _system_prompt(config, row, config.prompt_column, where), where), answer, row)


def to_chat(config: DataConfig, row: Row, where: str) -> Example | LeftOut:
    """Return the example of a row: messages, or a prompt and its response; `where` names the row in errors. A row with
    a reward below `data.min_reward` is left out, and so is a sample that was cut before its end token.

    Raises:
        DataError: the row lacks a column, one has a wrong type, or the row has nothing to train on.
    """
    if config.min_reward is not None and not _is_rewarded(row, config.min_reward, where):
        return LeftOut(f"have no reward of at least data.min_reward = {config.min_reward:g}")
    if row.get(_ENDING) in _CUT:
        return LeftOut(f"were cut before their end (column '{_ENDING}')")
    name = _messages_column(config, row)
    if name is None:
        # The whole text is the response.
        response = config.response_column or config.answer_column
        problem = to_problem(replace(config, answer_column=response, answer_pattern=None), row, where)
        if not problem.answer.strip():
            raise DataError(f"{where}: the response is empty")
        refuse_chat_as_text(problem.answer, f"{where}, the response")
        said = answered(problem.messages, problem.answer)
        return Example((replace(said, tools=_tools(config, row, config.prompt_column, where)),), where)
    messages = read_messages(column(row, name, where), f"{where}, column '{name}'")
    messages = with_system(messages, _system_prompt(config, row, name, where))
    spoken = [index for index, message in enumerate(messages) if _is_trained(message)]
    if not spoken:
        weights = ": they have weight 0" if any(message["role"] == "assistant" for message in messages) else ""
        raise DataError(f"{where}: column '{name}' has no message of the assistant to train on{weights}")
    first = spoken[0 if config.train_on == "all" else -1]
    if all(message["role"] in ("system", "developer") for message in messages[: spoken[0]]):
        raise DataError(f"{where}: column '{name}' begins with the assistant, without a prompt")
    said = Conversation(messages[: spoken[-1] + 1], first, _tools(config, row, name, where))
    trained = [messages[index] for index in said.trained()]
    if not any(one["content"].strip() or one.get("reasoning_content") or one.get("tool_calls") for one in trained):
        raise DataError(f"{where}: column '{name}' has only empty messages of the assistant to train on")
    return Example((said,), where, unanswered=messages[-1]["role"] != "assistant")


def to_pair(config: DataConfig, row: Row, where: str) -> Example | LeftOut:
    """Return the pair of a row, which is left out where neither response is better; `where` names the row in errors.

    Raises:
        DataError: the row has no known layout, or a column has a wrong type.
    """
    chosen, rejected = config.chosen_column, config.rejected_column
    if chosen in row and rejected in row:
        two = column(row, chosen, where), column(row, rejected, where)
        if two[0] == two[1]:
            return _NEITHER
        asked = _asked(config, row)
        if asked is None:
            pair = _whole_chats(read_messages(two[0], where), read_messages(two[1], where), where)
        else:
            pair = _continued(chat(asked, where=where), two, where)
    elif "context" in row and "completions" in row:
        pair = _continued(chat(row["context"], where=where), _ranked(row["completions"], where), where)
    elif "context" in row and "overall_preference" in row:
        preference = row["overall_preference"]
        if not is_number(preference):
            raise DataError(f"{where}: overall_preference must be a number, found {preference!r}")
        two = column(row, "response1", where), column(row, "response2", where)
        if not preference:
            return _NEITHER
        pair = _continued(chat(row["context"], where=where), two if preference < 0 else two[::-1], where)
    elif {"completion", "label"} <= row.keys():
        raise DataError(
            f"{where}: has a completion and its label, as for KTO (algorithm=kto); a pair has a better and a worse one"
        )
    else:
        raise DataError(
            f"{where}: no columns of a preference pair (needed: '{chosen}' and '{rejected}', or context and "
            f"completions, or context, response1, response2 and overall_preference; columns: {shown_columns(row)})"
        )
    if pair[0].messages == pair[1].messages:
        return _NEITHER
    system_prompt, tools = _system_prompt(config, row, chosen, where), _tools(config, row, chosen, where)
    conversations = []
    for one in pair:
        messages = with_system(one.messages, system_prompt)
        first = one.first_trained + len(messages) - len(one.messages)
        conversations.append(Conversation(messages, first, tools))
    return Example(tuple(conversations), where)


def to_labelled(config: DataConfig, row: Row, where: str) -> Example:
    """Return the response of a row with its label; `where` names the row in errors.

    Raises:
        DataError: the row lacks a column, or one has a wrong type.
    """
    name = config.response_column or _COMPLETION
    if name not in row or config.label_column not in row:
        pair = {config.chosen_column, config.rejected_column} <= row.keys()
        hint = "; pairs are for algorithm=dpo or orpo" if pair else ""
        needed = f"'{config.prompt_column}', '{name}' and '{config.label_column}'"
        raise DataError(f"{where}: no labelled response (needed: {needed}; columns: {shown_columns(row)}){hint}")
    system_prompt = _system_prompt(config, row, config.prompt_column, where)
    asked = chat(column(row, config.prompt_column, where), system_prompt, where)
    response = _response(column(row, name, where), where)
    said = _compared((*asked, *response), len(asked), where)
    said = replace(said, tools=_tools(config, row, config.prompt_column, where))
    label = {"true": True, "false": False}.get(str(row[config.label_column]).lower(), row[config.label_column])
    if label not in (0, 1):
        raise DataError(f"{where}: column '{config.label_column}' must be true or false, found {label!r}")
    return Example((said,), where, label=bool(label))


def chat_of(problem: Problem) -> Example:
    """Make a chat of a task's problem, with its answer as the response. Raises DataError: the problem has no answer."""
    where = "a problem of the task"
    if not problem.answer:
        raise DataError(f"{where} {problem.metadata.get('task', '')} has no answer to train on")
    return Example((answered(problem.messages, problem.answer),), where)


def pair_of(problem: Problem) -> Example:
    """Return the pair of a task's problem: its answer and its `mistake`. Raises DataError: the task has no mistakes."""
    if "mistake" not in problem.metadata:
        raise DataError("this task has right answers only: preference pairs need data=file or data=hub")
    responses = problem.answer, problem.metadata["mistake"]
    return Example(tuple(answered(problem.messages, response) for response in responses), "a problem of the task")


def labelled_of(problem: Problem) -> Example:
    """Return a task's problem with its answer or its `mistake`, which the problem's text decides. Raises DataError: the
    task has no mistakes."""
    pair, desirable = pair_of(problem), zlib.crc32(str(problem.messages).encode()) % 2 == 0
    return replace(pair, conversations=(pair.conversations[0 if desirable else 1],), label=desirable)


def answered(messages: Sequence[Message], response: str) -> Conversation:
    """Return the prompt's messages followed by the response, which is trained on."""
    return Conversation((*messages, {"role": "assistant", "content": response}), len(messages))


def _is_rewarded(row: Row, least: float, where: str) -> bool:
    """Raises DataError: the row has no column of rewards, or something else in it."""
    reward = row.get(_REWARD)
    if _REWARD not in row:
        raise DataError(f"{where}: no column '{_REWARD}', which data.min_reward reads")
    if reward is not None and not isinstance(reward, int | float):
        raise DataError(f"{where}: column '{_REWARD}' must be a number, found {reward!r:.80}")
    return reward is not None and reward >= least


def _is_trained(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _messages_column(config: DataConfig, row: Row) -> str | None:
    """Return `data.messages_column`, or in a row without a prompt a column with a usual name of chats."""
    if config.messages_column is not None:
        return config.messages_column
    if config.prompt_template is not None or config.prompt_column in row:
        return None
    return next((name for name in CHAT_COLUMNS if isinstance(row.get(name), Sequence)), None)


def _system_prompt(config: DataConfig, row: Row, name: str, where: str) -> str | None:
    """Return the system prompt in the column `system` beside column `name`, where ShareGPT's and Anthropic's formats
    have it, or `data.system_prompt`. A template of prompts names all columns that it uses."""
    own = None if config.prompt_template is not None else find_column(row, _beside(row, name, "system"))
    is_parts = isinstance(own, list) and all(isinstance(part, Mapping) for part in own)
    if not own or not (isinstance(own, str) or is_parts):
        return config.system_prompt
    (system,) = read_messages([{"role": "system", "content": own}], f"{where}, column 'system'")
    return system["content"] if system["content"].strip() else config.system_prompt


def _tools(config: DataConfig, row: Row, name: str, where: str) -> tuple[Tool, ...]:
    """Return the tools in the column `data.tools_column`, or in `tools` (once `functions`) beside column `name`. Beside
    anything but a whole chat, a column of this name may be something else."""
    if config.tools_column is not None:
        return row_tools(config, row, where)
    names = (_beside(row, name, other) for other in ("tools", "functions"))
    beside = next((one for one in names if find_column(row, one)), None)
    try:
        return row_tools(replace(config, tools_column=beside), row, where)
    except DataError:
        if name == _messages_column(config, row):
            raise
        return ()


def _beside(row: Row, name: str, other: str) -> str:
    """Return the name of another column in the structure that has column `name`."""
    return other if name in row else ".".join((*name.split(".")[:-1], other))


def _asked(config: DataConfig, row: Row) -> object:
    """Return the prompt of a pair; None where chosen and rejected are whole chats. In LLaMA-Factory's format they are
    one message each, which answers the chat beside them."""
    names = CHAT_COLUMNS if isinstance(row[config.chosen_column], Mapping) else ()
    return next((row[name] for name in (config.prompt_column, *names) if row.get(name) is not None), None)


def _continued(asked: tuple[Message, ...], two: tuple[object, object], where: str) -> list[Conversation]:
    """Return two chats that answer the messages `asked`, or repeat them."""
    said = [_response(one, where) for one in two]
    repeats = [one[0]["role"] != "assistant" for one in said]
    if all(repeats):
        pair = _whole_chats(said[0], said[1], where)
        # The prompt may be all turns as one text, and its blanks may differ.
        texts = [" ".join(one["content"].split()) for one in (asked[-1], *pair[0].messages[: pair[0].first_trained])]
        if not any(text in texts[0] or texts[0] in text for text in texts[1:]):
            raise DataError(f"{where}: the two chats begin with another text than the prompt")
        return pair
    if any(repeats):
        raise DataError(f"{where}: one of the two repeats the prompt, the other does not")
    return [_compared((*asked, *one), len(asked), where) for one in said]


def _response(value: object, where: str) -> tuple[Message, ...]:
    if isinstance(value, str | int | float):
        refuse_chat_as_text(str(value), f"{where}, the response")
        return ({"role": "assistant", "content": str(value)},)
    return read_messages([value] if isinstance(value, Mapping) else value, where)


def _whole_chats(chosen: tuple[Message, ...], rejected: tuple[Message, ...], where: str) -> list[Conversation]:
    """Return two chats that begin with the same messages."""
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise DataError(f"{where}: the two chats do not begin with the same message")
    if chosen != rejected and {one[common]["role"] for one in (chosen, rejected) if one[common:]} != {"assistant"}:
        raise DataError(f"{where}: the two chats answer different prompts: they part at message {common + 1}")
    return [_compared(one, common, where) for one in (chosen, rejected)]


def _compared(messages: tuple[Message, ...], first: int, where: str) -> Conversation:
    """Return the chat whose response begins at message `first`. Raises DataError: there is no response to compare."""
    if len(messages) <= first or not first or messages[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: a response must end with a message of the assistant, after the messages of the prompt"
        )
    said = Conversation(messages, first)
    if not said.trained():
        raise DataError(f"{where}: a response has only messages of weight 0, and the two are compared")
    return said


def _ranked(completions: object, where: str) -> tuple[object, object]:
    """Return the best and the worst completion."""
    ranked = completions if isinstance(completions, Sequence) and not isinstance(completions, str) else ()
    known = [one for one in ranked if isinstance(one, Mapping) and "rank" in one and "completion" in one]
    ranks = [one["rank"] for one in known if is_number(one["rank"])]
    if len(ranks) != len(ranked) or len(set(ranks)) < 2:
        raise DataError(f"{where}: column 'completions' must have completions of two ranks, each {{rank, completion}}")
    in_order = sorted(known, key=lambda one: one["rank"])
    return in_order[0]["completion"], in_order[-1]["completion"]


@dataclass(frozen=True)
class RowFormat[T: Prompted]:
    """Conversion of rows, and of the problems of tasks, to training items."""

    name: str
    """Plural noun."""
    from_row: Callable[[DataConfig, Row, str], T | LeftOut]
    """Reads a row, which the text names in errors, or says why it is left out."""
    from_problem: Callable[[Problem], T]
    reads_answers: bool = False
    """True if `data.answer_pattern` finds the answers of its rows."""


def problems(tools: Sequence[Tool] = ()) -> RowFormat[Problem]:
    """Return the format of problems that offer `tools`, unless their rows have some of their own."""

    def from_row(config: DataConfig, row: Row, where: str) -> Problem:
        own = callable_tools(row_tools(config, row, where), f"{where}, column '{config.tools_column}'")
        return replace(to_problem(config, row, where), tools=own or tuple(tools))

    def from_problem(problem: Problem) -> Problem:
        return replace(problem, tools=tuple(tools))

    return RowFormat("problems", from_row, from_problem, reads_answers=True)


PROBLEMS = problems()
CHATS = RowFormat[Example]("chats", to_chat, chat_of)
PAIRS = RowFormat[Example]("pairs", to_pair, pair_of)
UNPAIRED = RowFormat[Example]("labelled responses", to_labelled, labelled_of)
# Formats that need a wrong answer to each problem of a task.
NEEDS_NEGATIVES = (PAIRS, UNPAIRED)


def format_of(config: Config) -> RowFormat:
    """Return what the configuration's algorithm trains on."""
    return imported(algorithm_of(config).data)

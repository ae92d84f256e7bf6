"""The formats of rows that an algorithm trains on: chats, preference pairs, labelled responses, problems.

A pair's layout follows from its columns:

- prompt, chosen, rejected: the prompt text or messages, each continuation text or messages;
- chosen, rejected: whole chats that begin with the same messages (UltraFeedback binarized, HH-RLHF as messages);
- context, completions: completions with ranks, the lowest rank being the best (NeMo-RL);
- context, response1, response2, overall_preference: negative where the first is better (HelpSteer3).

A labelled response has a prompt, a completion (each text or messages) and a label, true or false, as TRL has them.
This module imports nothing heavy.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_rl_lite.config.algorithms import algorithm_of
from nemo_rl_lite.config.schema import Config, DataConfig
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.columns import column, is_number, shown_columns, to_problem
from nemo_rl_lite.data.messages import CHAT_COLUMNS, Message, read_messages
from nemo_rl_lite.data.problems import LeftOut, Problem, Prompted, chat, with_system
from nemo_rl_lite.data.rows import Row
from nemo_rl_lite.data.tools import Tool, callable_tools, row_tools
from nemo_rl_lite.errors import DataError

# What rollouts call a sample's reward.
REWARD_COLUMN = "reward"
# What they call the way in which it ended, and the values of samples whose last response may lack its end token. Other
# values, such as those of a column that a user calls so, say nothing.
_ENDING_COLUMN, _CUT = "ending", ("length", "error")


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
        return [index for index in later if _is_trained_on(self.messages[index])]


@dataclass(frozen=True)
class Example:
    """One conversation, or the chosen and the rejected conversation of a pair. `where` names the example in errors, by
    file and row. `unanswered`: the row's chat continued after the assistant's last message; that end is left out."""

    conversations: tuple[Conversation, ...]
    where: str
    unanswered: bool = False
    label: bool | None = None
    """Whether the response is desirable, where that is what the run trains on."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages before the first trained one: the prompt."""
        first = self.conversations[0]
        return first.messages[: first.first_trained]


def to_chat(config: DataConfig, row: Row, where: str) -> Example | LeftOut:
    """Return the example of a row: the messages of `data.messages_column`, or a prompt and its response, or, where
    there is no prompt, the messages of a column of a usual name; `where` names the row in errors. A row whose reward
    is below `data.min_reward` is left out, and so is a sample that was cut: nobody has sampled an end token after it.

    Raises:
        DataError: the row lacks a column, one has a wrong type, or the row has nothing to train on.
    """
    if config.min_reward is not None and not _is_rewarded(row, config.min_reward, where):
        return LeftOut(f"have no reward of at least data.min_reward = {config.min_reward:g}")
    if row.get(_ENDING_COLUMN) in _CUT:
        return LeftOut(f"were cut before their end (column '{_ENDING_COLUMN}')")
    name = _messages_column(config, row)
    if name is None:
        problem = to_problem(with_responses(config), row, where)
        if not problem.answer.strip():
            raise DataError(f"{where}: the response is empty")
        return Example((answered(problem.messages, problem.answer),), where)
    messages = with_system(read_messages(column(row, name, where), f"{where}, column '{name}'"), config.system_prompt)
    spoken = [index for index, message in enumerate(messages) if _is_trained_on(message)]
    if not spoken:
        weights = ": they have weight 0" if any(message["role"] == "assistant" for message in messages) else ""
        raise DataError(f"{where}: column '{name}' has no message of the assistant to train on{weights}")
    first = spoken[0 if config.train_on == "all" else -1]
    if all(message["role"] in ("system", "developer") for message in messages[: spoken[0]]):
        raise DataError(f"{where}: column '{name}' begins with the assistant, without a prompt")
    said = Conversation(messages[: spoken[-1] + 1], first, row_tools(config, row, where))
    trained = [messages[index] for index in said.trained()]
    if not any(one["content"].strip() or one.get("reasoning_content") or one.get("tool_calls") for one in trained):
        raise DataError(f"{where}: column '{name}' has only empty messages of the assistant to train on")
    return Example((said,), where, unanswered=messages[-1]["role"] != "assistant")


def _is_rewarded(row: Row, least: float, where: str) -> bool:
    """Raises DataError: the row has no column of rewards, or something else in it."""
    reward = row.get(REWARD_COLUMN)
    if REWARD_COLUMN not in row:
        raise DataError(f"{where}: no column '{REWARD_COLUMN}', which data.min_reward reads")
    if reward is not None and not isinstance(reward, int | float):
        raise DataError(f"{where}: column '{REWARD_COLUMN}' must be a number, found {reward!r:.80}")
    # A NaN is at least nothing.
    return reward is not None and reward >= least


def _is_trained_on(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _messages_column(config: DataConfig, row: Row) -> str | None:
    """The column that is named, or of a usual name in a row that has no prompt."""
    if config.messages_column is not None:
        return config.messages_column
    if config.prompt_template is not None or config.prompt_column in row:
        return None
    return next((name for name in CHAT_COLUMNS if isinstance(row.get(name), Sequence)), None)


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


_NEITHER = LeftOut("prefer neither response")


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
        if row.get(config.prompt_column) is None:
            pair = _whole_chats(read_messages(two[0], where), read_messages(two[1], where), where)
        else:
            pair = _continued(chat(row[config.prompt_column], where=where), two, where)
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
    conversations = []
    for one in pair:
        messages = with_system(one.messages, config.system_prompt)
        first = one.first_trained + len(messages) - len(one.messages)
        conversations.append(Conversation(messages, first, one.tools))
    return Example(tuple(conversations), where)


def pair_of(problem: Problem) -> Example:
    """Return the pair of a task's problem: its answer and its `mistake`. Raises DataError: the task has no mistakes."""
    if "mistake" not in problem.metadata:
        raise DataError("this task has right answers only: preference pairs need data=file or data=hub")
    responses = problem.answer, problem.metadata["mistake"]
    return Example(tuple(answered(problem.messages, response) for response in responses), "a problem of the task")


def _continued(asked: tuple[Message, ...], two: tuple[object, object], where: str) -> list[Conversation]:
    said = [({"role": "assistant", "content": v},) if isinstance(v, str) else read_messages(v, where) for v in two]
    repeats = [one[0]["role"] != "assistant" for one in said]
    if all(repeats):
        pair = _whole_chats(said[0], said[1], where)
        if not any(_share_text(asked[-1], message) for message in pair[0].messages[: pair[0].first_trained]):
            raise DataError(f"{where}: the two chats begin with another text than the prompt")
        return pair
    if any(repeats):
        raise DataError(f"{where}: one of the two repeats the prompt, the other does not")
    return [ending_with_the_assistant((*asked, *one), len(asked), where) for one in said]


def _share_text(one: Message, other: Message) -> bool:
    """Whether one of two texts is in the other, whatever their blanks: a prompt may be all turns as one text."""
    first, second = (" ".join(message["content"].split()) for message in (one, other))
    return first in second or second in first


def _whole_chats(chosen: tuple[Message, ...], rejected: tuple[Message, ...], where: str) -> list[Conversation]:
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise DataError(f"{where}: the two chats do not begin with the same message")
    if chosen != rejected and {one[common]["role"] for one in (chosen, rejected) if one[common:]} != {"assistant"}:
        raise DataError(f"{where}: the two chats answer different prompts: they part at message {common + 1}")
    return [ending_with_the_assistant(one, common, where) for one in (chosen, rejected)]


def ending_with_the_assistant(messages: tuple[Message, ...], first: int, where: str) -> Conversation:
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
    ranked = completions if isinstance(completions, Sequence) and not isinstance(completions, str) else ()
    known = [one for one in ranked if isinstance(one, Mapping) and "rank" in one and "completion" in one]
    ranks = [one["rank"] for one in known if is_number(one["rank"])]
    if len(ranks) != len(ranked) or len(set(ranks)) < 2:
        raise DataError(f"{where}: column 'completions' must have completions of two ranks, each {{rank, completion}}")
    in_order = sorted(known, key=lambda one: one["rank"])
    return in_order[0]["completion"], in_order[-1]["completion"]


_USUAL_COLUMN = "completion"


def to_labelled(config: DataConfig, row: Row, where: str) -> Example:
    """Return the response of a row with its label; `where` names the row in errors.

    Raises:
        DataError: the row lacks a column, or one has a wrong type.
    """
    name = config.response_column or _USUAL_COLUMN
    if name not in row or config.label_column not in row:
        pair = {config.chosen_column, config.rejected_column} <= row.keys()
        hint = "; pairs are for algorithm=dpo or orpo" if pair else ""
        needed = f"'{config.prompt_column}', '{name}' and '{config.label_column}'"
        raise DataError(f"{where}: no labelled response (needed: {needed}; columns: {shown_columns(row)}){hint}")
    asked = chat(column(row, config.prompt_column, where), config.system_prompt, where)
    value = column(row, name, where)
    response = ({"role": "assistant", "content": value},) if isinstance(value, str) else read_messages(value, where)
    said = ending_with_the_assistant((*asked, *response), len(asked), where)
    label = row[config.label_column]
    if label not in (0, 1):
        raise DataError(f"{where}: column '{config.label_column}' must be true or false, found {label!r}")
    return Example((said,), where, label=bool(label))


def labelled_of(problem: Problem) -> Example:
    """Return a task's problem with its answer, or with its `mistake`: one of the two, which the problem's text decides.
    Raises DataError: the task has no mistakes."""
    right, wrong = pair_of(problem).conversations
    desirable = zlib.crc32(str(problem.messages).encode()) % 2 == 0
    return replace(pair_of(problem), conversations=(right if desirable else wrong,), label=desirable)


@dataclass(frozen=True)
class RowFormat[T: Prompted]:
    """`name` is a plural. `from_row` reads one example from a row, which its text argument names in errors, or says
    why it is left out; `from_problem` makes one from a task's problem."""

    name: str
    from_row: Callable[[DataConfig, Row, str], T | LeftOut]
    from_problem: Callable[[Problem], T]
    reads_answers: bool = False
    """Whether `data.answer_pattern` finds the answers of its rows."""


def problems(tools: Sequence[Tool] = ()) -> RowFormat[Problem]:
    """Problems that offer `tools`, unless their rows have some of their own."""

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

"""Make chats to train on, from rows and from problems. This module imports nothing heavy."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_lite.config.sections.data import DataConfig
from nemo_rl_lite.data.columns import column, to_problem
from nemo_rl_lite.data.messages import CHAT_COLUMNS, Message, read_messages
from nemo_rl_lite.data.problems import LeftOut, Problem, with_system
from nemo_rl_lite.data.rows import Row
from nemo_rl_lite.data.tools import Tool, row_tools
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
    if not any(_says_something(messages[index]) for index in said.trained()):
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


def _says_something(message: Message) -> bool:
    return any((message["content"].strip(), message.get("reasoning_content"), message.get("tool_calls")))


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

"""Row formats: problems, chats, preference pairs, labelled responses. This module imports nothing heavy.

The columns of a preference pair decide its layout:

- prompt, chosen, rejected: each is text or messages;
- chosen, rejected: whole chats that begin with the same messages (UltraFeedback binarized, HH-RLHF as messages);
- conversations or messages, chosen, rejected: a chat, and one message for each response (LLaMA-Factory);
- context, completions: completions with ranks, the lowest rank being the best (NeMo-RL);
- context, response1, response2, overall_preference: negative if the first is better (HelpSteer3).

A labelled response has a prompt, a completion (each text or messages) and a boolean label, as in TRL.
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

# Columns of saved rollouts, and endings without an end token.
_REWARD, _ENDING, _CUT = "reward", "ending", ("length", "error")
# The usual name of a column of labelled responses.
_COMPLETION = "completion"
_NEITHER = LeftOut("prefer neither response")
_WITH_COMMAS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Conversation:
    """A chat that ends with the assistant. Training uses assistant messages from index `first_trained` on, except
    those of weight 0. `tools` are JSON schemas of functions that the assistant may call."""

    messages: tuple[Message, ...]
    first_trained: int
    tools: tuple[Tool, ...] = ()

    def trained(self) -> list[int]:
        """Return the indices of the trained messages."""
        later = range(self.first_trained, len(self.messages))
        return [index for index in later if _is_trained(self.messages[index])]


@dataclass(frozen=True)
class Example:
    """One conversation, or the chosen and the rejected conversation of a pair."""

    conversations: tuple[Conversation, ...]
    where: str
    """File and row, for errors."""
    unanswered: bool = False
    """True if messages after the assistant's last one were left out."""
    label: bool | None = None
    """True if a labelled response is desirable."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt: the messages before the first trained one."""
        first = self.conversations[0]
        return first.messages[: first.first_trained]


def to_problem(config: DataConfig, row: Row, where: str) -> Problem:
    """Convert a row to a problem; `where` names the row in errors. Raises DataError: a column is missing, has a wrong
    type, or does not match `data.answer_pattern`."""
    if config.prompt_template is not None:
        prompt = [{"role": "user", "content": filled(config.prompt_template, row, where)}]
    elif config.prompt_column not in row and (chats := [name for name in CHAT_COLUMNS if name in row]):
        rule = f"no column '{config.prompt_column}', but '{chats[0]}': algorithm=sft trains on whole chats"
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
        raise DataError(f"{where}: the answer in column '{config.answer_column}' is blank")
    return Problem(chat(prompt, _system_prompt(config, row, config.prompt_column, where), where), answer, row)


def to_chat(config: DataConfig, row: Row, where: str) -> Example | LeftOut:
    """Convert a row of messages, or of a prompt and its response, to an example; `where` names the row in errors.
    Rows with a reward below `data.min_reward` and truncated samples are left out.

    Raises:
        DataError: a column is missing or has a wrong type, or the row has nothing to train on.
    """
    if config.min_reward is not None and not _is_rewarded(row, config.min_reward, where):
        return LeftOut(f"have no reward of at least data.min_reward = {config.min_reward:g}")
    if row.get(_ENDING) in _CUT:
        return LeftOut(f"are truncated (column '{_ENDING}')")
    name = _messages_column(config, row)
    if name is None:
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
    """Convert a row to a preference pair; `where` names the row in errors. Rows that prefer neither response are left
    out. Raises DataError: the layout is unknown, or a column has a wrong type."""
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
            f"{where}: has a completion and a label, as for algorithm=kto; a pair has a better and a worse response"
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
    """Convert a row to a labelled response; `where` names the row in errors. Raises DataError: a column is missing or
    has a wrong type."""
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
    """Convert a task's problem to a chat with its answer as the response. Raises DataError: there is no answer."""
    where = "a problem of the task"
    if not problem.answer:
        raise DataError(f"{where} {problem.metadata.get('task', '')} has no answer to train on")
    return Example((answered(problem.messages, problem.answer),), where)


def pair_of(problem: Problem) -> Example:
    """Pair the answer of a task's problem with its `mistake`. Raises DataError: the task has no mistakes."""
    if "mistake" not in problem.metadata:
        raise DataError("this task has only right answers: preference pairs need data=file or data=hub")
    responses = problem.answer, problem.metadata["mistake"]
    return Example(tuple(answered(problem.messages, response) for response in responses), "a problem of the task")


def labelled_of(problem: Problem) -> Example:
    """Label the answer of a task's problem, or its `mistake`; a hash of the problem chooses. Raises DataError: the task
    has no mistakes."""
    pair, desirable = pair_of(problem), zlib.crc32(str(problem.messages).encode()) % 2 == 0
    return replace(pair, conversations=(pair.conversations[0 if desirable else 1],), label=desirable)


def answered(messages: Sequence[Message], response: str) -> Conversation:
    """Return the prompt with the response as its trained message."""
    return Conversation((*messages, {"role": "assistant", "content": response}), len(messages))


def _is_rewarded(row: Row, least: float, where: str) -> bool:
    """Return whether the reward is at least `least`. Raises DataError: the column is missing or has a wrong type."""
    reward = row.get(_REWARD)
    if _REWARD not in row:
        raise DataError(f"{where}: no column '{_REWARD}', which data.min_reward reads")
    if reward is not None and not isinstance(reward, int | float):
        raise DataError(f"{where}: column '{_REWARD}' must be a number, found {reward!r:.80}")
    return reward is not None and reward >= least


def _is_trained(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _messages_column(config: DataConfig, row: Row) -> str | None:
    """Return `data.messages_column`, or a usual name of chat columns if the row has no prompt."""
    if config.messages_column is not None:
        return config.messages_column
    if config.prompt_template is not None or config.prompt_column in row:
        return None
    return next((name for name in CHAT_COLUMNS if isinstance(row.get(name), Sequence)), None)


def _system_prompt(config: DataConfig, row: Row, name: str, where: str) -> str | None:
    """Return the system prompt: the column `system` next to column `name`, as in ShareGPT's and Anthropic's formats,
    or `data.system_prompt`. With a prompt template, only the latter."""
    own = None if config.prompt_template is not None else find_column(row, _beside(row, name, "system"))
    is_parts = isinstance(own, list) and all(isinstance(part, Mapping) for part in own)
    if not own or not (isinstance(own, str) or is_parts):
        return config.system_prompt
    (system,) = read_messages([{"role": "system", "content": own}], f"{where}, column 'system'")
    return system["content"] if system["content"].strip() else config.system_prompt


def _tools(config: DataConfig, row: Row, name: str, where: str) -> tuple[Tool, ...]:
    """Return the tools in the column `data.tools_column`, or in `tools` or `functions` next to column `name`. Next to
    a prompt, a column with such a name that holds no tools is ignored."""
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
    """Return the path of column `other` in the structure of column `name`."""
    return other if name in row else ".".join((*name.split(".")[:-1], other))


def _asked(config: DataConfig, row: Row) -> object:
    """Return the prompt of a pair; None if chosen and rejected are whole chats. In LLaMA-Factory's format they are one
    message each, and the chat is the prompt."""
    names = CHAT_COLUMNS if isinstance(row[config.chosen_column], Mapping) else ()
    return next((row[name] for name in (config.prompt_column, *names) if row.get(name) is not None), None)


def _continued(asked: tuple[Message, ...], two: tuple[object, object], where: str) -> list[Conversation]:
    """Return two chats that continue the messages `asked`, or repeat them."""
    said = [_response(one, where) for one in two]
    repeats = [one[0]["role"] != "assistant" for one in said]
    if all(repeats):
        pair = _whole_chats(said[0], said[1], where)
        # The prompt may join all turns in one text, with other whitespace.
        texts = [" ".join(one["content"].split()) for one in (asked[-1], *pair[0].messages[: pair[0].first_trained])]
        if not any(text in texts[0] or texts[0] in text for text in texts[1:]):
            raise DataError(f"{where}: the two chats do not begin with the prompt")
        return pair
    if any(repeats):
        raise DataError(f"{where}: one response repeats the prompt, the other does not")
    return [_compared((*asked, *one), len(asked), where) for one in said]


def _response(value: object, where: str) -> tuple[Message, ...]:
    if isinstance(value, str | int | float):
        refuse_chat_as_text(str(value), f"{where}, the response")
        return ({"role": "assistant", "content": str(value)},)
    return read_messages([value] if isinstance(value, Mapping) else value, where)


def _whole_chats(chosen: tuple[Message, ...], rejected: tuple[Message, ...], where: str) -> list[Conversation]:
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise DataError(f"{where}: the two chats do not begin with the same message")
    if chosen != rejected and {one[common]["role"] for one in (chosen, rejected) if one[common:]} != {"assistant"}:
        raise DataError(f"{where}: the two chats have different prompts: they differ from message {common + 1} on")
    return [_compared(one, common, where) for one in (chosen, rejected)]


def _compared(messages: tuple[Message, ...], first: int, where: str) -> Conversation:
    """Return the chat whose response begins at message `first`. Raises DataError: the response cannot be trained on."""
    if len(messages) <= first or not first or messages[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: a response must end with a message of the assistant, after the messages of the prompt"
        )
    said = Conversation(messages, first)
    if not said.trained():
        raise DataError(f"{where}: a response has only messages of weight 0")
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
    """Conversion of rows and of task problems to training items."""

    name: str
    """Plural noun."""
    from_row: Callable[[DataConfig, Row, str], T | LeftOut]
    """Converts a row, or returns the reason to leave it out. The text names the row in errors."""
    from_problem: Callable[[Problem], T]
    reads_answers: bool = False
    """True if `data.answer_pattern` applies."""


def problems(tools: Sequence[Tool] = (), source: str = "") -> RowFormat[Problem]:
    """Return the format of problems of a source that offer the row's tools, or else `tools`."""

    def from_row(config: DataConfig, row: Row, where: str) -> Problem:
        own = callable_tools(row_tools(config, row, where), f"{where}, column '{config.tools_column}'")
        return replace(to_problem(config, row, where), tools=own or tuple(tools), source=source)

    def from_problem(problem: Problem) -> Problem:
        return replace(problem, tools=tuple(tools), source=source)

    return RowFormat("problems", from_row, from_problem, reads_answers=True)


PROBLEMS = problems()
CHATS = RowFormat[Example]("chats", to_chat, chat_of)
PAIRS = RowFormat[Example]("pairs", to_pair, pair_of)
UNPAIRED = RowFormat[Example]("labelled responses", to_labelled, labelled_of)
# Formats that need a wrong answer to each task problem.
NEEDS_NEGATIVES = (PAIRS, UNPAIRED)


def format_of(config: Config) -> RowFormat:
    """Return the row format of the configured algorithm."""
    return imported(algorithm_of(config).data)

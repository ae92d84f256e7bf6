"""Read preference pairs: a prompt, a chosen and a rejected continuation. This module imports nothing heavy.

The columns of a row decide which published layout it has:

- prompt, chosen, rejected: the prompt text or messages, each continuation text or messages;
- chosen, rejected: whole chats that begin with the same messages (UltraFeedback binarized, HH-RLHF as messages);
- context, completions: completions with ranks, the lowest rank being the best (NeMo-RL);
- context, response1, response2, overall_preference: negative where the first is better (HelpSteer3).
"""

from collections.abc import Mapping, Sequence

from nemo_rl_lite.config.sections.data import DataConfig
from nemo_rl_lite.data.columns import column, is_number, shown_columns
from nemo_rl_lite.data.conversations import Conversation, Example, answered
from nemo_rl_lite.data.messages import Message, read_messages
from nemo_rl_lite.data.problems import LeftOut, Problem, chat, with_system
from nemo_rl_lite.data.rows import Row
from nemo_rl_lite.errors import DataError

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
    return Example(tuple(_with_system(config, one) for one in pair), where)


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


def _with_system(config: DataConfig, one: Conversation) -> Conversation:
    messages = with_system(one.messages, config.system_prompt)
    return Conversation(messages, one.first_trained + len(messages) - len(one.messages), one.tools)

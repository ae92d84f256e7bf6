import json

import pytest

from nemo_rl_lite.data.formats import PROBLEMS
from nemo_rl_lite.data.problems import chat
from nemo_rl_lite.data.reverse_digits import ReverseDigits
from nemo_rl_lite.data.sources import training_set, validation_set
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config


def file_config(tmp_path, rows, **keys):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    overrides = [f"data.{key}={value}" for key, value in keys.items()]
    return compose_config(["data=file", f"data.train_path={path}", f"data.validation_path={path}", *overrides]).data


def test_training_never_sees_a_held_out_problem():
    task = ReverseDigits(num_digits=2, seed=3)
    held_out = {problem.answer for problem in task.validation(300)}
    assert len(held_out) == 25
    assert held_out.isdisjoint(task.problem(position).answer for position in range(2000))


def test_problems_depend_on_seed_and_position_alone():
    first, again, other = ReverseDigits(4, seed=1), ReverseDigits(4, seed=1), ReverseDigits(4, seed=2)
    assert [first.problem(i) for i in (5, 3, 9)] == [again.problem(i) for i in (5, 3, 9)]
    assert [first.problem(i) for i in range(20)] != [other.problem(i) for i in range(20)]
    assert first.validation(300) == other.validation(300)
    assert len(first.validation(1000)) == ReverseDigits.HELD_OUT
    problem = first.problem(0)
    assert problem.answer == problem.messages[0]["content"][::-1]


def test_a_file_is_reshuffled_each_epoch_and_complete_in_each(tmp_path):
    rows = [{"prompt": str(i), "answer": i} for i in range(10)]
    data = training_set(file_config(tmp_path, rows), seed=0, kind=PROBLEMS)
    epochs = [[data.problem(epoch * 10 + place).answer for place in range(10)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [data.problem(i).answer for i in range(10)] == epochs[0]
    in_order = training_set(file_config(tmp_path, rows, shuffle="false"), seed=0, kind=PROBLEMS)
    assert [in_order.problem(i).answer for i in range(12)] == [str(i % 10) for i in range(12)]


def test_columns_system_prompt_and_chats(tmp_path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [{"question": messages, "solution": "d"}]
    keys = {"prompt_column": "question", "answer_column": "solution", "system_prompt": "Be brief."}
    (problem,) = validation_set(file_config(tmp_path, rows, **keys), limit=5, kind=PROBLEMS)
    assert [message["role"] for message in problem.messages] == ["system", "user", "assistant", "user"]
    assert problem.answer == "d"


def test_a_bad_row_far_down_is_named(tmp_path):
    rows = [{"prompt": "x", "answer": "y"}] * 150 + [{"prompt": 7, "answer": "y"}]
    with pytest.raises(DataError, match=r"problems.jsonl, row 151: the prompt must be text"):
        training_set(file_config(tmp_path, rows), seed=0, kind=PROBLEMS)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([("bot", "2+2")], "message 1: its role must be one of .*found 'bot'"),
        ([("user", "2+2"), ("assistant", "4")], "ends with the assistant.*algorithm=sft"),
        ([("system", "brief"), ("user", " ")], "the prompt is empty"),
        ([("user", [{"type": "image"}])], "only parts of the type text"),
    ],
)
def test_prompts_that_ask_nothing_are_refused(messages, words):
    prompt = [{"role": role, "content": content} for role, content in messages]
    with pytest.raises(DataError, match=rf"^file, row 7.*{words}"):
        chat(prompt, None, "file, row 7")


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    assert chat([{"role": "user", "content": parts}]) == chat("2+2")

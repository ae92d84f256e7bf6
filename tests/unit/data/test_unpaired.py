"""Labelled responses are read as TRL has them, and errors say what is wrong with a row."""

import dataclasses

import pytest

from nemo_rl_lite.data.formats import labelled_of, to_labelled
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.data.reverse_digits import ReverseDigits
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.data.test_conversations import said
from tests.unit.data.test_examples import encoder

ASKED, GOOD = said("u:2+2"), said("a:4")


def labelled(row: dict, **changes: object):
    config = dataclasses.replace(compose_config(["algorithm=kto"]).data, **changes)
    return to_labelled(config, row, "f.jsonl, row 2")


@pytest.mark.parametrize("label", [True, False, 1, 0])
@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ({"prompt": "2+2", "completion": "4"}, {}),
        ({"prompt": ASKED, "completion": GOOD}, {}),
        ({"asked": "2+2", "said": "4"}, {"prompt_column": "asked", "response_column": "said"}),
    ],
)
def test_a_response_and_its_label(row, changes, label):
    found = labelled(row | {"label": label}, **changes)
    assert found.label is bool(label) and found.where == "f.jsonl, row 2"
    assert [one.messages for one in found.conversations] == [(*ASKED, *GOOD)] and found.messages == tuple(ASKED)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1", "completion": "2", "label": "yes"}, "must be true or false, found 'yes'"),
        ({"prompt": "1", "completion": "2"}, "needed: 'prompt', 'completion' and 'label'"),
        ({"prompt": "1", "completion": ASKED, "label": True}, "must end with a message of the assistant"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row, said):
    with pytest.raises(DataError, match=r"f\.jsonl, row 2") as error:
        labelled(row)
    assert said in str(error.value)


def test_a_task_gives_right_and_wrong_answers():
    task = ReverseDigits(num_digits=4, seed=1)
    problems = [task.problem(place) for place in range(40)]
    found = [labelled_of(problem) for problem in problems]
    assert {one.label for one in found} == {True, False}
    for problem, one in zip(problems, found, strict=True):
        response = one.conversations[0].messages[-1]["content"]
        assert response == (problem.answer if one.label else problem.metadata["mistake"])
    with pytest.raises(DataError, match="right answers only"):
        labelled_of(Problem(chat("1"), "1"))


def test_rows_of_tokens_have_the_label_as_reward(tmp_path):
    rows = encoder(tmp_path).rows(
        [labelled({"prompt": "12", "completion": "21", "label": label}) for label in (True, False)]
    )
    assert [row.reward for row in rows] == [1.0, 0.0]

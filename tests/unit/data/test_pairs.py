"""Preference pairs of every known published layout are read, and labelled responses as in TRL."""

import dataclasses
import json

import pytest

from nemo_rl_lite.data.examples import training_examples, validation_examples
from nemo_rl_lite.data.formats import PAIRS, labelled_of, pair_of, to_labelled, to_pair
from nemo_rl_lite.data.problems import LeftOut, Problem, chat
from nemo_rl_lite.data.sources import training_set
from nemo_rl_lite.data.tasks import ReverseDigits
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.data.test_conversations import said
from tests.unit.data.test_examples import CHATML, encoder

ASKED = said("u:2+2")
GOOD, BAD = said("a:4"), said("a:5")


def pair(row: dict, **changes: object):
    config = dataclasses.replace(compose_config(["algorithm=dpo"]).data, **changes)
    return to_pair(config, row, "f.jsonl, row 2")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": "2+2", "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
        {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
        {"prompt": None, "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
        {"context": ASKED, "completions": [{"rank": 1, "completion": BAD}, {"rank": 0, "completion": GOOD}]},
        {"context": ASKED, "response1": "4", "response2": "5", "overall_preference": -2},
        {"context": "2+2", "response1": "5", "response2": "4", "overall_preference": 1},
    ],
    ids=["text", "messages", "repeated prompt", "whole chats", "null prompt", "NeMo-RL", "HelpSteer3", "HelpSteer3, 2"],
)
def test_the_same_pair_in_every_layout(row):
    found = pair(row)
    assert found.messages == tuple(ASKED) and found.where == "f.jsonl, row 2"
    assert [said.messages for said in found.conversations] == [(*ASKED, *GOOD), (*ASKED, *BAD)]
    assert [said.trained() for said in found.conversations] == [[1], [1]]


@pytest.mark.parametrize("asked", ["2+2", "2+2 ", "Human: 2+2 Assistant:", [*said("s:brief"), *ASKED]])
def test_a_prompt_that_is_repeated_otherwise_is_still_there_once(asked):
    chosen, rejected = ([*said("s:brief"), *ASKED, *response] for response in (GOOD, BAD))
    found = pair({"prompt": asked, "chosen": chosen, "rejected": rejected})
    assert [one.messages for one in found.conversations] == [tuple(chosen), tuple(rejected)]
    assert [one.trained() for one in found.conversations] == [[2], [2]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1", "chosen": "2", "rejected": "2"},
        {"chosen": said("u:1", "a:2"), "rejected": said("u:1", "a:2")},
        {"context": "1", "response1": "2", "response2": "3", "overall_preference": 0},
    ],
)
def test_rows_that_prefer_neither_are_left_out_and_counted(row, tmp_path, caplog):
    assert isinstance(pair(row), LeftOut)
    rows = [{"prompt": str(number), "chosen": "2", "rejected": "3"} for number in range(4)] + [row] * 2
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = dataclasses.replace(
        compose_config(["algorithm=dpo"]).data, name="file", train_path=str(tmp_path / "pairs.jsonl")
    )
    assert len(training_set(config, seed=0, kind=PAIRS).finite()) == 4
    assert "2 of 6 rows prefer neither response and were left out" in caplog.text


TRIMMING = CHATML.replace("m.content", "m.content | trim")
LONG = "long " * 20
ALIKE = [
    (TRIMMING, {"prompt": "1", "chosen": "yes", "rejected": "yes "}, "error"),
    (TRIMMING, {"prompt": "1", "chosen": "", "rejected": "\n"}, "error"),
    (TRIMMING, {"chosen": said("u:1", "a:yes"), "rejected": said("u:1", "a: yes")}, "drop"),
    (CHATML, {"prompt": "1", "chosen": LONG + "2", "rejected": LONG + "3"}, "truncate"),
    (None, {"prompt": "1", "chosen": LONG + "2", "rejected": LONG}, "truncate"),
]


@pytest.mark.parametrize("algorithm", ["dpo", "orpo"])
@pytest.mark.parametrize(("template", "row", "too_long"), ALIKE)
def test_pairs_of_the_same_tokens_are_left_out_and_counted(template, row, too_long, algorithm, tmp_path, caplog):
    rows = [{"prompt": str(number), "chosen": "2", "rejected": "3 or so"} for number in range(4)] + [row] * 2
    folder = tmp_path / "100%d"
    folder.mkdir()
    config = pairs_config(folder, algorithm, rows)
    encoded = encoder(folder, template, max_length=60, too_long=too_long)
    data = training_examples(config, encoded)
    words = "rows.jsonl: 2 of 6 pairs prefer neither response (their tokens are the same) and were left out"
    assert words in caplog.text and len(data.examples.finite()) == 4
    assert len(validation_examples(config, encoded)) == 2 * 4 and caplog.text.count(words) == 2
    for step in range(data.steps_per_epoch or 0):
        chosen, rejected = data.rows(step)[:2]
        assert chosen.tokens != rejected.tokens


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_pairs_that_differ_are_an_error(count, tmp_path):
    rows = [{"prompt": "1", "chosen": "2", "rejected": "3"}] * count + [ALIKE[0][1]] * 3
    config = pairs_config(tmp_path, "dpo", rows)
    words = rf"rows.jsonl: {count} pairs do not fill .* = 2; the others prefer neither response .*\(3\)"
    with pytest.raises(DataError, match=words):
        training_examples(config, encoder(tmp_path, TRIMMING))
    if not count:
        with pytest.raises(DataError, match="no pairs are left to validate on: they prefer neither response"):
            validation_examples(config, encoder(tmp_path, TRIMMING))


def test_a_long_pair_is_counted_once(tmp_path, caplog):
    rows = [{"prompt": "1", "chosen": "2", "rejected": "3"}] * 2 + [{"prompt": LONG, "chosen": "2", "rejected": "2 "}]
    training_examples(pairs_config(tmp_path, "dpo", rows), encoder(tmp_path, TRIMMING, 60, "drop"))
    assert "1 of 3 pairs are longer" in caplog.text and "1 were dropped" in caplog.text
    assert "prefer neither" not in caplog.text


def pairs_config(folder, algorithm: str, rows: list[dict]):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [f"data.{kind}_path='{file}'" for kind in ("train", "validation")]
    sizes = ["policy.train_global_batch_size=2", "policy.train_micro_batch_size=2"]
    return compose_config([f"algorithm={algorithm}", "data=file", *paths, *sizes])


def test_columns_and_the_system_prompt_can_be_named():
    row = {"question": "2+2", "good": "4", "bad": "5"}
    found = pair(row, prompt_column="question", chosen_column="good", rejected_column="bad", system_prompt="brief")
    assert [message["content"] for message in found.messages] == ["brief", "2+2"]
    assert all(said.trained() == [2] for said in found.conversations)


def test_a_longer_common_beginning_is_what_is_asked(tmp_path):
    """Both chats share an assistant turn, which is not trained on, and the start of their last turns."""
    turns = [*ASKED, *said("a:4", "u:and 1")]
    found = pair({"chosen": [*turns, *said("a:5 of course")], "rejected": [*turns, *said("a:5 or 6")]})
    assert found.messages == tuple(turns)
    rows = encoder(tmp_path).rows([found])
    prompt = len(encoder(tmp_path).tokenizer.prompt(turns))
    for row, text in zip(rows, ("5 of course", "5 or 6"), strict=True):
        assert row.mask[:prompt] == [False] * prompt
        assert sum(row.mask) == len(text) + 1


def test_an_empty_response_can_be_the_worse_one(tmp_path):
    rows = encoder(tmp_path).rows([pair({"prompt": "2+2", "chosen": "4", "rejected": ""})])
    assert [sum(row.mask) for row in rows] == [2, 1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1"}, "no columns of a preference pair .*columns: prompt"),
        ({"prompt": "1", "chosen": None, "rejected": "2"}, "column 'chosen' is null"),
        ({"chosen": said("u:1", "a:2"), "rejected": said("u:3", "a:2")}, "do not begin with the same message"),
        (
            {"prompt": "1", "chosen": said("a:2", "u:3"), "rejected": said("a:2")},
            "must end with a message of the assistant",
        ),
        ({"context": "1", "completions": [{"rank": 0, "completion": "2"}]}, "completions of two ranks"),
        ({"prompt": "3+3", "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]}, "do not begin with the prompt"),
        ({"chosen": said("s:1", "u:2", "a:3"), "rejected": said("s:1", "u:4", "a:3")}, "they differ from message 2"),
    ],
)
def test_rows_that_are_no_pair_are_named(row, words):
    with pytest.raises(DataError, match=rf"^f.jsonl, row 2.*{words}"):
        pair(row)


@pytest.mark.parametrize("digits", ["1234", "1112", "7777"])
def test_the_embedded_task_makes_a_mistake_for_each_answer(digits):
    found = pair_of(ReverseDigits(4, seed=0).problem_of(digits))
    right, wrong = (said.messages[-1]["content"] for said in found.conversations)
    assert right == digits[::-1] != wrong and len(wrong) == len(right)


@pytest.mark.parametrize("make", [pair_of, labelled_of])
def test_a_task_of_right_answers_has_no_pairs(make):
    with pytest.raises(DataError, match=r"only right answers.*data=file or data=hub"):
        make(Problem(chat("1+1"), "2"))


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
    problems = list(map(ReverseDigits(num_digits=4, seed=1).problem, range(40)))
    found = [labelled_of(problem) for problem in problems]
    assert {one.label for one in found} == {True, False}
    for problem, one in zip(problems, found, strict=True):
        response = one.conversations[0].messages[-1]["content"]
        assert response == (problem.answer if one.label else problem.metadata["mistake"])


def test_rows_of_tokens_have_the_label_as_reward(tmp_path):
    rows = encoder(tmp_path).rows(
        [labelled({"prompt": "12", "completion": "21", "label": label}) for label in (True, False)]
    )
    assert [row.reward for row in rows] == [1.0, 0.0]

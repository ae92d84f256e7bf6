"""Rows that a built-in reward cannot use are known before a run starts anything."""

import pytest
from nemo_rl_lite.rewards.rows import check_rows

from nemo_rl_lite.data.problems import FileSet, Problem, chat
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.rules.compose import compose_config

GOOD = {"tests": "assert f(1) == 2"}


def check(reward: str, rows: list[dict], *arguments: str) -> None:
    problems = [Problem(chat(f"prompt {number}"), row.get("answer", ""), row) for number, row in enumerate(rows)]
    check_rows(compose_config([f"reward={reward}", *arguments]).reward, FileSet(tuple(problems), 0, shuffle=True))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{}] * 4, "4 of 4 rows cannot be judged, such as: the row has no tests in its column tests .*'prompt 0'"),
        ([GOOD, {"tests": ""}], "1 of 2 rows cannot be judged"),
        ([{"tests": "assert True"}], "an empty program passes the tests in the column tests .*'prompt 0'"),
    ],
)
def test_programs_that_nothing_judges(rows, words):
    with pytest.raises(DataError, match=words):
        check("program", rows)


def test_a_few_rows_without_tests_are_noted(capsys):
    check("program", [GOOD] * 9 + [{}])
    assert "note: reward.name = program: 1 of 10 rows cannot be judged" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"reward\.kwargs\.tests_column"):
        check("program", [GOOD] * 9 + [{}], "reward.max_error_share=0.05")


ODD = {
    "math": ["Paris is the capital, since it has 8817", "\\frac{1}{2}", "no solution", "\\text{all of the numbers}"],
    "last_number": ["twelve", "1,200", "-3.5", "1e-5"],
}


@pytest.mark.parametrize("reward", ODD)
def test_answers_that_a_reward_cannot_compare_are_noted(reward, capsys):
    answers = ODD[reward]
    check(reward, [{"answer": answer} for answer in answers])
    told = capsys.readouterr().err
    assert f"the answer of 1 of {len(answers)} rows" in told and repr(answers[0]) in told
    check(reward, [{"answer": answer} for answer in answers[1:]])
    assert not capsys.readouterr().err


def test_empty_answers_are_noted_where_others_are_not(capsys):
    check("exact_match", [{"answer": ""}, {"answer": "1"}])
    assert "the answer of 1 of 2 rows is empty" in capsys.readouterr().err
    # Where no row has an answer, the environment judges.
    check("exact_match", [{"answer": ""}] * 2)
    assert not capsys.readouterr().err

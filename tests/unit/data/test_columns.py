import pytest

from nemo_rl_lite.data.columns import to_problem
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config

WORKED = {"question": "Ann has 2 boxes of 600 nails. How many?", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}


def data(**keys):
    config = compose_config()
    return config.data.__class__(**(vars(config.data) | {"prompt_column": "question"} | keys))


def gsm8k(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}')
    return compose_config(["data=gsm8k", f"data.train_path={path}", f"data.validation_path={path}"]).data


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("a\n#### 42", "42"), ("#### 1,234,567", "1234567"), ("#### -3.5", "-3.5"), ("####7", "7"), ("#### 10.", "10")],
)
def test_gsm8k_answers(tmp_path, solution, answer):
    problem = to_problem(gsm8k(tmp_path), {"question": "?", "answer": solution}, "here")
    assert problem.answer == answer
    assert problem.messages == ({"role": "user", "content": "?"},)


def test_only_the_thousands_commas_of_a_number_found_by_a_pattern_are_dropped():
    row = {"question": "?", "answer": "1,200"}
    assert to_problem(data(), row, "here").answer == "1,200"
    assert to_problem(data(answer_pattern="(.*)"), row, "here").answer == "1200"
    assert to_problem(data(answer_pattern="(.*)"), row | {"answer": "1,2"}, "here").answer == "1,2"


def test_a_template_fills_in_columns_and_keeps_plain_braces():
    config = data(prompt_template="{question}\nWrite \\boxed{{}}, as {n} people do.", system_prompt="Be brief.")
    problem = to_problem(config, WORKED | {"n": 3}, "here")
    assert [message["role"] for message in problem.messages] == ["system", "user"]
    assert problem.messages[1]["content"] == WORKED["question"] + "\nWrite \\boxed{}, as 3 people do."
    assert problem.metadata["n"] == 3


def test_braces_inside_a_column_stay_as_they_are():
    row = {"question": "What is {answer}?", "answer": "secret"}
    assert to_problem(data(prompt_template="{question}!"), row, "x").messages[0]["content"] == "What is {answer}?!"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "4"}, r"row 3: no column 'question' \(columns: answer\)"),
        ({"question": None, "answer": "4"}, "row 3: column 'question' is null"),
        ({"question": ["a"], "answer": "4"}, "row 3: column 'question' must be text"),
    ],
)
def test_rows_a_template_cannot_use_are_named(row, message):
    with pytest.raises(DataError, match=message):
        to_problem(data(prompt_template="{question}?"), row, "row 3")


@pytest.mark.parametrize(("value", "answer"), [(7.0, "7"), (-0.0, "0"), (7.5, "7.5"), (2.0**53, "9007199254740992.0")])
def test_whole_numbers_are_written_without_a_point(value, answer):
    """Parquet makes 7.0 of a 7 in a column with gaps."""
    assert to_problem(data(), {"question": "?", "answer": value}, "here").answer == answer

"""reward=math judges every pair of scripts/bench/answers.tsv rightly, and reads long responses fast."""

import json
import time

import answers
import pytest

from nemo_rl_lite.rewards.answers import find_answer
from nemo_rl_lite.rewards.mathematics import same_value
from nemo_rl_lite.rewards.numbers import last_number_in
from tests.unit.pages import ROOT


def test_the_table_is_judged_rightly():
    pairs = answers.read_pairs()
    assert len(pairs) >= 300 and {one.right for one in pairs} == {"0", "1", "error"}
    assert answers.wrongly_judged(pairs, same_value) == []


def test_the_record_is_of_the_whole_table():
    found = json.loads((ROOT / "docs" / "benchmarks" / "answers-cpu.json").read_text())
    assert found["bars"][0]["value"] == len(answers.read_pairs()) and all(bar["met"] for bar in found["bars"])
    paid = [f"{one['median']} of" for one in found["results"] if one["name"] == "right answers paid"]
    page = (ROOT / "docs" / "math_reward.md").read_text()
    assert f"{found['bars'][0]['value']:,} responses" in page and all(words in page for words in paid)


PIECES = (
    *(r"\boxed{", r"\boxed{1}", r"\[", r"\(", "$", "$1$ ", "**1** ", "`", "<answer>", "<think>x</think>", "answer is "),
    *(
        "1 ",
        "1, ",
        "1:",
        "a ",
        "\n",
        "(",
        "{",
        "=",
        r"\frac",
        r"\begin{align}",
        "<a",
        "-",
        "1,234",
        "1 x 10^",
        "答",
        "9",
        "1e9",
    ),
)


@pytest.mark.parametrize("piece", PIECES)
def test_long_responses_are_read_fast(piece):
    text = piece * (64_000 // len(piece))
    began = time.process_time()
    find_answer(text)
    last_number_in(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "answer",
    [
        "5 " + 300 * "a" + "?",
        "9" * 5000,
        "1e" + "9" * 5000,
        "5 m" + "^2" * 1000 + "?",
        "1:" * 1000,
        "\\boxed{1}," + " " * 9000 + "x\\boxed{2}",
        "(" * 3000,
    ],
)
def test_long_answers_are_compared_fast_and_raise_nothing(answer):
    began = time.process_time()
    assert same_value(f"\\boxed{{{answer}}}", "7") == 0.0
    assert time.process_time() - began < 5

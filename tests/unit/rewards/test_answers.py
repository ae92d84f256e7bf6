"""reward=math judges every pair of scripts/bench/answers.tsv rightly, and reads long responses fast."""

import json
import sys
import time

import pytest

from nemo_rl_lite.rewards.answers import find_answer
from nemo_rl_lite.rewards.mathematics import same_value
from nemo_rl_lite.rewards.numbers import last_number_in
from tests.unit.pages import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import answers


def test_the_table_is_judged_rightly():
    pairs = answers.read_pairs()
    assert len(pairs) >= 300 and {one.right for one in pairs} == {"0", "1", "error"}
    assert answers.wrongly_judged(pairs, same_value) == []


def test_the_record_is_of_the_whole_table():
    found = json.loads((ROOT / "docs" / "benchmarks" / "answers-cpu.json").read_text())
    assert found["bars"][0]["value"] == len(answers.read_pairs()) and all(bar["met"] for bar in found["bars"])


PIECES = (
    *(r"\boxed{", r"\boxed{1}", r"\[", r"\(", "$", "$1$ ", "**1** ", "`", "<answer>", "<think>x</think>", "answer is "),
    *("1 ", "1, ", "1:", "a ", "\n", "(", "{", "=", r"\frac", r"\begin{align}", "<a", "-", "1,234", "1 x 10^", "答"),
)


@pytest.mark.parametrize("piece", PIECES)
def test_long_responses_are_read_fast(piece):
    text = piece * (64_000 // len(piece))
    began = time.process_time()
    find_answer(text)
    last_number_in(text)
    assert time.process_time() - began < 5

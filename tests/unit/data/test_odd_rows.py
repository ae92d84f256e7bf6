"""What is odd about all rows of a file is told: a wrong column, another template, rows that are trained on."""

import pytest

from nemo_rl_lite.data.formats import CHATS, PAIRS, PROBLEMS
from nemo_rl_lite.data.sources import training_set, validation_set
from tests.unit.data.test_sources import config, write

OFF = ("algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=0")
SMALL = "policy.train_global_batch_size=1"


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def twice(text: str) -> list[dict[str, str]]:
    return [message("user", text), message("assistant", "a"), message("assistant", text)]


ALPACA = [{"prompt": "reverse", "input": f"{i}", "answer": f"{-i}"} for i in range(10)]
ODD = {
    "another column belongs to the prompt": (PROBLEMS, ALPACA, "9 of 10 rows ask what another row asks"),
    "several answers are right": (PROBLEMS, ALPACA, "'reverse' with 10 different answers: does data.prompt_column"),
    "the same in chats": (CHATS, ALPACA, "9 of 10 rows ask what another row asks"),
    "rows are there twice": (
        PROBLEMS,
        [{"prompt": f"{i % 5}", "answer": i % 5} for i in range(10)],
        "5 of 10 rows ask",
    ),
    "the answer is a label": (PROBLEMS, [{"prompt": f"{i}", "answer": "gsm8k"} for i in range(10)], "answer, 'gsm8k'"),
    "samples are there twice": (
        CHATS,
        [{"prompt": f"{i % 2}", "answer": f"{i % 5}", "reward": 1.0} for i in range(20)],
        "10 of 20 rows have the prompt and the response of another row",
    ),
    "a column of samples is wrong": (
        CHATS,
        [{"prompt": "train", "answer": f"{i}", "reward": 1.0} for i in range(10)],
        "9 of 10 rows ask what another row asks, such as 'train'",
    ),
    "chats are there twice": (
        CHATS,
        [{"messages": [message("user", f"{i % 5}"), message("assistant", "a")]} for i in range(10)],
        "5 of 10 rows have the prompt and the response of another row",
    ),
    "a problem is there several times, with a reward": (
        PROBLEMS,
        [{"prompt": f"{i % 5}", "answer": f"{i % 5}", "reward": 1.0} for i in range(10)],
        "5 of 10 rows ask what another row asks",
    ),
    "nobody asks": (
        PROBLEMS,
        [{"prompt": [message("system", f"{i}")], "answer": i} for i in range(10)],
        "10 of 10 rows have no message of the user",
    ),
    "a response has the prompt": (
        CHATS,
        [{"prompt": f"{i} ?", "answer": f"{i} ? {-i}"} for i in range(10)],
        "10 of 10 rows have a response that repeats the prompt, such as the one that asks '0 ?'",
    ),
    "both responses have the prompt": (
        PAIRS,
        [{"prompt": "Q:", "chosen": f"Q: {i}", "rejected": f"Q: {-1 - i}"} for i in range(10)],
        "10 of 10 rows have a response that repeats the prompt",
    ),
    "a turn is missing": (
        CHATS,
        [{"messages": twice(f"{i}")} for i in range(10)],
        "10 of 10 rows have two messages of the assistant in a row",
    ),
    "columns are exchanged": (
        PAIRS,
        [{"prompt": "x", "chosen": f"{i}", "rejected": "r", "score_chosen": 1, "score_rejected": 2} for i in range(10)],
        "score_chosen is less than score_rejected in 10 of 10 rows",
    ),
}
FINE = {
    "a few repeat": (PROBLEMS, [{"prompt": f"{max(i, 2)}", "answer": i} for i in range(10)]),
    "few rows": (PROBLEMS, [{"prompt": "x", "answer": "1"}] * 3),
    "several pairs for a prompt": (PAIRS, [{"prompt": "x", "chosen": f"{i}", "rejected": "r"} for i in range(10)]),
    "several samples of a prompt": (
        CHATS,
        [{"prompt": f"{i % 2}", "answer": f"{i}", "reward": 1.0} for i in range(10)],
    ),
    "chats that begin alike": (
        CHATS,
        [{"messages": [message("user", "hi"), message("assistant", f"{i}")]} for i in range(9)]
        + [{"messages": [message("user", "ho"), message("assistant", "9")]}],
    ),
    "an echo": (CHATS, [{"prompt": f"{i}", "answer": f"{i}"} for i in range(10)]),
    "scores": (
        PAIRS,
        [
            {"prompt": "x", "chosen": f"{i}", "rejected": "r", "score_chosen": 2, "score_rejected": None}
            for i in range(9)
        ],
    ),
}


def load(tmp_path, rows, kind):
    path = write(tmp_path / "rows.jsonl", rows)
    algorithm = next(name for name, one in (("grpo", PROBLEMS), ("sft", CHATS), ("dpo", PAIRS)) if one is kind)
    training_set(config(f"algorithm={algorithm}", "data=file", f"data.train_path={path}", SMALL, *OFF), 0, kind)


@pytest.mark.parametrize("what", ODD)
def test_odd_rows_are_told(what, tmp_path, caplog):
    kind, rows, words = ODD[what]
    load(tmp_path, rows, kind)
    assert words in caplog.text


@pytest.mark.parametrize("what", FINE)
def test_usual_rows_are_not(what, tmp_path, caplog):
    kind, rows = FINE[what]
    load(tmp_path, rows, kind)
    assert not caplog.messages


def test_rows_for_validation_that_are_trained_on_are_counted(tmp_path, caplog):
    rows = [{"prompt": f"{i}", "answer": f"{-i}"} for i in range(10)]
    write(tmp_path / "train.jsonl", rows)
    held_out = write(tmp_path / "held_out.jsonl", [*rows[:3], {"prompt": "3", "answer": "4"}])
    data = config("data=file", f"data.train_path={tmp_path / 'train.jsonl'}", f"data.validation_path={held_out}")
    validation_set(data, 100, PROBLEMS, training_set(data, 0, PROBLEMS).finite())
    assert caplog.messages == [f"{held_out}: 3 of the 4 rows for validation are trained on, too"]

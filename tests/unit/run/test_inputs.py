"""Functions and rows in memory become files that other processes read."""

import asyncio
import datetime
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from nemo_rl_lite.config.user_code import imported, own_name
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.rows import file_rows
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.rewards.builtin import exact_match
from nemo_rl_lite.rewards.judge import RewardResult, make_judge
from nemo_rl_lite.rewards.registry import RewardError
from nemo_rl_lite.run.inputs import Inputs
from nemo_rl_lite.validation.compose import compose_config

ROWS = [{"prompt": "é", "answer": 7}, {"prompt": [{"role": "user", "content": "a\nb"}], "answer": None}]


def read(path):
    return [dict(row) for _, row in file_rows(path)]


def test_rows_of_every_kind_are_the_rows_of_a_file(tmp_path):
    inputs = Inputs(tmp_path)
    assert read(inputs.rows("data", ROWS)) == ROWS
    assert read(inputs.rows("data", (row for row in ROWS))) == ROWS
    arrays = [{"prompt": "x", "answer": np.int64(3), "parts": np.array([1, 2])}]
    assert read(inputs.rows("data", arrays)) == [{"prompt": "x", "answer": 3, "parts": [1, 2]}]


def test_rows_of_datasets_and_pandas(tmp_path):
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    rows = [{"prompt": "a", "answer": 1.5}, {"prompt": "b", "answer": None}]
    inputs = Inputs(tmp_path)
    assert read(inputs.rows("data", datasets.Dataset.from_list(rows))) == rows
    assert read(inputs.rows("data", pandas.DataFrame(rows))) == rows
    with pytest.raises(DataError, match=r"data: is a mapping \(prompt\); give rows, .*Dataset.from_dict\(data\)"):
        inputs.rows("data", {"prompt": ["1", "2"]})
    with pytest.raises(DataError, match=r"data: is a mapping \(train, test\); .* data=data\['train'\]"):
        inputs.rows("data", datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=None))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], "text"], "eval_data, row 2: is a str; a row is a dictionary"),
        ([{"when": datetime.date(2026, 1, 1)}], "eval_data, row 1: cannot be written as JSON: a date"),
    ],
)
def test_an_unusable_row_is_named(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        Inputs(tmp_path).rows("eval_data", rows)


def test_a_function_travels_with_what_it_uses_to_another_process(tmp_path):
    weights = {"a": 2.0}

    def score(response, answer):
        return weights[response]

    path = Inputs(tmp_path).path_of("reward", score)
    assert own_name(path) == "score"
    code = f"from nemo_rl_lite.config.user_code import imported\nprint(imported({path!r})('a', ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "2.0\n"


def test_a_function_in_memory_that_hangs_is_ended_in_time(tmp_path):
    def score(response, answer):
        while response == "hangs":
            pass
        return 1.0

    config = replace(compose_config().reward, name=Inputs(tmp_path).path_of("reward", score), timeout_s=0.5)
    problem = Problem(({"role": "user", "content": "?"},), "")

    async def judged():
        judge = make_judge(config)
        return [await judge(response, problem) for response in ("ends", "hangs", "ends")]

    first, late, last = asyncio.run(judged())
    assert first == last == RewardResult(1.0)
    assert isinstance(late, RewardError) and "reward.timeout_s" in str(late)


def test_what_can_be_imported_goes_by_its_name(tmp_path):
    assert Inputs(tmp_path).path_of("reward", exact_match) == "nemo_rl_lite.rewards.builtin.exact_match"
    for one, label in ((lambda response, answer: 1.0, "lambda"), (partial(max, 1), "partial")):
        path = Inputs(tmp_path).path_of("reward", one)
        assert own_name(path) == label and callable(imported(path))


def test_a_class_has_one_name_in_every_process():
    code = (
        "import pathlib, tempfile\nfrom nemo_rl_lite.run.inputs import Inputs\n"
        "class Score:\n    def __call__(self, response, answer):\n        return 1.0\n"
        "print(Inputs(pathlib.Path(tempfile.mkdtemp())).path_of('reward', Score).rpartition('/')[2])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in "12"]
    assert runs[0].stdout == runs[1].stdout != ""


def test_errors_name_values_and_not_their_files(tmp_path):
    inputs = Inputs(tmp_path)
    rows, code = inputs.rows("data", ROWS), inputs.path_of("reward", lambda: 0)
    with pytest.raises(ConfigError, match=r"data.train_path = 'data'\n +data, row 1: .*lambda\n"), inputs.named():
        raise ConfigError([Violation("data.train_path", rows, f"{rows}, row 1: no fit for {code}", "a fix")])
    with pytest.raises(DataError, match=r"^data: no rows$"), inputs.named():
        raise DataError(f"{rows}: no rows")


def test_what_cannot_be_pickled_is_an_error_of_its_key(tmp_path):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"(?s)reward = .*cannot be sent to other processes: TypeError.*lock"):
        Inputs(tmp_path).path_of("reward", lambda response, answer: lock)


def test_a_folder_keeps_the_files_of_earlier_runs(tmp_path):
    for rows in (ROWS, ROWS[:1], ROWS):
        (staged := tmp_path / "staged").mkdir(exist_ok=True)
        inputs = Inputs(staged)
        assert inputs.rows("data", rows) == inputs.rows("data", rows)
        inputs.copy_to(tmp_path / "run")
        assert read(inputs.rows("data", rows)) == rows
        assert inputs.rows("data", rows).startswith(str(tmp_path / "run" / "inputs"))
    assert len(list((tmp_path / "run" / "inputs").iterdir())) == 2

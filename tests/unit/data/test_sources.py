import json

import pytest

from nemo_rl_lite.data.formats import PAIRS, PROBLEMS
from nemo_rl_lite.data.sources import training_set, validation_set
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config

ROWS = [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(400)]


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def config(*arguments):
    return compose_config(list(arguments)).data


def split(tmp_path, ending, rows=ROWS, fraction=0.1):
    path = write(tmp_path / f"rows{ending}", rows)
    return config("data=file", f"data.train_path={path}", f"data.validation_fraction={fraction}")


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_a_fraction_is_held_out_and_never_trained_on(tmp_path, ending):
    data = split(tmp_path, ending)
    held_out = {problem.messages[0]["content"] for problem in validation_set(data, limit=1000, kind=PROBLEMS)}
    trained = {problem.messages[0]["content"] for problem in training_set(data, seed=0, kind=PROBLEMS).finite()}
    assert 20 <= len(held_out) <= 60
    assert held_out.isdisjoint(trained) and len(held_out | trained) == 400
    assert validation_set(data, limit=5, kind=PROBLEMS) == validation_set(data, limit=1000, kind=PROBLEMS)[:5]


def test_rows_that_ask_the_same_are_on_the_same_side(tmp_path):
    data = split(tmp_path, ".jsonl", [{"prompt": f"{i % 20}", "answer": i} for i in range(400)], fraction=0.3)
    held_out = {problem.messages[0]["content"] for problem in validation_set(data, limit=1000, kind=PROBLEMS)}
    assert held_out.isdisjoint(
        problem.messages[0]["content"] for problem in training_set(data, seed=0, kind=PROBLEMS).finite()
    )


def test_what_is_held_out_depends_on_neither_seed_nor_the_other_rows(tmp_path):
    data, other = split(tmp_path, ".jsonl"), split(tmp_path, ".json", ROWS[::-1][:200])
    held_out = {problem.messages[0]["content"] for problem in validation_set(data, limit=1000, kind=PROBLEMS)}
    assert {problem.messages[0]["content"] for problem in validation_set(other, limit=1000, kind=PROBLEMS)} < held_out
    first, second = training_set(data, seed=1, kind=PROBLEMS), training_set(data, seed=2, kind=PROBLEMS)
    assert set(map(str, first.finite())) == set(map(str, second.finite()))


def test_parquet_holds_chats_too(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = write(tmp_path / "chats.parquet", [{"prompt": chat, "answer": "d"}])
    data = config("data=file", f"data.train_path={path}", f"data.validation_path={path}")
    assert training_set(data, seed=0, kind=PROBLEMS).problem(0).messages == tuple(chat)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Make a folder that stands for a dataset of the hub, with two splits."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    write(folder / "train.jsonl", ROWS)
    write(folder / "test.jsonl", ROWS[:7])
    return ["data=hub", f"data.path={folder}"]


def test_splits_of_a_hub_dataset(hub):
    data = config(*hub, "data.validation_split=test", "data.shuffle=false")
    assert training_set(data, seed=0, kind=PROBLEMS).problem(1).answer == "2"
    assert len(validation_set(data, limit=100, kind=PROBLEMS)) == 7
    with pytest.raises(DataError, match=r"data.train_split = all: .* has no such split \(splits: train, test\)"):
        training_set(config(*hub, "data.validation_split=test", "data.train_split=all"), seed=0, kind=PROBLEMS)
    with pytest.raises(DataError, match=r"split train, row 1: no column 'question' \(columns: prompt, answer\)"):
        training_set(config(*hub, "data.validation_split=test", "data.prompt_column=question"), seed=0, kind=PROBLEMS)


def test_a_fraction_of_a_hub_split_is_held_out(hub):
    data = config(*hub, "data.validation_fraction=0.2")
    held_out = {problem.answer for problem in validation_set(data, limit=1000, kind=PROBLEMS)}
    assert held_out and held_out.isdisjoint(
        problem.answer for problem in training_set(data, seed=0, kind=PROBLEMS).finite()
    )


def test_the_gsm8k_preset_serves_files_and_the_hub(monkeypatch):
    import datasets

    seen = []
    splits = {"train": [{"question": "1 + 1?", "answer": "#### 2"}], "test": [{"question": "0?", "answer": "#### 0"}]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: seen.append(names) or splits)
    data = config("data=gsm8k", "data.name=hub")
    assert (
        training_set(data, seed=0, kind=PROBLEMS).problem(0).answer == "2"
        and validation_set(data, 5, kind=PROBLEMS)[0].answer == "0"
    )
    assert seen == [("openai/gsm8k", "main")] * 2


def loaded(tmp_path, rows, *arguments, kind=PROBLEMS, fraction=0.5):
    path = write(tmp_path / "rows.jsonl", rows)
    data = config("data=file", f"data.train_path={path}", f"data.validation_fraction={fraction}", *arguments)
    training_set(data, seed=0, kind=kind)
    validation_set(data, limit=1000, kind=kind)


def test_pairs_that_prefer_nothing_are_counted_once(tmp_path, caplog):
    rows = [{"prompt": f"{i}", "chosen": "a", "rejected": "ab"[i > 0]} for i in range(30)]
    loaded(tmp_path, rows, "algorithm=dpo", "policy.train_global_batch_size=8", kind=PAIRS)
    assert caplog.messages == ["1 of 30 rows prefer neither response and were left out"]


def test_rows_for_validation_that_are_trained_on_are_counted(tmp_path, caplog):
    rows = [{"prompt": f"{i}", "answer": f"{-i}"} for i in range(10)]
    write(tmp_path / "train.jsonl", rows)
    held_out = write(tmp_path / "held_out.jsonl", [*rows[:3], {"prompt": "3", "answer": "4"}])
    data = config("data=file", f"data.train_path={tmp_path / 'train.jsonl'}", f"data.validation_path={held_out}")
    validation_set(data, 100, PROBLEMS, training_set(data, 0, PROBLEMS).finite())
    assert caplog.messages == [f"{held_out}: 3 of the 4 rows for validation are trained on, too"]

"""Training and validation sets of files and hub datasets, and what is told about their rows."""

import json

import pytest

from nemo_rl_lite.data.formats import PAIRS, PROBLEMS
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.data.rows import file_rows
from nemo_rl_lite.data.sources import data_identity, training_set, validation_set
from nemo_rl_lite.errors import ConfigError, DataError
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


def split(tmp_path, *overrides, ending=".jsonl", rows=ROWS, fraction=0.1):
    path = write(tmp_path / f"rows{ending}", rows)
    return config("data=file", f"data.train_path={path}", f"data.validation_fraction={fraction}", *overrides)


def both_paths(tmp_path, rows, *overrides, ending=".jsonl"):
    path = write(tmp_path / f"problems{ending}", rows)
    return config("data=file", f"data.train_path={path}", f"data.validation_path={path}", *overrides)


def trained(data, seed=0):
    return training_set(data, seed, PROBLEMS)


def held_out(data, limit=1000):
    return validation_set(data, limit, PROBLEMS)


def questions(problems):
    return {problem.messages[0]["content"] for problem in problems}


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_a_fraction_is_held_out_and_never_trained_on(tmp_path, ending):
    data = split(tmp_path, ending=ending)
    kept, seen = questions(held_out(data)), questions(trained(data).finite())
    assert 20 <= len(kept) <= 60
    assert kept.isdisjoint(seen) and len(kept | seen) == 400
    assert held_out(data, limit=5) == held_out(data)[:5]


def test_rows_that_ask_the_same_are_on_the_same_side(tmp_path):
    data = split(tmp_path, rows=[{"prompt": f"{i % 20}", "answer": i} for i in range(400)], fraction=0.3)
    assert questions(held_out(data)).isdisjoint(questions(trained(data).finite()))


def test_what_is_held_out_depends_on_neither_seed_nor_the_other_rows(tmp_path):
    data, other = split(tmp_path), split(tmp_path, ending=".json", rows=ROWS[::-1][:200])
    assert questions(held_out(other)) < questions(held_out(data))
    assert set(map(str, trained(data, 1).finite())) == set(map(str, trained(data, 2).finite()))


def test_a_file_is_reshuffled_each_epoch_and_complete_in_each(tmp_path):
    rows = [{"prompt": str(i), "answer": i} for i in range(10)]
    data = trained(both_paths(tmp_path, rows))
    epochs = [[data.problem(epoch * 10 + place).answer for place in range(10)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [data.problem(i).answer for i in range(10)] == epochs[0]
    in_order = trained(both_paths(tmp_path, rows, "data.shuffle=false"))
    assert [in_order.problem(i).answer for i in range(12)] == [str(i % 10) for i in range(12)]


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def test_columns_system_prompt_and_chats(tmp_path):
    keys = ("prompt_column=question", "answer_column=solution", "system_prompt=Brief.")
    rows = [{"question": CHAT, "solution": "d"}]
    (problem,) = held_out(both_paths(tmp_path, rows, *(f"data.{key}" for key in keys)))
    assert problem.messages == ({"role": "system", "content": "Brief."}, *CHAT) and problem.answer == "d"


def test_parquet_holds_chats_too(tmp_path):
    data = both_paths(tmp_path, [{"prompt": CHAT, "answer": "d"}], ending=".parquet")
    assert trained(data).problem(0).messages == tuple(CHAT)


def test_a_bad_row_far_down_is_named(tmp_path):
    rows = [{"prompt": "x", "answer": "y"}] * 150 + [{"prompt": {}, "answer": "y"}]
    with pytest.raises(DataError, match=r"problems.jsonl, row 151: the prompt must be text"):
        trained(both_paths(tmp_path, rows))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([("bot", "2+2")], "message 1: its role must be one of .*found 'bot'"),
        ([("user", "2+2"), ("assistant", "4")], "ends with an assistant message .*algorithm=sft"),
        ([("system", "brief"), ("user", " ")], "the prompt is empty"),
        ([("user", [{"type": "image"}])], "only parts of type text"),
    ],
)
def test_prompts_that_ask_nothing_are_refused(messages, words):
    prompt = [{"role": role, "content": content} for role, content in messages]
    with pytest.raises(DataError, match=rf"^file, row 7.*{words}"):
        chat(prompt, None, "file, row 7")


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    assert chat([{"role": "user", "content": parts}]) == chat("2+2")


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
    assert trained(data).problem(1).answer == "2"
    assert len(held_out(data)) == 7
    with pytest.raises(DataError, match=r"data.train_split = all: .* has no such split \(splits: train, test\)"):
        trained(config(*hub, "data.validation_split=test", "data.train_split=all"))
    with pytest.raises(DataError, match=r"split train, row 1: no column 'question' \(columns: prompt, answer\)"):
        trained(config(*hub, "data.validation_split=test", "data.prompt_column=question"))


def test_a_fraction_of_a_hub_split_is_held_out(hub):
    data = config(*hub, "data.validation_fraction=0.2")
    kept = questions(held_out(data))
    assert kept and kept.isdisjoint(questions(trained(data).finite()))


def test_the_gsm8k_preset_serves_files_and_the_hub(monkeypatch):
    import datasets

    seen = []
    splits = {"train": [{"question": "1 + 1?", "answer": "#### 2"}], "test": [{"question": "0?", "answer": "#### 0"}]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: seen.append(names) or splits)
    data = config("data=gsm8k", "data.name=hub")
    assert trained(data).problem(0).answer == "2" and held_out(data)[0].answer == "0"
    assert seen == [("openai/gsm8k", "main")] * 2


def test_pairs_that_prefer_nothing_are_counted_once(tmp_path, caplog):
    rows = [{"prompt": f"{i}", "chosen": "a", "rejected": "ab"[i > 0]} for i in range(30)]
    data = split(tmp_path, "algorithm=dpo", "policy.train_global_batch_size=8", rows=rows, fraction=0.5)
    training_set(data, 0, PAIRS)
    validation_set(data, 1000, PAIRS)
    assert caplog.messages == ["1 of 30 rows prefer neither response and were left out"]


def test_rows_for_validation_that_are_trained_on_are_counted(tmp_path, caplog):
    rows = [{"prompt": f"{i}", "answer": f"{-i}"} for i in range(10)]
    train = write(tmp_path / "train.jsonl", rows)
    kept = write(tmp_path / "held_out.jsonl", [*rows[:3], {"prompt": "3", "answer": "4"}])
    data = config("data=file", f"data.train_path={train}", f"data.validation_path={kept}")
    validation_set(data, 100, PROBLEMS, trained(data).finite())
    assert caplog.messages == [f"{kept}: 3 of the 4 validation rows are also training rows"]


def test_the_identity_of_rows_tells_their_order_and_content():
    rows = [Problem(({"role": "user", "content": f"{number}+1"},), str(number + 1)) for number in range(3)]
    whole = data_identity(rows)
    assert whole["rows"] == 3 and whole == data_identity([*rows])
    assert len({data_identity(some)["sha256"] for some in (rows, rows[::-1], rows[:2], [*rows[:2], rows[0]])}) == 4
    assert data_identity(()) == {}


MAP = """
def keep(row):
    return None if row["answer"] % 2 else {"prompt": row["prompt"].upper(), "answer": row["answer"]}

def broken(row):
    return row["missing"]

def wrong(row):
    return row["answer"] > 3

def nothing(row):
    return None
"""


def mapped(tmp_path, function, *overrides):
    (tmp_path / "rows.py").write_text(MAP)
    return split(tmp_path, f"data.map={tmp_path / 'rows.py'}:{function}", *overrides, fraction=0)


def test_a_map_changes_and_drops_rows_before_they_are_counted(tmp_path, caplog):
    caplog.set_level("INFO")
    off = ["algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=0"]
    found = trained(mapped(tmp_path, "keep", "data.max_samples=3", *off)).finite()
    assert [(one.messages[0]["content"], one.answer) for one in found] == [
        (f"WHAT IS {i} + 1?", str(i + 1)) for i in (1, 3, 5)
    ]
    assert "data.map dropped 3 of 6 rows" in caplog.text


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("broken", r"row 1: data.map = .* raised KeyError: 'missing' \(rows.py, line 6\)"),
        ("wrong", "returned a bool; return the row as a dictionary, or None"),
        ("nothing", "returned None for all"),
        ("other", "cannot be imported"),
    ],
)
def test_a_map_that_cannot_be_used_is_refused(tmp_path, function, words):
    with pytest.raises(ConfigError, match=words):
        mapped(tmp_path, function)


@pytest.mark.parametrize("key", ["data.train_path", "data.path"])
def test_folders_of_save_to_disk_are_read(tmp_path, key):
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(tmp_path / "splits")
    one = config(f"{key}={tmp_path / 'one'}", "data.validation_fraction=0.1")
    assert len(trained(one).finite()) + len(held_out(one)) == 400
    if key == "data.path":
        splits = config(f"{key}={tmp_path / 'splits'}", "data.validation_split=test")
        assert len(trained(splits).finite()) == 400 and len(held_out(splits)) == 5
    else:
        assert len(list(file_rows(str(tmp_path / "splits" / "test")))) == 5
        with pytest.raises(DataError, match=r"holds the splits train, test; name one: .*splits/train"):
            list(file_rows(str(tmp_path / "splits")))

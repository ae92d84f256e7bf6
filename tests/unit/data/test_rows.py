"""Rows of files, what is wrong with them, and problems made of their columns."""

import dataclasses
import decimal
import gzip
import json

import numpy as np
import pytest

from nemo_rl_lite.data.formats import to_problem
from nemo_rl_lite.data.rows import FileError, file_rows, share_a_file
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config

ROW = b'{"prompt": "1"}\n'
WORKED = {"question": "Ann has 2 boxes of 600 nails. How many?", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}


def rows(file, content: bytes | str) -> list:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return [row for _, row in file_rows(str(file))]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(ROW, mtime=0), "compressed by gzip; .*gunzip"),
        (ROW.decode().encode("utf-16"), "text in UTF-16; .*iconv"),
        ("caf\xe9".encode("latin-1"), r"not text in UTF-8 \(byte 0xe9\); .*WINDOWS-1252"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer; git lfs pull"),
    ],
)
def test_another_format_is_named(tmp_path, content, words):
    with pytest.raises(FileError, match=f"rows.jsonl: cannot be read: it is .*{words}"):
        rows(tmp_path / "rows.jsonl", content)


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("a.jsonl", '[{"role": "user"}]\n[{"role": "user"}]\n', 1),
        ("a.jsonl", '\n[1]\n\n{"prompt": "1"}', 2),
        ("a.jsonl", '{"prompt": "1"}\n[]\n', 2),
        ("a.jsonl", "[[1], [2]]", 1),
        ("a.json", '[{"prompt": "1"},\n [2]]', 2),
    ],
)
def test_a_row_that_is_a_list_is_named_with_what_to_write(tmp_path, name, content, row):
    words = rf'{name}, row {row}: a JSON object is needed, found list; give the list a name, as in {{"messages": '
    with pytest.raises(DataError, match=words):
        rows(tmp_path / name, content)


@pytest.mark.parametrize("content", ["[\n1]\n[\n2]", '[{"a": 1},\n]', '"a"', "7", "{"])
def test_the_layout_of_a_json_file_is_told(tmp_path, content):
    with pytest.raises(DataError, match=r"a.jsonl.*; a JSON file has one object per line, or is one list of objects"):
        rows(tmp_path / "a.jsonl", content)


@pytest.mark.parametrize("row", [{"role": "user", "content": "1"}, {"from": "human", "value": "1"}])
def test_a_row_that_is_one_message_is_told(row):
    with pytest.raises(DataError, match=r"no column 'prompt' .*; this is one message of a chat: give the list a name"):
        to_problem(compose_config(["algorithm=grpo"]).data, row, "row 1")


@pytest.mark.parametrize("content", ['[{"a": 1}, {"a": 2}]', '[{"a": 1}, {"a": 2}]\n\n', '[\n{"a": 1},\n{"a": 2}\n]'])
def test_a_file_may_be_one_list(tmp_path, content):
    assert rows(tmp_path / "a.jsonl", content) == [{"a": 1}, {"a": 2}]


def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path):
    for name, content in (("a.jsonl", ROW), ("a.json", b"[" + ROW + b"]")):
        assert rows(tmp_path / name, b"\xef\xbb\xbf" + content) == [{"prompt": "1"}]


def test_files_are_the_same_by_every_name(tmp_path):
    file, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    file.write_bytes(ROW)
    other.write_bytes(ROW)
    (tmp_path / "link.jsonl").symlink_to(file)
    (tmp_path / "hard.jsonl").hardlink_to(file)
    for name in ("link.jsonl", "hard.jsonl", "./rows.jsonl", f"../{tmp_path.name}/rows.jsonl", "r*.jsonl"):
        assert share_a_file(str(file), f"{tmp_path}/{name}")
    assert not share_a_file(str(file), str(other))
    assert not share_a_file(str(file), str(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize("half", ["\\ud800", "a\\udfffb", "\\uD83D \\uDE00"])
def test_half_a_character_is_named_with_its_row(tmp_path, half):
    with pytest.raises(DataError, match=r"rows.jsonl, row 2: has '.*\\ud[8-f].*', half of a surrogate pair"):
        rows(tmp_path / "rows.jsonl", f'{{"prompt": "1"}}\n{{"prompt": "{half}", "answer": "1"}}')


def test_both_halves_are_a_character(tmp_path):
    grin = {"prompt": "\N{GRINNING FACE}"}
    assert rows(tmp_path / "rows.jsonl", json.dumps(grin)) == [grin]


def test_a_pattern_names_several_files(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    found = list(file_rows(str(tmp_path / "[ab].jsonl")))
    assert [row for _, row in found] == [{"prompt": "a"}, {"prompt": "b"}] and "a.jsonl, row 1" in found[0][0]
    with pytest.raises(DataError, match=r"z\*.jsonl: no file matches"):
        list(file_rows(str(tmp_path / "z*.jsonl")))


def test_a_list_of_objects_is_read_as_well(tmp_path):
    two = [{"prompt": "1"}, {"prompt": "2"}]
    assert rows(tmp_path / "rows.json", json.dumps(two, indent=2)) == two
    with pytest.raises(DataError, match=r"row 2: a JSON object is needed, found int"):
        rows(tmp_path / "rows.json", '[{"prompt": "1"}, 3]')


def problem(row: dict, *overrides: str, **keys: str):
    config = compose_config(list(overrides)).data
    return to_problem(dataclasses.replace(config, **{"prompt_column": "question"} | keys), row, "row 3")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("a\n#### 42", "42"), ("#### 1,234,567", "1234567"), ("#### -3.5", "-3.5"), ("####7", "7"), ("#### 10.", "10")],
)
def test_gsm8k_answers(tmp_path, solution, answer):
    rows(tmp_path / "rows.jsonl", '{"question": "1 + 1?", "answer": "#### 2"}')
    paths = [f"data.{split}_path={tmp_path}/rows.jsonl" for split in ("train", "validation")]
    found = problem({"question": "?", "answer": solution}, "data=gsm8k", *paths)
    assert found.answer == answer and found.messages == ({"role": "user", "content": "?"},)


@pytest.mark.parametrize(
    ("pattern", "value", "answer"), [(None, "1,200", "1,200"), ("(.*)", "1,200", "1200"), ("(.*)", "1,2", "1,2")]
)
def test_only_the_thousands_commas_of_a_number_found_by_a_pattern_are_dropped(pattern, value, answer):
    assert problem({"question": "?", "answer": value}, answer_pattern=pattern).answer == answer


def test_a_template_fills_in_columns_and_keeps_plain_braces():
    template = "{question}\nWrite \\boxed{{}}, as {n} people do."
    found = problem(WORKED | {"n": 3}, prompt_template=template, system_prompt="Be brief.")
    assert [message["role"] for message in found.messages] == ["system", "user"]
    assert found.messages[1]["content"] == WORKED["question"] + "\nWrite \\boxed{}, as 3 people do."
    assert found.metadata["n"] == 3


def test_braces_inside_a_column_stay_as_they_are():
    row = {"question": "What is {answer}?", "answer": "secret"}
    assert problem(row, prompt_template="{question}!").messages[0]["content"] == "What is {answer}?!"


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
        problem(row, prompt_template="{question}?")


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (7.0, "7"),
        (-0.0, "0"),
        (7.5, "7.5"),
        (-0.001, "-0.001"),
        (2.0**53, "9007199254740992"),
        (5e-05, "0.00005"),
        (1e-7, "0.0000001"),
        (1.5e-7, "0.00000015"),
        (1e16, "10000000000000000"),
        (10**20, "100000000000000000000"),
        (np.float64(2.5e-5), "0.000025"),
    ],
)
def test_numbers_are_written_without_an_exponent_or_a_needless_point(value, answer):
    """Parquet makes 7.0 of a 7 in a column with gaps."""
    # A task of reasoning-gym sets the precision of all decimals.
    with decimal.localcontext(prec=3):
        assert problem({"question": "?", "answer": value}).answer == answer

import json

import pytest

from nemo_rl_lite.data.rows import file_rows
from nemo_rl_lite.errors import DataError


def rows(folder, *lines: str) -> list:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines))
    return [row for _, row in file_rows(str(file))]


@pytest.mark.parametrize("half", ["\\ud800", "a\\udfffb", "\\uD83D \\uDE00"])
def test_half_a_character_is_named_with_its_row(tmp_path, half):
    bad = f'{{"prompt": "{half}", "answer": "1"}}'
    with pytest.raises(DataError, match=r"rows.jsonl, row 2: has '.*\\ud[8-f].*', which is half of a character"):
        rows(tmp_path, '{"prompt": "1"}', bad)


def test_both_halves_are_a_character(tmp_path):
    assert rows(tmp_path, json.dumps({"prompt": "\N{GRINNING FACE}"})) == [{"prompt": "\N{GRINNING FACE}"}]


def test_a_pattern_names_several_files(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    found = list(file_rows(str(tmp_path / "[ab].jsonl")))
    assert [row for _, row in found] == [{"prompt": "a"}, {"prompt": "b"}] and "a.jsonl, row 1" in found[0][0]
    with pytest.raises(DataError, match=r"z\*.jsonl: no file matches"):
        list(file_rows(str(tmp_path / "z*.jsonl")))


def test_a_list_of_objects_is_read_as_well(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": "1"}, {"prompt": "2"}], indent=2))
    assert [row for _, row in file_rows(str(tmp_path / "rows.json"))] == [{"prompt": "1"}, {"prompt": "2"}]
    (tmp_path / "rows.json").write_text('[{"prompt": "1"}, 3]')
    with pytest.raises(DataError, match=r"row 2: a JSON object is needed, found int"):
        list(file_rows(str(tmp_path / "rows.json")))

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

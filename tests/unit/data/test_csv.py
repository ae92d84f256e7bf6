"""Rows of CSV files."""

import pytest

from nemo_rl_lite.data.rows import file_rows
from nemo_rl_lite.errors import DataError


def test_a_csv_files_values_are_texts(tmp_path):
    (file := tmp_path / "rows.csv").write_text('\ufeffprompt,answer\r\n"7, or\n""8""?",007\r\né,\r\n')
    rows = list(file_rows(str(file)))
    assert [row for _, row in rows] == [{"prompt": '7, or\n"8"?', "answer": "007"}, {"prompt": "é", "answer": ""}]
    assert rows[1][0] == f"{file}, row 2"


@pytest.mark.parametrize(
    ("text", "said"),
    [("a,b\n1\n", "row 1 has not as many"), ("a,b\n1,2,3\n", "row 1 has not as many"), ('a,b\n"1,2\n', "end of data")],
)
def test_a_broken_csv_file_is_named(tmp_path, text, said):
    (file := tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError, match=f"rows.csv: cannot be read: .*{said}"):
        list(file_rows(str(file)))

"""Rows of CSV files."""

import pytest

from nemo_rl_lite.data.formats import UNPAIRED
from nemo_rl_lite.data.rows import file_rows, text_of
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.validation.compose import compose_config


def rows_of(path, text: str) -> list:
    (file := path / "rows.csv").write_text(text)
    return [row for _, row in file_rows(str(file))]


def test_texts_stay_as_they_are(tmp_path):
    rows = rows_of(tmp_path, '\ufeffprompt,answer\r\n"7, or\n""8""?",007\r\né,\r\n')
    assert rows == [{"prompt": '7, or\n"8"?', "answer": "007"}, {"prompt": "é", "answer": ""}]


def test_a_column_of_numbers_or_booleans_has_their_type(tmp_path):
    first, second = rows_of(
        tmp_path, "id,level,share,right,code,price,word\n1,-2,0.5,True,007,7.50,true\n2,3,1.0,False,8,1,x\n"
    )
    assert first == {"id": 1, "level": -2, "share": 0.5, "right": True, "code": "007", "price": "7.50", "word": "true"}
    assert second == {"id": 2, "level": 3, "share": 1.0, "right": False, "code": "8", "price": "1", "word": "x"}
    assert [text_of(first, name, "row 1") for name in ("id", "level", "right")] == ["1", "-2", "True"]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_may_be_separated_by_semicolons_or_tabs(tmp_path, separator):
    text = "\ufeffprompt,answer\r\n2*3,6\r\n".replace(",", separator)
    assert rows_of(tmp_path, text) == [{"prompt": "2*3", "answer": 6}]


@pytest.mark.parametrize("labels", ["True,False", "true,false", "1,0"])
def test_ktos_label_may_have_any_spelling(tmp_path, labels):
    good, bad = labels.split(",")
    (tmp_path / "rows.csv").write_text(f"prompt,completion,label\n1,2,{good}\n3,4,{bad}\n")
    config = compose_config(
        ["algorithm=kto", f"data.train_path={tmp_path}/rows.csv", "policy.train_global_batch_size=2"]
    )
    examples = [UNPAIRED.from_row(config.data, row, "row") for _, row in file_rows(f"{tmp_path}/rows.csv")]
    assert [one.label for one in examples] == [True, False]


def test_several_files_are_a_list(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(f"prompt,answer\n{name},1\n")
    paths = [f"{tmp_path}/{name}.csv" for name in "ab"]
    config = compose_config([f"data.train_path=[{','.join(paths)}]"])
    assert config.data.train_path == ",".join(paths)
    assert [row["prompt"] for _, row in file_rows(",".join(paths))] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("a,b\n1\n", "row 1 has not as many"), ("a,b\n1,2,3\n", "row 1 has not as many"), ('a,b\n"1,2\n', "end of data")],
)
def test_a_broken_csv_file_is_named(tmp_path, text, said):
    with pytest.raises(DataError, match=f"rows.csv: cannot be read: .*{said}"):
        rows_of(tmp_path, text)

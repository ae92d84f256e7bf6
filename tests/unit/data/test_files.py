"""Files that are no rows of JSON or Parquet are refused, with what to do about them."""

import gzip

import pytest

from nemo_rl_lite.data.rows import FileError, file_rows, share_a_file

ROW = b'{"prompt": "1"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(ROW, mtime=0), "compressed by gzip; .*gunzip"),
        (ROW.decode().encode("utf-16"), "text in UTF-16; .*iconv"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS.*; git lfs pull"),
    ],
)
def test_another_format_is_named(tmp_path, content, words):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(FileError, match=f"rows.jsonl: cannot be read: it is .*{words}"):
        list(file_rows(str(file)))


def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path):
    for name, content in (("a.jsonl", ROW), ("a.json", b"[" + ROW + b"]")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert [row for _, row in file_rows(str(tmp_path / name))] == [{"prompt": "1"}]


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

from pathlib import Path

import pytest

from nemo_rl_lite.host import disk
from nemo_rl_lite.host.disk import why_not_writable


def test_a_folder_that_can_be_made_is_left_unmade(tmp_path):
    assert why_not_writable(tmp_path / "a" / "b") == why_not_writable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_its_place_is_named(tmp_path, below):
    (tmp_path / "file").write_text("")
    assert why_not_writable(tmp_path / "file" / below) == f"{tmp_path / 'file'} is a file"


def test_a_file_system_without_folders():
    assert why_not_writable(Path("/proc/x")).startswith("/proc cannot be written: ")


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.Path, "write_bytes", full)
    assert why_not_writable(tmp_path) == f"{tmp_path} cannot be written: No space left on device"

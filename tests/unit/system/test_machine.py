"""Facts of this machine, and of what a command line names on it."""

import shutil
from pathlib import Path

import pytest

from nemo_rl_lite import export
from nemo_rl_lite.report import __main__ as report
from nemo_rl_lite.system import machine
from nemo_rl_lite.system.machine import gpu_bytes, gpu_name, lacks_gpus, local_path, why_full, why_not_writable


def answering(folder: Path, text: str, status: int = 0) -> str:
    """A command that prints `text`."""
    script = folder / "smi"
    script.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
    script.chmod(0o755)
    return str(script)


def test_the_smallest_gpu_counts(tmp_path):
    assert gpu_bytes(answering(tmp_path, "81559\\n40960\\n")) == 40960 * 2**20
    for text, status in (("[N/A]\\n", 0), ("", 0), ("81559\\n", 9)):
        assert gpu_bytes(answering(tmp_path, text, status)) is None


def test_gpus_have_a_name_where_all_are_of_one_kind(tmp_path):
    assert gpu_name(answering(tmp_path, "NVIDIA H200\\nNVIDIA H200\\n")) == "NVIDIA H200"
    assert gpu_name(answering(tmp_path, "NVIDIA H200\\nNVIDIA B200\\n")) is None
    assert gpu_name(str(tmp_path / "absent")) is None


@pytest.mark.parametrize(
    ("wanted", "listed", "lacks"), [(0, "", False), (2, "H200\\nH200\\n", False), (2, "H200\\n", True)]
)
def test_gpus_that_are_not_here(tmp_path, monkeypatch, wanted, listed, lacks):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert lacks_gpus(wanted, answering(tmp_path, listed)) is lacks
    # Parts of GPUs that are split by MIG are not counted.
    assert not lacks_gpus(3, answering(tmp_path, "Enabled\\n"))


def test_gpus_that_nothing_lists(tmp_path, monkeypatch):
    absent = str(tmp_path / "absent")
    monkeypatch.setattr(machine, "_NVIDIA_DEVICE", tmp_path / "nvidiactl")
    assert lacks_gpus(1, absent)
    (tmp_path / "nvidiactl").touch()
    assert not lacks_gpus(1, absent)


def test_a_folder_that_can_be_made_is_left_unmade(tmp_path):
    assert why_not_writable(tmp_path / "a" / "b") == why_not_writable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert why_not_writable(tmp_path / "file" / "run") == f"{tmp_path / 'file'} is a file"
    assert why_not_writable(Path("/proc/x")).startswith("/proc cannot be written: ")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert why_not_writable(tmp_path) == f"{tmp_path} cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("error", "free", "full"),
    [
        (OSError(28, "No space left on device"), 2**40, True),
        (OSError(122, "Disk quota exceeded"), 2**40, True),
        (RuntimeError("a writer of torch failed"), 2**20, True),
        (RuntimeError("a writer of torch failed"), 2**40, False),
        (OSError(13, "Permission denied"), 2**40, False),
    ],
)
def test_a_full_disk(tmp_path, monkeypatch, error, free, full):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**41, 0, free))
    assert why_full(tmp_path, error).startswith(f"the disk is full: {tmp_path} has ") is full
    assert why_full(tmp_path, error) != "" or not full


def test_a_path_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/x") == tmp_path / "x" and str(local_path("a/~")) == "a/~"


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [(export, ["run", "s3://bucket/model"]), (report, ["run", "--output", "~nobody-here/page.html"])],
)
def test_what_is_no_path_of_this_machine(verb, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        verb.main(arguments)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and arguments[-1] in said and "Traceback" not in said

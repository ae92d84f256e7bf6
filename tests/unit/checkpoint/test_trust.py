"""A checkpoint's index is looked at before it is read."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nemo_rl_lite.checkpoint.trust import INDEX_FILE, check_index
from nemo_rl_lite.errors import CheckpointError


def test_an_index_of_torchs_own_is_fine(tmp_path):
    state = {"a": torch.ones(3, 2, dtype=torch.bfloat16), "b": torch.arange(3), "note": ["bytes", 1]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    check_index(tmp_path)


class Command:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def test_a_command_in_it_is_refused_and_not_run(tmp_path):
    (tmp_path / INDEX_FILE).write_bytes(pickle.dumps(Command(tmp_path / "was-run")))
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        check_index(tmp_path)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps({"a": 1})[:-3]])
def test_what_is_no_pickle_is_named(tmp_path, content):
    (tmp_path / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a checkpoint's index"):
        check_index(tmp_path)


def test_a_folder_without_one_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        check_index(tmp_path)

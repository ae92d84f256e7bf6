"""A checkpoint's index is looked at before it is read."""

import os
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.policy.checkpoint_reading import INDEX_FILE, reading_only


def read(folder):
    state = {"a": torch.zeros(3, 2, dtype=torch.bfloat16), "note": None}
    with reading_only(folder):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_what_torch_has_written_is_read(tmp_path):
    dcp.save({"a": torch.ones(3, 2, dtype=torch.bfloat16), "note": ["text", 1]}, checkpoint_id=tmp_path, no_dist=True)
    state = read(tmp_path)
    assert state["a"].sum() == 6 and state["note"] == ["text", 1]


class Command:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def test_a_command_beside_the_tensors_is_refused_and_not_run(tmp_path):
    dcp.save({"a": torch.ones(3, 2), "note": Command(tmp_path / "was-run")}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        read(tmp_path)
    assert not (tmp_path / "was-run").exists()


def test_a_command_in_the_index_is_refused_and_not_run(tmp_path):
    (tmp_path / INDEX_FILE).write_bytes(pickle.dumps(Command(tmp_path / "was-run")))
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        read(tmp_path)
    assert not (tmp_path / "was-run").exists()


def test_a_damaged_index_is_an_error_that_a_user_can_read_or_harmless(tmp_path):
    dcp.save({"a": torch.ones(3, 2, dtype=torch.bfloat16), "note": ["text", 1]}, checkpoint_id=tmp_path, no_dist=True)
    whole, source = (tmp_path / INDEX_FILE).read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(source.choice([1, 1, 2, 8])):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        (tmp_path / INDEX_FILE).write_bytes(damaged[: source.choice([None, None, source.randrange(len(damaged))])])
        try:
            with reading_only(tmp_path):
                pass
        except CheckpointError:
            refused += 1
    assert refused > 30

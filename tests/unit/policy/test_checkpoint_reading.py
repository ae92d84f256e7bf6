"""A checkpoint's index is looked at before it is read, and threads read its parts."""

import os
import pickle
import queue
import random
import threading
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from nemo_rl_lite.checkpoint.store import has_digest
from nemo_rl_lite.compat.megatron import staged_writing
from nemo_rl_lite.compat.megatron_cpu import prepare_import
from nemo_rl_lite.errors import CheckpointError, HostMemoryError
from nemo_rl_lite.policy import checkpoint_reading
from nemo_rl_lite.policy.checkpoint_reading import INDEX_FILE, _SharedReader, reading_only


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


def test_threads_read_ahead_up_to_a_limit_and_in_order(monkeypatch):
    monkeypatch.setattr(checkpoint_reading, "_AHEAD", 30)
    begun, has_begun, may_end = [], threading.Event(), threading.Event()

    def read(place):
        begun.append(place)
        has_begun.set()
        assert may_end.wait(60)
        if place[1] == 1:
            raise ValueError("damaged")
        return torch.tensor(place[1])

    sizes = [50, 10, 10, 10, 40]
    results = checkpoint_reading._in_threads(read, [(("file", one), size) for one, size in enumerate(sizes)], 8)
    first = next(results)
    # The first exceeds the limit alone.
    assert has_begun.wait(60)
    assert begun == [("file", 0)]
    may_end.set()
    assert first.result() == 0
    damaged = next(results)
    with pytest.raises(ValueError, match="damaged"):
        damaged.result()
    assert [int(result.result()) for result in results] == [2, 3, 4]
    assert sorted(begun) == [("file", one) for one in range(5)]


def written(folder, buckets, copied=list):
    """The parts of each file, and what the threads tell megatron-core."""
    prepare_import()
    results = queue.Queue()
    files = [
        (str(folder / name), name, ([], [(_create_write_items("a", tensor)[0], tensor) for tensor in tensors]))
        for name, tensors in buckets.items()
    ]
    request = SimpleNamespace(async_fn=object(), async_fn_args=(0, files, results))
    return staged_writing(request, copied)(), results.get_nowait()


def test_tensors_that_threads_write_to_files_are_read_with_their_digests(tmp_path):
    tensors = [
        torch.randn(300, 5),
        torch.randn(4, 3).t(),
        torch.tensor(2.0),
        torch.randn(0, 2),
        torch.arange(100.0)[10:20],
        torch.ones(3).bfloat16(),
    ]
    parts, told = written(tmp_path, {"one": tensors, "two": tensors[::-1]})
    for number, (name, own) in enumerate(parts.items()):
        begins = accumulate((length for length, _ in own), initial=0)
        places = [(one.storage_data.offset, one.storage_data.length) for one in told[number]]
        assert places == [(begin, length) for begin, (length, _) in zip(begins, own, strict=False)]
        verified = []
        reader = _SharedReader(str(tmp_path), None, lambda *part, verified=verified: verified.append(part[2]))
        found = [reader._read((name, begin), length, torch.float32) for begin, length in places]
        assert all(has_digest(content, digest) for content, (_, digest) in zip(verified, own, strict=True))
        assert all(map(torch.equal, found, tensors if name == "one" else tensors[::-1]))
        with pytest.raises(EOFError, match=f"{name} ends early"):
            reader.part(name, places[-1][0], places[-1][1] + 1)


def test_copies_that_find_no_memory_are_an_error_of_the_save(tmp_path):
    def fails(tensors):
        raise HostMemoryError("too large")

    parts, told = written(tmp_path, {"one": [torch.ones(2)]}, fails)
    assert not parts and isinstance(told, HostMemoryError) and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("names", [("there", "missing/file"), ("missing/file", "there")])
def test_a_file_that_a_thread_cannot_write_is_an_error(names, tmp_path):
    _, told = written(tmp_path, {name: [torch.ones(2)] for name in names})
    assert isinstance(told, FileNotFoundError)

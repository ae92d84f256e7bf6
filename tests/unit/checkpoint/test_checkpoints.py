"""When checkpoints are written, with a policy that only takes notes."""

import hashlib
import shutil
from pathlib import Path

import pytest

from nemo_rl_lite.checkpoint.store import POLICY, Checkpoints, CheckpointStore, Retention
from nemo_rl_lite.errors import CheckpointError


class NotingPolicy:
    """Finishes a write when the test says that the disk is done."""

    def __init__(self):
        self.folder, self.written, self.calls, self.full = Path(), False, [], False

    def begin_save(self, folder):
        self.folder = Path(folder)
        self.calls.append(("begin", self.folder.parent.name))
        (self.folder / "weights").write_text("some")

    def save_is_written(self):
        return self.written

    def finish_save(self):
        self.calls.append(("finish", self.folder.parent.name))
        if self.full:
            raise CheckpointError("no space left on device")
        return {"weights": [(4, hashlib.sha256(b"some").hexdigest())]}


@pytest.fixture
def run(tmp_path):
    policy, said = NotingPolicy(), []
    store = CheckpointStore(tmp_path / "checkpoints", Retention(2, 1, "accuracy", True))
    return Checkpoints(store, policy, 2, True, {"seed": 1}, said.append), policy, store, said


def steps(store):
    return [one.step for one in store.complete()]


def test_one_is_written_after_each_period_and_after_the_last_step(run):
    checkpoints, policy, store, _ = run
    policy.written = True
    for step in range(1, 6):
        checkpoints.save_if_due(step, last=step == 5)
        checkpoints.finish_if_written()
    assert [name for call, name in policy.calls if call == "begin"] == [f".step-{n:08d}" for n in (2, 4, 5)]
    assert steps(store) == [4, 5] and store.latest().record == {"seed": 1}
    assert (store.newest().path / POLICY / "weights").read_text() == "some"


def test_training_goes_on_until_it_is_written_and_the_next_save_waits_for_it(run):
    checkpoints, policy, store, _ = run
    checkpoints.save_if_due(2, last=False)
    checkpoints.finish_if_written()
    assert policy.calls == [("begin", ".step-00000002")] and steps(store) == []
    checkpoints.save_if_due(4, last=False)
    assert [call for call, _ in policy.calls] == ["begin", "finish", "begin"] and steps(store) == [2]
    checkpoints.finish()
    assert steps(store) == [2, 4]


def test_without_async_save_it_is_there_at_once(tmp_path):
    store = CheckpointStore(tmp_path, Retention(2, 1, None, True))
    Checkpoints(store, NotingPolicy(), 1, False, {}, print).save_if_due(1, last=False)
    assert steps(store) == [1]


def test_with_period_0_nothing_is_saved(tmp_path):
    checkpoints = Checkpoints(
        CheckpointStore(tmp_path, Retention(2, 1, None, True)), NotingPolicy(), 0, True, {}, print
    )
    checkpoints.save_if_due(1, last=True)
    checkpoints.finish()
    assert not checkpoints.enabled and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("measured_late", [False, True])
def test_what_was_measured_belongs_to_its_checkpoint(run, measured_late):
    checkpoints, policy, store, _ = run
    checkpoints.save_if_due(2, last=False)
    policy.written = True
    if measured_late:
        checkpoints.finish_if_written()
    checkpoints.measured(2, {"accuracy": 0.5})
    checkpoints.finish_if_written()
    checkpoints.save_if_due(4, last=False)
    checkpoints.finish_if_written()
    assert [one.metrics for one in store.complete()] == [{"accuracy": 0.5}, {}]
    assert store.best()[0].step == 2


def test_a_full_disk_is_named_before_what_was_written_is_removed(run, monkeypatch):
    checkpoints, policy, store, said = run

    def free(_: object) -> object:
        return shutil._ntuple_diskusage(2**23, 0, 2**20 if list(store.folder.glob(".step*")) else 2**23)

    monkeypatch.setattr(shutil, "disk_usage", free)
    policy.written = policy.full = True
    checkpoints.save_if_due(2, last=False)
    checkpoints.finish_if_written()
    assert f"the disk is full: {store.folder} has 1 MiB free of 8 MiB; there is no other checkpoint" in said[0]


def test_a_full_disk_is_told_of_and_training_goes_on(run):
    checkpoints, policy, store, said = run
    policy.written = True
    checkpoints.save_if_due(2, last=False)
    checkpoints.finish_if_written()
    policy.full = True
    checkpoints.save_if_due(4, last=False)
    checkpoints.finish_if_written()
    (line,) = said
    assert "step 4 was not written: no space left on device; the newest checkpoint is of step 2" in line
    assert steps(store) == [2] and [path.name for path in store.folder.glob(".step*")] == []
    checkpoints.finish()
    with pytest.raises(CheckpointError, match="step 4 was not written"):
        checkpoints.require()
    policy.full = False
    checkpoints.save_if_due(6, last=False)
    checkpoints.finish()
    checkpoints.require()
    assert steps(store) == [2, 6]

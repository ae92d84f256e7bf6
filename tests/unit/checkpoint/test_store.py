"""Checkpoints on disk: whole or not there."""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import xxhash

from nemo_rl_lite.checkpoint import store as store_module
from nemo_rl_lite.checkpoint.store import LATEST, RECORD, CheckpointStore, Retention, checked, way_out
from nemo_rl_lite.errors import CheckpointError


def make(folder: Path, newest: int = 2, best: int = 0, metric: str | None = "loss", higher: bool = False):
    return CheckpointStore(folder, Retention(newest, best, metric, higher))


def save(store: CheckpointStore, step: int, **metrics: float):
    (store.begin(step) / "weights").write_text(str(step))
    return store.finish(step, metrics, {"seed": 1})


def steps(store: CheckpointStore) -> list[int]:
    return [one.step for one in store.complete()]


def test_what_was_written_is_found_again(tmp_path):
    store = make(tmp_path / "checkpoints")
    assert store.latest() is None and store.complete() == []
    saved = save(store, 5, loss=0.25)
    found = make(tmp_path / "checkpoints").latest()
    assert found == saved and found.record == {"seed": 1} and found.metrics == {"loss": 0.25}
    assert (found.path / "weights").read_text() == "5"
    assert (tmp_path / "checkpoints" / LATEST).read_text() == f"{found.path.name}\n"


def test_the_newest_and_the_best_are_kept(tmp_path):
    store = make(tmp_path, newest=2, best=1)
    for step, loss in ((1, 0.9), (2, 0.1), (3, 0.5), (4, 0.4), (5, 0.3)):
        save(store, step, loss=loss)
    assert steps(store) == [2, 4, 5] and [one.step for one in store.best()] == [2]
    save(store, 6, loss=0.05)
    assert steps(store) == [5, 6]


@pytest.mark.parametrize(("higher", "expected"), [(True, [2, 3]), (False, [1, 4])])
def test_best_is_by_the_metric_and_of_equal_ones_the_newer(higher, expected, tmp_path):
    store = make(tmp_path, newest=9, metric="accuracy", higher=higher)
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.1), (5, 0.5)):
        save(store, step, accuracy=accuracy)
    save(store, 6)
    assert sorted(one.step for one in store.best(2)) == expected


def test_an_unfinished_one_is_nobodys_and_goes_with_the_next(tmp_path):
    store = make(tmp_path)
    save(store, 1)
    (store.begin(2) / "weights").write_text("half")
    assert steps(store) == [1] and store.latest().step == 1
    assert not list(store.begin(2).iterdir())
    store.discard(2)
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize("broken", ["write_text", "fsync", "rename", "replace"])
def test_whatever_fails_leaves_the_one_before(broken, tmp_path, monkeypatch):
    store = make(tmp_path)
    save(store, 1)
    (store.begin(2) / "weights").write_text("2")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", fail) if broken == "fsync" else (Path, broken, fail)))
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written to .*No space left"):
        store.finish(2, {}, {})
    monkeypatch.undo()
    found = make(tmp_path).latest()
    assert found.step in (1, 2) and (found.path / "weights").read_text() == str(found.step)
    save(store, 3)
    assert store.latest().step == 3


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path):
    store = make(tmp_path)
    save(store, 1, loss=1.0)
    save(store, 1, loss=2.0)
    assert [one.metrics for one in store.complete()] == [{"loss": 2.0}] and not list(tmp_path.glob(".*-*"))


def test_a_folder_with_a_broken_record_is_none(tmp_path):
    store = make(tmp_path)
    save(store, 1)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / RECORD).write_text("{")
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / RECORD).write_text(json.dumps({"step": 3}))
    assert store.latest().step == 1


def test_everything_is_brought_to_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    store, order = make(tmp_path), []
    real = Path.rename
    monkeypatch.setattr(store_module, "to_disk", lambda path: order.append(path.name))
    monkeypatch.setattr(Path, "rename", lambda path, target: (order.append("rename"), real(path, target))[1])
    save(store, 1)
    before = order[: order.index("rename")]
    assert {"weights", RECORD, ".step-00000001"} <= set(before)


def test_what_a_killed_run_left_is_tidied_up(tmp_path):
    store = make(tmp_path, newest=1)
    save(store, 3)
    (store.begin(4) / "weights").write_text("half")
    # Killed between the two renames of a step that is saved again.
    (tmp_path / "step-00000003").rename(tmp_path / ".replaced-step-00000003")
    assert store.latest() is None
    store.tidy()
    assert steps(store) == [3] and {path.name for path in tmp_path.iterdir()} == {"step-00000003", LATEST}


def test_a_new_one_is_not_undone_by_the_one_it_replaced(tmp_path):
    store = make(tmp_path)
    save(store, 3)
    (tmp_path / "step-00000003").rename(tmp_path / ".replaced-step-00000003")
    save(store, 3, loss=0.5)
    store.tidy()
    assert [one.metrics for one in store.complete()] == [{"loss": 0.5}] and not list(tmp_path.glob(".*"))


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def damaged(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        make(folder).newest()
    return str(error.value)


@pytest.fixture
def two(tmp_path) -> Path:
    """The folder of checkpoints of steps 1 and 2."""
    store = make(tmp_path, newest=3)
    for step in (1, 2):
        (store.begin(step) / "policy").mkdir()
        (tmp_path / f".step-{step:08d}" / "policy" / "weights").write_text("0123456789")
        store.finish(step, {"loss": 0.5}, {"config": {"seed": step}})
    assert store.newest().step == 2
    return tmp_path


def test_every_bit_of_a_file_counts(two):
    weights = two / "step-00000002" / "policy" / "weights"
    for bit in range(0, 80, 7):
        flip(weights, bit)
        said = damaged(two)
        assert "policy/weights has changed" in said and f"intact one is {two / 'step-00000001'}; fix:" in said
        flip(weights, bit)
    assert make(two).newest().step == 2


def parts(digest=xxhash.xxh3_128):
    return {"weights": [(len(content), digest(content).hexdigest()) for content in (b"0123", b"456789")]}


@pytest.mark.parametrize("digest", [xxhash.xxh3_128, hashlib.sha256], ids=["xxh3", "sha256 of older checkpoints"])
def test_a_part_is_verified_by_its_reader_and_its_size_by_everyone(tmp_path, digest):
    store = make(tmp_path)
    (store.begin(3) / "weights").write_text("0123456789")
    saved = store.finish(3, {}, {}, parts(digest))
    assert store.newest().parts == {"weights": [list(part) for part in saved.parts["weights"]]}
    whole = saved.path / "weights"
    flip(whole, 50)
    assert store.newest().step == 3
    with pytest.raises(CheckpointError, match="weights has changed"):
        checked(saved.path, parts=True)
    flip(whole, 50)
    assert checked(saved.path, parts=True).step == 3
    whole.write_text("012345678")
    assert "weights has changed" in damaged(tmp_path)


def test_the_way_out_is_an_older_one_with_intact_parts(tmp_path):
    store = make(tmp_path, newest=3)
    for step in (1, 2, 3):
        (store.begin(step) / "weights").write_text("0123456789")
        store.finish(step, {}, {}, parts())
    flip(tmp_path / "step-00000002" / "weights", 0)
    assert way_out(tmp_path / "step-00000003").startswith(f"the newest intact one is {tmp_path / 'step-00000001'}; fix")
    assert way_out(tmp_path / "step-00000001").startswith("no older one is intact; fix")


def test_every_bit_of_the_record_counts(two):
    record = two / "step-00000002" / RECORD
    whole = json.loads(record.read_text())
    for bit in range(0, 8 * record.stat().st_size, 31):
        flip(record, bit)
        try:
            # Space between two values may be another kind of space.
            assert json.loads(record.read_text()) == whole and make(two).newest().step == 2
        except (ValueError, AssertionError):
            assert "step-00000001; fix:" in damaged(two)
        flip(record, bit)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "policy" / "other").write_text("?"), "policy/other is not one of its files"),
        (lambda folder: (folder / "policy" / "weights").unlink(), "policy/weights is missing"),
        (lambda folder: (folder / RECORD).unlink(), "has no checkpoint.json that can be read"),
        (lambda folder: (folder / RECORD).write_text("[" * 100_000), "RecursionError"),
        (lambda folder: folder.rename(folder.with_name("step-00000003")), "is of step 2"),
    ],
)
def test_what_is_wrong_is_named_and_the_next_older_one_offered(two, change, said):
    change(two / "step-00000002")
    assert said in damaged(two) and "move it away to resume from there" in damaged(two)


@pytest.mark.parametrize("name", ["step", "record", "metrics", "files"])
@pytest.mark.parametrize("value", ["2", None, [], 10**9, {"config": None}])
def test_a_record_of_other_kinds_is_damaged(two, name, value):
    file = two / "step-00000002" / RECORD
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    assert RECORD in damaged(two) and "step-00000001; fix:" in damaged(two)


def test_without_a_whole_one_it_says_so(two):
    for step in (1, 2):
        flip(two / f"step-{step:08d}" / "policy" / "weights", 0)
    assert "no older one is intact" in damaged(two)


def test_a_measurement_leaves_a_checkpoint_whole(two):
    make(two).measured(2, {"loss": 0.25})
    found = make(two).newest()
    assert found.metrics == {"loss": 0.25}
    flip(two / "step-00000002" / "policy" / "weights", 0)
    assert "weights has changed" in damaged(two)


@pytest.mark.parametrize("losses", [(math.nan, 0.5, 0.7), (0.5, math.nan, 0.7), (0.7, 0.5, math.nan)])
@pytest.mark.parametrize("higher", [True, False])
def test_a_metric_that_is_nan_is_never_the_best(tmp_path, losses, higher):
    store = make(tmp_path, newest=9, higher=higher)
    for step, loss in enumerate(losses, start=1):
        save(store, step, loss=loss)
    best = losses.index(0.7 if higher else 0.5) + 1
    assert next(one.step for one in store.best(3)) == best and len(store.best(3)) == 2

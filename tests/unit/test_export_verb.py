"""What `nrl-lite export` refuses, before it imports anything heavy; what it writes is in tests/functional."""

import dataclasses

import pytest

from nemo_rl_lite import export
from nemo_rl_lite.checkpoint.store import CheckpointStore, Retention
from nemo_rl_lite.validation.compose import compose_config


def test_a_folder_without_a_checkpoint_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        export.main([str(tmp_path)])
    assert ended.value.code == 1
    assert f"{tmp_path} has no complete checkpoint: name a run's folder" in capsys.readouterr().err


def test_a_push_that_cannot_work_is_refused_before_the_export(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: None)
    with pytest.raises(SystemExit) as ended:
        export.main([str(tmp_path), "--push-to-hub", "no/such/name"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "--push-to-hub = 'no/such/name'" in said and "hf auth login" in said


def saved(folder, record):
    store = CheckpointStore(folder / "checkpoints", Retention(1, 0, None, True))
    store.begin(3)
    return store.finish(3, {}, record).path


def test_a_checkpoint_of_another_version_says_what_it_lacks(tmp_path, capsys):
    config = dataclasses.asdict(compose_config())
    saved(tmp_path, {"config": config | {"no_such_key": 1}})
    with pytest.raises(SystemExit) as ended:
        export.main([str(tmp_path)])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "saved by another version of the launcher" in said
    assert "no_such_key" in said and "set it" not in said


@pytest.mark.parametrize(
    ("size", "said"),
    [("500", "500 means bytes; write 500MB or 500GB"), ("5 apples", "is not a size"), ("-5GB", "is not a size")],
)
def test_a_wrong_size_of_shards_names_the_fix(tmp_path, capsys, size, said):
    with pytest.raises(SystemExit) as ended:
        export.main([str(tmp_path), f"--max-shard-size={size}"])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "count"), [("500MB", 5e8), ("5GB", 5e9), ("2GiB", 2**31), ("1KB", 1000), ("40000000", 4e7)]
)
def test_sizes_of_shards(tmp_path, monkeypatch, size, count):
    given = []
    monkeypatch.setattr(export, "export", lambda _run, _target, shard_bytes: given.append(shard_bytes) or [])
    export.main([str(tmp_path), "--max-shard-size", size])
    assert given == [count]

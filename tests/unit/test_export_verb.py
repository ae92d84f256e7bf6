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

"""What `nrl-lite export` refuses, before it imports anything heavy; what it writes is in tests/functional."""

import dataclasses

import pytest

from nemo_rl_lite import export
from nemo_rl_lite.checkpoint.store import CheckpointStore, Retention
from nemo_rl_lite.rules.compose import compose_config


def test_a_folder_without_a_checkpoint_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        export.main([str(tmp_path)])
    assert ended.value.code == 1
    assert f"{tmp_path} has no complete checkpoint: name a run's folder" in capsys.readouterr().err


def saved(folder, record):
    store = CheckpointStore(folder / "checkpoints", Retention(1, 0, None, True))
    store.begin(3)
    return store.finish(3, {}, record).path


@pytest.mark.parametrize(("checkpoints", "place"), [("checkpoints", "new"), ("moved", "step-00000003/hf")])
def test_nothing_is_written_among_checkpoints(tmp_path, capsys, checkpoints, place):
    folder = saved(tmp_path, {}).parent.rename(tmp_path / checkpoints)
    with pytest.raises(SystemExit):
        export.main([str(folder / "step-00000003"), str(folder / place)])
    assert f"is among a run's checkpoints, {folder}" in capsys.readouterr().err
    assert not (folder / place).exists()


def test_a_checkpoint_of_another_version_says_what_it_lacks(tmp_path, capsys):
    config = dataclasses.asdict(compose_config())
    del config["reward"]["timeout_s"]
    saved(tmp_path, {"config": config | {"no_such_key": 1}})
    with pytest.raises(SystemExit) as ended:
        export.main([str(tmp_path)])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "saved by another version of the launcher" in said
    assert "reward.timeout_s has no value" in said and "no_such_key" in said and "set it" not in said


@pytest.mark.parametrize(("record", "message"), [({}, "does not say which configuration"), (None, "is not empty")])
def test_what_is_there_already_stays(tmp_path, capsys, record, message):
    saved(tmp_path / "run", record or {})
    mine = tmp_path / "models" / "mine"
    if record is None:
        mine.parent.mkdir()
        mine.write_text("a model")
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / "run"), str(tmp_path / "models")])
    assert message in capsys.readouterr().err
    assert mine.exists() == (record is None)

"""What `nrl-lite export` refuses, before it imports anything heavy; what it writes is in tests/functional."""

import pytest

from nemo_rl_lite import export
from nemo_rl_lite.checkpoint.store import CheckpointStore, Retention


def test_a_folder_without_a_checkpoint_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        export.main([str(tmp_path)])
    assert ended.value.code == 1
    assert f"{tmp_path} has no complete checkpoint: name a run's folder" in capsys.readouterr().err


@pytest.mark.parametrize(("record", "message"), [({}, "does not say which configuration"), (None, "is not empty")])
def test_what_is_there_already_stays(tmp_path, capsys, record, message):
    store = CheckpointStore(tmp_path / "run" / "checkpoints", Retention(1, 0, None, True))
    store.begin(3)
    store.finish(3, {}, record or {})
    mine = tmp_path / "models" / "mine"
    if record is None:
        mine.parent.mkdir()
        mine.write_text("a model")
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / "run"), str(tmp_path / "models")])
    assert message in capsys.readouterr().err
    assert mine.exists() == (record is None)

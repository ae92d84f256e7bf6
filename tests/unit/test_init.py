"""`nrl-lite init` writes an experiment that composes, reads its rows and judges with its reward."""

import pytest

from nemo_rl_lite import init
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rewards.registry import find_reward
from nemo_rl_lite.validation.compose import compose_config


def test_what_is_written_is_an_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    init.main(["my lab"])
    assert "cd 'my lab' && nrl-lite train experiment.yaml" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "my lab")
    config = compose_config(["experiment.yaml"])
    assert config.run_name == "my-experiment" and config.cluster.gpus_per_node == 0
    reward, problem = find_reward(config.reward.name, {}), Problem((), "4321")
    assert [reward(response, problem) for response in ("4321", "43", "")] == [1.0, 0.5, 0.0]


def test_files_are_never_overwritten(tmp_path, capsys):
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(SystemExit) as end:
        init.main([str(tmp_path)])
    assert end.value.code == 2 and (tmp_path / "reward.py").read_text() == "mine"
    assert not (tmp_path / "rows.jsonl").exists()

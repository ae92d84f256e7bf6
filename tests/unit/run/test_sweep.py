"""The jobs of a sweep, and the table at its end."""

from pathlib import Path

from nemo_rl_lite.observability.summary import Summary
from nemo_rl_lite.run import command
from nemo_rl_lite.run.command import Sweep, jobs, launch


def test_jobs_are_in_the_order_of_hydras_sweeper():
    assert list(jobs(["algorithm=sft", "algorithm.seed=1,2", "policy.precision=choice(float32,bfloat16)"])) == [
        ["algorithm=sft", f"algorithm.seed={seed}", f"policy.precision={precision}"]
        for seed in (1, 2)
        for precision in ("float32", "bfloat16")
    ]


def test_the_table_has_what_was_swept_and_what_came_of_it(capsys):
    done = Summary("sweep/0", 30, 0.14, 0.723, None, None, None, None, 1.234, {}, {})
    sweep = Sweep(["logger.plots=false", "+algorithm.seed=1,2"])
    sweep.ended.append((["logger.plots=False", "+algorithm.seed=1"], Path("sweep/0"), done))
    sweep.ended.append((["logger.plots=False", "+algorithm.seed=2"], Path("sweep/1"), 3))
    sweep.show()
    text = capsys.readouterr().out
    assert "accuracy 0.140 -> 0.723" in text and "1.23" in text and "failed (status 3)" in text
    assert "algorithm.seed=1" in text and "plots" not in text and "nrl-lite report sweep\n" in text
    assert sweep.failed == [(1, 3)]


def test_a_sweep_is_in_the_folder_that_the_command_names(tmp_path, monkeypatch):
    ran = []
    done = Summary("", 30, 0.14, 0.723, None, None, None, None, 1.234, {}, {})
    monkeypatch.setattr(command, "run_in", lambda folder, *_: ran.append(folder) or done)
    launch(["-m", "algorithm.seed=1,2", f"hydra.sweep.dir={tmp_path / 'both'}"])
    assert ran == [tmp_path / "both" / "0", tmp_path / "both" / "1"]

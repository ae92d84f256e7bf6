"""Records of what algorithms learn: continued, drawn, and summed up over seeds."""

import json

import learning
import learning_figure as figure
import pytest


def test_a_record_is_continued_with_the_runs_that_have_not_finished(tmp_path, monkeypatch):
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"runs": [run("grpo", 1), run("dapo", 1) | {"finished": False}]}))
    begun = []
    monkeypatch.setattr(learning, "run_together", lambda jobs, *rest: begun.extend(job.name for job in jobs))
    command = "small gcd --algorithms grpo dapo gspo --seeds 1 2 --only grpo:1 dapo:1 gspo:2"
    learning.main([*command.split(), "--continue", str(kept)])
    assert begun == ["dapo-1", "gspo-2"]


def test_the_picture_is_stale_when_the_runs_change(tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "PICTURE", tmp_path / "learning.svg")
    records = [{"bench": "learning-gcd", "task": "gcd", "runs": [run("grpo", 1), run("gspo", 1)]}]
    assert figure.is_stale(records)
    figure.draw(records)
    assert not figure.is_stale(records)
    records[0]["runs"].append(run("gspo", 2))
    assert figure.is_stale(records)
    figure.draw([])
    assert not figure.is_stale([]) and not figure.PICTURE.exists()


def test_an_interval_over_seeds_is_that_of_student():
    runs = [run("grpo", seed) for seed in (1, 2, 3)]
    for one, accuracy in zip(runs, (0.4, 0.5, 0.6), strict=True):
        one["validation"][-1]["accuracy"] = accuracy
    # 4.303 standard deviations of the mean, with two degrees of freedom.
    assert figure.interval_of_seeds(runs) == pytest.approx((0.5 - 0.2484, 0.5 + 0.2484), abs=1e-3)
    assert figure.interval_of_seeds(runs[:1]) is None


def test_a_problem_is_one_observation_of_several_seeds():
    one, other = run("grpo", 1), run("grpo", 2)
    one["validation"][-1]["right"], other["validation"][-1]["right"] = "1100", "1000"
    mean, low, high = figure.over_seeds([one, other], -1)
    assert mean == pytest.approx(3 / 8) and low < mean < high


def run(algorithm: str, seed: int) -> dict:
    point = {"accuracy": 0.5, "problems": 4, "commonest_answer": 0.25, "right": "0101"}
    return {
        "algorithm": algorithm,
        "seed": seed,
        "finished": True,
        "validation": [{"step": step, **point} for step in (0, 9)],
    }

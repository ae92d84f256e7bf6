"""`nrl-lite compare` on folders with validation samples or metrics."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from nemo_rl_lite import compare
from nemo_rl_lite.errors import UsageError
from nemo_rl_lite.report.comparison import compare as compared

DRAW = np.random.default_rng(0)


def run(folder, share, seed=1, problems=range(200), steps=(0, 4), lr=0.1, samples=True, **metrics):
    """Write the files of a run whose responses are right with the probability `share`."""
    (folder / "rollouts").mkdir(parents=True)
    config = {"algorithm": {"seed": seed}, "policy": {"lr": lr}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"step": step, "validation/accuracy": share} | metrics for step in steps]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for step in steps if samples else ():
        rows = [
            {
                "problem": place,
                "sample": 0,
                "prompt": [{"role": "user", "content": f"problem {number}"}],
                "answer": "1",
                "source": "",
                "reward": float(DRAW.random() < share) if number else None,
                "tokens": 5,
            }
            for place, number in enumerate(problems)
        ]
        parquet.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / f"step-{step:08d}-validation.parquet")
    return folder


def said(capsys, *words) -> str:
    compare.main(list(map(str, words)))
    return capsys.readouterr().out


def test_groups_of_runs_are_compared_by_problem(tmp_path, capsys):
    for seed in range(3):
        run(tmp_path / "base" / str(seed), 0.2, seed)
        run(tmp_path / "new" / str(seed), 0.6, seed, lr=0.2)
    text = said(capsys, tmp_path / "base", "vs", tmp_path / "new")
    assert "base: 3 run(s), new: 3 run(s), after step 4" in text and "policy.lr: 0.1 -> 0.2" in text
    assert "better" in text and "seed" not in text
    found = json.loads(said(capsys, tmp_path / "new", "vs", tmp_path / "base", "--json"))
    by_name = {one["quantity"]: one for one in found["compared"]}
    reward = by_name["held-out reward"]
    low, high = reward["interval"]
    assert low < reward["difference"] == reward["new"] - reward["base"] < high < 0
    assert by_name["held-out reward"]["verdict"] == "worse" and by_name["response tokens"]["verdict"] == "undecided"
    # The reward of one problem failed.
    assert by_name["held-out reward"]["problems"] == 199


def test_two_runs_need_no_word_between_them(tmp_path, capsys):
    text = said(capsys, run(tmp_path / "a", 0.5), run(tmp_path / "b", 0.5, problems=range(100, 300)), "--step", "0")
    assert "after step 0" in text and "200 problems are left out" in text and "other problems, not other seeds" in text


def test_differences_within_a_group_are_told(tmp_path, capsys):
    runs = [run(tmp_path / str(number), 0.5, number, lr=number) for number in range(3)]
    assert "runs also differ in: policy.lr" in said(capsys, *runs[:2], "vs", runs[2])


def test_equal_seeds_within_a_group_are_told(tmp_path, capsys):
    runs = [run(tmp_path / str(number), 0.5, seed) for number, seed in enumerate((1, 1, 2))]
    assert "the same algorithm.seed" in said(capsys, *runs[:2], "vs", runs[2])
    assert "algorithm.seed" not in said(capsys, runs[0], "vs", *runs[1:])


def test_equal_groups_need_no_seeds(tmp_path, capsys):
    runs = [run(tmp_path / str(seed), 1.0, seed) for seed in range(3)]
    assert "held-out reward: the groups are equal" in said(capsys, *runs[:2], "vs", runs[2])


def test_a_killed_run_has_the_metrics_of_its_whole_lines(tmp_path, capsys):
    runs = [run(tmp_path / str(seed), 0.5, seed, samples=False) for seed in range(3)]
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "validation/acc')
    assert "after step 4" in said(capsys, *runs[:2], "vs", runs[2])


def test_runs_without_samples_have_their_metrics(tmp_path, capsys):
    losses = {"base": (1.0, 1.01, 1.02), "new": (0.5, 0.51, 0.52)}
    for group, own in losses.items():
        for seed, loss in enumerate(own):
            run(tmp_path / group / str(seed), 0.5, seed, samples=False, **{"validation/val_loss": loss})
    found = json.loads(said(capsys, tmp_path / "base", "vs", tmp_path / "new", "--json"))["compared"]
    assert {one["quantity"]: one["verdict"] for one in found}["held-out loss"] == "better"
    text = said(capsys, tmp_path / "base" / "0", tmp_path / "new" / "0")
    assert "one number per group has no interval" in text


@pytest.mark.parametrize("words", [["a"], ["a", "vs"], ["vs", "a"], ["a", "b", "c"], ["a", "vs", "b", "vs", "c"]])
def test_other_words_are_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        compare.main(words)
    assert end.value.code == 2 and "`vs`" in capsys.readouterr().err


def test_runs_without_something_in_common_are_refused(tmp_path):
    base, other = run(tmp_path / "a", 0.5), run(tmp_path / "b", 0.5, problems=range(500, 600))
    with pytest.raises(UsageError, match="no held-out problem in common"):
        compared([base], [other])
    with pytest.raises(UsageError, match="no validated step in common"):
        compared([base], [run(tmp_path / "c", 0.5, steps=(3,))])
    with pytest.raises(UsageError, match="no validation after step 3; it has 0, 4"):
        compared([base], [other], step=3)
    with pytest.raises(UsageError, match="no validation yet"):
        compared([base], [run(tmp_path / "d", 0.5, steps=())])
    with pytest.raises(UsageError, match="is in both groups"):
        compared([base, other], [base])
    evaluation = run(tmp_path / "e", 0.5, steps=(0,))
    (evaluation / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="some are runs and some evaluations"):
        compared([base], [evaluation])

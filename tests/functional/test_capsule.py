"""A rerun of a capsule is bitwise identical, and a change is named by the first value that it changes."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from nemo_rl_lite import capsule, rerun
from tests.functional.here import leaving_nothing, train_here, without_ray
from tests.functional.supervised import SFT, write_data

pytestmark = pytest.mark.functional

GRPO = [
    *("algorithm.max_num_steps=4", "algorithm.num_prompts_per_step=4", "algorithm.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=16", "policy.logprob_batch_size=16"),
    *("algorithm.max_val_samples=20", "generation=transformers", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"),
    "reward.name=tests.functional.rewards.share_of_digits",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder) -> Path:
    folder = tmp_path_factory.mktemp("capsule") / "run"
    train_here(folder, model_folder, *GRPO)
    capsule.main([str(folder), "--steps", "2"])
    return folder


def again(file: Path, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit status and the lines of the comparison."""
    output = StringIO()
    with redirect_stdout(output), leaving_nothing(), without_ray(), pytest.raises(SystemExit) as end:
        rerun.main([str(file), "--folder", str(folder), *arguments])
    beginnings = ("changed", "first difference", "then", "also different", "equal")
    return end.value.code, [line for line in output.getvalue().splitlines() if line.startswith(beginnings)]


def test_an_unchanged_rerun_is_equal(run, tmp_path):
    assert again(run / "capsule.json", tmp_path / "again") == (0, ["equal    all compared values up to step 2"])


def test_a_step_that_is_not_repeated_is_a_difference(run, tmp_path):
    status, found = again(run / "capsule.json", tmp_path / "again", "algorithm.max_num_steps=1")
    assert status == 1 and "first difference  step 2: the step was not repeated" in found


@pytest.mark.parametrize(
    ("change", "changed", "first"),
    [
        ("algorithm.seed=7", "algorithm.seed: 42 -> 7", "step 0: tokens of validation problem 0, sample 0: "),
        (
            "policy.megatron_cfg.optimizer.lr=1e-2",
            "policy.megatron_cfg.optimizer.lr: 0.0003 -> 0.01",
            "step 1: learning rate: 0.01, was 0.0003",
        ),
        (
            "algorithm.loss_fn.reference_policy_kl_penalty=0.5",
            "algorithm.loss_fn.reference_policy_kl_penalty: 0.001 -> 0.5",
            "step 2: loss: ",
        ),
        (
            "reward.name=tests.functional.rewards.nothing",
            "reward.name: 'tests.functional.rewards.share_of_digits' -> 'tests.functional.rewards.nothing'",
            "step 0: reward of validation problem ",
        ),
    ],
)
def test_a_change_is_named_by_the_first_value_that_it_changes(run, tmp_path, change, changed, first):
    status, lines = again(run / "capsule.json", tmp_path / "again", change)
    assert status == 1 and lines[0] == f"changed  {changed}"
    assert lines[1].startswith(f"first difference  {first}"), lines


def test_whole_supervised_runs_are_compared_to_their_weights(tmp_path, model_folder):
    run = tmp_path / "run"
    train_here(run, model_folder, *SFT, *write_data(tmp_path))
    capsule.main([str(run), str(tmp_path / "c.json"), "--steps", "99"])
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["weights"] and content["data"]["rows"] and content["steps"][1]["metrics"]["train/loss"] > 0
    assert again(tmp_path / "c.json", tmp_path / "same")[0] == 0
    name = "model.norm.weight"
    content["weights"][name] = "0"
    (tmp_path / "c.json").write_text(json.dumps(content))
    status, lines = again(tmp_path / "c.json", tmp_path / "other")
    assert status == 1 and lines == [
        f"first difference  step 6: weights of {name} (1 of {len(content['weights'])} differ)"
    ]


def test_what_cannot_be_repeated_is_named(tmp_path, run, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "command.txt").write_text("nrl-lite train\n")
    (tmp_path / "bad.json").write_text("[1")
    for command, arguments, said in (
        (capsule.main, [str(tmp_path / "none")], "no such run"),
        (capsule.main, [str(tmp_path)], "has no readable config.json"),
        (rerun.main, [str(tmp_path / "bad.json")], "is not a capsule"),
        (rerun.main, [str(run / "config.json")], "is not a capsule of this version"),
        (rerun.main, [str(run / "capsule.json"), "algorithm.sed=3"], "algorithm.seed"),
        (
            rerun.main,
            [str(run / "capsule.json"), "--folder", str(run / "below")],
            "is inside the folder of another run",
        ),
    ):
        with pytest.raises(SystemExit) as end:
            command(arguments)
        assert end.value.code == 2 and said in capsys.readouterr().err, said

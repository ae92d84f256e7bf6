"""A run that was stopped resumes like one that was not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.here import run_here, train_here
from tests.functional.supervised import DPO, SFT, write_data, write_pairs

pytestmark = pytest.mark.functional


def metrics_of(folder: Path) -> dict[tuple[int, str], float]:
    """What training and validation measured, by step and name."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kinds = ("train/", "validation/")
    return {(line["step"], name): line[name] for line in lines for name in line if name.startswith(kinds)}


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


ONE_STEP_OFF = [
    *("generation=transformers", "generation.colocated.enabled=false", "algorithm.rollouts.source=one_step_off"),
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
    *("algorithm.num_prompts_per_step=8", "policy.train_global_batch_size=64", "policy.train_micro_batch_size=64"),
    *("policy.logprob_batch_size=64", "algorithm.max_val_samples=20"),
    "reward.name=tests.functional.rewards.share_of_digits",
]


@pytest.mark.parametrize(("options", "write"), [(SFT, write_data), (DPO, write_pairs)], ids=["sft", "dpo"])
def test_half_and_half_is_the_whole(tmp_path, model_folder, options, write):
    """Stopped in the middle of an epoch, at a step that the period does not save."""
    common = [*options, *write(tmp_path), "algorithm.val_period=2", "checkpoint.save_period=5"]
    train_here(tmp_path / "whole", model_folder, *common, "algorithm.max_num_steps=6")
    train_here(tmp_path / "halves", model_folder, *common, "algorithm.max_num_steps=3")
    output, _ = train_here(tmp_path / "halves", model_folder, *common, "algorithm.max_num_steps=6")
    assert "resuming after step 3" in output
    halves, whole = metrics_of(tmp_path / "halves"), metrics_of(tmp_path / "whole")
    # Only the first half validates after its last step.
    only = {key for key in halves if key not in whole}
    assert {step for step, _ in only} == {3} and whole == {k: v for k, v in halves.items() if k not in only}
    assert_same_weights(tmp_path / "halves" / "hf", tmp_path / "whole" / "hf")


def test_one_step_off_the_next_rollout_is_in_the_checkpoint(tmp_path, model_folder):
    """The weights of the checkpoint could not sample it again: it was sampled by those of the step before."""
    common = [*ONE_STEP_OFF, "algorithm.max_num_steps=6", "algorithm.val_period=2", "checkpoint.save_period=3"]
    train_here(tmp_path / "whole", model_folder, *common)
    saved = tmp_path / "whole" / "checkpoints" / "step-00000003"
    train_here(tmp_path / "rest", model_folder, *common, f"checkpoint.resume_from={saved}")
    whole, rest = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "rest")
    assert whole == {key: value for key, value in whole.items() if key[0] < 4} | rest and max(rest)[0] == 6
    ages = [whole[step, "train/trajectory_age_max"] for step in range(1, 7)]
    assert ages == [0, 1, 1, 1, 1, 1] and len({whole[step, "train/loss"] for step in range(1, 7)}) == 6
    assert_same_weights(tmp_path / "rest" / "hf", tmp_path / "whole" / "hf")


def test_a_damaged_checkpoint_is_named_with_an_older_one_and_the_folder_stays(tmp_path, model_folder):
    """Its size is that of the intact one, so that a rank finds it. Later steps would be set aside if it had begun."""
    run = tmp_path / "run"
    common = [*SFT, *write_data(tmp_path), "checkpoint.save_period=2"]
    train_here(run, model_folder, *common, "algorithm.max_num_steps=4")
    file = run / "checkpoints" / "step-00000004" / "policy" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 5, "train/loss": 1.0}) + "\n")
    before = files_of(run)
    done = run_here(run, model_folder, *common, "algorithm.max_num_steps=6")
    assert done.returncode and f"{file.parent.parent} is damaged: policy/__0_0.distcp has changed" in done.stderr
    assert f"the newest intact one is {file.parents[2] / 'step-00000002'}; fix:" in done.stderr
    assert files_of(run) == before
    file.parents[1].rename(tmp_path / "away")
    output, _ = train_here(run, model_folder, *common, "algorithm.max_num_steps=6")
    assert "resuming after step 2" in output


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of each file, but of logs."""
    files = [
        file for file in folder.rglob("*") if file.is_file() and "logs" not in file.parts and file.suffix != ".log"
    ]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}

"""A run that was stopped resumes like one that was not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.here import train_here
from tests.functional.test_dpo import SMALL as DPO
from tests.functional.test_dpo import write_pairs
from tests.functional.test_sft import SMALL as SFT
from tests.functional.test_sft import write_data

pytestmark = pytest.mark.functional


def metrics_of(folder: Path) -> dict[tuple[int, str], float]:
    """What training and validation measured, by step and name."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kinds = ("train/", "validation/")
    return {(line["step"], name): line[name] for line in lines for name in line if name.startswith(kinds)}


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


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

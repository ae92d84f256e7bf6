"""A reference policy that follows the trained one: its weights, and its place in checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.functional.here import train_here
from tests.functional.ranks import run_ranks
from tests.functional.reference_rank import FIRST, tokens_of
from tests.functional.test_grpo import PAPER
from tests.functional.test_resume import assert_same_weights, metrics_of

pytestmark = pytest.mark.functional

LR = ["policy.megatron_cfg.optimizer.lr=0.01", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"]
TENSOR = [*LR, "cluster.cpu_ranks=2", "policy.megatron_cfg.tensor_model_parallel_size=2"]
PIPELINE = [*LR, "cluster.cpu_ranks=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"]
DATA = [*LR, "cluster.cpu_ranks=2"]
HALF = [*LR, "policy.precision=bfloat16"]
# Name: overrides, and whose checkpoint it resumes from (none: it saves one).
ON_TWO = {
    "tensor": [TENSOR, None],
    "tensor again": [TENSOR, "tensor"],
    "pipeline": [PIPELINE, None],
    "pipeline again": [PIPELINE, "pipeline"],
    "data": [DATA, None],
    "data again": [DATA, "data"],
    "pipeline from tensor": [PIPELINE, "tensor"],
}
ON_ONE = {
    "one": [LR, None],
    "one again": [LR, "one"],
    "one from data": [LR, "data"],
    "half": [HALF, None],
    "half again": [HALF, "half"],
}
SAVING = [name for cases in (ON_TWO, ON_ONE) for name, (_, saved_by) in cases.items() if saved_by is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder):
    """The logprobs of each case's reference policy, in a file of its name."""
    output, script = tmp_path_factory.mktemp("reference"), Path(__file__).with_name("reference_rank.py")
    for ranks, cases in ((2, ON_TWO), (1, ON_ONE)):
        run_ranks(script, [str(model_folder), str(output), json.dumps(cases)], ranks)
    return output


def found(folder: Path, case: str) -> dict[str, np.ndarray]:
    return torch.load(folder / case.replace(" ", "-"), weights_only=False)


@pytest.mark.parametrize("case", SAVING)
def test_its_weights_are_the_mean_of_both(folder, model_folder, case):
    from transformers import AutoModelForCausalLM

    own, before = found(folder, case), load_file(model_folder / "model.safetensors")
    policy = load_file(folder / f"{case}.hf" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    mean = {name: FIRST * policy[name].float() + (1 - FIRST) * before[name].float() for name in before}
    model.load_state_dict(mean, strict=False)
    tokens = tokens_of(9)
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1).numpy()
    atol = 0.05 if case == "half" else 1e-4
    np.testing.assert_allclose(own["moved"][:, 1:], expected, atol=atol)
    assert np.abs(own["moved"] - own["start"]).max() > 5 * atol
    # Training does not move it.
    assert np.array_equal(own["moved"], own["later"]) and np.array_equal(own["moved again"], own["last"])
    assert np.abs(own["moved again"] - own["moved"]).max() > 5 * atol


@pytest.mark.parametrize("case", SAVING)
def test_in_the_same_layout_it_goes_on_bit_for_bit(folder, case):
    own, again = found(folder, case), found(folder, f"{case} again")
    assert all(np.array_equal(again[name], own[name]) for name in ("later", "moved again", "last"))


@pytest.mark.parametrize("case", ["pipeline from tensor", "one from data"])
def test_another_layout_goes_on_from_it(folder, case):
    own, expected = found(folder, case), found(folder, case.split(" from ")[1])
    for name in ("later", "moved again", "last"):
        np.testing.assert_allclose(own[name], expected[name], atol=1e-4)


def test_a_run_that_was_stopped_resumes_like_one_that_was_not(tmp_path, model_folder):
    """With several passes over each rollout, too."""
    common = [*PAPER, "algorithm.ref_model_sync_steps=2", "algorithm.num_iterations=2", "checkpoint.save_period=3"]
    common += ["algorithm.loss_fn.reference_policy_kl_penalty=0.1", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"]
    common += ["checkpoint.export_hf_at_end=true"]
    train_here(tmp_path / "whole", model_folder, *common, "algorithm.max_num_steps=5")
    saved = tmp_path / "whole" / "checkpoints" / "step-00000003"
    train_here(tmp_path / "rest", model_folder, *common, "algorithm.max_num_steps=5", f"checkpoint.resume_from={saved}")
    whole, rest = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "rest")
    assert rest == {key: value for key, value in whole.items() if key[0] > 3} and max(rest)[0] == 5
    assert_same_weights(tmp_path / "rest" / "hf", tmp_path / "whole" / "hf")
    kl = [whole[step, "train/kl_penalty"] for step in range(1, 6)]
    assert kl[2] < kl[1] and kl[4] < kl[3], "the reference moves after the second and the fourth rollout"

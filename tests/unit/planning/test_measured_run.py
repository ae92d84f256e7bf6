"""Predictions from a run's own seconds and lengths."""

import dataclasses
import json

import pytest

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.known import KNOWN_MODELS
from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.planning.measured_run import read_measured
from nemo_rl_lite.planning.phase_time import Lengths
from nemo_rl_lite.planning.step_time import StepTime
from nemo_rl_lite.planning.waiting import Basis, predict_waiting
from nemo_rl_lite.rules.compose import compose_config

SHAPE = model_shape(KNOWN_MODELS["Qwen/Qwen3-1.7B"])
SIZES = ["policy.model_name=Qwen/Qwen3-1.7B", "cluster.gpus_per_node=4", "policy.train_global_batch_size=96"]
APART = ["generation.colocated.enabled=false", "generation.colocated.resources.gpus_per_node=2"]
RUN = ["policy=megatron_gpu", "generation=vllm_gpu", "algorithm.num_prompts_per_step=12", *SIZES, *APART]
GPU_BYTES = 141 * 2**30
# 12 x 8 responses of 200 tokens at 960 tokens a second are 20 s.
STEP = {
    "timing/train/generation": 0.5,
    "timing/train/policy_and_reference_logprobs": 4.0,
    "timing/train/policy_training": 11.0,
    "timing/train/prepare_for_generation/transfer_and_update_weights": 0.75,
    "timing/train/refit_check": 0.25,
    "train/mean_total_tokens_per_sample": 260.0,
    "train/mean_gen_tokens_per_sample": 200.0,
    "train/max_gen_tokens_per_sample": 480.0,
    "performance/generation_tokens_per_sec": 960.0,
}
SLOW = {name: 9 * value for name, value in STEP.items()}


def write_run(folder, overrides=RUN, steps=(SLOW, STEP, STEP, STEP)):
    """A run's folder; its metrics have lines of other steps, too, and the last one is incomplete."""
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(compose_config(overrides))))
    entries = [{"step": 0, "validation/accuracy": 0.5}, *({"step": n, **one} for n, one in enumerate(steps, 1))]
    text = "".join(f"{json.dumps(one)}\n" for one in entries)
    (folder / "metrics.jsonl").write_text(f'{text}{{"step": 9, "timi')
    return folder


def test_medians_without_the_first_step(tmp_path):
    """How long the policy waited (timing/train/generation) says nothing about how long the engines worked."""
    found = read_measured(write_run(tmp_path), "config.json")
    assert found.time == StepTime(generation=20, logprob=4, train=11, refit=1)
    assert found.lengths == Lengths(prompt=60, mean=200, longest=480)


def test_the_runs_own_configuration_gets_the_runs_own_seconds(tmp_path):
    config = compose_config(RUN)
    basis = Basis.measured(config, SHAPE, GPU_BYTES, read_measured(write_run(tmp_path), "config.json"))
    found = predict_waiting(config, RUN, SHAPE, GPU_BYTES, basis)
    assert dataclasses.astuple(found.present.time) == pytest.approx((20, 4, 11, 1))
    assert found.present.time.overlapped == pytest.approx(21)


def test_other_divisions_are_as_far_from_the_prediction_as_the_run_was(tmp_path):
    """Fewer GPUs take longer, with more to generate for each engine or more to train on for each rank."""
    config = compose_config(RUN)
    basis = Basis.measured(config, SHAPE, GPU_BYTES, read_measured(write_run(tmp_path), "config.json"))
    one, two, three = predict_waiting(config, RUN, SHAPE, GPU_BYTES, basis).apart
    assert one.time.generation > two.time.generation > three.time.generation
    assert one.time.policy < two.time.policy < three.time.policy


def refusal(folder, config=RUN) -> str:
    with pytest.raises(ConfigError) as error:
        Basis.measured(compose_config(config), SHAPE, GPU_BYTES, read_measured(folder, "config.json"))
    [violation] = error.value.violations
    assert violation.key == "--from-run" and violation.fix
    return violation.rule


def test_what_is_no_run_is_refused(tmp_path):
    assert "is no run's folder: it has no config.json" in refusal(tmp_path / "nothing")
    write_run(tmp_path)
    (tmp_path / "config.json").write_text('{"algorithm": {"name": "grpo"}}')
    assert "cannot read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["algorithm=sft"], "is a run of sft, which generates nothing"),
        ([], "is a run on CPUs"),
    ],
)
def test_runs_without_engines_on_gpus_are_refused(tmp_path, overrides, rule):
    assert rule in refusal(write_run(tmp_path, overrides))


def test_a_run_without_a_second_step_is_refused(tmp_path):
    assert "has 1 whole steps in metrics.jsonl; two are needed" in refusal(write_run(tmp_path, steps=(STEP,)))
    lost = {name: None if name == "timing/train/refit_check" else value for name, value in STEP.items()}
    assert "has 0 whole steps" in refusal(write_run(tmp_path, steps=(lost, lost)))
    (tmp_path / "metrics.jsonl").unlink()
    assert "has 0 whole steps" in refusal(tmp_path)


def test_a_run_of_another_model_is_refused(tmp_path):
    other = [one.replace("Qwen3-1.7B", "Qwen3-4B") for one in RUN]
    assert "trained Qwen3-1.7B, and the plan is for Qwen3-4B" in refusal(write_run(tmp_path), other)

"""Rollouts that are generated while the policy trains, on GPUs."""

import pytest

from nemo_rl_lite.rollout.store import read_rollout, rollout_files
from tests.functional.conftest import train
from tests.gpu.test_run import APART, SMALL

CORRECTED = [
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
]
# Responses that last longer than a step trains, and end by their length alone.
LONG = ["policy.max_total_sequence_length=640", "generation.max_new_tokens=600", "algorithm.max_num_steps=6"]
QUEUE = ["algorithm.rollouts.source=queue", "algorithm.rollouts.max_trajectory_age_steps=2"]


def check(metrics: list[dict], oldest: int) -> None:
    """Policy and engines agreed after every refit, and no rollout was older than allowed."""
    probed = [line["refit/probe_logprob_diff"] for line in metrics if "refit/probe_logprob_diff" in line]
    steps = [line for line in metrics if "train/loss" in line]
    assert len(probed) == 7 and max(probed) < 0.2 and len(steps) == 6
    ages = [line["train/trajectory_age_max"] for line in steps]
    assert ages[0] == 0 and 1 <= max(ages) <= oldest
    assert all(line["train/correction/ess"] > 0.2 for line in steps)


@pytest.mark.gpu
@pytest.mark.parametrize("recomputes", [False, True])
def test_an_engine_that_stays_awake_generates_while_the_policy_trains(gpu_model, tmp_path, recomputes):
    folder, cache = tmp_path / "run", f"generation.vllm_cfg.recompute_kv_cache_after_weight_updates={recomputes}"
    own = [*SMALL, *LONG, *CORRECTED, *QUEUE, "cluster.gpus_per_node=1", "generation.colocated.sleep=false"]
    _, metrics = train(folder, gpu_model, *own, cache, timeout_s=400)
    check(metrics, oldest=2)
    # Responses have seen several versions: the mean age of a rollout is no whole number.
    means = [line["train/trajectory_age_mean"] for line in metrics if "train/loss" in line]
    assert any(mean % 1 for mean in means)
    trained = [row for file in rollout_files(folder) if "train" in file.stem for row in read_rollout(file)]
    prompts = {row["prompt"][-1]["content"] for row in trained}
    assert len(prompts) == len(trained) / 8 == 6 * 8


@pytest.mark.gpu
def test_an_engine_that_sleeps_continues_its_responses_after_the_refit(gpu_model, tmp_path):
    """Its KV cache is lost with each sleep, and the KL compares every token with the policy."""
    folder = tmp_path / "run"
    own = [*SMALL, *LONG, *CORRECTED, *QUEUE, "cluster.gpus_per_node=1", "generation.colocated.sleep=true"]
    # The engine decodes half of a step's responses at a time, so a step leaves many unfinished.
    _, metrics = train(folder, gpu_model, *own, "generation.vllm_cfg.max_num_seqs=32", timeout_s=400)
    check(metrics, oldest=2)
    steps = [line for line in metrics if "train/loss" in line]
    assert any(line["train/trajectory_age_mean"] % 1 for line in steps)
    assert all(line["train/gen_kl_error"] < 0.05 for line in steps)
    taken = [row for file in rollout_files(folder) if "train" in file.stem for row in read_rollout(file)]
    assert len({row["prompt"][-1]["content"] for row in taken}) == len(taken) / 8 == 6 * 8


@pytest.mark.gpu(2)
@pytest.mark.parametrize("source", ["one_step_off", "queue"])
def test_engines_on_their_own_gpu_generate_while_the_policy_trains(gpu_model, tmp_path, source):
    own = [*SMALL, *LONG, *CORRECTED, f"algorithm.rollouts.source={source}", "cluster.gpus_per_node=2"]
    _, metrics = train(tmp_path / "run", gpu_model, *own, APART[0], f"{APART[1]}=1", timeout_s=400)
    check(metrics, oldest=1 if source == "one_step_off" else 2)

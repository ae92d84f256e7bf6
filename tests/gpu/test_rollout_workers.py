"""Rollout workers on GPUs: policy and engines work on the rows that they keep."""

import pytest

from tests.gpu.test_async import CORRECTED
from tests.gpu.test_run import APART, check, run

WORKERS = "algorithm.rollouts.num_workers={}"


@pytest.mark.gpu
def test_a_rollout_worker_samples_what_the_launcher_samples(gpu_model, tmp_path):
    alone, apart = (run(tmp_path / str(count), gpu_model, 1, WORKERS.format(count)) for count in (0, 1))
    check(alone)
    check(apart)
    first, same = (next(line for line in metrics if "train/loss" in line) for metrics in (alone, apart))
    assert same["train/global_valid_toks"] == pytest.approx(first["train/global_valid_toks"], rel=0.02)
    assert same["train/reward"] == pytest.approx(first["train/reward"], abs=0.05)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("count", [1, 2])
def test_rollout_workers_of_two_engines_on_the_policys_gpus(count, gpu_model, tmp_path):
    check(run(tmp_path / "run", gpu_model, 2, WORKERS.format(count)))


@pytest.mark.gpu(2)
def test_a_rollout_worker_generates_while_the_policy_trains(gpu_model, tmp_path):
    ahead = ["algorithm.rollouts.source=one_step_off", *CORRECTED]
    metrics = run(tmp_path / "run", gpu_model, 2, APART[0], f"{APART[1]}=1", *ahead, WORKERS.format(1))
    steps = [line for line in metrics if "train/loss" in line]
    assert len(steps) == 3 and max(line["train/trajectory_age_max"] for line in steps) == 1

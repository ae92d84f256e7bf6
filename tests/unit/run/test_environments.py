"""What the launcher puts into the environment of its workers, whatever the user's has."""

from types import SimpleNamespace

import pytest

from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers import reserve
from nemo_rl_lite.workers.reserve import worker_threads

GPU = ["policy=megatron_gpu", "cluster.gpus_per_node=1", "policy.train_micro_batch_size=64"]
GPU += ["policy.max_total_sequence_length=128"]


@pytest.mark.parametrize(
    ("overrides", "segments"),
    [
        ([], "expandable_segments:False"),
        (["algorithm=sft"], "expandable_segments:True"),
        (["generation.colocated.enabled=false", "generation.colocated.resources.gpus_per_node=1"], None),
    ],
    ids=["shared GPUs", "no engine", "GPUs of their own"],
)
def test_memory_that_is_shared_or_put_to_sleep_is_in_fixed_segments(overrides, segments, monkeypatch, tmp_path):
    made = {}
    monkeypatch.setattr(
        reserve, "WorkerGroup", lambda name, slots, logs, environment, *_, **__: made.update(environment)
    )
    more = ["cluster.gpus_per_node=2"] if segments is None else []
    config = compose_config([*GPU, *overrides, *more])
    reserve.policy_group(config, [], tmp_path)
    assert {made.get("PYTORCH_CUDA_ALLOC_CONF"), made.get("PYTORCH_ALLOC_CONF")} == {segments}
    if config.algorithm.name == "grpo":
        made.clear()
        reserve.generation_group(config, SimpleNamespace(generation=[]), tmp_path)
        assert {made.get("PYTORCH_CUDA_ALLOC_CONF"), made.get("PYTORCH_ALLOC_CONF")} == {segments}


def test_on_cpus_no_gpu_is_seen_and_waiting_threads_sleep(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(
        reserve, "WorkerGroup", lambda name, slots, logs, environment, *_, **__: made.append(environment)
    )
    reserve.policy_group(compose_config(), [], tmp_path)
    reserve.generation_group(compose_config(), SimpleNamespace(generation=[]), tmp_path)
    assert [(one["CUDA_VISIBLE_DEVICES"], one["OMP_WAIT_POLICY"]) for one in made] == [("", "PASSIVE")] * 2


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 1, 2), (4, 1, 3), (4, 2, 2), (8, 2, 3), (1, 2, 1)])
def test_of_more_than_two_cores_a_worker_leaves_one(cores, workers, threads, monkeypatch):
    monkeypatch.setattr(reserve, "available_cores", lambda: cores)
    assert worker_threads(compose_config(), workers) == threads
    assert worker_threads(compose_config(["cluster.threads_per_worker=4"]), workers) == 4


def test_a_worker_on_a_gpu_has_one_thread():
    on_gpus = ["policy=megatron_gpu", "cluster.gpus_per_node=1", "policy.max_total_sequence_length=64"]
    assert worker_threads(compose_config(on_gpus), 1) == 1
    assert worker_threads(compose_config([*on_gpus, "cluster.threads_per_worker=4"]), 1) == 4

"""A policy is built while awake engines warm up, and after the start of engines that sleep."""

from types import SimpleNamespace

import pytest

from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers import launch

PARTS = {"cuda_graphs": "memory"}
GPU = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "policy.train_micro_batch_size=64"]
GPU += ["policy.max_total_sequence_length=128"]
IN_TURN = ["engines and rollouts", "engines sleep", "policy begins", "policy"]
SLEEP, LEAVE = "generation.colocated.sleep", "policy.offload_for_generation"


@pytest.mark.parametrize(
    ("overrides", "order"),
    [
        ([f"{SLEEP}=false", f"{LEAVE}=[]"], ["memory of engines", "policy begins", "policy and engines and rollouts"]),
        ([f"{SLEEP}=true", f"{LEAVE}=[]"], IN_TURN),
        ([f"{SLEEP}=false", f"{LEAVE}=[optimizer_states]"], IN_TURN),
    ],
    ids=["all stay", "engines sleep", "the policy leaves"],
)
def test_order(overrides, order, monkeypatch):
    done = []
    group = SimpleNamespace(part=lambda ranks: group, start_reaches=lambda part: f"{PARTS[part]} of engines")
    generation = SimpleNamespace(group=group, live=[0], finish_generation=lambda: done.append("engines sleep"))
    monkeypatch.setattr(launch, "wait", lambda call, timeout_s: done.append(call))
    monkeypatch.setattr(launch, "_built", lambda setup, limit_s, *calls: done.append(" and ".join(calls)))
    monkeypatch.setattr(launch, "start_policy", lambda *_: done.append("policy begins") or "policy")
    waiting = {"rollout_workers": "rollouts", "teacher_group": None, "policy_group": None, "model_path": None}
    begun = SimpleNamespace(config=compose_config([*GPU, *overrides]), **waiting)
    launch._build_beside_engines(begun, generation, ["engines"], False, Timer())
    assert done == order


def test_the_part_that_is_awaited_is_one_of_vllms_start():
    from nemo_rl_lite.compat.vllm import PARTS

    assert launch._LAST_MEMORY in PARTS.values()

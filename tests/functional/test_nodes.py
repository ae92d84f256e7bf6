"""Several nodes: one that is lost, one that joins later, and an engine on two. They are raylets on this machine, with
GPUs that are only numbers."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table, remove_placement_group

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.runtime import place
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.config.sizes import engines, rollout_workers
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers import reserve
from nemo_rl_lite.workers.reserve import generation_group, load_generation, start_engines
from tests.functional.conftest import PYTHONPATH

pytestmark = pytest.mark.functional
WORKERS = "tests.functional.workers"
TWO_NODES = [
    "algorithm=sft",
    "policy=megatron_gpu",
    "policy.train_micro_batch_size=64",
    "policy.max_total_sequence_length=128",
    "cluster.num_nodes=2",
    "cluster.gpus_per_node=1",
]


@pytest.fixture
def cluster(monkeypatch):
    nodes = started_cluster()
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def started_cluster(attempts: int = 3) -> Cluster:
    """A head node. On a busy machine it may not start within Ray's 30 s."""
    try:
        return Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    except Exception:
        if attempts == 1:
            raise
        return started_cluster(attempts - 1)


def connect() -> None:
    ray.init(log_to_driver=False, configure_logging=False)


def test_a_lost_node_is_told_from_an_error_and_another_one_takes_its_place(cluster, tmp_path):
    _, second = (cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2))
    connect()
    config = compose_config([*TWO_NODES, "cluster.start_timeout_s=300.0"])
    group = quiet_group(place(config, 0).policy, tmp_path)
    assert wait(group.call("answer")) == ["here", "here"]
    cluster.remove_node(second)
    with pytest.raises(WorkerError) as caught:
        wait(group.call("answer"))
    assert caught.value.lost and caught.value.worker in ("policy rank 0", "policy rank 1")
    # As the launcher does: a new connection, whose workers take what is there.
    ray.shutdown()
    connect()
    asked = (
        r"asks for 2 GPUs \(cluster.num_nodes x cluster.gpus_per_node\) and the Ray cluster has 1 on 2 nodes after 3 s"
    )
    with pytest.raises(WorkerError, match=asked):
        place(compose_config([*TWO_NODES, "cluster.start_timeout_s=3.0"]), 0)
    with ThreadPoolExecutor() as pool:
        placing = pool.submit(place, config, 0)
        time.sleep(4)
        assert not placing.done()
        cluster.add_node(num_cpus=1, num_gpus=1)
        group = quiet_group(placing.result().policy, tmp_path)
    assert wait(group.call("answer")) == ["here", "here"]


def test_a_node_whose_worker_failed_is_used_last(cluster):
    nodes = {cluster.add_node(num_cpus=1, num_gpus=1).node_id for _ in range(3)}
    connect()

    def used(*avoided: str) -> set[str]:
        slots = place(compose_config([*TWO_NODES, "cluster.start_timeout_s=60.0"]), 0, avoided=avoided).policy
        group = slots[0]["scheduling_strategy"].placement_group
        found = set(placement_group_table(group)["bundles_to_node_id"].values())
        remove_placement_group(group)
        return found

    for node in nodes:
        assert used(node) == nodes - {node}
    # Two nodes are needed, so the one that failed before the others is used.
    first, second, spare = nodes
    assert used(first, second) == {first, spare}
    assert used(first, "a node that is gone") == {second, spare}


def quiet_group(slots, folder) -> WorkerGroup:
    group = WorkerGroup("policy", slots, str(folder), {"PYTHONPATH": PYTHONPATH})
    wait(group.load("tests.functional.workers.Quiet", [{}, {}]), timeout_s=300)
    wait(group.start([{}, {}]), timeout_s=300)
    return group


def test_rollout_workers_are_on_the_nodes_of_their_engines(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(reserve, "ROLLOUT_CLASS", f"{WORKERS}.Quiet")
    nodes = [cluster.add_node(num_cpus=1, num_gpus=2).node_id for _ in range(2)]
    connect()
    size = ["cluster.num_nodes=2", "cluster.gpus_per_node=2", "algorithm.rollouts.num_workers=auto"]
    config = compose_config(["policy=megatron_gpu", "generation=vllm_gpu", *size])
    assert (rollout_workers(config), engines(config)) == (2, 4)
    group = reserve._rollout_group(config, place(config, 4), tmp_path)
    wait(reserve.load_rollout_workers(group), timeout_s=300)
    wait(group.start([{}, {}]), timeout_s=300)
    assert set(wait(group.call("node"))) == set(nodes)
    # A replaced one starts on its node.
    before = wait(group.call("node"))
    again = group.replace([1])
    wait(reserve.load_rollout_workers(again), timeout_s=300)
    wait(again.start([{}]), timeout_s=300)
    assert wait(group.call("node")) == before


def test_an_engine_on_two_nodes_starts_on_both_and_again_after_a_loss(cluster, tmp_path, monkeypatch):
    scripted = replace(ENGINES["vllm"], worker=f"{WORKERS}.FirstHost", follower=f"{WORKERS}.OtherHost")
    monkeypatch.setitem(ENGINES, "vllm", scripted)
    for gpus in ("0,1", "2,3"):
        cluster.add_node(num_cpus=1, num_gpus=2, env_vars={"CUDA_VISIBLE_DEVICES": gpus})
    connect()
    split = ["generation.vllm_cfg.tensor_parallel_size=2", "generation.vllm_cfg.pipeline_parallel_size=2"]
    nodes = ["cluster.num_nodes=2", "cluster.gpus_per_node=2", "cluster.start_timeout_s=300.0"]
    config = compose_config(["policy=megatron_gpu", "generation=vllm_gpu", *nodes, *split])
    assert engines(config) == 1
    group = generation_group(config, place(config, 1), tmp_path)
    assert group.processes == ["generation rank 0", *(f"generation rank 0 slot {slot}" for slot in (1, 2, 3))]

    def seen(part: WorkerGroup) -> None:
        wait(load_generation(config, part), timeout_s=300)
        wait(start_engines(config, part, tmp_path), timeout_s=300)
        first, second = wait(part.call("call", "seen"))[0]
        assert (first[0], second[0]) == (0, 1) and first[1] != second[1]
        assert {first[2], second[2]} == {"0,1", "2,3"}

    seen(group)
    assert group.lost() == []
    ray.kill(group.places[0][2])
    # Calls that were already on their way are answered.
    deadline = time.monotonic() + 60
    while not group.lost() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group.lost() == [0]
    seen(group.replace([0]))

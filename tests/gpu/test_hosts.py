"""Engines on several hosts, in whole runs: Ray has a node for each GPU of this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.functional.conftest import train
from tests.gpu.test_run import PARALLEL, SMALL, check, check_ways

ENGINE = "generation.vllm_cfg.{}_parallel_size=2"


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Cluster]:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    yield nodes
    nodes.shutdown()


def run(cluster: Cluster, folder: Path, model: Path, nodes: int, *overrides: str) -> list[dict]:
    """A small run's metrics, on nodes of one GPU each."""
    for gpu in range(nodes):
        cluster.add_node(num_cpus=4, num_gpus=1, env_vars={"CUDA_VISIBLE_DEVICES": str(gpu)})
    layout = [f"cluster.num_nodes={nodes}", "cluster.gpus_per_node=1"]
    return train(folder, model, *SMALL, *layout, *overrides, timeout_s=500)[1]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_an_engine_on_two_hosts_shares_the_policys_gpus(split, cluster, gpu_model, tmp_path):
    folder = tmp_path / "run"
    check(run(cluster, folder, gpu_model, 2, ENGINE.format(split), "generation.colocated.sleep=true"))
    check_ways(folder, shared=True)
    assert "world_size=2 rank=1 local_rank=0" in (folder / "logs" / "generation-0-slot-1.log").read_text()


@pytest.mark.gpu(2)
def test_experts_are_spread_over_two_hosts(cluster, gpu_experts_model, tmp_path):
    folder, triton = tmp_path / "run", "+generation.vllm_kwargs.moe_backend=triton"
    spread = [ENGINE.format("tensor"), "generation.vllm_cfg.expert_parallel=true", PARALLEL.format("expert_model")]
    check(run(cluster, folder, gpu_experts_model, 2, *spread, triton))
    check_ways(folder, shared=True)


@pytest.mark.gpu(4)
def test_an_engine_on_two_hosts_of_its_own_gets_weights_over_nccl(cluster, gpu_model, tmp_path):
    apart = ["generation.colocated.enabled=false", "generation.colocated.resources.num_nodes=2"]
    check(run(cluster, tmp_path / "run", gpu_model, 4, ENGINE.format("tensor"), *apart))
    check_ways(tmp_path / "run", shared=False)

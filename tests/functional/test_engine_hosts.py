"""An engine whose ranks are on two hosts: logprobs, refits, and the loss of a host. Both hosts are this machine."""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.engines import ENGINES, EngineHost
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Completion, Request, Sampling
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.validation.compose import compose_config
from tests.functional.conftest import PYTHONPATH
from tests.functional.test_engines import Producer, check_logprobs, load
from tests.functional.workers import kill_rank

# Each engine has four processes that import vLLM.
pytestmark = [pytest.mark.functional, pytest.mark.slow]

LIMIT_S = 600
PROMPTS = [(1, 5, 6, 7, 8, 41), (1, 9, 41)]
# vLLM's CPU build computes wrong addresses where ranks have different experts: test_vllm_loader.py has those.
SPLITS = ["tensor", "pipeline"]


@pytest.fixture
def group(tmp_path) -> Iterator[WorkerGroup]:
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    environment = ENGINES["vllm"].environment(compose_config().generation, False)
    environment |= {"PYTHONPATH": PYTHONPATH, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    try:
        yield WorkerGroup("generation", [{}, {}], str(tmp_path / "logs"), environment, slots_each=2, hosts_each=2)
    finally:
        ray.shutdown()


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_on_two_hosts_are_one_engine(split, group, model_folder, tmp_path):
    start(group, split, model_folder)
    old = load(model_folder).eval()
    check_logprobs(old, PROMPTS, sampled(group), temperature=1.0)
    new = load(model_folder).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in new.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    for model, shared in ((new, True), (old, False)):
        # As policy ranks do: on the same device through a shared buffer, and over sockets.
        model.save_pretrained(tmp_path / "sent")
        weights = list(load_file(tmp_path / "sent" / "model.safetensors").items())
        sent, received = refit(group, Producer("", weights, shared=shared, ranks=2))
        assert [report.checksums for report in received] == [sent.checksums] * 2
        check_logprobs(model, PROMPTS, sampled(group), temperature=1.0)


@pytest.mark.parametrize("lost", ["host", "rank"])
def test_an_engine_is_lost_with_one_of_its_hosts_or_ranks(lost, group, model_folder, tmp_path):
    start(group, "tensor", model_folder)
    if lost == "host":
        ray.kill(group.places[0][1])
    else:
        kill_rank(tmp_path / "logs" / "generation-0.log")
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        while time.monotonic() < began + 60:
            sampled(group)
    assert caught.value.lost and caught.value.worker == "generation rank 0"
    assert group.lost() == [0]


def start(group: WorkerGroup, split: str, folder: Path) -> None:
    config = compose_config([f"policy.model_name={folder}", "policy.max_total_sequence_length=32"])
    size: dict[str, Any] = {f"{split}_parallel_size": 2}
    settings = dataclasses.replace(config.generation.vllm_cfg, **size)
    arguments = {
        "generation": dataclasses.replace(config.generation, vllm_cfg=settings),
        "policy": config.policy,
        "model_path": str(folder),
        "seed": 1,
        "on_gpu": False,
    }
    own = ENGINES["vllm"]
    wait(group.load(own.worker, [{}, {}], own.follower or ""), timeout_s=LIMIT_S)
    addresses = tuple(group.addresses(LIMIT_S))
    wait(group.start([arguments | {"host": EngineHost(index, addresses)} for index in range(2)]), timeout_s=LIMIT_S)


def refit(group: WorkerGroup, producer: Producer) -> tuple[RefitReport, list[RefitReport]]:
    """The reports of the producer and of each engine rank."""
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(producer.send)
        wait(group.call("join_refit", producer.sources), timeout_s=LIMIT_S)
        received = wait(group.call("receive_weights", 1), timeout_s=LIMIT_S)[0]
        return sent.result(), received


def sampled(group: WorkerGroup) -> list[Completion]:
    sampling = Sampling(1.0, 1.0, None, 8, stop_token_ids=(), stop_strings=())
    asked = {number: Request(prompt, sampling, seed=number) for number, prompt in enumerate(PROMPTS)}
    found: dict[int, Completion] = {}
    wait(group.call("submit", asked))
    while len(found) < len(asked):
        found |= wait(group.call("poll", 1.0))[0]
    return [done for _, done in sorted(found.items())]

"""A tensor-parallel vLLM engine starts in a process of Ray's placement group, whose seats are all taken, and ends with
its ranks."""

import dataclasses

import pytest
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_lite.cluster.actor import WorkerActor
from nemo_rl_lite.config.engines import ENGINES, EngineHost
from nemo_rl_lite.generation.interface import Request, Sampling
from nemo_rl_lite.validation.compose import compose_config
from tests.functional.workers import kill_rank

# An engine of three processes that import vLLM; on GPUs tests/gpu/test_run.py has such engines too.
pytestmark = [pytest.mark.functional, pytest.mark.slow]


def test_ranks_of_an_engine_ask_ray_for_nothing(model_folder, tmp_path):
    config = compose_config()
    settings = dataclasses.replace(config.generation.vllm_cfg, tensor_parallel_size=2)
    arguments = {
        "generation": dataclasses.replace(config.generation, vllm_cfg=settings),
        "policy": config.policy,
        "model_path": str(model_folder),
        "seed": 1,
        "on_gpu": False,
        "host": EngineHost(0, (("127.0.0.1", 0),)),
    }
    sampling = Sampling(1.0, 1.0, None, max_new_tokens=4, stop_token_ids=(), stop_strings=())
    environment = ENGINES["vllm"].environment(config.generation, False) | {
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    ray.init(address="local", include_dashboard=False, log_to_driver=False, resources={"seat": 2})
    try:
        group = placement_group([{"seat": 1}, {"seat": 1}])
        ray.get(group.ready())
        engine, _ = (
            WorkerActor.options(
                resources={"seat": 1},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=seat),
            ).remote("", str(tmp_path / f"{seat}.log"), environment)
            for seat in range(2)
        )
        ray.get(engine.load.remote(ENGINES["vllm"].worker, {}), timeout=6000)
        ray.get(engine.start.remote(arguments), timeout=6000)
        asked = {0: Request((1, 2, 3), sampling, seed=1)}
        ray.get(engine.call.remote("submit", "generate", None, asked), timeout=600)
        completion = ray.get(engine.call.remote("poll", "generate", None, 60.0), timeout=600)[0]
        kill_rank(tmp_path / "0.log")
        # The recovery replaces engines whose process has ended.
        with pytest.raises(RayActorError):
            while True:
                ray.get(engine.is_there.remote(), timeout=60)
    finally:
        ray.shutdown()
    assert len(completion.tokens) == len(completion.logprobs) == 4

"""From a configuration to running workers."""

import logging
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.cluster.runtime import available_cores
from nemo_rl_lite.cluster.weight_sync import ProbeSettings, WeightSync
from nemo_rl_lite.cluster.workers import WorkerGroup, wait
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import data_parallel_size, policy_ranks
from nemo_rl_lite.generation.remote import ENGINE_CLASSES, RemoteGeneration
from nemo_rl_lite.generation.vllm import worker as vllm_worker
from nemo_rl_lite.policy.remote import WORKER_CLASS, RemotePolicy

log = logging.getLogger(__name__)

# megatron-core compiles a few fused functions; on a CPU that takes seconds at the first batch and gains nothing.
POLICY_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}


@dataclass(frozen=True)
class Workers:
    """A run's workers, connected for refits."""

    policy: RemotePolicy
    generation: RemoteGeneration
    weights: WeightSync

    def peak_memory(self) -> dict[str, int]:
        """Highest resident bytes by worker name."""
        groups = (self.policy.group, self.generation.group)
        return {f"{group.name}-{rank}": size for group in groups for rank, size in enumerate(group.peak_memory())}


def launch(config: Config, model_path: Path, run_folder: Path) -> Workers:
    """Start policy ranks and generation engines side by side (Ray is up) and connect them.

    Raises:
        WorkerError: one did not start, or not within `cluster.start_timeout_s`.
    """
    ranks, engines = policy_ranks(config), config.generation.data_parallel_size
    threads = config.cluster.threads_per_worker or max(1, available_cores() // ranks)
    engine_threads = config.cluster.threads_per_worker or max(1, available_cores() // engines)
    logs = str(run_folder / "logs")
    policy = WorkerGroup.create("policy", ranks, logs, POLICY_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)})
    engine_environment = vllm_worker.environment(config.generation) if config.generation.backend == "vllm" else {}
    engine_environment |= {"OMP_NUM_THREADS": str(engine_threads)}
    log.info("environment of the generation engines: %s", engine_environment)
    generation = WorkerGroup.create("generation", engines, logs, engine_environment)

    address, port = policy.address(config.cluster.start_timeout_s)
    policy_arguments = {
        "policy": config.policy,
        "cluster": config.cluster,
        "refit": config.refit,
        "model_path": str(model_path),
        "seed": config.algorithm.seed,
        "temperature": config.generation.temperature,
        "keep_reference": config.algorithm.loss_fn.reference_policy_kl_penalty > 0,
        "threads": threads,
    }
    places = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for rank in range(ranks)
    ]
    engine_arguments = {
        "generation": config.generation,
        "policy": config.policy,
        "refit": config.refit,
        "model_path": str(model_path),
        "seed": config.algorithm.seed,
    }
    wait(
        policy.start(WORKER_CLASS, [policy_arguments] * ranks, places),
        generation.start(ENGINE_CLASSES[config.generation.backend], [engine_arguments] * engines, [{}] * engines),
        timeout_s=config.cluster.start_timeout_s,
    )
    remote_policy = RemotePolicy(policy, config.policy.train_global_batch_size)
    remote_generation = RemoteGeneration(generation)
    probe = ProbeSettings(
        temperature=config.generation.temperature,
        tolerance=getattr(config.refit.probe_tolerance, config.policy.precision),
        rows=config.policy.logprob_batch_size * data_parallel_size(config),
    )
    weights = WeightSync(remote_policy, remote_generation, config.refit, probe, config.cluster.start_timeout_s)
    return Workers(remote_policy, remote_generation, weights)

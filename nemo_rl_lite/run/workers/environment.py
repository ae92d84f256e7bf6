"""The environment of a run's worker processes, and the CPU threads that they have."""

from nemo_rl_lite.cluster.runtime import available_cores
from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import engines, on_gpus, parallel_dims, policy_ranks
from nemo_rl_lite.host.machine import ON_CPUS

# megatron-core compiles a few fused functions. On a CPU that delays the first batch by seconds and gains nothing.
CPU_POLICY_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}
_SEGMENTS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The number of hardware work queues of a process. With a single queue, a copy that waits for an earlier copy also
# delays kernels that were launched after it. megatron-core's tensor and context parallelism need that order to
# overlap communication with computation; other layouts do not.
ONE_QUEUE, MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def policy_environment(config: Config) -> dict[str, str]:
    """Return the environment of a process of megatron-core, which depends on the layout of the policy in `config`."""
    dims = parallel_dims(config)
    if not on_gpus(config):
        environment = CPU_POLICY_ENVIRONMENT | ON_CPUS
    else:
        environment = ONE_QUEUE if dims.tp * dims.cp > 1 else MANY_QUEUES
        environment = environment | _segments(config)
    threads = {"OMP_NUM_THREADS": str(worker_threads(config, policy_ranks(config)))}
    return environment | threads | _of_activations(config)


def generation_environment(config: Config) -> dict[str, str]:
    """Return the environment of a process of a generation engine."""
    environment = engine_of(config).environment(config.generation, on_gpus(config))
    environment |= _segments(config) if on_gpus(config) else ON_CPUS
    return environment | {"OMP_NUM_THREADS": str(worker_threads(config, engines(config)))}


def worker_threads(config: Config, workers: int) -> int:
    """CPU threads of each of `workers` workers. On GPUs it is one: what is left to the CPU is small, and waking threads
    takes longer than the work (the CPU optimizer takes more by itself). Otherwise they share the cores of their
    machines; a worker with more than two leaves one to other processes, because all its threads wait for one that has
    to share its core."""
    if on_gpus(config):
        return config.cluster.threads_per_worker or 1
    cores = available_cores() // -(-workers // config.cluster.num_nodes)
    return config.cluster.threads_per_worker or max(1, cores - (cores > 2))


def _of_activations(config: Config) -> dict[str, str]:
    if not config.policy.megatron_cfg.fine_grained_activation_offloading:
        return {}
    # This module imports torch, for which the launcher's other runs need not wait here.
    from nemo_rl_lite.offload import activations

    return activations.environment(config.policy.megatron_cfg)


def _segments(config: Config) -> dict[str, str]:
    """Set torch's allocator: batches of changing sizes fragment its cache less with expandable segments. Memory of such
    segments can neither be shared with another process nor be put to sleep by vLLM."""
    if not generates(config):
        return dict.fromkeys(_SEGMENTS, "expandable_segments:True")
    return dict.fromkeys(_SEGMENTS, "expandable_segments:False") if config.generation.colocated.enabled else {}

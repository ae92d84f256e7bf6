"""Rules that compare a run on CPUs with the machine that checks it. (Runs on GPUs, and on several nodes, are mostly
checked on another one.)"""

import os
from collections.abc import Iterator

import psutil

from nemo_rl_lite.config.engines import CacheFacts, engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import engines, on_gpus
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule

# More engines on a core than this, or more threads than cores where there are more cores than this, are a mistake.
_MOST_A_CORE = 4
# Judges may wait for something, such as a compiler or a server.
_MOST_JUDGES_A_CORE = 16
_CLUSTER = ("cluster.num_nodes", "cluster.gpus_per_node")


def runs_here(config: Config) -> bool:
    return not on_gpus(config) and config.cluster.num_nodes == 1


@rule(*_CLUSTER, "cluster.threads_per_worker")
def threads_have_cores(config: Config) -> Iterator[Violation]:
    threads, cores = config.cluster.threads_per_worker, _cores()
    if runs_here(config) and threads is not None and threads > max(cores, _MOST_A_CORE):
        key = "cluster.threads_per_worker"
        yield Violation(key, threads, f"this machine gives the run {cores} cores", f"{key}=null, or {key}={cores}")


@rule(*_CLUSTER, "cluster.cpu_ranks")
def ranks_have_cores(config: Config) -> Iterator[Violation]:
    ranks, cores = config.cluster.cpu_ranks, _cores()
    if runs_here(config) and ranks > _MOST_A_CORE * cores:
        key = "cluster.cpu_ranks"
        yield Violation(key, ranks, f"this machine gives the run {cores} cores", f"{key}={cores} or fewer")


@rule(*_CLUSTER, "reward.processes", "environment.processes", options=RolloutAlgorithmConfig)
def judges_have_cores(config: Config) -> Iterator[Violation]:
    most = _MOST_JUDGES_A_CORE * _cores()
    asked = {"reward.processes": config.reward.processes, "environment.processes": config.environment.processes}
    for key, processes in asked.items():
        if runs_here(config) and processes > most:
            yield Violation(key, processes, f"this machine gives the run {_cores()} cores", f"{key}={most} or fewer")


@rule(*_CLUSTER, "generation.data_parallel_size", options=RolloutAlgorithmConfig)
def engines_have_cores(config: Config) -> Iterator[Violation]:
    size, cores = engines(config), _cores()
    if runs_here(config) and size > _MOST_A_CORE * cores:
        key = "generation.data_parallel_size"
        yield Violation(key, size, f"this machine gives the run {cores} cores", f"{key}={cores} or fewer")


@rule(*_CLUSTER, "generation", options=RolloutAlgorithmConfig)
def caches_fit_the_memory(config: Config) -> Iterator[Violation]:
    if not runs_here(config):
        return
    # Without a model, only a cache of a size that is set has one.
    wanted = engine_of(config).kv_bytes(config, CacheFacts(0, 0, None)) * engines(config)
    there = psutil.virtual_memory().total
    if wanted > there:
        key, size = "generation.vllm_cfg.cpu_kv_cache_gib", config.generation.vllm_cfg.cpu_kv_cache_gib
        rule_text = f"the machine has {there // 2**30} GiB, for {engines(config)} engine{'s' * (engines(config) > 1)}"
        yield Violation(key, size, rule_text, f"{key}=1")


def _cores() -> int:
    return len(os.sched_getaffinity(0))

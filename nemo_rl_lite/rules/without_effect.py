"""Keys of the command line that change nothing in this run, because another key switches off what they set.

A file of `configs/` may set such keys: a recipe is for several machines and algorithms. Who writes one into a command
expects something of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.effects import EFFECTS
from nemo_rl_lite.rules.step_effects import Effect

# A command for GPUs may be tried on CPUs: these are told, and not refused. So are keys that by the table would have an
# effect on GPUs.
ON_GPUS = (
    "offload",
    "policy.offload_optimizer_states_for_logprob",
    "policy.offload_for_generation",
    "policy.use_pinned_optimizer_offload",
    "policy.overlap_offload",
    "generation.colocated.resources",
    "refit.direct",
    "generation.vllm_cfg.gpu_memory_utilization",
    "generation.vllm_cfg.enforce_eager",
    "cluster.numa_binding",
    "policy.megatron_cfg.cuda_graph_impl",
)


def keys_without_effect(config: Config, given: Sequence[str]) -> Iterator[Violation]:
    """The keys of `given`, which the command line sets, that change nothing in this run, nor would on GPUs."""
    for key in given:
        effect = _unmet(key, config)
        if effect and _unmet(key, _with_gpus(config)):
            rule_text, fix = f"{effect.otherwise} without {effect.needs}", f"leave {key} out, or {effect.needs}"
            yield Violation(key, None, rule_text, fix)


def offload_moves_something(config: Config, preset: str | None) -> Iterator[Violation]:
    """Yield where the command chooses a preset of offload, and other keys switch off all that it moves or saves."""
    policy, parallel = config.policy, config.policy.megatron_cfg
    saves = (
        policy.offload_optimizer_states_for_logprob,
        policy.offload_for_generation,
        parallel.optimizer.optimizer_cpu_offload,
        parallel.fine_grained_activation_offloading,
        parallel.activation_checkpointing,
    )
    if preset not in (None, "none") and not any(saves):
        rule_text = "has no effect, because the keys that it sets are switched off by others of the command or recipe"
        yield Violation("offload", preset, rule_text, "leave these keys out, or offload=none")


def told_on_cpus(config: Config, given: Sequence[str]) -> list[str]:
    """The keys of `given` that only a run on GPUs makes use of, where this one is on CPUs."""
    if on_gpus(config):
        return []
    there = _with_gpus(config)
    return [key for key in given if is_of(key, ON_GPUS) or (_unmet(key, config) and not _unmet(key, there))]


def _with_gpus(config: Config) -> Config:
    """The same run on GPUs, as many as it has ranks on CPUs."""
    cluster = config.cluster
    return config if on_gpus(config) else replace(config, cluster=replace(cluster, gpus_per_node=cluster.cpu_ranks))


def _unmet(key: str, config: Config) -> Effect | None:
    """The first row of the table by which a key has no effect; None where it has one. Later rows may be of other
    algorithms."""
    return next((effect for effect in EFFECTS if is_of(key, effect.keys) and not effect.holds(config)), None)


def is_of(key: str, names: Sequence[str]) -> bool:
    """Whether `key` is one of `names` or below one of them. A name that ends in a dot means what is below it alone."""
    return any(key.startswith(name) if name.endswith(".") else f"{key}.".startswith(f"{name}.") for name in names)

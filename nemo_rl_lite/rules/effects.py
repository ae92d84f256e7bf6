"""The table of keys that have an effect in some runs only, and what such a run needs. Those of the policy, the loss,
the steps and the data are in modules of their own."""

from dataclasses import fields

from nemo_rl_lite.config.algorithms import ALGORITHMS, generates, has_teacher
from nemo_rl_lite.config.automatic import generates_ahead
from nemo_rl_lite.config.engines import ENGINES, engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.config.sections.data import AgentConfig, EnvironmentConfig
from nemo_rl_lite.config.sizes import batch_mode, has_endpoint, on_gpus
from nemo_rl_lite.config.teacher import as_teacher
from nemo_rl_lite.environments import registry as environments
from nemo_rl_lite.rewards.judge import terms_of
from nemo_rl_lite.rewards.registry import INSTANT
from nemo_rl_lite.rules.data_effects import DATA_EFFECTS
from nemo_rl_lite.rules.loss_effects import LOSS_EFFECTS
from nemo_rl_lite.rules.policy_effects import POLICY_EFFECTS
from nemo_rl_lite.rules.step_effects import STEP_EFFECTS, Effect


def _updates_in_flight(config: Config) -> bool:
    if not generates(config):
        return False
    rollouts = config.options(GRPOConfig).rollouts
    return rollouts.source == "queue" and rollouts.in_flight_weight_updates


EFFECTS = (
    Effect(
        (
            *("reward", "environment", "agent", "generation.", "refit."),
            *(f"logger.{name}" for name in ("mismatch_warning", "log_samples", "show_samples_period")),
        ),
        generates,
        " or ".join(f"algorithm={name}" for name, row in ALGORITHMS.items() if row.generates),
    ),
    Effect(
        ("teacher",),
        has_teacher,
        " or ".join(f"algorithm={name}" for name, row in ALGORITHMS.items() if row.has_teacher),
    ),
    Effect(
        tuple(f"teacher.megatron_cfg.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")),
        lambda config: config.teacher.megatron_cfg.pipeline_model_parallel_size > 1,
        "teacher.megatron_cfg.pipeline_model_parallel_size=2 or more",
    ),
    Effect(
        ("teacher.logprob_batch_size",),
        lambda config: batch_mode(as_teacher(config).policy, on_gpus(config)) == "fixed",
        "policy.sequence_packing.enabled=false; packed and dynamic batches are limited by teacher.logprob_mb_tokens",
    ),
    Effect(
        ("teacher.logprob_mb_tokens",),
        lambda config: batch_mode(as_teacher(config).policy, on_gpus(config)) != "fixed",
        "policy.sequence_packing.enabled=true or policy.dynamic_batching.enabled=true",
    ),
    Effect(
        ("algorithm.oversample", "algorithm.dynamic_sampling_max_gen_batches"),
        lambda config: config.options(GRPOConfig).use_dynamic_sampling,
        "algorithm.use_dynamic_sampling=true",
    ),
    Effect(
        ("algorithm.rollouts.max_trajectory_age_steps", "algorithm.rollouts.in_flight_weight_updates"),
        lambda config: config.options(GRPOConfig).rollouts.source == "queue",
        "algorithm.rollouts.source=queue",
    ),
    Effect(
        ("algorithm.rollouts.save_begun",),
        generates_ahead,
        "algorithm.rollouts.source=queue or one_step_off",
    ),
    Effect(
        ("generation.vllm_cfg.recompute_kv_cache_after_weight_updates",),
        _updates_in_flight,
        "algorithm.rollouts.source=queue algorithm.rollouts.in_flight_weight_updates=true",
    ),
    Effect(
        ("algorithm.reward_shaping.overlong_buffer_penalty",),
        lambda config: config.options(GRPOConfig).reward_shaping.overlong_buffer_length is not None,
        "algorithm.reward_shaping.overlong_buffer_length=N",
    ),
    Effect(
        ("reward.timeout_s", "reward.processes", "reward.concurrency"),
        lambda config: not all(term.name in INSTANT for term in terms_of(config.reward)),
        f"another reward than {' and '.join(sorted(INSTANT))}, which take no time",
    ),
    Effect(
        ("reward.processes", "reward.concurrency"),
        lambda config: config.reward.timeout_s is not None,
        "reward.timeout_s=60: rewards without a limit are judged in the launcher",
    ),
    Effect(
        tuple(f"environment.{one.name}" for one in fields(EnvironmentConfig) if one.name != "name"),
        lambda config: config.environment.name is not None,
        "environment=python, tools, calculator or environment.name=package.module.Class",
    ),
    Effect(
        ("environment.timeout_s", "environment.concurrency", "environment.processes"),
        lambda config: config.environment.name not in environments.INSTANT,
        f"another environment than {' and '.join(sorted(environments.INSTANT))}, which answers at once",
    ),
    Effect(
        tuple(f"agent.{one.name}" for one in fields(AgentConfig) if one.name != "name"),
        lambda config: config.agent.name is not None,
        "agent.name=package.module.function",
    ),
    Effect(
        ("generation.serve.host", "generation.serve.port"),
        has_endpoint,
        "generation.serve.enabled=true or agent.name=package.module.function",
    ),
    *(
        Effect(row.own_keys, lambda config, name=name: config.generation.backend == name, f"generation={name}")
        for name, row in ENGINES.items()
    ),
    Effect(
        ("generation.colocated.sleep",),
        lambda config: config.generation.colocated.enabled and on_gpus(config) and engine_of(config).can_sleep,
        "generation.colocated.enabled=true, cluster.gpus_per_node=N and generation=vllm_gpu",
    ),
    Effect(
        ("generation.colocated.resources",),
        lambda config: not config.generation.colocated.enabled,
        "generation.colocated.enabled=false",
    ),
    Effect(("refit.buffer_memory_ratio",), lambda config: config.refit.bucket_bytes is None, "refit.bucket_bytes=null"),
    Effect(
        ("refit.num_buffers",),
        lambda config: not config.generation.colocated.enabled,
        "generation.colocated.enabled=false: engines on the policy's GPUs need no buffers",
    ),
    Effect(
        ("refit.direct",),
        lambda config: config.generation.colocated.enabled,
        "generation.colocated.enabled=true: weights are sent to engines on GPUs of their own",
    ),
    *POLICY_EFFECTS,
    *LOSS_EFFECTS,
    *STEP_EFFECTS,
    *DATA_EFFECTS,
    Effect(
        ("algorithm.sft_average_log_probs",),
        lambda config: getattr(config.algorithm, "sft_loss_weight", 0) > 0,
        "algorithm.sft_loss_weight=1",
    ),
    Effect(("profile.tool",), lambda config: bool(config.profile.steps), "'profile.steps=[3]'"),
    Effect(("logger.wandb",), lambda config: config.logger.wandb_enabled, "logger.wandb_enabled=true"),
    Effect(("logger.mlflow",), lambda config: config.logger.mlflow_enabled, "logger.mlflow_enabled=true"),
    Effect(
        tuple(f"checkpoint.{name}" for name in ("async_save", "keep_newest", "keep_best", "resume_layouts")),
        lambda config: config.checkpoint.save_period > 0,
        "checkpoint.save_period=10",
    ),
    Effect(
        ("cluster.cpu_ranks", "generation.vllm_cfg.cpu_kv_cache_gib"),
        lambda config: not on_gpus(config),
        "cluster.gpus_per_node=0",
    ),
)

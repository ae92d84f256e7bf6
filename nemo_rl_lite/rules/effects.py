"""The table of keys that have an effect in some runs only, and what such a run needs."""

from dataclasses import fields

from nemo_rl_lite.config.algorithms import ALGORITHMS, compares, generates, has_teacher
from nemo_rl_lite.config.automatic import generates_ahead
from nemo_rl_lite.config.engines import ENGINES, engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.config.sections.data import AgentConfig, EnvironmentConfig
from nemo_rl_lite.config.sizes import batch_mode, has_endpoint, on_gpus, parallel_dims
from nemo_rl_lite.config.teacher import as_teacher
from nemo_rl_lite.data.kinds import CHATS, PAIRS, PROBLEMS, UNPAIRED, kind_of
from nemo_rl_lite.data.sources import ROWS, TASKS
from nemo_rl_lite.environments import registry as environments
from nemo_rl_lite.rewards.registry import INSTANT
from nemo_rl_lite.rewards.terms import terms_of
from nemo_rl_lite.rules.layout import MEGATRON
from nemo_rl_lite.rules.loss_effects import LOSS_EFFECTS
from nemo_rl_lite.rules.policy import DATA_PARALLEL
from nemo_rl_lite.rules.step_effects import STEP_EFFECTS, Effect, validates

_OPTIMIZER = f"{MEGATRON}.optimizer"


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
    Effect(
        ("policy.train_micro_batch_size", "policy.logprob_batch_size"),
        lambda config: batch_mode(config.policy, on_gpus(config)) == "fixed",
        "policy.sequence_packing.enabled=false; packed and dynamic batches are limited by train_mb_tokens",
    ),
    Effect(
        ("policy.sequence_length_round",),
        lambda config: batch_mode(config.policy, on_gpus(config)) != "fixed",
        "policy.sequence_packing.enabled=true or policy.dynamic_batching.enabled=true",
    ),
    Effect(
        ("policy.sequence_packing.train_mb_tokens", "policy.sequence_packing.logprob_mb_tokens"),
        lambda config: batch_mode(config.policy, on_gpus(config)) == "packed",
        "policy.sequence_packing.enabled=true",
    ),
    Effect(
        ("policy.dynamic_batching.train_mb_tokens", "policy.dynamic_batching.logprob_mb_tokens"),
        lambda config: config.policy.dynamic_batching.enabled,
        "policy.dynamic_batching.enabled=true",
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
    Effect(
        ("policy.offload_optimizer_states_for_logprob",),
        lambda config: generates(config) or compares(config) or validates(config),
        "logprobs or validations, in which the optimizer's states can be away: algorithm.val_at_end=true",
    ),
    Effect(
        ("policy.overlap_offload",),
        lambda config: config.policy.offload_optimizer_states_for_logprob or bool(config.policy.offload_for_generation),
        "something to move: offload=logprob or offload=colocated",
    ),
    Effect(("policy.router_replay",), generates, "engines, whose experts it replays: algorithm=grpo"),
    Effect(
        (f"{MEGATRON}.peft", "generation.vllm_cfg.lora"),
        lambda config: config.policy.megatron_cfg.peft.enabled,
        f"{MEGATRON}.peft.enabled=true",
    ),
    Effect(
        (f"{MEGATRON}.offload_modules", f"{MEGATRON}.activation_offload_fraction"),
        lambda config: config.policy.megatron_cfg.fine_grained_activation_offloading,
        f"{MEGATRON}.fine_grained_activation_offloading=true",
    ),
    Effect(
        (f"{MEGATRON}.cp_comm_type",),
        lambda config: config.policy.megatron_cfg.context_parallel_size > 1,
        f"{MEGATRON}.context_parallel_size=2 or more",
    ),
    Effect(
        (DATA_PARALLEL,),
        lambda config: parallel_dims(config).dense_dp != 1,
        "several data-parallel replicas or context-parallel ranks, which exchange gradients and weights",
    ),
    Effect(
        (f"{DATA_PARALLEL}.bucket_size",),
        lambda config: config.policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce,
        f"{DATA_PARALLEL}.overlap_grad_reduce=true",
    ),
    Effect(
        tuple(f"{_OPTIMIZER}.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps")),
        lambda config: config.policy.megatron_cfg.optimizer.optimizer == "adam",
        f"{_OPTIMIZER}.optimizer=adam",
    ),
    Effect(
        (f"{_OPTIMIZER}.sgd_momentum",),
        lambda config: config.policy.megatron_cfg.optimizer.optimizer == "sgd",
        f"{_OPTIMIZER}.optimizer=sgd",
    ),
    Effect(
        (f"{_OPTIMIZER}.optimizer_offload_fraction",),
        lambda config: config.policy.megatron_cfg.optimizer.optimizer_cpu_offload,
        f"{_OPTIMIZER}.optimizer_cpu_offload=true",
    ),
    Effect(
        (f"{_OPTIMIZER}.min_lr", f"{MEGATRON}.scheduler.lr_decay_iters"),
        lambda config: config.policy.megatron_cfg.scheduler.lr_decay_style != "constant",
        f"{MEGATRON}.scheduler.lr_decay_style=cosine",
    ),
    Effect(
        (f"{MEGATRON}.scheduler.lr_warmup_init",),
        lambda config: config.policy.megatron_cfg.scheduler.lr_warmup_iters > 0,
        f"{MEGATRON}.scheduler.lr_warmup_iters=10",
    ),
    *LOSS_EFFECTS,
    *STEP_EFFECTS,
    Effect(
        ("algorithm.max_num_epochs",),
        lambda config: config.data.name not in TASKS,
        "rows, such as data=file: generated data never ends",
    ),
    Effect(
        ("algorithm.sft_average_log_probs",),
        lambda config: getattr(config.algorithm, "sft_loss_weight", 0) > 0,
        "algorithm.sft_loss_weight=1",
    ),
    Effect(("data.train_path", "data.validation_path"), lambda config: config.data.name == "file", "data.name=file"),
    Effect(
        ("data.path", "data.subset", "data.train_split", "data.validation_split"),
        lambda config: config.data.name == "hub",
        "data.name=hub",
    ),
    Effect(("data.min_reward",), lambda config: config.data.name in ROWS, "data=samples, data=file or data=hub"),
    Effect(("data.task",), lambda config: config.data.name == "reasoning_gym", "data=reasoning_gym"),
    Effect(
        (
            *("data.shuffle", "data.answer_column", "data.chosen_column", "data.rejected_column"),
            *("data.label_column", "data.train_on"),
        ),
        lambda config: config.data.name in ROWS,
        "data=file or data=hub",
    ),
    Effect(
        ("data.prompt_column",),
        lambda config: config.data.name != "reverse_digits" and config.data.prompt_template is None,
        "data with such columns and data.prompt_template=null",
    ),
    Effect(
        ("data.chosen_column", "data.rejected_column"),
        lambda config: kind_of(config) is PAIRS,
        "algorithm=dpo or algorithm=orpo",
    ),
    Effect(("data.label_column",), lambda config: kind_of(config) is UNPAIRED, "algorithm=kto"),
    Effect(
        ("data.answer_column",),
        lambda config: kind_of(config) is CHATS or kind_of(config) is PROBLEMS,
        "algorithm=grpo or algorithm=sft",
    ),
    Effect(
        ("data.prompt_column", "data.answer_column"),
        lambda config: kind_of(config) is not CHATS or config.data.messages_column is None,
        "data.messages_column=null: the messages are prompt and response",
    ),
    Effect(
        ("data.answer_column",),
        lambda config: kind_of(config) is not CHATS or config.data.response_column is None,
        "data.response_column=null, which names the response in its place",
    ),
    Effect(("data.answer_pattern",), lambda config: kind_of(config) is PROBLEMS, "algorithm=grpo"),
    Effect(("data.train_on",), lambda config: kind_of(config) is CHATS, "algorithm=sft"),
    Effect(
        ("data.train_on",),
        lambda config: config.data.response_column is None and config.data.prompt_template is None,
        "whole chats (data.messages_column): a prompt has one response",
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
        tuple(f"{MEGATRON}.moe_{name}" for name in ("grouped_gemm", "permute_fusion", "router_fusion")),
        on_gpus,
        "cluster.gpus_per_node=1: these kernels are for GPUs",
    ),
    Effect(
        ("cluster.cpu_ranks", "generation.vllm_cfg.cpu_kv_cache_gib"),
        lambda config: not on_gpus(config),
        "cluster.gpus_per_node=0",
    ),
)

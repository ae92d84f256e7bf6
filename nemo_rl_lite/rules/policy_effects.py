"""Keys of the policy that have an effect in some runs only."""

from nemo_rl_lite.config.algorithms import compares, generates
from nemo_rl_lite.config.sizes import batch_mode, on_gpus, parallel_dims
from nemo_rl_lite.rules.layout import MEGATRON
from nemo_rl_lite.rules.policy import DATA_PARALLEL
from nemo_rl_lite.rules.step_effects import Effect, validates

_OPTIMIZER = f"{MEGATRON}.optimizer"

POLICY_EFFECTS = (
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
        (f"{MEGATRON}.num_layers_in_first_pipeline_stage", f"{MEGATRON}.num_layers_in_last_pipeline_stage"),
        lambda config: config.policy.megatron_cfg.pipeline_model_parallel_size > 1,
        f"{MEGATRON}.pipeline_model_parallel_size=2 or more",
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
    Effect(
        tuple(f"{MEGATRON}.moe_{name}" for name in ("grouped_gemm", "permute_fusion", "router_fusion")),
        on_gpus,
        "cluster.gpus_per_node=1: these kernels are for GPUs",
    ),
)

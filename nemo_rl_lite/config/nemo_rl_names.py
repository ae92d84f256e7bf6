"""NeMo-RL's keys: in which sections they are here, and what takes the place of those that have no namesake here. They
are those of its `grpo_math_1B.yaml`, `sft.yaml`, `dpo.yaml` and `distillation_math.yaml` of August 2026."""

from collections.abc import Collection

# Sections that have another name here.
_SECTIONS = {
    **dict.fromkeys(("grpo", "sft", "dpo", "distillation"), "algorithm"),
    "grpo.async_grpo": "algorithm.rollouts",
    "loss_fn": "algorithm.loss_fn",
    "policy.generation": "generation",
    "checkpointing": "checkpoint",
}
_NO_CHOICE = "leave it out: there is no such choice here"
_FOLDER = "hydra.run.dir=FOLDER, which has all that a run writes"
_LOSS, _MEGATRON, _ENGINE = "algorithm.loss_fn", "policy.megatron_cfg", "generation.vllm_cfg"
_ADAM, _LORA, _REPLICAS = (f"{_MEGATRON}.{it}" for it in ("optimizer", "peft", "distributed_data_parallel_config"))
_SLICES = f"leave it out: logits are computed in slices, and {_MEGATRON}.keep_logits says whether they are kept"
_DATA = "data=hub data.path=NAME data.train_split=SPLIT, or data=file data.train_path=FILE"
_JUDGE = "reward=FILE for reward.name, such as reward=math, or environment=FILE"
_OWN_REWARD = "a reward of your own: reward.name=path/to/file.py:function"
_TEACHER = "leave it out: a teacher only scores, with the policy's tokens and lengths"
_VALIDATED, _WATCHED = "algorithm.max_val_samples", "leave it out: GPUs are always watched"
# A section by its name here (or by NeMo-RL's own, which comes first), keys of it or sections below it, and the key that
# stands for them or what to do instead.
_ROWS = (
    ("grpo", "max_num_epochs", "algorithm.max_num_steps: this algorithm counts steps"),
    ("distillation", "max_num_epochs", "algorithm.max_num_steps: this algorithm counts steps"),
    ("algorithm", "max_rollout_turns", "environment.max_turns"),
    ("algorithm", "batch_multiplier", "algorithm.oversample"),
    ("algorithm", "val_num_generations_per_prompt", "algorithm.val_samples_per_problem"),
    ("algorithm", "val_batch_size", "leave it out: engines get all prompts of a validation at once"),
    ("algorithm", "val_batches val_global_batch_size", _VALIDATED),
    ("algorithm", "val_micro_batch_size", "policy.logprob_batch_size"),
    ("algorithm", "only_unmask_final", "data.train_on=last"),
    ("algorithm.adv_estimator", "name", "algorithm=FILE, such as algorithm=grpo or algorithm=reinforce_pp"),
    ("algorithm.adv_estimator", "normalize_rewards", "algorithm.normalize_rewards"),
    (
        "algorithm.adv_estimator",
        "use_leave_one_out_baseline minus_baseline",
        "algorithm.use_leave_one_out_baseline",
    ),
    ("algorithm", "reward_scaling", _OWN_REWARD),
    (
        "algorithm",
        "seq_logprob_error_threshold",
        f"{_LOSS}.sequence_rejection_ratio; logger.mismatch_warning only warns",
    ),
    ("algorithm", "val_start_at stop_at_validation_metric stop_at_validation_threshold", _NO_CHOICE),
    ("algorithm", "invalid_tool_call_advantage malformed_thinking_advantage", _NO_CHOICE),
    ("algorithm.reward_shaping", "enabled", "algorithm.reward_shaping.overlong_buffer_length=N, which switches it on"),
    ("algorithm.reward_shaping", "stop_properly_penalty_coef", _NO_CHOICE),
    ("algorithm.rollouts", "enabled", "algorithm.rollouts.source=queue, or one_step_off"),
    ("algorithm.rollouts", "max_generation_failures", "cluster.max_restarts: engines that fail are restarted"),
    (
        "algorithm.rollouts",
        "recompute_kv_cache_after_weight_updates",
        f"{_ENGINE}.recompute_kv_cache_after_weight_updates",
    ),
    (_LOSS, "use_on_policy_kl_approximation", f"{_LOSS}.use_bias_correction_kl"),
    (_LOSS, "use_cispo", f"{_LOSS}.policy_loss=cispo"),
    (_LOSS, "disable_ppo_ratio", f"{_LOSS}.policy_loss=reinforce"),
    ("checkpoint", "enabled", "checkpoint.save_period=N, with 0 for no checkpoints"),
    ("checkpoint", "checkpoint_dir", _FOLDER),
    ("checkpoint", "metric_name", "algorithm.val_metric"),
    ("checkpoint", "higher_is_better", "algorithm.higher_is_better"),
    ("checkpoint", "keep_top_k", "checkpoint.keep_best"),
    ("checkpoint", "ft_keep_latest_k", "checkpoint.keep_newest"),
    ("checkpoint", "checkpoint_must_save_by", "checkpoint.must_save_by"),
    ("checkpoint", "save_optimizer", "leave it out: checkpoints are always whole"),
    ("checkpoint", "model_save_format save_consolidated", "checkpoint.export_hf_at_end, which writes safetensors"),
    ("policy.tokenizer", "name", "leave it out: the tokenizer is read from the folder of policy.model_name"),
    ("policy.tokenizer", "use_fastokens", _NO_CHOICE),
    ("policy", "hf_config_overrides", "leave it out, or copy the model's folder with another config.json"),
    ("policy", "generation_batch_size", f"{_ENGINE}.max_num_seqs"),
    ("policy", "logprob_chunk_size", _SLICES),
    ("policy", "refit_buffer_size_gb", "refit.bucket_bytes, in bytes"),
    ("policy", "make_sequence_length_divisible_by", "leave it out: sequences are padded as the layout needs it"),
    ("policy", "dtensor_cfg", f"leave it out: the policy is megatron-core's, whose layout {_MEGATRON} sets"),
    ("policy", "draft", "+generation.vllm_kwargs.speculative_config={...}; the draft model is not trained"),
    ("policy", "optimizer", _ADAM),
    ("policy", "scheduler", f"{_MEGATRON}.scheduler"),
    ("policy.optimizer", "name", f"{_ADAM}.optimizer"),
    ("policy.optimizer", "kwargs", _NO_CHOICE),
    ("policy.optimizer.kwargs", "lr", f"{_ADAM}.lr"),
    ("policy.optimizer.kwargs", "weight_decay", f"{_ADAM}.weight_decay"),
    ("policy.optimizer.kwargs", "betas", f"{_ADAM}.adam_beta1 and {_ADAM}.adam_beta2"),
    ("policy.optimizer.kwargs", "eps", f"{_ADAM}.adam_eps"),
    ("policy.dynamic_batching", "sequence_length_round", "policy.sequence_length_round"),
    ("policy.sequence_packing", "sequence_length_round", "policy.sequence_length_round"),
    ("policy.sequence_packing", "algorithm", "leave it out: packs are always of nearly equal length"),
    ("policy.sequence_packing", "microbatch_order", _NO_CHOICE),
    ("policy.router_replay", "transport", _NO_CHOICE),
    (_MEGATRON, "enabled", "leave it out: the policy is always megatron-core's"),
    (_MEGATRON, "use_fused_linear_logprobs fused_linear_logprobs_chunk_size defer_fp32_logits", _SLICES),
    (_MEGATRON, "empty_unused_memory_level", "leave it out: offload=FILE says what is on the GPU in each phase"),
    (_MEGATRON, "env_vars", "leave it out: the launcher sets the variables that a feature needs"),
    (_MEGATRON, "fp8_cfg", "leave it out: training is in bfloat16 or float32 (policy.precision)"),
    (_MEGATRON, "pipeline_dtype", "leave it out: it is that of policy.precision"),
    (_MEGATRON, "expert_tensor_parallel_size", f"leave it out: {_MEGATRON}.expert_model_parallel_size spreads experts"),
    (_MEGATRON, "recompute_granularity recompute_modules", f"{_MEGATRON}.activation_checkpointing"),
    (_MEGATRON, "moe_router_load_balancing_type", "leave it out: no loss balances the experts"),
    (_MEGATRON, "moe_enable_deepep moe_token_dispatcher_type moe_shared_expert_overlap", _NO_CHOICE),
    (_MEGATRON, "model_overrides force_reconvert_from_hf use_gloo_process_groups moe_per_layer_logging", _NO_CHOICE),
    (_MEGATRON, "cuda_graph_modules cuda_graph_warmup_steps use_fused_weighted_squared_relu", _NO_CHOICE),
    (_MEGATRON, "apply_rope_fusion bias_activation_fusion gradient_accumulation_fusion", _NO_CHOICE),
    (_MEGATRON, "mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads", _NO_CHOICE),
    (f"{_MEGATRON}.checkpoint", "async_save", "checkpoint.async_save"),
    (f"{_MEGATRON}.checkpoint", "ckpt_assume_constant_structure", _NO_CHOICE),
    (_LORA, "exclude_modules", f"{_LORA}.target_modules, which names all that have adapters"),
    (_LORA, "dropout_position lora_A_init_method lora_B_init_method a2a_experimental lora_dtype", _NO_CHOICE),
    (_ADAM, "clip_grad", "policy.max_grad_norm"),
    (_ADAM, "bf16 fp16", "policy.precision"),
    (_ADAM, "params_dtype", "leave it out: master weights are float32"),
    (_ADAM, "use_precision_aware_optimizer", "leave it out: the optimizer's states are float32"),
    (f"{_MEGATRON}.scheduler", "start_weight_decay end_weight_decay", f"{_ADAM}.weight_decay"),
    (f"{_MEGATRON}.scheduler", "weight_decay_incr_style", "leave it out: the weight decay stays as it is"),
    (_REPLICAS, "grad_reduce_in_fp32", "leave it out: gradients are summed in float32"),
    (
        _REPLICAS,
        "use_custom_fsdp data_parallel_sharding_strategy",
        f"{_ADAM}.use_distributed_optimizer, which shards the optimizer's states alone",
    ),
    ("generation", "val_temperature", "algorithm.val_temperature"),
    ("generation", "val_top_p", "generation.top_p, which validations have too"),
    ("generation", "val_top_k", "generation.top_k, which validations have too"),
    ("generation", "refit_transport", "leave it out: it follows from generation.colocated.enabled"),
    ("generation", "mcore_generation_config refit_cfg real_quant_export_cpu_offload", _NO_CHOICE),
    ("generation", "port_range_low port_range_high", _NO_CHOICE),
    (_ENGINE, "max_model_len", "policy.max_total_sequence_length"),
    (_ENGINE, "reset_encoder_cache_after_weight_update", _NO_CHOICE),
    (_ENGINE, "precision", "policy.precision; for fp8 +generation.vllm_kwargs.quantization=fp8_per_block"),
    (_ENGINE, "kv_cache_dtype", "+generation.vllm_kwargs.kv_cache_dtype=..."),
    (_ENGINE, "pipeline_parallel_size expert_parallel_size", f"{_ENGINE}.tensor_parallel_size alone splits an engine"),
    ("data", "max_input_seq_length", "policy.max_total_sequence_length"),
    ("data", "add_bos add_eos add_generation_prompt", "leave it out: the chat template writes what it needs"),
    ("data", "num_workers use_multiple_dataloader", "leave it out: the launcher reads the data"),
    ("data", "train", _DATA),
    ("data", "default", _DATA),
    ("data", "validation", "data.validation_path=FILE, or data=hub data.validation_split=SPLIT"),
    ("data.*", "prompt_file", "data.prompt_template"),
    ("data.*", "system_prompt_file", "data.system_prompt"),
    ("data.*", "input_key", "data.prompt_column"),
    ("data.*", "output_key", "data.answer_column"),
    ("data.*", "split_validation_size", "data.validation_fraction"),
    ("data.*", "seed", "leave it out: which rows are held out depends on the rows alone"),
    ("data.*", "processor", "leave it out: data.prompt_template and the columns of data say how rows are read"),
    ("data.*", "env_name", _JUDGE),
    ("env", "math", _JUDGE),
    ("env.math", "num_workers", "reward.processes"),
    ("logger", "log_dir", _FOLDER),
    ("logger", "tensorboard", "logger.tensorboard_enabled"),
    ("logger.tensorboard", "log_dir", _FOLDER),
    ("logger", "num_val_samples_to_print", "logger.show_samples_period"),
    ("logger", "monitor_gpus gpu_monitoring", _WATCHED),
    ("logger", "swanlab swanlab_enabled", "logger.wandb_enabled or logger.mlflow_enabled"),
    ("logger.wandb", "log_nemo_gym_full_result_tables", _NO_CHOICE),
    ("logger.mlflow", "experiment_name", "logger.mlflow.experiment"),
    ("logger.mlflow", "run_name", "logger.mlflow.name"),
    ("teacher", "tokenizer generation optimizer scheduler dtensor_cfg dynamic_batching sequence_packing", _TEACHER),
    ("teacher", "train_global_batch_size train_micro_batch_size max_grad_norm max_total_sequence_length", _TEACHER),
    ("teacher", "generation_batch_size make_sequence_length_divisible_by hf_config_overrides", _TEACHER),
    ("teacher.megatron_cfg", "optimizer scheduler distributed_data_parallel_config peft checkpoint fp8_cfg", _TEACHER),
    ("teacher.megatron_cfg", "enabled env_vars activation_checkpointing offload_modules cuda_graph_impl", _TEACHER),
    ("teacher.megatron_cfg", "fine_grained_activation_offloading freeze_moe_router context_parallel_size", _TEACHER),
    ("teacher.megatron_cfg", "moe_router_bias_update_rate moe_permute_fusion expert_tensor_parallel_size", _TEACHER),
    ("teacher.megatron_cfg", "defer_fp32_logits cuda_graph_modules", _TEACHER),
    ("teacher", "logprob_chunk_size offload_optimizer_for_logprob", _TEACHER),
    ("cluster", "master_port_range_low master_port_range_high segment_size", _NO_CHOICE),
)
_INSTEAD = {f"{section}.{name}": answer for section, names, answer in _ROWS for name in names.split()}
_INSTEAD |= dict.fromkeys(("data_plane", "on_policy_distillation"), _NO_CHOICE) | {"reward_penalties": _OWN_REWARD}
_DATASETS = ("data.train", "data.validation", "data.default")


def name_here(key: str) -> str:
    """Return a key of NeMo-RL by the name that its section has here; any other key as it is."""
    section = _longest(key, _SECTIONS)
    return key if section is None else f"{_SECTIONS[section]}{key.removeprefix(section)}"


def instead_of_nemo_rls(key: str) -> str | None:
    """Return the key or the advice that takes the place of a key of NeMo-RL that has no namesake here; None for other
    keys. `key` is by its own name or by that of `name_here`."""
    section, _, leaf = key.rpartition(".")
    of_a_dataset = _INSTEAD.get(f"data.*.{leaf}") if section in _DATASETS else None
    found = _longest(key, _INSTEAD)
    return of_a_dataset or (None if found is None else _INSTEAD[found])


def _longest(key: str, names: Collection[str]) -> str | None:
    """The name among `names` that `key` is or that is the nearest above it."""
    while key and key not in names:
        key = key.rpartition(".")[0]
    return key or None

"""What TRL, verl, NeMo-RL and others call keys of `configs/`: a key of theirs is answered with the one it means."""

import difflib
from collections.abc import Mapping, Sequence

_KL = ("reference_policy_kl_penalty",)
_CLIP = ("ratio_clip_min", "ratio_clip_max")
_PROMPTS, _SAMPLES = ("num_prompts_per_step",), ("num_generations_per_prompt",)
_BATCH, _MICRO_BATCH = ("policy.train_global_batch_size",), ("policy.train_micro_batch_size",)
_STEPS, _EPOCHS = ("max_num_steps",), ("max_num_epochs",)
_RESPONSE, _SEQUENCE = ("max_new_tokens",), ("max_total_sequence_length",)
_MODEL, _RANK = ("policy.model_name",), ("peft.dim",)
_TRAIN, _HELD_OUT = ("data.train_path",), ("data.validation_path",)
_ENGINES_RANKS, _KEPT = ("generation.vllm_cfg.tensor_parallel_size",), ("checkpoint.keep_newest",)
_SAVE, _VALIDATE = ("checkpoint.save_period",), ("val_period",)
# The last part of another launcher's key, or its last two parts, which come first, and the ends of the keys that stand
# for it here.
_OTHER_NAMES = {
    "batch_size": _BATCH,
    "ppo_mini_batch_size": _BATCH,
    "per_device_train_batch_size": _MICRO_BATCH,
    "ppo_micro_batch_size_per_gpu": _MICRO_BATCH,
    "train_batch_size": _PROMPTS,
    "num_generations": _SAMPLES,
    "n": _SAMPLES,
    "max_steps": _STEPS,
    "total_training_steps": _STEPS,
    "num_train_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "learning_rate": ("lr",),
    "lr": ("lr",),
    "warmup_steps": ("lr_warmup_iters",),
    "warmup_ratio": ("lr_warmup_iters",),
    "lr_scheduler_type": ("lr_decay_style",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "enable_gradient_checkpointing": ("activation_checkpointing",),
    "max_prompt_length": _SEQUENCE,
    "max_length": _SEQUENCE,
    "max_completion_length": _RESPONSE,
    "max_response_length": _RESPONSE,
    "beta": _KL,
    "kl_beta": _KL,
    "kl_coef": _KL,
    "kl_loss_coef": _KL,
    "ratio_eps": _CLIP,
    "epsilon": _CLIP,
    "epsilon_high": ("ratio_clip_max",),
    "clip_ratio": _CLIP,
    "clip_ratio_low": ("ratio_clip_min",),
    "clip_ratio_high": ("ratio_clip_max",),
    "scale_rewards": ("normalize_rewards",),
    "bf16": ("policy.precision",),
    "dtype": ("policy.precision",),
    "torch_dtype": ("policy.precision",),
    "lora_r": _RANK,
    "lora_rank": _RANK,
    "lora_alpha": ("peft.alpha",),
    "model_name_or_path": _MODEL,
    "chat_template_path": ("policy.tokenizer.chat_template",),
    "custom_chat_template": ("policy.tokenizer.chat_template",),
    "apply_chat_template_kwargs": ("policy.tokenizer.chat_template_kwargs",),
    "reward_funcs": ("reward.name",),
    "dataset_name": ("data.path",),
    "train_files": _TRAIN,
    "train_file": _TRAIN,
    "val_files": _HELD_OUT,
    "eval_steps": _VALIDATE,
    "test_freq": _VALIDATE,
    "save_steps": _SAVE,
    "save_freq": _SAVE,
    "experiment_name": ("run_name",),
    "model.path": _MODEL,
    "peft.r": _RANK,
    "lora_dropout": ("peft.dropout",),
    "tensor_parallel_size": _ENGINES_RANKS,
    "rollout.tensor_model_parallel_size": _ENGINES_RANKS,
    "tensor_model_parallel_size": ("policy.megatron_cfg.tensor_model_parallel_size",),
    "ulysses_sequence_parallel_size": ("policy.megatron_cfg.context_parallel_size",),
    "packing": ("policy.sequence_packing.enabled",),
    "use_dynamic_bsz": ("policy.dynamic_batching.enabled",),
    "ppo_max_token_len_per_gpu": ("policy.sequence_packing.train_mb_tokens",),
    "log_prob_max_token_len_per_gpu": ("policy.sequence_packing.logprob_mb_tokens",),
    "vllm_mode": ("generation.colocated.enabled",),
    "vllm_importance_sampling_cap": ("truncated_importance_sampling_ratio",),
    "delta": ("ratio_clip_c",),
    "loss_agg_mode": ("token_level_loss",),
    "loss_type": ("algorithm.preference_loss",),
    "rpo_alpha": ("algorithm.sft_loss_weight",),
    "kl_loss_type": ("reference_policy_kl_type",),
    "norm_adv_by_std_in_grpo": ("normalize_rewards",),
    "mask_truncated_completions": ("algorithm.overlong_filtering",),
    "filter_groups.enable": ("use_dynamic_sampling",),
    "reward_weights": ("reward.terms",),
    "assistant_only_loss": ("data.train_on",),
    "max_assistant_turns": ("environment.max_turns",),
    "val_before_train": ("val_at_start",),
    "val_kwargs.n": ("val_samples_per_problem",),
    "val_kwargs.temperature": ("val_temperature",),
    "save_total_limit": _KEPT,
    "max_actor_ckpt_to_keep": _KEPT,
    "report_to": ("logger.wandb_enabled", "logger.tensorboard_enabled"),
}
_ONE_PASS = (
    "leave it out: a rollout is trained on once; more optimizer steps by a smaller policy.train_global_batch_size"
)
_IN_STEPS = "algorithm.max_num_steps: this algorithm counts steps"
_MOVES = "offload=FILE, such as offload=auto or offload=pinned"
_LOSS, _OWN_REWARD = "algorithm.loss_fn", "reward.name=path/to/file.py:function"
# What takes the place of a key that none stands for here.
_INSTEAD = {
    "recipe": "recipes=NAME",
    "output_dir": "hydra.run.dir=FOLDER",
    "default_local_dir": "hydra.run.dir=FOLDER",
    "use_vllm": "generation=vllm, which is the default, or generation=transformers",
    "gradient_accumulation_steps": "leave it out: it follows from policy.train_global_batch_size and the micro-batches",
    "num_iterations": _ONE_PASS,
    "ppo_epochs": _ONE_PASS,
    "loss_type": "algorithm=FILE, such as algorithm=dapo or algorithm=drgrpo; algorithm=dpo has "
    "algorithm.preference_loss=ipo",
    "importance_sampling_level": f"algorithm=gspo, or {_LOSS}.sequence_level_importance_ratios=true "
    f"{_LOSS}.token_level_loss=false",
    "rpo_alpha": "algorithm.sft_loss_weight, which needs algorithm=dpo",
    "custom_reward_function.path": _OWN_REWARD,
    "custom_reward_function.name": _OWN_REWARD,
    "filter_overlong_prompts": "data.too_long=drop",
    "max_samples": "leave it out: data is not cut, and algorithm.max_num_steps says how long a run is",
    "param_offload": _MOVES,
    "optimizer_offload": _MOVES,
    "converter_type": "leave it out: a model's own configuration says how its weights are converted",
    "adv_estimator": "algorithm=FILE, such as algorithm=grpo, algorithm=rloo or algorithm=reinforce_pp",
    "num_train_epochs": _IN_STEPS,
    "num_epochs": _IN_STEPS,
    "total_epochs": _IN_STEPS,
}


def meant_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return the known keys that a key of another launcher stands for; none where it is no such key."""
    section, ends = key.rpartition(".")[0], _entry(_OTHER_NAMES, key) or ()
    found = [[path for path in known if f".{path}".endswith(f".{end}")] for end in ends]
    return [most_like(f"{section}.{end}", paths) for end, paths in zip(ends, found, strict=True) if paths]


def instead_of(key: str) -> str | None:
    """Return what takes the place of another launcher's key that no key stands for; None where nothing is known."""
    return _entry(_INSTEAD, key)


def _entry[Entry](table: Mapping[str, Entry], key: str) -> Entry | None:
    """The entry of a key's last two parts, or else that of its last."""
    parts = key.split(".")
    return table.get(".".join(parts[-2:])) or table.get(parts[-1])


def most_like(key: str, paths: Sequence[str]) -> str:
    """Return the path that has most in common with a key."""
    return max(paths, key=lambda path: difflib.SequenceMatcher(None, path, key).ratio())

"""What TRL, verl, NeMo-RL and others call keys of `configs/`: a key of theirs is answered with the one it means."""

import difflib
from collections.abc import Sequence

_KL = ("reference_policy_kl_penalty",)
_CLIP = ("ratio_clip_min", "ratio_clip_max")
_PROMPTS, _SAMPLES = ("num_prompts_per_step",), ("num_generations_per_prompt",)
_BATCH, _MICRO_BATCH = ("policy.train_global_batch_size",), ("policy.train_micro_batch_size",)
_STEPS, _EPOCHS = ("max_num_steps",), ("max_num_epochs",)
_RESPONSE, _SEQUENCE = ("max_new_tokens",), ("max_total_sequence_length",)
_MODEL, _RANK = ("policy.model_name",), ("peft.dim",)
_TRAIN, _HELD_OUT = ("data.train_path",), ("data.validation_path",)
_SAVE, _VALIDATE = ("checkpoint.save_period",), ("val_period",)
# The last part of another launcher's key, and the ends of the keys that stand for it here.
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
    "report_to": ("logger.wandb_enabled", "logger.tensorboard_enabled"),
}
_ONE_PASS = (
    "leave it out: a rollout is trained on once; more optimizer steps by a smaller policy.train_global_batch_size"
)
_IN_STEPS = "algorithm.max_num_steps: this algorithm counts steps"
# What takes the place of a key that none stands for here.
_INSTEAD = {
    "recipe": "recipes=NAME",
    "output_dir": "hydra.run.dir=FOLDER",
    "default_local_dir": "hydra.run.dir=FOLDER",
    "use_vllm": "generation=vllm, which is the default, or generation=transformers",
    "gradient_accumulation_steps": "leave it out: it follows from policy.train_global_batch_size and the micro-batches",
    "num_iterations": _ONE_PASS,
    "ppo_epochs": _ONE_PASS,
    "loss_type": "algorithm=FILE, such as algorithm=dapo, algorithm=drgrpo or algorithm=dpo",
    "adv_estimator": "algorithm=FILE, such as algorithm=grpo, algorithm=rloo or algorithm=reinforce_pp",
    "num_train_epochs": _IN_STEPS,
    "num_epochs": _IN_STEPS,
    "total_epochs": _IN_STEPS,
}


def meant_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return the known keys that a key of another launcher stands for; none where it is no such key."""
    section, _, leaf = key.rpartition(".")
    ends = _OTHER_NAMES.get(leaf, ())
    found = [[path for path in known if f".{path}".endswith(f".{end}")] for end in ends]
    return [most_like(f"{section}.{end}", paths) for end, paths in zip(ends, found, strict=True) if paths]


def instead_of(key: str) -> str | None:
    """Return what takes the place of another launcher's key that no key stands for; None where nothing is known."""
    return _INSTEAD.get(key.rpartition(".")[2])


def most_like(key: str, paths: Sequence[str]) -> str:
    """Return the path that has most in common with a key."""
    return max(paths, key=lambda path: difflib.SequenceMatcher(None, path, key).ratio())

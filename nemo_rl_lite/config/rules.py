"""What configuration fields must mean together. Each rule is a small function that yields what is wrong.

A rule names the keys it reads, so that a key with a wrong type does not also break every rule that uses it.
"""

import importlib.util
import netrc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.config.model_shape import NoModelError, read_model_shape
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.data.problems import GENERATED, read_problems
from nemo_rl_lite.errors import DataError, Violation
from nemo_rl_lite.rewards.registry import REWARDS

Check = Callable[[Config], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    keys: tuple[str, ...]
    check: Check


RULES: list[Rule] = []


def rule(*keys: str) -> Callable[[Check], Check]:
    """Register a check with the keys (or sections) it reads."""

    def register(check: Check) -> Check:
        RULES.append(Rule(keys, check))
        return check

    return register


def check_rules(config: Config, unusable: frozenset[str] = frozenset()) -> list[Violation]:
    """Everything the rules find wrong. Rules that read a key of `unusable` are left out."""
    return [
        violation
        for rule in RULES
        if not any(_overlap(key, bad) for key in rule.keys for bad in unusable)
        for violation in rule.check(config)
    ]


def policy_ranks(config: Config) -> int:
    """Policy workers: one a GPU, or `cluster.cpu_ranks`."""
    return config.cluster.num_nodes * config.cluster.gpus_per_node or config.cluster.cpu_ranks


def data_parallel_size(config: Config) -> int:
    """Policy replicas: ranks over tensor x pipeline parallel size."""
    parallel = config.policy.megatron_cfg
    return policy_ranks(config) // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)


def samples_per_step(config: Config) -> int:
    """Sequences a rollout."""
    return config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt


def _overlap(key: str, bad: str) -> bool:
    return key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.")


_PARALLEL = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.cpu_ranks",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
)


@rule("cluster.num_nodes", "cluster.gpus_per_node")
def cpu_only(config: Config) -> Iterator[Violation]:
    if config.cluster.gpus_per_node > 0:
        key, given = "cluster.gpus_per_node", config.cluster.gpus_per_node
        yield Violation(key, given, "this version places workers on CPUs only", f"{key}=0")
    elif config.cluster.num_nodes > 1:
        yield Violation("cluster.num_nodes", config.cluster.num_nodes, "CPU runs use one node", "cluster.num_nodes=1")


@rule(*_PARALLEL)
def ranks_fill_parallel_groups(config: Config) -> Iterator[Violation]:
    parallel, ranks = config.policy.megatron_cfg, policy_ranks(config)
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if ranks % (tensor * pipeline):
        yield Violation(
            "policy.megatron_cfg.tensor_model_parallel_size",
            tensor,
            f"tensor ({tensor}) x pipeline ({pipeline}) parallel size must divide the {ranks} policy ranks",
            f"cluster.cpu_ranks={tensor * pipeline}, or smaller parallel sizes",
        )


@rule("algorithm.num_prompts_per_step", "algorithm.num_generations_per_prompt", "policy.train_global_batch_size")
def rollout_fills_optimizer_steps(config: Config) -> Iterator[Violation]:
    samples, batch = samples_per_step(config), config.policy.train_global_batch_size
    if samples % batch:
        sizes = f"{config.algorithm.num_prompts_per_step} prompts x {config.algorithm.num_generations_per_prompt}"
        yield Violation(
            "policy.train_global_batch_size",
            batch,
            f"must divide the rollout's {samples} samples ({sizes} generations)",
            f"policy.train_global_batch_size={samples}, or another divisor of {samples}",
        )


@rule(*_PARALLEL, "policy.train_global_batch_size", "policy.train_micro_batch_size")
def micro_batches_fill_global_batch(config: Config) -> Iterator[Violation]:
    ranks = data_parallel_size(config)
    if not ranks:
        return
    batch, micro = config.policy.train_global_batch_size, config.policy.train_micro_batch_size
    if batch % (micro * ranks):
        yield Violation(
            "policy.train_micro_batch_size",
            micro,
            f"micro-batch ({micro}) x data-parallel size ({ranks}) must divide train_global_batch_size ({batch})",
            f"policy.train_micro_batch_size={batch // ranks}" if batch % ranks == 0 else "change the batch sizes",
        )


@rule(*_PARALLEL, "algorithm.num_prompts_per_step", "algorithm.num_generations_per_prompt", "policy.logprob_batch_size")
def logprob_batches_fill_rollout(config: Config) -> Iterator[Violation]:
    ranks = data_parallel_size(config)
    if not ranks:
        return
    samples, micro = samples_per_step(config), config.policy.logprob_batch_size
    if samples % (micro * ranks):
        yield Violation(
            "policy.logprob_batch_size",
            micro,
            f"micro-batch ({micro}) x data-parallel size ({ranks}) must divide the rollout's {samples} samples",
            f"policy.logprob_batch_size={samples // ranks}" if samples % ranks == 0 else "change the batch sizes",
        )


@rule("algorithm.num_generations_per_prompt")
def groups_have_a_baseline(config: Config) -> Iterator[Violation]:
    size = config.algorithm.num_generations_per_prompt
    if size < 2:
        key = "algorithm.num_generations_per_prompt"
        yield Violation(key, size, "GRPO compares samples of one prompt, so it needs at least 2", f"{key}=8")


@rule("algorithm.loss_fn")
def loss_options_agree(config: Config) -> Iterator[Violation]:
    loss = config.algorithm.loss_fn
    prefix = "algorithm.loss_fn"
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        key = f"{prefix}.sequence_level_importance_ratios"
        yield Violation(key, True, "needs a sequence-level loss", f"{prefix}.token_level_loss=false")
    if loss.truncated_importance_sampling_ratio is not None and not loss.use_importance_sampling_correction:
        key = f"{prefix}.truncated_importance_sampling_ratio"
        fix = f"{prefix}.use_importance_sampling_correction=true, or {key}=null"
        yield Violation(key, loss.truncated_importance_sampling_ratio, "limits a correction that is off", fix)
    if loss.ratio_clip_c is not None and loss.ratio_clip_c <= 1 + loss.ratio_clip_max:
        key = f"{prefix}.ratio_clip_c"
        limit = 1 + loss.ratio_clip_max
        yield Violation(key, loss.ratio_clip_c, f"must exceed 1 + ratio_clip_max = {limit:g}", f"{key}=3.0")


@rule("policy.megatron_cfg.optimizer.optimizer", "policy.megatron_cfg.optimizer.use_distributed_optimizer")
def optimizer_can_be_sharded(config: Config) -> Iterator[Violation]:
    optimizer = config.policy.megatron_cfg.optimizer
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        key = "policy.megatron_cfg.optimizer.use_distributed_optimizer"
        yield Violation(key, True, "megatron-core shards the states of adam only, not of sgd", f"{key}=false")


@rule("policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler")
def learning_rates_are_ordered(config: Config) -> Iterator[Violation]:
    optimizer, scheduler = config.policy.megatron_cfg.optimizer, config.policy.megatron_cfg.scheduler
    prefix = "policy.megatron_cfg"
    if optimizer.min_lr > optimizer.lr:
        key = f"{prefix}.optimizer.min_lr"
        yield Violation(key, optimizer.min_lr, f"must not exceed lr = {optimizer.lr:g}", f"{key}=0.0")
    if scheduler.lr_warmup_iters and scheduler.lr_warmup_init > optimizer.lr:
        key = f"{prefix}.scheduler.lr_warmup_init"
        yield Violation(key, scheduler.lr_warmup_init, f"must not exceed lr = {optimizer.lr:g}", f"{key}=0.0")
    if scheduler.lr_warmup_iters >= scheduler.lr_decay_iters:
        key = f"{prefix}.scheduler.lr_warmup_iters"
        rule_text = f"must be smaller than lr_decay_iters = {scheduler.lr_decay_iters}"
        yield Violation(key, scheduler.lr_warmup_iters, rule_text, f"{key}=0")


@rule(
    *_PARALLEL,
    "policy.model_name",
    "policy.max_total_sequence_length",
    "generation.backend",
    "generation.vllm_cfg.tensor_parallel_size",
)
def model_fits_the_layout(config: Config) -> Iterator[Violation]:
    try:
        model = read_model_shape(config.policy.model_name)
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError) as error:
        fix = "give a Hugging Face model folder or a hub name (organisation/model)"
        yield Violation("policy.model_name", config.policy.model_name, str(error), fix)
        return
    if model is None:
        return
    prefix = "policy.megatron_cfg"
    tensor = config.policy.megatron_cfg.tensor_model_parallel_size
    for what, count in (
        ("attention heads", model.heads),
        ("key/value heads", model.kv_heads),
        ("tokens", model.vocabulary),
    ):
        if count % tensor:
            key = f"{prefix}.tensor_model_parallel_size"
            sizes = [
                size for size in range(1, count + 1) if _splits(model.heads, model.kv_heads, model.vocabulary, size)
            ]
            yield Violation(key, tensor, f"must divide the model's {count} {what}", f"one of {sizes}")
    pipeline = config.policy.megatron_cfg.pipeline_model_parallel_size
    if model.layers % pipeline:
        key = f"{prefix}.pipeline_model_parallel_size"
        yield Violation(key, pipeline, f"must divide the model's {model.layers} layers", f"{key}=1")
    length = config.policy.max_total_sequence_length
    if length > model.max_positions:
        key = "policy.max_total_sequence_length"
        yield Violation(key, length, f"the model has {model.max_positions} positions", f"{key}={model.max_positions}")
    if config.generation.backend == "vllm" and config.cluster.gpus_per_node == 0 and model.head_dim < 32:
        fix = "generation=transformers, or a model with a larger head_dim"
        yield Violation("policy.model_name", config.policy.model_name, "vLLM on a CPU needs head_dim >= 32", fix)


def _splits(heads: int, kv_heads: int, vocabulary: int, size: int) -> bool:
    return not (heads % size or kv_heads % size or vocabulary % size)


@rule("generation.vllm_cfg.tensor_parallel_size", "cluster.gpus_per_node")
def generation_parallel_size(config: Config) -> Iterator[Violation]:
    key, size = "generation.vllm_cfg.tensor_parallel_size", config.generation.vllm_cfg.tensor_parallel_size
    if size > 1 and config.cluster.gpus_per_node == 0:
        fix = f"{key}=1, and generation.data_parallel_size for more engines"
        yield Violation(key, size, "a CPU engine is one process", fix)


@rule("generation.backend", "generation.vllm_kwargs")
def engine_is_installed(config: Config) -> Iterator[Violation]:
    if config.generation.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        fix = "bash scripts/install.sh, or generation=transformers"
        yield Violation("generation.backend", "vllm", "vLLM is not installed here", fix)
    owned = {
        "model": "policy.model_name",
        "dtype": "policy.precision",
        "max_model_len": "policy.max_total_sequence_length",
        "tensor_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
        "enforce_eager": "generation.vllm_cfg.enforce_eager",
        "max_num_seqs": "generation.vllm_cfg.max_num_seqs",
        "gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
        "seed": "algorithm.seed",
        "logprobs_mode": None,
        "worker_extension_cls": None,
        "disable_log_stats": None,
        "skip_tokenizer_init": None,
    }
    for name in config.generation.vllm_kwargs:
        if name in owned:
            fix = f"set {owned[name]} instead" if owned[name] else "remove it"
            yield Violation(f"generation.vllm_kwargs.{name}", None, "is set by the launcher", fix)


@rule("generation.max_new_tokens", "policy.max_total_sequence_length")
def responses_fit_the_sequence(config: Config) -> Iterator[Violation]:
    new, total = config.generation.max_new_tokens, config.policy.max_total_sequence_length
    if new >= total:
        rule_text = f"must leave room for the prompt within policy.max_total_sequence_length = {total}"
        yield Violation("generation.max_new_tokens", new, rule_text, f"generation.max_new_tokens={max(total // 2, 1)}")


@rule("generation.stop_strings")
def stop_strings_are_not_empty(config: Config) -> Iterator[Violation]:
    if "" in config.generation.stop_strings:
        key = "generation.stop_strings"
        yield Violation(key, config.generation.stop_strings, "an empty string stops at once", f"{key}=[]")


@rule("data", "algorithm.val_at_start", "algorithm.val_at_end", "algorithm.val_period")
def data_can_be_read(config: Config) -> Iterator[Violation]:
    data = config.data
    if data.name in GENERATED:
        yield from _task_arguments(config)
        return
    if data.name != "jsonl":
        known = ", ".join([*GENERATED, "jsonl"])
        yield Violation("data.name", data.name, "no such dataset", f"choose one of: {known}")
        return
    if data.task_kwargs:
        yield Violation("data.task_kwargs", data.task_kwargs, "a file takes no arguments", "data.task_kwargs={}")
    paths = {"data.train_path": data.train_path}
    if data.validation_path is not None:
        paths["data.validation_path"] = data.validation_path
    for key, path in paths.items():
        try:
            read_problems(data, path, limit=100)
        except DataError as error:
            yield Violation(key, path, str(error), "correct the path, data.prompt_column or data.answer_column")
    algorithm = config.algorithm
    if data.validation_path is None and (algorithm.val_at_start or algorithm.val_at_end or algorithm.val_period):
        fix = "name a file, or algorithm.val_at_start=false algorithm.val_at_end=false algorithm.val_period=0"
        yield Violation("data.validation_path", None, "is null, but validation is on", fix)


def _task_arguments(config: Config) -> Iterator[Violation]:
    wanted = {"num_digits"}
    given = config.data.task_kwargs
    for name in given.keys() - wanted:
        fix = f"remove it; {config.data.name} takes: {', '.join(wanted)}"
        yield Violation(f"data.task_kwargs.{name}", given[name], "the task has no such argument", fix)
    if "num_digits" not in given:
        yield Violation("data.task_kwargs.num_digits", None, "has no value", "data.task_kwargs.num_digits=5")
    elif not 2 <= given["num_digits"] <= 20:
        key = "data.task_kwargs.num_digits"
        yield Violation(key, given["num_digits"], "must be between 2 and 20", f"{key}=5")


@rule("data.name", "data.task_kwargs", "generation.max_new_tokens")
def answers_fit_the_response(config: Config) -> Iterator[Violation]:
    if config.data.name != "reverse_digits" or "num_digits" not in config.data.task_kwargs:
        return
    digits = config.data.task_kwargs["num_digits"]
    if config.generation.max_new_tokens <= digits:
        key = "generation.max_new_tokens"
        rule_text = f"{digits} digits and the end token need {digits + 1}"
        yield Violation(key, config.generation.max_new_tokens, rule_text, f"{key}={digits + 1}")


@rule("reward.name")
def reward_exists(config: Config) -> Iterator[Violation]:
    name = config.reward.name
    top = name.split(".")[0]
    if name in REWARDS or ("." in name and top and importlib.util.find_spec(top) is not None):
        return
    fix = f"choose one of {', '.join(REWARDS)}, or package.module.function of your own"
    yield Violation("reward.name", name, "no such reward", fix)


@rule("logger.wandb_enabled", "logger.wandb.mode")
def wandb_can_log_in(config: Config) -> Iterator[Violation]:
    if config.logger.wandb_enabled and config.logger.wandb.mode == "online" and not _wandb_key():
        rule_text = "W&B has no API key on this machine"
        fix = "run `wandb login`, set WANDB_API_KEY, or logger.wandb.mode=offline"
        yield Violation("logger.wandb.mode", "online", rule_text, fix)


def _wandb_key() -> bool:
    # A server of one's own may need no key, or one that is kept elsewhere; its client will say.
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_BASE_URL"):
        return True
    try:
        hosts = netrc.netrc(str(Path("~/.netrc").expanduser())).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)

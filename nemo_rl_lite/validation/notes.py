"""Notes on a command: settings that are allowed but probably unintended."""

import dataclasses
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

from nemo_rl_lite.config.algorithms import algorithm_of, compares, generates, has_teacher
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.keys import known_variables, unread_variables
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import ActiveIf, GRPOConfig, LossConfig, RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import (
    batch_mode,
    engines,
    has_endpoint,
    iterations,
    on_gpus,
    optimizer_steps,
    parallel_dims,
    samples_per_step,
    validates,
)
from nemo_rl_lite.config.sources import in_source, source_configs, source_weights
from nemo_rl_lite.data.sources import ROWS
from nemo_rl_lite.rewards.judge import terms_of
from nemo_rl_lite.system import sandbox
from nemo_rl_lite.validation.algorithm import LOSS, reads_ratios, truncations
from nemo_rl_lite.validation.layout import BATCH, MEGATRON
from nemo_rl_lite.validation.rewards import harness_command

log = logging.getLogger(__name__)

FACTS: dict[str, Callable[[Config], object]] = {
    "an algorithm that generates": generates,
    "a teacher": has_teacher,
    "an endpoint": has_endpoint,
    "an environment or agent": lambda config: config.environment.name is not None or config.agent.name is not None,
    "validations": validates,
    "data with epochs": lambda config: any(one.data.name in ROWS for one in source_configs(config).values()),
    "GPUs": on_gpus,
    "vLLM on GPUs, or a queue of rollouts": lambda config: _sleep_matters(config),
    "CPUs": lambda config: not on_gpus(config),
    "tensor-parallel engines": lambda config: config.generation.vllm_cfg.tensor_parallel_size > 1,
    "data-parallel ranks": lambda config: parallel_dims(config).dense_dp > 1,
    "batches": lambda config: batch_mode(config.policy, on_gpus(config)),
    # The row of the algorithm names a constant of `data.formats`.
    "as data": lambda config: algorithm_of(config).data.rpartition(".")[2].lower(),
    "phases without the optimizer": lambda config: generates(config) or compares(config) or validates(config),
}
"""Facts that `ActiveIf` can name in addition to keys."""
# Warn if the mean learning rate is a smaller fraction of `lr` than this.
_LITTLE = 0.25
_HARBOR = "nemo_rl_lite.environments.harbor.play"
# Groups without their own section, and a key that their files set.
_GROUPS = {"offload": "policy.offload_for_generation"}


def notes(config: Config, given: Sequence[str]) -> Iterator[str]:
    """Yield the notes on a command with the keys `given`."""
    if unread := unread_variables():
        known = ", ".join(sorted(name for name in known_variables() if name.startswith("NRL_")))
        yield f"unknown environment variables: {', '.join(unread)} (known: {known})"
    if idle := idle_note(config, given):
        yield idle
    if any(key.startswith(f"{MEGATRON}.scheduler.") for key in given):
        yield from _schedule_notes(config)
    else:
        yield from _warmup_note(config, _LITTLE)
    for name, one in source_configs(config).items():
        yield from (in_source(name, note) for note in _held_out(one, given))
    for name, weight in source_weights(config).items():
        if weight == 0:
            yield f"data.sources.{name}.weight = 0: the source is not sampled"
    if isinstance(loss := getattr(config.algorithm, "loss_fn", None), LossConfig):
        yield from filter(None, (_kl_estimate(config, loss), _steps_without_a_ratio(config, loss)))
        yield from _truncated_sampling(config)
        yield from _negative_means(config)
        yield from _adapter_dropout(config)
    if isinstance(config.algorithm, GRPOConfig):
        yield from _workers_without_engines(config, config.algorithm)
    yield from _harbor_without_isolation(config)
    yield from _longer_than_a_phase(config)
    yield from _unread_environment(config)


def _held_out(config: Config, given: Sequence[str]) -> Iterator[str]:
    """Yield a note on rows that are held out by default, or without a validation."""
    key, fraction = "data.validation_fraction", config.data.validation_fraction
    if fraction and not validates(config):
        yield f"{key} = {fraction:g}: this run does not validate, but holds these rows out of training"
    if fraction and config.data.name in ROWS and "recipes" not in given and key not in given:
        own = "data.validation_path=FILE" if config.data.name == "file" else "data.validation_split=SPLIT"
        yield f"{key} = {fraction:g}: {fraction:.0%} of the rows are held out for validation ({own} for others)"


def _workers_without_engines(config: Config, options: GRPOConfig) -> Iterator[str]:
    """Yield a note on rollout workers that do not start, because each needs an engine."""
    workers = options.rollouts.num_workers
    if workers != "auto" and workers > engines(config):
        most = f"each needs an engine, so {engines(config)} will start"
        yield f"algorithm.rollouts.num_workers = {workers}: {most}"


def notes_elsewhere(config: Config) -> Iterator[str]:
    """Yield notes for a command that plans or submits a run elsewhere, instead of refusing it here."""
    named = config.checkpoint.resume_from
    if named is not None and not Path(named).expanduser().is_dir():
        yield f"checkpoint.resume_from = {named}: there is no such folder here"


def notes_here(config: Config) -> Iterator[str]:
    """Yield notes on this machine for a command that runs here."""
    sources = source_configs(config).values()
    names = {one.environment.name for one in sources} | {term.name for one in sources for term in terms_of(one.reward)}
    if names & {"program", "python"} and (refused := sandbox.refused()):
        yield f"the kernel refuses {refused}, so {sandbox.OPEN}: {sandbox.ALLOW}, or use a container without secrets"
    for source, own in source_configs(config).items():
        if (command := harness_command(own.agent)) and shutil.which(command[0]) is None:
            key, missing = in_source(source, "agent.kwargs.command"), "is not on the PATH of this machine"
            yield f"{key}: {command[0]} {missing}, and without it all episodes fail: install the harness"


def show_notes(found: Iterable[str]) -> None:
    """Print notes."""
    for note in found:
        sys.stderr.write(f"note: {note}\n")


def _harbor_without_isolation(config: Config) -> Iterator[str]:
    """Yield a note on tasks of Harbor that run on this machine."""
    for source, own in source_configs(config).items():
        if own.agent.name == _HARBOR and own.agent.kwargs.get("runtime") == "local":
            rule = "the policy's commands run on this machine without isolation; use a container without secrets"
            yield f"{in_source(source, 'agent.kwargs.runtime')} = local: {rule}"


def _longer_than_a_phase(config: Config) -> Iterator[str]:
    """Yield timeouts of user code that exceed the timeout of a phase."""
    most, sections = config.cluster.phase_timeout_s, ("environment", "agent", "reward")
    sources = source_configs(config).items() if generates(config) else ()
    for source, own, name in ((source, own, name) for source, own in sources for name in sections):
        section, key = getattr(own, name), in_source(source, f"{name}.timeout_s")
        if section.name is not None and most is not None and (section.timeout_s or 0) > most:
            limit = f"cluster.phase_timeout_s = {most:g}"
            yield f"{key} = {section.timeout_s:g}: {limit} would end the run first; increase it"


def _unread_environment(config: Config) -> Iterator[str]:
    """Yield trackers' environment variables that keys override."""
    logger = config.logger
    keys = {
        "MLFLOW_TRACKING_URI": ("mlflow.tracking_uri", logger.mlflow.tracking_uri, logger.mlflow_enabled),
        "MLFLOW_EXPERIMENT_NAME": ("mlflow.experiment", logger.mlflow.experiment, logger.mlflow_enabled),
        "WANDB_PROJECT": ("wandb.project", logger.wandb.project, logger.wandb_enabled),
        "WANDB_MODE": ("wandb.mode", logger.wandb.mode, logger.wandb_enabled),
        "WANDB_ENTITY": ("wandb.entity", logger.wandb.entity, logger.wandb_enabled and logger.wandb.entity is not None),
        "WANDB_NAME": ("wandb.name", logger.wandb.name, logger.wandb_enabled),
        "WANDB_DISABLED": ("wandb_enabled", True, logger.wandb_enabled),
        "MLFLOW_RUN_NAME": ("mlflow.name", logger.mlflow.name, logger.mlflow_enabled),
    }
    for variable, (key, value, enabled) in keys.items():
        if enabled and os.environ.get(variable) not in (None, "", value):
            yield f"{variable} has no effect; logger.{key} = {value} is used"


def note_total_steps(config: Config, total: int) -> None:
    """Warn of a schedule that does not fit a run whose epochs end after `total` steps."""
    if total != config.algorithm.max_num_steps:
        options = dataclasses.replace(config.algorithm, max_num_steps=total)
        for note in _schedule_notes(dataclasses.replace(config, algorithm=options)):
            log.warning(note)


def _schedule_notes(config: Config) -> Iterator[str]:
    """Yield a note if the run ends before the learning rate reaches its maximum or minimum."""
    steps, scheduler = _optimizer_steps_of_run(config), config.policy.megatron_cfg.scheduler
    yield from _warmup_note(config, 1.0)
    if steps is not None and scheduler.lr_decay_style != "constant" and 2 * steps <= scheduler.lr_decay_iters:
        key, rule = f"{MEGATRON}.scheduler.lr_decay_iters", "so the learning rate stays far above optimizer.min_lr"
        yield f"{key} = {scheduler.lr_decay_iters}: the run has {steps} optimizer steps, {rule}"


def _warmup_note(config: Config, least: float) -> Iterator[str]:
    """Yield a note if the run ends within its warm-up and its mean learning rate is below `least` x `lr`."""
    steps, optimizer = _optimizer_steps_of_run(config), config.policy.megatron_cfg.optimizer
    scheduler = config.policy.megatron_cfg.scheduler
    warmup, key = scheduler.lr_warmup_iters, f"{MEGATRON}.scheduler.lr_warmup_iters"
    if steps is None or not 0 < steps <= warmup or not optimizer.lr:
        return
    first = scheduler.lr_warmup_init / optimizer.lr
    mean = first + (1 - first) * (steps - 1) / (2 * warmup)
    if mean < least:
        learned = f"{mean:.0%} of optimizer.lr on average" if mean else "0, and nothing is learned"
        rule = f"so its learning rate is {learned}; {key}=0 has no warm-up"
        yield f"{key} = {warmup}: the run has {steps} optimizer step(s), {rule}"


def _optimizer_steps_of_run(config: Config) -> int | None:
    """Return the optimizer steps up to `max_num_steps`; None without that limit."""
    steps = config.algorithm.max_num_steps
    if steps is None or not isinstance(config.algorithm, RolloutAlgorithmConfig):
        return steps
    return steps * max(iterations(config), optimizer_steps(config))


def _kl_estimate(config: Config, loss: LossConfig) -> str:
    """Return a note on a KL estimator with a wrong gradient; empty if it is right."""
    kind, estimate = f"{LOSS}.reference_policy_kl_type", loss.reference_policy_kl_type
    if not compares(config) or config.algorithm.loss is not None:
        return ""
    if loss.use_kl_in_reward and estimate != "k1":
        why = f"with {LOSS}.use_kl_in_reward only k1 has the gradient of the KL, so it hardly constrains the policy"
        return f"{kind} = {estimate}: {why} ({kind}=k1)"
    if not loss.use_kl_in_reward and estimate == "k1" and loss.use_bias_correction_kl is False:
        why = "its gradient averages to zero, so it hardly constrains the policy"
        return f"{kind} = k1: {why} ({LOSS}.use_bias_correction_kl=true, or {kind}=k2)"
    return ""


def _steps_without_a_ratio(config: Config, loss: LossConfig) -> str:
    """Return a note on off-policy optimizer steps without a ratio; empty if there are none. NeMo-RL allows them too
    (`disable_ppo_ratio`); TRL's RLOO has a clipped ratio."""
    if loss.policy_loss != "reinforce" or config.algorithm.loss is not None or not reads_ratios(config):
        return ""
    if (steps := optimizer_steps(config)) == 1:
        return ""
    one_step = f"{BATCH}={samples_per_step(config)}{' algorithm.num_iterations=1' if iterations(config) > 1 else ''}"
    return (
        f"{LOSS}.policy_loss = reinforce: of {steps} optimizer steps per rollout, all but the first are off-policy "
        f"without a ratio ({one_step} makes one step, {LOSS}.policy_loss=clip has a ratio)"
    )


def _truncated_sampling(config: Config) -> Iterator[str]:
    if reads_ratios(config) and (cut := truncations(config)):
        settings = ", ".join(f"{key} = {value}" for key, (value, _) in cut.items())
        yield f"{settings}: the policy's logprobs are not truncated, so ratios are wrong by the excluded share"


def _negative_means(config: Config) -> Iterator[str]:
    options = config.options(GRPOConfig)
    if options.normalize_rewards == "mean" and options.reward_shaping.overlong_buffer_length is not None:
        why = "the penalty of long responses can make a prompt's mean reward negative, which ends the run"
        yield f"algorithm.normalize_rewards = mean: {why} (algorithm.reward_shaping.overlong_buffer_length=null)"


def _adapter_dropout(config: Config) -> Iterator[str]:
    peft = config.policy.megatron_cfg.peft
    if peft.enabled and peft.dropout:
        why = "training applies it but logprob passes do not, so ratios are not exactly 1 on a fresh rollout"
        yield f"{MEGATRON}.peft.dropout = {peft.dropout:g}: {why}"


def _sleep_matters(config: Config) -> bool:
    """Return whether `generation.colocated.sleep` has an effect. In a queue, other engines pause."""
    options = config.algorithm
    queues = isinstance(options, GRPOConfig) and options.rollouts.source == "queue"
    return queues or (on_gpus(config) and engine_of(config).can_sleep)


def idle_note(config: Config, given: Sequence[str]) -> str:
    """Return a note on the keys of `given` without an effect in this run; empty if all have one."""
    idle = [f"{key} (needs {condition})" for key in given if (condition := unmet(config, key))]
    return f"no effect in this run: {', '.join(idle)}" if idle else ""


def unmet(config: Config, key: str) -> str:
    """Return the condition that a key lacks to have an effect in this run; empty if it has one."""
    for section, condition in _conditions(config, _GROUPS.get(key, key)):
        name = f"{section}{condition.key}" if condition.key.startswith(".") else condition.key
        # A section's own switch always has an effect.
        is_switch = f"{name}.".startswith(f"{key}.")
        value = FACTS[name](config) if name in FACTS else attrgetter(name)(config)
        if not is_switch and not condition.holds(value):
            if name in FACTS:
                return " ".join([" or ".join(map(str, condition.values)), name]).strip()
            return str(condition).replace(condition.key, name, 1)
    return ""


def _conditions(config: Config, key: str) -> Iterator[tuple[str, ActiveIf]]:
    """Yield the conditions of a key and of the sections above it, each with the section that it stands in."""
    node: object = config
    section: list[str] = []
    for name in key.split("."):
        if not dataclasses.is_dataclass(node):
            return
        hint = get_type_hints(type(node), include_extras=True).get(name)
        if get_origin(hint) is Annotated:
            yield from ((".".join(section), one) for one in get_args(hint)[1:] if isinstance(one, ActiveIf))
        node = getattr(node, name, None)
        section.append(name)

"""The models of a run: starting model, teachers, chat template, predicted memory and speed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_lite.config.algorithms import has_teacher
from nemo_rl_lite.config.composition import overlaid
from nemo_rl_lite.config.keys import RUN_FOLDER
from nemo_rl_lite.config.overrides import check_overrides, given_keys
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import as_teacher, on_gpus, policy_ranks
from nemo_rl_lite.config.sources import naming_source, teacher_configs
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.models.folder import TEMPLATE_FILE, TEMPLATED, check_model_folder, locate_model, with_template
from nemo_rl_lite.models.shape import ModelShape, NoModelError, is_hub_name, read_model_shape
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.timer import DecodingSpeed, PolicySpeed
from nemo_rl_lite.offload.residency import Phase, Residency
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import ENGINE, Budget, Gpu, budget, headers, known_by_name, render, size, title
from nemo_rl_lite.planning.disk import DiskUse
from nemo_rl_lite.planning.memory import Bytes, DecodingBytes, predicted_metrics
from nemo_rl_lite.system.machine import free_host_bytes, gpu_bytes, gpu_name
from nemo_rl_lite.validation.algorithm import TEACHER, with_teachers_keys
from nemo_rl_lite.validation.compose import check_rules, is_of, resolve
from nemo_rl_lite.validation.notes import show_notes

if TYPE_CHECKING:
    # Imports torch, after a run has started its workers.
    from nemo_rl_lite.generation.interface import Decoded

CHAT_KEYS = ("policy.tokenizer.chat_template", "policy.tokenizer.chat_template_kwargs")
"""Keys that `chat`, `serve` and `evaluate` also accept."""


def starting_model(config: Config, console: RunConsole, untrained: Path | None = None) -> Path:
    """Return the model's folder, which is created or downloaded if it is missing. `untrained`: see `locate_model`.

    Raises:
        ConfigError: the Hub is unreachable or lacks the model; the model is broken or conflicts with the configuration.
    """
    was_unknown = is_hub_name(config.policy.model_name)
    folder = locate_model(config, console, untrained)
    try:
        check_model_folder(folder)
    except NoModelError as error:
        fix = "correct the file, or copy the folder again"
        raise ConfigError([Violation("policy.model_name", config.policy.model_name, str(error), fix)]) from None
    if was_unknown:
        # Check rules about the architecture, which was unknown before the download.
        local = replace(config, policy=replace(config.policy, model_name=str(folder)))
        if violations := check_rules(local):
            raise ConfigError(violations)
    return folder


def with_chosen_template(config: Config, model: Path, run_folder: Path, say: Callable[[str], None]) -> Path:
    """Return the model's folder, or a copy in the run's folder with `policy.tokenizer.chat_template`, if that is set.

    Raises:
        ConfigError: the run's folder has a conflicting folder of that name.
    """
    key, template = "policy.tokenizer.chat_template", config.policy.tokenizer.chat_template
    if template is None:
        return model
    own, given = run_folder / TEMPLATED, Path(template).expanduser()
    if (own / TEMPLATE_FILE).exists() and (own / TEMPLATE_FILE).read_text() != given.read_text():
        say(f"{given} differs from the run's previous chat template ({key})")
    try:
        return with_template(model, given, own)
    except NoModelError as error:
        raise ConfigError([Violation(key, template, str(error), f"another {RUN_FOLDER}, or move it away")]) from None


def with_teacher(config: Config, console: RunConsole, untrained: Path | None = None) -> Config:
    """Return the configuration with the folder of each teacher in `teacher.model_name`; see `starting_model`.

    Raises:
        ConfigError: as `starting_model`, with the teacher's keys.
    """
    if not has_teacher(config):
        return config
    folders: dict[str | None, str] = {}
    for name, one in teacher_configs(config).items():
        with naming_source(name), _naming_teacher():
            folders[one.teacher.model_name] = str(starting_model(as_teacher(one), console, untrained))
    # The run's teacher may be of no source.
    model = config.teacher.model_name
    sources = {
        name: replace(one, teacher=replace(one.teacher, model_name=folders[one.teacher.model_name]))
        for name, one in config.data.sources.items()
    }
    teacher = replace(config.teacher, model_name=folders.get(model, model))
    return replace(config, teacher=teacher, data=replace(config.data, sources=sources))


@contextmanager
def _naming_teacher() -> Iterator[None]:
    """Give the block's errors the teacher's keys."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(with_teachers_keys(error.violations)) from None


def check_same_tokens(policy: ChatTokenizer, config: Config) -> None:
    """Check that each teacher has the policy's token ids.

    Raises:
        ConfigError: its tokenizer is unreadable, or a token of the policy has another id.
    """
    for name, one in teacher_configs(config).items():
        with naming_source(name):
            _check_same_tokens(policy, str(one.teacher.model_name))


def _check_same_tokens(policy: ChatTokenizer, name: str) -> None:
    with _naming_teacher():
        others = ChatTokenizer(Path(name)).vocabulary
    own = policy.vocabulary
    unlike = sorted(((token, text) for text, token in own.items() if others.get(text) != token), key=lambda one: one[0])
    if unlike:
        token, text = unlike[0]
        there = f"{others[text]} in the teacher" if text in others else "missing in the teacher"
        rule = f"{len(unlike)} of the policy's {len(own)} tokens have other ids in the teacher: {text!r} is {token} in "
        rule += f"policy.model_name and {there}"
        raise ConfigError([Violation(TEACHER, name, rule, "a teacher of the policy's family, with the same tokenizer")])


def chat_tokenizer(folder: Path, config: Config) -> ChatTokenizer:
    """Return the tokenizer of a model's folder, with the configured chat template, if any.

    Raises:
        ConfigError: the tokenizer or the chat template is invalid.
    """
    given = config.policy.tokenizer
    return ChatTokenizer(folder, given.chat_template_kwargs, given.chat_template)


def with_chat_keys(config: Config, arguments: Sequence[str]) -> Config:
    """Apply a command's overrides of `CHAT_KEYS` to a configuration.

    Raises:
        ConfigError: all invalid overrides.
    """
    overrides, violations = check_overrides(arguments)
    if violations:
        raise ConfigError(violations)
    overrides = with_effect(overrides, CHAT_KEYS)
    if not overrides:
        return config
    given = given_keys(overrides)
    return resolve(overlaid(config, overrides), matters=lambda broken: broken.key in given)


def with_effect(overrides: Sequence[str], read: Sequence[str]) -> list[str]:
    """Return the overrides of the keys in `read`; print a note about the others."""
    kept = [one for one in overrides if any(is_of(key, read) for key in given_keys([one]))]
    if unread := given_keys([one for one in overrides if one not in kept]):
        show_notes([f"without effect here: {', '.join(unread)} (this command reads {', '.join(read)})"])
    return kept


def settled(config: Config, model_path: Path, console: RunConsole) -> Config:
    """Replace `auto` by values, and print the reasons."""
    shape = _shape(model_path, console)
    found = resolve_auto(config, shape, gpu_bytes() if on_gpus(config) else None, free_host_bytes())
    for reason in found.reasons:
        console.say(f"auto: {reason}")
    return found.config


def show_memory_plan(config: Config, model_path: Path, console: RunConsole) -> dict[str, float]:
    """Print the residency table with predicted bytes, and warn about phases that may not fit. Returns the prediction as
    metrics, `memory/predicted/...`."""
    shape = _shape(model_path, console)
    if shape is None:
        return {}
    residency = Residency.of(config)
    device_bytes = gpu_bytes() if on_gpus(config) else None
    unknown = on_gpus(config) and device_bytes is None
    # The KV cache is a share of the GPU; without the GPU's size it is shown as 0 bytes.
    planned = budget(config, shape, 0 if unknown else device_bytes)
    console.table(title(config, shape, device_bytes), headers(residency), render(residency, planned.prediction))
    console.say(str(DiskUse.of(config, shape)) or "no checkpoints and no exported model")
    if unknown and residency.engines_share_device:
        console.say("nvidia-smi reports no GPU memory on this machine, so the KV cache is not predicted")
    for warning in () if unknown else _device_warnings(planned):
        console.say(warning)
    # Each rank checks only its part of the host memory.
    if planned.host > (free := free_host_bytes()):
        console.say(
            f"the {planned.ranks_per_host} policy rank(s) of a machine need {size(planned.host)} of host memory for "
            f"offloaded components and reference weights, and this machine has {size(free)} free"
        )
    return predicted_metrics(planned.prediction)


def _shape(model_path: Path, console: RunConsole) -> ModelShape | None:
    try:
        return read_model_shape(str(model_path))
    except NoModelError as error:
        console.say(f"memory is not predicted for this model: {error}")
        return None


def _device_warnings(planned: Budget) -> Iterator[str]:
    for phase, nbytes in planned.device.items():
        if planned.gpu_bytes is None or nbytes <= planned.gpu_bytes:
            continue
        engine = sum(planned.prediction.get((phase, part), Bytes()).device for part in ENGINE)
        if engine:
            advice = "offload=pinned or a smaller generation.vllm_cfg.gpu_memory_utilization helps"
        elif phase is Phase.TRAIN:
            advice = "smaller train micro-batches, activation_checkpointing or offload=cpu_optimizer helps"
        else:
            advice = "smaller logprob micro-batches or offload=logprob helps"
        other = size(planned.buffers[phase] + planned.overhead)
        yield (
            f"phase {phase.value} may not fit: {size(nbytes)} on a GPU of {size(planned.gpu_bytes)}, "
            f"of which {other} for the refit's buffers, contexts and captured graphs; {advice}; see nrl-lite plan"
        )


def policy_speed(config: Config) -> PolicySpeed:
    gpu = _gpu(config)
    return PolicySpeed(policy_ranks(config), gpu.flops if gpu else None)


def decoding_speed(
    config: Config, shape: ModelShape | None, take_decoded: Callable[[], tuple["Decoded", float]]
) -> Callable[[], dict[str, float]]:
    """Return a function that returns the engines' rates since its last call. It adds rates of speculation, the use of
    KV caches, and the share of time in which engines had requests but did not step. An unknown architecture has no
    rates."""
    speed, gpu = None, _gpu(config)
    if shape is not None:
        nbytes = DecodingBytes.of(config, shape)
        speed = DecodingSpeed(nbytes.step, nbytes.token, gpu.bandwidth if gpu else None)

    def take() -> dict[str, float]:
        decoded, seconds = take_decoded()
        rates = speed.metrics(decoded.steps, decoded.cached, seconds) if speed else {}
        if seconds:
            rates["engines_starved_share"] = max(0.0, 1 - decoded.seconds / seconds)
        return rates | decoded.drafts.metrics() | decoded.cache.metrics(decoded.steps)

    return take


def _gpu(config: Config) -> Gpu | None:
    """Return this machine's GPU model, which all machines of a run have."""
    return known_by_name(gpu_name()) if on_gpus(config) else None

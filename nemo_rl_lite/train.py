"""`python -m nemo_rl_lite.train [group=file ...] [key.path=value ...]`: compose, validate, run."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from nemo_rl_lite.config.compose import CONFIG_NAME, check_overrides, compose_config, config_dir, resolve
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, LauncherError, Violation, WorkerError

if TYPE_CHECKING:
    from nemo_rl_lite.observability.report import Summary

INTERRUPTED = 130
# Hydra's flags that print something instead of running, and those that take a value.
_INFORMATION = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
_INFO = ("--info", "-i")
_INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_SWEEP = ("--multirun", "-m")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit status: 0 done, 2 bad configuration, 3 a worker failed, 130 interrupted."""
    launch(sys.argv[1:] if arguments is None else list(arguments))


def launch(arguments: Sequence[str]) -> "list[Summary]":
    """Run what the command line asks for; the summary of each run (several with -m, none with --help and the like)."""
    flags, overrides = split_arguments(arguments)
    summaries: list[Summary] = []

    def task(composed: DictConfig) -> None:
        summaries.append(_guarded(resolve(composed), Path(HydraConfig.get().runtime.output_dir)))

    try:
        accepted, violations = check_overrides(overrides)
        if not any(flag.split("=")[0] in _INFORMATION + _SWEEP for flag in flags):
            # Before Hydra makes the run's folder. A sweep's jobs are checked one by one as they start.
            compose_config(overrides)
        elif violations:
            raise ConfigError(violations)
        sys.argv = [sys.argv[0], *flags, *accepted]
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=CONFIG_NAME)(task)()
    except ConfigError as error:
        fail(error)
    return summaries


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags (with their values) and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for argument, previous in zip(arguments, ["", *arguments], strict=False):
        is_value = previous in _WITH_VALUE or (previous in _INFO and argument in _INFO_TOPICS)
        (flags if is_value or argument.startswith("-") else overrides).append(argument)
    return flags, overrides


def run(config: Config, folder: Path) -> "Summary":
    """One training run in `folder`, from starting weights to report."""
    from nemo_rl_lite.algorithms.grpo import GRPO
    from nemo_rl_lite.checkpoint.source import locate_model
    from nemo_rl_lite.cluster.launch import launch as launch_workers
    from nemo_rl_lite.cluster.runtime import ray_runtime
    from nemo_rl_lite.config.rules import policy_ranks
    from nemo_rl_lite.data.problems import training_set, validation_set
    from nemo_rl_lite.data.tokenizer import ChatTokenizer
    from nemo_rl_lite.generation.interface import Sampling
    from nemo_rl_lite.observability.console import RunConsole
    from nemo_rl_lite.observability.report import report, summarize
    from nemo_rl_lite.observability.samples import SampleLog
    from nemo_rl_lite.observability.sinks import METRICS_FILE, MetricsLog
    from nemo_rl_lite.rewards.registry import find_reward
    from nemo_rl_lite.rollout.rollout import RolloutCollector

    if (folder / METRICS_FILE).exists():
        rule = "holds a run already; a second one would be mixed into it"
        raise ConfigError([Violation("hydra.run.dir", str(folder), rule, "name another folder, or remove this one")])
    console = RunConsole()
    whole_config = dataclasses.asdict(config)
    (folder / "config.json").write_text(json.dumps(whole_config, indent=2) + "\n")
    (folder / "command.txt").write_text(shlex.join([sys.executable, *sys.argv]) + "\n")
    reward = find_reward(config.reward.name, config.reward.kwargs)
    training = training_set(config.data, config.algorithm.seed)
    validation = validation_set(config.data, config.algorithm.max_val_samples)
    model_path = locate_model(config, console)
    metrics = MetricsLog.open(config.logger, folder, whole_config)
    try:
        with ray_runtime():
            with console.busy(f"starting {policy_ranks(config)} policy rank(s) and {config.generation.backend}"):
                workers = launch_workers(config, model_path, folder)
            tokenizer = ChatTokenizer(model_path)
            length = config.policy.max_total_sequence_length
            GRPO(
                config=config.algorithm,
                policy=workers.policy,
                refit=workers.weights.refit,
                collector=RolloutCollector(workers.generation, tokenizer, reward, length),
                sampling=Sampling.of(config.generation, tokenizer.end_token),
                training=training,
                validation=validation,
                metrics=metrics,
                console=console,
                mismatch_warning=config.logger.mismatch_warning,
                ranks=policy_ranks(config),
                on_rollout=SampleLog(folder, config.logger.log_samples),
            ).run()
            if config.checkpoint.export_hf_at_end:
                workers.policy.export_hf(str(folder / "hf"))
            peak_memory = workers.peak_memory()
        summary = summarize(metrics, folder, peak_memory)
        report(summary, metrics, console, config.run_name, config.logger.plots)
        return summary
    finally:
        metrics.close()


def _guarded(config: Config, folder: Path) -> "Summary":
    try:
        return run(config, folder)
    except WorkerError as error:
        (folder / "error.txt").write_text(f"{error}\n\n{error.details}\n")
        fail(error, f"its traceback: {folder / 'error.txt'}", f"its log: {folder / 'logs'}")
    except LauncherError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.stderr.write(f"\ninterrupted; what was done so far is in {folder}\n")
        sys.exit(INTERRUPTED)


def fail(error: LauncherError, *more: str) -> NoReturn:
    """Say what went wrong and exit with the error's status."""
    sys.stderr.write("\n".join([str(error), *more]) + "\n")
    sys.exit(error.exit_status)


if __name__ == "__main__":
    main()

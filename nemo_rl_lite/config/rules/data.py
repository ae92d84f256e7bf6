"""Data and rewards."""

import importlib.util
from collections.abc import Iterator

from nemo_rl_lite.config.rules.base import rule
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.data.problems import GENERATED, read_problems
from nemo_rl_lite.errors import DataError, Violation
from nemo_rl_lite.rewards.registry import REWARDS


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

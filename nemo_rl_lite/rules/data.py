"""Rules about data: files can be read, columns exist, tasks exist."""

import dataclasses
import re
from collections.abc import Iterator
from itertools import combinations, islice
from pathlib import Path

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig, SupervisedConfig
from nemo_rl_lite.config.sections.data import DataConfig
from nemo_rl_lite.data import gym
from nemo_rl_lite.data.columns import MissingColumnError, template_columns
from nemo_rl_lite.data.formats import CHATS, PAIRS, PROBLEMS, RowFormat, kind_of
from nemo_rl_lite.data.rows import FileError, file_rows
from nemo_rl_lite.data.sources import ROWS, TASKS, check_file, validation_source
from nemo_rl_lite.errors import DataError, Violation
from nemo_rl_lite.rules.base import rule


@rule("data.name")
def dataset_exists(config: Config) -> Iterator[Violation]:
    if config.data.name not in (*ROWS, *TASKS):
        fix = f"choose one of: {', '.join((*ROWS, *TASKS))}"
        yield Violation("data.name", config.data.name, "no such dataset", fix)


@rule("data.prompt_template")
def template_is_plain(config: Config) -> Iterator[Violation]:
    key, template = "data.prompt_template", config.data.prompt_template
    if template is None:
        return
    fix = 'write columns as {column} and plain braces as {{ and }}, as in "{question} Answer briefly."'
    try:
        if not template_columns(template):
            yield Violation(key, template, "names no column, so every prompt would be the same", fix)
    except ValueError as error:
        yield Violation(key, template, f"is no template: {error}", fix)


@rule("data.system_prompt")
def system_prompt_is_a_text(config: Config) -> Iterator[Violation]:
    key, text = "data.system_prompt", config.data.system_prompt
    if text and re.fullmatch(r"\S+", text) and (text.endswith((".txt", ".md")) or Path(text).expanduser().is_file()):
        rule_text = "is the name of a file, and the model would be told that name"
        yield Violation(key, text, rule_text, f"the text itself: \"{key}='$(cat {text})'\", or {key} in a recipe")
    elif text and re.fullmatch(r"\s*\{\w+\}\s*", text):
        rule_text = "is one field, and no column is filled in there: the model would be told these letters"
        yield Violation(key, text, rule_text, f"data.prompt_template='{text} {{prompt}}', and {key}=null")


@rule("data")
def columns_differ(config: Config) -> Iterator[Violation]:
    data, kind = config.data, kind_of(config)
    if data.name not in ROWS or (kind is CHATS and data.messages_column is not None):
        return
    answer = "response_column" if kind is CHATS and data.response_column is not None else "answer_column"
    named = ("chosen_column", "rejected_column") if kind is PAIRS else (answer,)
    if kind is PAIRS or data.prompt_template is None:
        named = ("prompt_column", *named)
    elif not [*template_is_plain(config)] and getattr(data, answer) in template_columns(data.prompt_template):
        rule_text = f"shows the model data.{answer} = {getattr(data, answer)!r}, which it has to answer"
        yield Violation("data.prompt_template", data.prompt_template, rule_text, "a template without that column")
    for first, second in combinations(named, 2):
        if getattr(data, first) == getattr(data, second):
            rule_text = f"is data.{first} too, and the two must differ"
            yield Violation(f"data.{second}", getattr(data, second), rule_text, "the names of two columns")


@rule("data", "algorithm.name")
def answers_are_named(config: Config) -> Iterator[Violation]:
    data, key = config.data, "data.answer_column"
    if data.answer_column is None and (data.name in TASKS or kind_of(config) is not PROBLEMS):
        what = data.name if data.name in TASKS else f"algorithm={config.algorithm.name}"
        yield Violation(key, None, f"is null, and {what} needs answers", f"{key}=answer")
    if data.answer_column is None and data.answer_pattern is not None:
        rule_text = "looks for the answer in data.answer_column, which is null"
        yield Violation("data.answer_pattern", data.answer_pattern, rule_text, "data.answer_pattern=null")


@rule("data.answer_pattern")
def answer_pattern_has_a_group(config: Config) -> Iterator[Violation]:
    key, pattern = "data.answer_pattern", config.data.answer_pattern
    if pattern is None:
        return
    fix = f"its first group is the answer, as in {key}='#### (.+)'"
    try:
        if not re.compile(pattern).groups:
            yield Violation(key, pattern, "has no group", fix)
    except re.error as error:
        yield Violation(key, pattern, f"is no regular expression: {error}", fix)


@rule("data")
def files_can_be_read(config: Config) -> Iterator[Violation]:
    data, kind = config.data, kind_of(config)
    wrong = [*template_is_plain(config), *columns_differ(config), *answer_pattern_has_a_group(config)]
    if data.name != "file" or wrong:
        return
    if data.train_path is None:
        hub = f", or data.name=hub, which fetches {data.path}" if data.path else ""
        yield Violation("data.train_path", None, "is null", f"data.train_path=FILE{hub}")
    for key, path in (("data.train_path", data.train_path), ("data.validation_path", data.validation_path)):
        if path is None:
            continue
        try:
            check_file(data, path, 100, kind)
        except FileError as error:
            yield Violation(key, path, error.problem, error.fix)
        except DataError as error:
            yield Violation(key, path, str(error), _right_columns(data, error, kind))


def _right_columns(data: DataConfig, error: DataError, kind: RowFormat) -> str:
    """The fix for a row that cannot be read; it names the key of a column that is missing. What `data.answer_column`
    names is a response where no pattern finds an answer in it."""
    if isinstance(error, MissingColumnError) and error.name not in template_columns(data.prompt_template or ""):
        named = dataclasses.asdict(data).items()
        keys = [f"data.{field}" for field, name in named if field.endswith("_column") and name == error.name]
        if keys:
            is_response = keys[0] == "data.answer_column" and not kind.reads_answers
            key = "data.response_column" if is_response else keys[0]
            return f"correct the path, or {key}=NAME, with the name that the column has there"
    return "correct the path, or the columns, template or pattern of data"


@rule("data", "policy.train_global_batch_size", options=SupervisedConfig)
def rows_fill_a_batch(config: Config) -> Iterator[Violation]:
    data, key, size = config.data, "policy.train_global_batch_size", config.policy.train_global_batch_size
    if data.name != "file" or data.train_path is None:
        return
    try:
        count = sum(1 for _ in islice(file_rows(data.train_path), size))
    except DataError:
        # Another rule says why the file cannot be read.
        return
    if 0 < count < size:
        # Some rows may be held out, or left out.
        fitting = 2 ** max(0, (count // 2).bit_length() - 1)
        yield Violation(key, size, f"is more than the {count} row(s) of {data.train_path}", f"{key}={fitting}")


@rule("data.name", "data.path")
def hub_dataset_is_named(config: Config) -> Iterator[Violation]:
    if config.data.name == "hub" and not config.data.path:
        yield Violation("data.path", config.data.path, "names no dataset", "data.path=organisation/name")


@rule("data.name", "data.task_kwargs")
def only_tasks_take_arguments(config: Config) -> Iterator[Violation]:
    data = config.data
    if data.name in ROWS and data.task_kwargs:
        yield Violation(
            "data.task_kwargs", data.task_kwargs, "rows take no arguments", "leave it out, or a recipe that gives it"
        )


@rule("data")
def tasks_read_no_rows(config: Config) -> Iterator[Violation]:
    data = config.data
    if data.name not in TASKS:
        return
    unread = ["train_path", "validation_path", "path"]
    if data.name == "reverse_digits":
        unread += ["prompt_template", "answer_pattern", "response_column", "validation_fraction"]
    for name in unread:
        if value := getattr(data, name):
            fix = f"data.{name}={'0' if isinstance(value, float) else 'null'}, or data=file"
            yield Violation(f"data.{name}", value, f"{data.name} generates its problems, and does not read this", fix)


@rule("data", "algorithm.val_at_start", "algorithm.val_at_end", "algorithm.val_period")
def validation_has_problems(config: Config) -> Iterator[Violation]:
    data, algorithm = config.data, config.algorithm
    validates = algorithm.val_at_start or algorithm.val_at_end or algorithm.val_period
    off = "algorithm.val_at_start=false algorithm.val_at_end=false algorithm.val_period=0"
    fraction = "data.validation_fraction"
    if data.name == "reasoning_gym" and validates and not data.validation_fraction:
        yield Violation(
            fraction, data.validation_fraction, "holds nothing out, but validation is on", f"{fraction}=0.1"
        )
    if data.name not in ROWS:
        return
    key = "data.validation_path" if data.name == "file" else "data.validation_split"
    if validation_source(data) is None and not data.validation_fraction and validates:
        yield Violation(key, None, "is null, but validation is on", f"name one, or {fraction}=0.05, or {off}")
    if data.name == "hub" and validates and data.validation_split == data.train_split:
        rule_text = "is data.train_split too: validation would be on what is trained on"
        fix = f"the name of another split, or {key}=null {fraction}=0.05"
        yield Violation(key, data.validation_split, rule_text, fix)
    if validation_source(data) is not None and data.validation_fraction:
        rule_text = f"{key} names the validation problems already"
        yield Violation(fraction, data.validation_fraction, rule_text, f"{fraction}=0, or {key}=null")


@rule("data")
def task_can_be_made(config: Config) -> Iterator[Violation]:
    if config.data.name == "reverse_digits":
        yield from _reverse_digits_arguments(config)
    elif config.data.name == "reasoning_gym":
        try:
            yield from _gym_task(config.data)
        except ImportError as error:
            fix = "bash scripts/install.sh, or: pip install '.[reasoning-gym]' && pip install --no-deps reasoning-gym"
            broken = f"the package reasoning-gym is not installed here, or not with all it needs: {error}"
            yield Violation("data.name", "reasoning_gym", broken, fix)


def _gym_task(data: DataConfig) -> Iterator[Violation]:
    if data.task is None:
        yield Violation("data.task", None, "names no task of reasoning-gym", "data.task=chain_sum")
        return
    hint = gym.nearest_task(data.task)
    if hint is not None:
        yield Violation("data.task", data.task, "reasoning-gym has no such task", hint)
        return
    unknown = gym.unknown_arguments(data.task, data.task_kwargs)
    for name, hint in unknown.items():
        yield Violation(f"data.task_kwargs.{name}", data.task_kwargs[name], "the task has no such argument", hint)
    if unknown:
        return
    try:
        gym.ReasoningGym(data, seed=0).problem(0)
    except DataError as error:
        fix = "correct the arguments, or the template, columns or validation_fraction of data"
        yield Violation("data.task_kwargs", data.task_kwargs, str(error), fix)


def _reverse_digits_arguments(config: Config) -> Iterator[Violation]:
    given, key = config.data.task_kwargs, "data.task_kwargs.num_digits"
    for name in given.keys() - {"num_digits"}:
        fix = "remove it; reverse_digits takes: num_digits"
        yield Violation(f"data.task_kwargs.{name}", given[name], "the task has no such argument", fix)
    if "num_digits" not in given:
        yield Violation(key, None, "has no value", f"{key}=5")
    elif not isinstance(given["num_digits"], int) or not 2 <= given["num_digits"] <= 20:
        yield Violation(key, given["num_digits"], "must be an integer between 2 and 20", f"{key}=5")


@rule("data.name", "data.task_kwargs", "generation.max_new_tokens", options=RolloutAlgorithmConfig)
def answers_fit_the_response(config: Config) -> Iterator[Violation]:
    digits = config.data.task_kwargs.get("num_digits")
    if config.data.name == "reverse_digits" and isinstance(digits, int) and config.generation.max_new_tokens <= digits:
        key = "generation.max_new_tokens"
        rule_text = f"{digits} digits and the end token need {digits + 1}"
        yield Violation(key, config.generation.max_new_tokens, rule_text, f"{key}={digits + 1}")

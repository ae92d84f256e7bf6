"""Rules about data: files, columns, templates and tasks."""

import dataclasses
import logging
import re
from collections.abc import Iterator
from itertools import combinations

from nemo_rl_lite.config.schema import Config, DataConfig
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.config.sizes import validates
from nemo_rl_lite.config.sources import weight_at
from nemo_rl_lite.data.formats import CHATS, NEEDS_NEGATIVES, PAIRS, PROBLEMS, RowFormat, format_of
from nemo_rl_lite.data.rows import FileError, MissingColumnError, template_columns
from nemo_rl_lite.data.sources import ROWS, check_file, row_map, validation_source
from nemo_rl_lite.data.tasks import TASKS, unknown_arguments, unknown_task
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.validation.compose import rule

log = logging.getLogger(__name__)


@rule("data", of_sources=True)
def check_source(config: Config) -> Iterator[Violation]:
    data, kind = config.data, format_of(config)
    if data.name not in (*ROWS, *TASKS):
        yield Violation("data.name", data.name, "no such dataset", f"choose one of: {', '.join((*ROWS, *TASKS))}")
    if data.name == "hub" and not data.path:
        yield Violation("data.path", data.path, "is null", "data.path=organisation/name")
    if data.name == "reasoning_gym" and kind in NEEDS_NEGATIVES:
        rule_text = f"has only right answers, and {kind.name} need wrong ones too"
        yield Violation("data.name", data.name, rule_text, f"data=file or data=hub, with {kind.name}")
    for name, source in (("train_path", "file"), ("path", "hub")):
        if data.name in TASKS and (value := getattr(data, name)) is not None:
            rule_text = f"has no effect: {data.name} generates its problems"
            yield Violation(f"data.{name}", value, rule_text, f"data={source}, or data.{name}=null")
    if data.too_long == "truncate" and kind is PROBLEMS:
        fix = "data.too_long=drop, or a larger policy.max_total_sequence_length"
        yield Violation("data.too_long", "truncate", "would cut off the end of prompts", fix)


@rule("data", of_sources=True)
def check_rows(config: Config) -> Iterator[Violation]:
    """Check templates and columns, and with them the first rows of files."""
    data, wrong = config.data, [*_texts(config.data)]
    try:
        row_map(data)
    except ConfigError as error:
        wrong += error.violations
    wrong += [] if wrong or data.name not in ROWS else _columns(config, format_of(config))
    yield from wrong
    if data.name != "file" or wrong:
        return
    if data.train_path is None:
        hub = f", or data.name=hub, which fetches {data.path}" if data.path else ""
        yield Violation("data.train_path", None, "is null", f"data.train_path=FILE{hub}")
    for key, path in (("data.train_path", data.train_path), ("data.validation_path", data.validation_path)):
        try:
            if path is not None:
                check_file(data, path, 100, format_of(config))
        except FileError as error:
            yield Violation(key, path, error.problem, error.fix)
        except DataError as error:
            yield Violation(key, path, str(error), _right_columns(data, error, format_of(config)))


def _texts(data: DataConfig) -> Iterator[Violation]:
    key, template = "data.prompt_template", data.prompt_template
    try:
        if template is not None and not template_columns(template):
            rule_text = "has no column, so all prompts would be equal"
            yield Violation(key, template, rule_text, f"{key}='{{question}} Answer briefly.'")
    except ValueError as error:
        fix = 'write columns as {column} and plain braces as {{ and }}, as in "{question} Answer briefly."'
        yield Violation(key, template, f"is not a template: {error}", fix)
    key, text = "data.system_prompt", data.system_prompt
    if text and re.fullmatch(r"\S+\.(txt|md)", text):
        rule_text = "is a file name, and the model would get the name as text"
        yield Violation(key, text, rule_text, f"the text itself: \"{key}='$(cat {text})'\", or {key} in a recipe")
    key, pattern = "data.answer_pattern", data.answer_pattern
    fix = f"add a group for the answer, as in {key}='#### (.+)'"
    try:
        if pattern is not None and not re.compile(pattern).groups:
            yield Violation(key, pattern, "has no group", fix)
    except re.error as error:
        yield Violation(key, pattern, f"is not a regular expression: {error}", fix)


def _columns(config: Config, kind: RowFormat) -> Iterator[Violation]:
    """Yield columns that are missing, read twice, or that show the model its answer."""
    data = config.data
    if kind is CHATS and data.messages_column is not None:
        for other in ("response_column", "prompt_template"):
            if getattr(data, other) is not None:
                rule_text, fix = "has no effect with data.messages_column", "data.messages_column=null"
                yield Violation(f"data.{other}", getattr(data, other), rule_text, f"data.{other}=null, or {fix}")
        return
    answer = "response_column" if kind is not PROBLEMS and data.response_column is not None else "answer_column"
    if kind is not PROBLEMS and kind is not PAIRS and getattr(data, answer) is None:
        rule_text = f"is null, and algorithm={config.algorithm.name} needs answers"
        yield Violation(f"data.{answer}", None, rule_text, f"data.{answer}=answer")
    named = ("chosen_column", "rejected_column") if kind is PAIRS else (answer,)
    if kind is PAIRS or data.prompt_template is None:
        named = ("prompt_column", *named)
    elif getattr(data, answer) in template_columns(data.prompt_template):
        rule_text = f"contains the answer, data.{answer} = {getattr(data, answer)!r}"
        yield Violation("data.prompt_template", data.prompt_template, rule_text, "a template without that column")
    for first, second in combinations(named, 2):
        if getattr(data, first) == getattr(data, second):
            rule_text = f"must differ from data.{first}"
            yield Violation(f"data.{second}", getattr(data, second), rule_text, "the names of two columns")


def _right_columns(data: DataConfig, error: DataError, kind: RowFormat) -> str:
    """Return the fix for a row that cannot be read: the key of the missing column, if that is why."""
    if isinstance(error, MissingColumnError) and error.name not in template_columns(data.prompt_template or ""):
        named = dataclasses.asdict(data).items()
        if keys := [f"data.{field}" for field, name in named if field.endswith("_column") and name == error.name]:
            # Without a pattern that finds answers, data.answer_column names a response.
            is_response = keys[0] == "data.answer_column" and not kind.reads_answers
            key = "data.response_column" if is_response else keys[0]
            return f"correct the path, or {key}=NAME with the column's name in that file"
    return "correct the path, or the columns, template or pattern of data"


@rule("data", "algorithm", of_sources=True)
def check_validation_data(config: Config) -> Iterator[Violation]:
    data, fraction = config.data, "data.validation_fraction"
    if data.name == "reasoning_gym" and validates(config) and not data.validation_fraction:
        yield Violation(fraction, data.validation_fraction, "is 0, but validation is on", f"{fraction}=0.1")
    if data.name not in ROWS or (data.name == "file" and data.train_path is None):
        return
    key = "data.validation_path" if data.name == "file" else "data.validation_split"
    if validation_source(data) is None and not data.validation_fraction and validates(config):
        off = "algorithm.val_at_start=false algorithm.val_at_end=false algorithm.val_period=0"
        yield Violation(key, None, "is null, but validation is on", f"name one, or {fraction}=0.05, or {off}")
    if validation_source(data) is not None and data.validation_fraction:
        yield Violation(fraction, data.validation_fraction, f"excludes {key}", f"{fraction}=0, or {key}=null")


@rule("data", of_sources=True)
def check_task(config: Config) -> Iterator[Violation]:
    data, unknown = config.data, {}
    if data.name not in TASKS:
        return
    try:
        if data.name == "reasoning_gym":
            hint = "data.task=chain_sum" if data.task is None else unknown_task(data.task)
            if data.task is None or hint is not None:
                yield Violation("data.task", data.task, "is not a task of reasoning-gym", hint or "")
                return
            unknown = unknown_arguments(data.task, data.task_kwargs)
        for name, hint in unknown.items():
            yield Violation(f"data.task_kwargs.{name}", data.task_kwargs[name], "the task has no such argument", hint)
        if not unknown:
            TASKS[data.name](data, 0).problem(0)
    except ImportError as error:
        fix = "bash scripts/install.sh, or: pip install '.[reasoning-gym]' && pip install --no-deps reasoning-gym"
        broken = f"the package reasoning-gym is not installed here, or not with all it needs: {error}"
        yield Violation("data.name", "reasoning_gym", broken, fix)
    except (DataError, TypeError, ValueError) as error:
        fix = "correct the arguments, or the template, columns or validation_fraction of data"
        yield Violation("data.task_kwargs", data.task_kwargs, str(error), fix)


@rule("data.sources", "algorithm")
def check_weights(config: Config) -> Iterator[Violation]:
    """Check that each weight is well formed, and that each step has a source."""
    sources, steps = config.data.sources, {0.0}
    for name, one in sources.items():
        key, weight = f"data.sources.{name}.weight", one.weight
        curves = weight if isinstance(weight, dict) else {"step": {0.0: float(weight)}}
        points = next(iter(curves.values()), {})
        if len(curves) != 1 or not points:
            yield Violation(key, weight, "must have points of one axis", f"{key}.step={{0:1.0,100:0.2}}")
            return
        elif "step" in curves:
            steps.update(points)
        elif not isinstance(config.algorithm, GRPOConfig):
            rule_text = f"needs rewards, and algorithm={config.algorithm.name} has none"
            yield Violation(key, weight, rule_text, f"{key}=1.0, or {key}.step={{0:1.0,100:0.2}}")
        elif min(points) < 0 or max(points) > 1 or not all(points.values()):
            rule_text = "must map solve rates of 0 to 1 to weights above 0"
            yield Violation(key, weight, rule_text, f"{key}.solve_rate={{0:1.0,1:0.1}}")
    # Between two points all weights are linear, so a sum above 0 stays above 0.
    empty = [step for step in sorted(steps) if not any(weight_at(one.weight, step, 0.0) for one in sources.values())]
    if sources and empty:
        rule_text = f"has only weights of 0 at step {empty[0]:g}"
        yield Violation("data.sources", None, rule_text, "a weight above 0 at this step, for one of the sources")


@rule("data.sources", "algorithm", options=GRPOConfig)
def check_parts(config: Config) -> Iterator[Violation]:
    """Check that a reward's term has one weight in all sources if advantages are computed by term."""
    if config.options(GRPOConfig).normalize_rewards != "parts":
        return
    weights: dict[str, float] = {}
    for name, one in config.data.sources.items():
        for label, term in one.reward.terms.items():
            if weights.setdefault(label, term.weight) != term.weight:
                key = f"data.sources.{name}.reward.terms.{label}.weight"
                rule_text = f"differs from {weights[label]:g} in another source"
                fix = f"{key}={weights[label]:g}, another name, or algorithm.normalize_rewards=true"
                yield Violation(key, term.weight, rule_text, fix)


def check_epochs(config: Config, prompts: int) -> None:
    """Warn if a step samples per prompt twice. `prompts`: those of an epoch; 0 for endless data.

    Raises:
        ConfigError: `solved_cooldown_epochs` needs data with epochs.
    """
    options = config.options(GRPOConfig)
    key, a_step = "algorithm.solved_cooldown_epochs", options.num_prompts_per_step
    if options.solved_cooldown_epochs and not prompts:
        rule, fix = "needs data with epochs, and this data is endless", f"{key}=0, or data=file"
        raise ConfigError([Violation(key, options.solved_cooldown_epochs, rule, fix)])
    if 0 < prompts < a_step:
        rule = "the data has only %d prompts, so a step samples some twice"
        log.warning(f"algorithm.num_prompts_per_step = %d: {rule}", a_step, prompts)

"""Sources of a mixture: each is the run's configuration with its own data, reward, environment, agent and teacher."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from typing import Literal

from nemo_rl_lite.config.schema import Config, DataConfig, DataSetConfig, SourceConfig
from nemo_rl_lite.errors import ConfigError, DataError, Violation

ONLY = ""
"""Name of the source of a run without `data.sources`."""
# Keys and choices of files that a source has instead of the run.
_KEYS = re.compile(
    r"\b(data\.|reward\.|environment\.|agent\.|teacher\.(?=model_name)|generation\.(?=max_new)|"
    r"(?:data|reward|environment|agent)=)(?=[a-z_])"
)


def source_configs(config: Config) -> dict[str, Config]:
    """Return the configuration of each source, by name; that of the run under `ONLY` if it has no sources."""
    if not config.data.sources:
        return {ONLY: config}
    return {name: _of_source(config, one) for name, one in config.data.sources.items()}


def _of_source(config: Config, source: SourceConfig) -> Config:
    own = {field.name: getattr(source, field.name) for field in fields(DataSetConfig)}
    return replace(
        config,
        data=DataConfig(**own, sources={}),
        reward=source.reward,
        environment=source.environment,
        agent=source.agent,
        teacher=replace(config.teacher, model_name=source.teacher.model_name),
        generation=replace(config.generation, max_new_tokens=source.max_new_tokens),
    )


def teacher_configs(config: Config) -> dict[str, Config]:
    """Return the configuration of a source of each teacher, by the name of the source; by `ONLY` for the run's teacher.

    Teachers differ in `teacher.model_name`.
    """
    found: dict[str | None, tuple[str, Config]] = {}
    for name, one in source_configs(config).items():
        model = one.teacher.model_name
        found.setdefault(model, (ONLY if model == config.teacher.model_name else name, one))
    return dict(found.values())


@contextmanager
def naming_source(name: str) -> Iterator[None]:
    """Name the source and its keys in the block's errors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([of_source(name, one) for one in error.violations]) from error
    except DataError as error:
        raise DataError(in_source(name, str(error))) from error


def of_source(name: str, one: Violation) -> Violation:
    """Return a violation with the keys of a source."""
    return replace(one, key=in_source(name, one.key), rule=in_source(name, one.rule), fix=in_source(name, one.fix))


def in_source(name: str, text: str) -> str:
    """Return a text with the keys of a source: `reward.name` becomes `data.sources.NAME.reward.name`."""
    return text if name == ONLY else _KEYS.sub(lambda found: _key(name, found[1]), text)


def _key(name: str, start: str) -> str:
    keys = {"data.": "", "data=": "preset=", "generation.": ""}
    return f"data.sources.{name}.{keys.get(start, start)}"


Weight = float | Mapping[Literal["step", "solve_rate"], Mapping[float, float]]
"""A number, or one that depends linearly on the step or the solve rate between the given points."""


def source_weights(config: Config) -> dict[str, Weight]:
    """Return the weight of each source, by name."""
    return {name: one.weight for name, one in config.data.sources.items()} or {ONLY: 1.0}


def weight_at(weight: Weight, step: float, solve_rate: float) -> float:
    """Return a weight at a step, for a source of which `solve_rate` of the samples are solved."""
    if not isinstance(weight, Mapping):
        return float(weight)
    (axis, points), *_ = weight.items()
    return _interpolated(points, step if axis == "step" else solve_rate)


def _interpolated(points: Mapping[float, float], at: float) -> float:
    """Return the value at a place: linear between points, constant outside them."""
    places = sorted(points)
    if at <= places[0]:
        return points[places[0]]
    for left, right in pairwise(places):
        if at <= right:
            return points[left] + (points[right] - points[left]) * (at - left) / (right - left)
    return points[places[-1]]

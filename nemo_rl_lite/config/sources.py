"""Sources of a mixture: each is the run's configuration with its own data, reward, environment, agent and teacher."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from typing import Literal

from nemo_rl_lite.config.schema import (
    AgentConfig,
    Config,
    DataConfig,
    DataSetConfig,
    EnvironmentConfig,
    RewardConfig,
    SourceConfig,
)
from nemo_rl_lite.errors import ConfigError, DataError, Violation

ONLY = ""
"""Name of the source of a run without `data.sources`."""
_SECTIONS = {"data": DataSetConfig, "reward": RewardConfig, "environment": EnvironmentConfig, "agent": AgentConfig}
_SINGLE = ["generation.max_new_tokens", "teacher.model_name"]
# Keys and choices of files that a source has instead of the run. A file such as `reward.py` or `a/data.name` has none.
_OWN = "|".join(
    [rf"{section}\.{field.name}" for section, kind in _SECTIONS.items() for field in fields(kind)] + _SINGLE
)
_KEYS = re.compile(rf"(?<![\w./-])(?:(?:{_OWN})(?![\w/-])|(?:{'|'.join(_SECTIONS)})(?==[a-z_]))")


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
    return replace(one, key=_key(name, one.key), rule=in_source(name, one.rule), fix=in_source(name, one.fix))


def in_source(name: str, text: str) -> str:
    """Return a text with the keys of a source: `reward.name` becomes `data.sources.NAME.reward.name`."""
    return _KEYS.sub(lambda found: _key(name, found[0]), text)


def _key(name: str, key: str) -> str:
    section, _, rest = key.partition(".")
    if name == ONLY or (section not in _SECTIONS and key not in _SINGLE):
        return key
    own = {"data": rest or "preset", "generation": rest}.get(section, key)
    return f"data.sources.{name}.{own}"


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

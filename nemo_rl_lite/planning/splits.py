"""Search the ways to divide a run's GPUs between policy and engines, and predict a step of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from nemo_rl_lite.config.automatic import generates_ahead, leaving_for_generation
from nemo_rl_lite.config.keys import parse_override
from nemo_rl_lite.config.leaves import leaves
from nemo_rl_lite.config.overrides import given_keys
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.config.sizes import all_gpus, generation_gpus, policy_ranks
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.planning.step_time import StepTime
from nemo_rl_lite.rules.algorithm import corrects_age
from nemo_rl_lite.rules.compose import compose_config

_COLOCATED, _SOURCE, _LOSS = "generation.colocated", "algorithm.rollouts.source", "algorithm.loss_fn"
_RESOURCES = [f"{_COLOCATED}.resources.{name}" for name in ("num_nodes", "gpus_per_node")]
_CORRECTED = [f"{_LOSS}.use_importance_sampling_correction=true", f"{_LOSS}.truncated_importance_sampling_ratio=2"]


@dataclass(frozen=True)
class Split:
    """A division of a run's GPUs; colocated, each of them counts for both sides."""

    engine_gpus: int
    policy_gpus: int
    colocated: bool
    overlaps: bool
    """Whether the engines generate while the policy trains. Where both work on the same GPUs, the sum of the phases is
    the most that a step takes."""
    time: StepTime
    overrides: tuple[str, ...] = ()
    """What the command needs besides its own overrides."""
    instead_of: tuple[str, ...] = ()
    """Overrides of the command that have to go."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.overlapped if self.overlaps and not self.colocated else self.time.in_turn


@dataclass(frozen=True)
class Refusal:
    """A division that the rules refuse, or that does not fit."""

    engine_gpus: int
    policy_gpus: int
    reason: str


@dataclass(frozen=True)
class Search:
    """Tries other divisions of the GPUs of `config`, which was composed from `overrides`.

    `predict` and `fits` (into the GPUs' memory) are asked about configurations that the rules accept."""

    config: Config
    overrides: Sequence[str]
    predict: Callable[[Config], StepTime]
    fits: Callable[[Config], bool]

    def present(self) -> Split:
        """The configuration as it is."""
        return self._split(self.config)

    def colocated(self) -> Split | Refusal:
        """Engines and policy on the same GPUs."""
        wanted, total = [f"{_COLOCATED}.enabled=true", f"{_SOURCE}=on_policy"], all_gpus(self.config)
        return self._first([wanted, [*wanted, "offload=pinned"]], total, total)

    def apart(self) -> Iterator[Split | Refusal]:
        """Every number of GPUs for engines, or of whole machines where there are several; one step off."""
        nodes, total = self.config.cluster.num_nodes, all_gpus(self.config)
        by_node, by_gpu = _RESOURCES
        key, other, count = (by_node, by_gpu, nodes) if nodes > 1 else (by_gpu, by_node, total)
        for number in range(1, count):
            wanted = [f"{_COLOCATED}.enabled=false", f"{key}={number}", f"{other}=null", *self._one_step_off()]
            # A policy on GPUs of its own makes no room for engines.
            makes_room = leaving_for_generation(self.config.policy)
            ways = [[*wanted, "offload=none"], [*wanted, "policy.offload_for_generation=[]"]]
            engines = number * total // count
            yield self._first(ways if makes_room else [wanted], engines, total - engines)

    def _one_step_off(self) -> list[str]:
        options = self.config.options(GRPOConfig)
        if generates_ahead(self.config):
            return []
        corrects = options.loss is not None or corrects_age(options.loss_fn)
        return [f"{_SOURCE}=one_step_off", *([] if corrects else _CORRECTED)]

    def _first(self, ways: Sequence[Sequence[str]], engine_gpus: int, policy_gpus: int) -> Split | Refusal:
        """The first of the ways to ask for a division that the rules accept and that fits."""
        reasons = []
        for wanted in ways:
            changes = [one for one in wanted if self._changes(one)]
            # Colocated engines have no GPUs of their own to count.
            without_effect = _RESOURCES if f"{_COLOCATED}.enabled=true" in wanted else []
            replaced = {*given_keys(changes), *without_effect}
            gone = [one for one in self.overrides if replaced & {*given_keys([one])}]
            try:
                config = compose_config([*(one for one in self.overrides if one not in gone), *changes])
            except ConfigError as error:
                reasons.append(f"{error.violations[0].key} {error.violations[0].rule}")
                continue
            if self.fits(config):
                return self._split(config, changes, gone)
            reasons.append("it does not fit the GPUs' memory")
        return Refusal(engine_gpus, policy_gpus, reasons[0])

    def _changes(self, override: str) -> bool:
        """Whether the configuration has another value, or the override chooses a file."""
        parsed, values = parse_override(override), dict(leaves(asdict(self.config)))
        return parsed is not None and values.get(parsed.key_or_group, override) != parsed.value()

    def _split(self, config: Config, wanted: Sequence[str] = (), gone: Sequence[str] = ()) -> Split:
        return Split(
            generation_gpus(config),
            policy_ranks(config),
            config.generation.colocated.enabled,
            generates_ahead(config),
            self.predict(config),
            tuple(wanted),
            tuple(gone),
        )

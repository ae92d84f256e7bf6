"""Residency table: the place of each component in each phase, from the configuration alone.

It drives the moves, is printed at start, and is compared with measured memory. This module imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_lite.config.algorithms import generates, has_teacher
from nemo_rl_lite.config.engines import engines_serve_adapters, engines_sleep
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import leaving_for_generation, records_training


class Phase(StrEnum):
    """Phases of a GRPO step, in order."""

    GENERATE = "generate"
    LOGPROB = "logprob"
    TRAIN = "train"
    REFIT = "refit"


class Component(StrEnum):
    """Component that takes memory."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    TEACHER_WEIGHTS = "teacher_weights"
    GENERATION_WEIGHTS = "generation_weights"
    KV_CACHE = "kv_cache"


class Place(StrEnum):
    """Place of a component. In a run on CPUs the device is host memory as well."""

    DEVICE = "device"
    HOST = "host"
    RELEASED = "released"


# The policy moves these between phases; activations come and go with the computation, and a teacher and engines move
# their own.
POLICY_COMPONENTS = (Component.PARAMETERS, Component.GRADIENTS, Component.OPTIMIZER_STATES)
ENGINE_COMPONENTS = (Component.GENERATION_WEIGHTS, Component.KV_CACHE)


@dataclass(frozen=True)
class Residency:
    """Places of the components on the policy's device, a teacher's and (if `engines_share_device`) the engines'
    included."""

    places: Mapping[Phase, Mapping[Component, Place]]
    engines_share_device: bool

    @classmethod
    def of(cls, config: Config) -> "Residency":
        """Derive the table from the configuration."""
        shared = generates(config) and config.generation.colocated.enabled
        phases = tuple(Phase) if generates(config) else (Phase.LOGPROB, Phase.TRAIN)
        table = {phase: _policy(config, phase, shared) for phase in phases}
        if has_teacher(config):
            # It scores in the logprob phase.
            for phase, row in table.items():
                away = config.teacher.offload and phase is not Phase.LOGPROB
                row[Component.TEACHER_WEIGHTS] = _leaving(Place.HOST, away)
        if shared:
            sleeps = engines_sleep(config)
            # A sleeping engine releases its weights, or moves them to the host if no refit brings them. Weights return
            # in the refit, the KV cache after it.
            to = Place.HOST if engines_serve_adapters(config.generation, config.policy) else Place.RELEASED
            for phase, row in table.items():
                trains = phase in (Phase.LOGPROB, Phase.TRAIN)
                row[Component.GENERATION_WEIGHTS] = _leaving(to, sleeps and trains)
                row[Component.KV_CACHE] = _leaving(Place.RELEASED, sleeps and phase is not Phase.GENERATE)
        return cls(table, shared)

    @property
    def engines_sleep(self) -> bool:
        """True if engines on the policy's device release memory for it, and take it back."""
        rows = self.places.values()
        return any(row.get(part) is Place.RELEASED for row in rows for part in ENGINE_COMPONENTS)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(self.places)

    @property
    def components(self) -> tuple[Component, ...]:
        return tuple(next(iter(self.places.values())))

    def place(self, phase: Phase, component: Component) -> Place:
        """Return the component's place. Raises ValueError: the run has no such phase, or no such component there."""
        if component not in self._row(phase):
            raise ValueError(f"{component} are not on the policy's device in this run; {_listed(self.components)} are")
        return self._row(phase)[component]

    def policy_places(self, phase: Phase) -> dict[Component, Place]:
        """Return the places of the components that the policy moves. Raises ValueError: there is no such phase."""
        row = self._row(phase)
        return {component: row[component] for component in POLICY_COMPONENTS}

    def _row(self, phase: Phase) -> Mapping[Component, Place]:
        if phase not in self.places:
            raise ValueError(f"this run has no phase {phase}; it has {_listed(self.phases)}")
        return self.places[phase]


def _policy(config: Config, phase: Phase, shared: bool) -> dict[Component, Place]:
    # Engines with their own devices do not need the memory, so offloading for generation has no effect.
    leaves = frozenset(leaving_for_generation(config.policy) if shared else ())
    # States that left before generation stay away until training, whatever the logprob phase's own key says.
    states_leave = Component.OPTIMIZER_STATES in leaves
    states_leave |= phase is Phase.LOGPROB and config.policy.offload_optimizer_states_for_logprob
    on_cpu = config.policy.megatron_cfg.optimizer.optimizer_cpu_offload
    # The memory of a recorded training pass stays with its graph.
    graphs = records_training(config)
    return {
        Component.PARAMETERS: _leaving(Place.HOST, phase is Phase.GENERATE and Component.PARAMETERS in leaves),
        # Gradients hold nothing between an optimizer step and the next training phase, which allocates them again. The
        # logprob phase never keeps them, except for the addresses of a recorded training pass.
        Component.GRADIENTS: _leaving(
            Place.RELEASED,
            phase is not Phase.TRAIN and (Component.GRADIENTS in leaves or (phase is Phase.LOGPROB and not graphs)),
        ),
        Component.OPTIMIZER_STATES: _leaving(Place.HOST, on_cpu or (phase is not Phase.TRAIN and states_leave)),
        Component.ACTIVATIONS: _leaving(Place.RELEASED, phase not in (Phase.LOGPROB, Phase.TRAIN) and not graphs),
    }


def _leaving(to: Place, leaves: bool) -> Place:
    return to if leaves else Place.DEVICE


def _listed(names: tuple[StrEnum, ...]) -> str:
    return ", ".join(name.value for name in names)

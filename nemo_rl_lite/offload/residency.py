"""Residency table: the place of each component in each phase, from the configuration. Imports nothing heavy."""

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
    """Consumer of device memory."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    TEACHER_WEIGHTS = "teacher_weights"
    GENERATION_WEIGHTS = "generation_weights"
    KV_CACHE = "kv_cache"


class Place(StrEnum):
    """Place of a component. On CPUs, the device is host memory too."""

    DEVICE = "device"
    HOST = "host"
    RELEASED = "released"


# Components that the policy moves between phases.
POLICY_COMPONENTS = (Component.PARAMETERS, Component.GRADIENTS, Component.OPTIMIZER_STATES)
ENGINE_COMPONENTS = (Component.GENERATION_WEIGHTS, Component.KV_CACHE)


@dataclass(frozen=True)
class Residency:
    """Places of all components on the policy's device: policy, teacher, and engines that share it."""

    places: Mapping[Phase, Mapping[Component, Place]]
    engines_share_device: bool

    @classmethod
    def of(cls, config: Config) -> "Residency":
        """Derive the table from the configuration."""
        shared = generates(config) and config.generation.colocated.enabled
        phases = tuple(Phase) if generates(config) else (Phase.LOGPROB, Phase.TRAIN)
        table = {phase: _policy(config, phase, shared) for phase in phases}
        if has_teacher(config):
            for phase, row in table.items():
                away = config.teacher.offload and phase is not Phase.LOGPROB
                row[Component.TEACHER_WEIGHTS] = _place(Place.HOST, away)
        if shared:
            sleeps = engines_sleep(config)
            # A sleeping engine releases its weights, or offloads them if refits send only adapters. Weights return in
            # the refit, the KV cache after it.
            to = Place.HOST if engines_serve_adapters(config.generation, config.policy) else Place.RELEASED
            for phase, row in table.items():
                trains = phase in (Phase.LOGPROB, Phase.TRAIN)
                row[Component.GENERATION_WEIGHTS] = _place(to, sleeps and trains)
                row[Component.KV_CACHE] = _place(Place.RELEASED, sleeps and phase is not Phase.GENERATE)
        return cls(table, shared)

    @property
    def engines_sleep(self) -> bool:
        """True if engines on the policy's device release memory between phases."""
        rows = self.places.values()
        return any(row.get(part) is Place.RELEASED for row in rows for part in ENGINE_COMPONENTS)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(self.places)

    @property
    def components(self) -> tuple[Component, ...]:
        return tuple(next(iter(self.places.values())))

    def place(self, phase: Phase, component: Component) -> Place:
        """Return the component's place. Raises ValueError: the run has no such phase or component."""
        if phase not in self.places or component not in self.places[phase]:
            phases, components = ", ".join(self.phases), ", ".join(self.components)
            raise ValueError(f"this run has no {component} in the phase {phase}, but {components} in {phases}")
        return self.places[phase][component]

    def policy_places(self, phase: Phase) -> dict[Component, Place]:
        """Return the places of the policy's components. Raises ValueError: the run has no such phase."""
        return {component: self.place(phase, component) for component in POLICY_COMPONENTS}


def _policy(config: Config, phase: Phase, shared: bool) -> dict[Component, Place]:
    # Offload for generation has no effect if engines have their own devices.
    offloaded = frozenset(leaving_for_generation(config.policy) if shared else ())
    # States that were offloaded for generation return for training.
    states = Component.OPTIMIZER_STATES in offloaded
    states |= phase is Phase.LOGPROB and config.policy.offload_optimizer_states_for_logprob
    on_cpu = config.policy.megatron_cfg.optimizer.optimizer_cpu_offload
    # A CUDA graph keeps its activations, and the addresses of the gradients.
    graphs = records_training(config)
    # Gradients have no contents between an optimizer step and the next training phase.
    gradients = Component.GRADIENTS in offloaded or (phase is Phase.LOGPROB and not graphs)
    return {
        Component.PARAMETERS: _place(Place.HOST, phase is Phase.GENERATE and Component.PARAMETERS in offloaded),
        Component.GRADIENTS: _place(Place.RELEASED, phase is not Phase.TRAIN and gradients),
        Component.OPTIMIZER_STATES: _place(Place.HOST, on_cpu or (phase is not Phase.TRAIN and states)),
        Component.ACTIVATIONS: _place(Place.RELEASED, phase not in (Phase.LOGPROB, Phase.TRAIN) and not graphs),
    }


def _place(away: Place, is_away: bool) -> Place:
    return away if is_away else Place.DEVICE

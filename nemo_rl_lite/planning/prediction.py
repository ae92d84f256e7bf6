"""Predict the bytes of each component in each phase on the fullest policy rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from nemo_rl_lite.config.algorithms import has_teacher
from nemo_rl_lite.config.engines import CacheFacts, engine_of, engines_serve_adapters, engines_share_weights
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import engine_ranks, on_gpus, parallel_dims, records_training
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency
from nemo_rl_lite.planning import teacher
from nemo_rl_lite.planning.activation_size import item_bytes, logprob_activations, training_activations
from nemo_rl_lite.planning.model_size import (
    Parameters,
    parameter_count,
    rank_parameters,
    served_adapters,
    trained_parameters,
    unlike_the_engine,
)

# Gradients are summed, over micro-batches and ranks, in float32.
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Bytes:
    """Bytes on the rank's device, and in its host's memory."""

    device: int = 0
    host: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host)


Prediction = Mapping[tuple[Phase, Component], Bytes]


def predict(config: Config, shape: ModelShape, device_bytes: int | None) -> dict[tuple[Phase, Component], Bytes]:
    """Predict every phase and component of `Residency.of(config)`, for the pipeline stage with the highest peak.

    `device_bytes` is the size of one GPU, None on CPUs. CUDA's context, captured graphs, the refit's buffers and the
    reference weights in host memory are not included. Optimizer states are those after the first step.

    Raises:
        ValueError: an engine shares a GPU, and `device_bytes` is None.
    """
    residency = Residency.of(config)
    stages = [_of_stage(config, shape, residency, device_bytes, stage) for stage in range(parallel_dims(config).pp)]
    return max(stages, key=lambda stage: max(sums.device for sums in totals(stage).values()))


def totals(prediction: Prediction) -> dict[Phase, Bytes]:
    """Sum all components, by phase."""
    sums: dict[Phase, Bytes] = {}
    for (phase, _), nbytes in prediction.items():
        sums[phase] = sums.get(phase, Bytes()) + nbytes
    return sums


def predicted_metrics(prediction: Prediction) -> dict[str, float]:
    """Metrics `memory/predicted/<phase>/<component>`: bytes on the device, logged once."""
    return {
        f"memory/predicted/{phase}/{component}": float(nbytes.device)
        for (phase, component), nbytes in prediction.items()
    }


def _of_stage(
    config: Config, shape: ModelShape, residency: Residency, device_bytes: int | None, stage: int
) -> dict[tuple[Phase, Component], Bytes]:
    dims, peft = parallel_dims(config), config.policy.megatron_cfg.peft
    trained = trained_parameters(shape, dims, peft, stage, grouped=on_gpus(config))
    held = rank_parameters(shape, dims, stage).total + (trained.total if peft.enabled else 0)
    sizes = {
        Component.PARAMETERS: held * item_bytes(config) - shared_weights(config, shape, stage),
        Component.GRADIENTS: trained.total * GRADIENT_BYTES,
    }
    of_teacher = teacher.weight_bytes(config) if has_teacher(config) else 0
    if residency.engines_share_device:
        weights = engine_weights(config, shape)
        sizes[Component.GENERATION_WEIGHTS] = weights
        sizes[Component.KV_CACHE] = engine_of(config).kv_bytes(
            config, CacheFacts(token_cache_bytes(config, shape), weights, device_bytes)
        )

    def cell(phase: Phase, component: Component) -> Bytes:
        place = residency.place(phase, component)
        if component is Component.OPTIMIZER_STATES:
            return _optimizer_states(config, trained, place)
        if component is Component.ACTIVATIONS:
            return _activations(config, shape, phase, stage)
        if component is Component.TEACHER_WEIGHTS:
            # The copy in host memory stays there.
            return Bytes(host=of_teacher if config.teacher.offload else 0) + _at(place, of_teacher, moved=False)
        return _at(place, sizes[component])

    return {
        (phase, component): cell(phase, component) for phase in residency.phases for component in residency.components
    }


def _at(place: Place, nbytes: int, moved: bool = True) -> Bytes:
    """Bytes at a place. Where nothing is `moved`, what is on the host is counted elsewhere."""
    match place:
        case Place.DEVICE:
            return Bytes(device=nbytes)
        case Place.HOST:
            return Bytes(host=nbytes if moved else 0)
        case Place.RELEASED:
            return Bytes()


def _activations(config: Config, shape: ModelShape, phase: Phase, stage: int) -> Bytes:
    training = Bytes(*training_activations(config, shape, stage))
    if phase is Phase.TRAIN:
        return training
    # A recorded training pass keeps its memory in all phases.
    kept = training if records_training(config) else Bytes()
    if phase is not Phase.LOGPROB:
        return kept
    own = logprob_activations(config, shape, stage)
    # Teacher and policy score one after the other.
    return kept + Bytes(max(own, teacher.activation_bytes(config)) if has_teacher(config) else own)


def _optimizer_states(config: Config, parameters: Parameters, place: Place) -> Bytes:
    """Bytes of float32 master weights, unless the parameters are float32, and of the optimizer's moments."""
    settings, dims = config.policy.megatron_cfg.optimizer, parallel_dims(config)
    held = parameters.total
    if settings.use_distributed_optimizer:
        held = ceil(parameters.dense / dims.dense_dp) + ceil(parameters.experts / dims.expert_dp)
    masters = 4 if config.policy.precision == "bfloat16" else 0
    past = 8 if settings.optimizer == "adam" else 4 if settings.sgd_momentum > 0 else 0
    whole = held * (masters + past)
    if not settings.optimizer_cpu_offload:
        return _at(place, whole)
    away = settings.optimizer_offload_fraction
    # The CPU optimizer keeps float32 copies of the parameters and gradients that it steps.
    return Bytes(device=int((1 - away) * whole), host=int(away * held * (4 + GRADIENT_BYTES + past)))


def engine_weights(config: Config, shape: ModelShape) -> int:
    """Bytes of weights, and of adapters that the engine applies itself, on one of an engine's devices."""
    serves = engines_serve_adapters(config.generation, config.policy)
    adapters = served_adapters(shape, config.policy.megatron_cfg.peft) if serves else 0
    return (parameter_count(shape) + adapters) * item_bytes(config) // engine_ranks(config)


def shared_weights(config: Config, shape: ModelShape, stage: int) -> int:
    """Bytes of a policy rank's frozen weights that are in the memory of the engine on its GPU. Of matrices that the two
    split over other numbers of ranks, nothing is."""
    dims = parallel_dims(config)
    if not engines_share_weights(config) or dims.tp != config.generation.vllm_cfg.tensor_parallel_size:
        return 0
    return (rank_parameters(shape, dims, stage).total - unlike_the_engine(shape, dims, stage)) * item_bytes(config)


def token_cache_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes that a token takes of the KV cache on one GPU of an engine."""
    own_heads = -(-shape.kv_heads // config.generation.vllm_cfg.tensor_parallel_size)
    return 2 * shape.layers * own_heads * shape.head_dim * item_bytes(config)

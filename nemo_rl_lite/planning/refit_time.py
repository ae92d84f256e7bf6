"""How long a refit will take, from what refits were measured to take (docs/refit.md)."""

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.budget import engines_copy, refit_bytes

# Bytes a second: 8 B of weights in 0.05 s from one H200 to another of the host; within one GPU it is less.
IN_HOST = 330e9
# The same for weights that two ranks have together: 0.04 s.
PUT_TOGETHER = 400e9
# One link of 400 Gb/s a GPU: assumed, not measured.
BETWEEN_HOSTS = 50e9
# Seconds a tensor where megatron-bridge exports it.
BRIDGE_EXPORT_S = 0.30e-3
_OF_A_LAYER, _OF_AN_EXPERT, _OUTSIDE = 9, 3, 3


def refit_seconds(config: Config, shape: ModelShape) -> float:
    """Without checksums."""
    parallel, cluster = config.policy.megatron_cfg, config.cluster
    apart = not config.generation.colocated.enabled
    rate = BETWEEN_HOSTS if apart and cluster.num_nodes > 1 else IN_HOST
    spread = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    nbytes, export = refit_bytes(config, shape), 0.0
    if parallel.peft.enabled:
        export = BRIDGE_EXPORT_S * _tensors(shape)
    elif spread * parallel.expert_model_parallel_size > 1 and not engines_copy(config):
        export = nbytes / PUT_TOGETHER
    return nbytes / rate + export


def _tensors(shape: ModelShape) -> int:
    sparse = shape.layers - shape.dense_layers
    return shape.layers * _OF_A_LAYER + sparse * shape.experts * _OF_AN_EXPERT + _OUTSIDE

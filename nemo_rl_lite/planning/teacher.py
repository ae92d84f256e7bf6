"""Bytes and seconds of a run's teacher."""

import logging
from functools import cache

from nemo_rl_lite.config.algorithms import has_teacher
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import parallel_dims
from nemo_rl_lite.config.teacher import as_teacher, teacher_topk
from nemo_rl_lite.models.known import find_shape
from nemo_rl_lite.models.shape import ModelShape, NoModelError
from nemo_rl_lite.planning.activation_size import item_bytes, logprob_activations, micro_batch
from nemo_rl_lite.planning.model_size import rank_parameters

log = logging.getLogger(__name__)


def teacher_shape(config: Config) -> ModelShape | None:
    """The shape of the run's teacher; None where it has none, or one of unknown shape, which a warning says."""
    return _shape(config.teacher.model_name or "") if has_teacher(config) else None


def weight_bytes(config: Config) -> int:
    """Bytes of the weights on the fullest rank of the teacher."""
    shape, own = teacher_shape(config), as_teacher(config)
    if shape is None:
        return 0
    dims = parallel_dims(own)
    return max(rank_parameters(shape, dims, stage).total for stage in range(dims.pp)) * item_bytes(own)


def activation_bytes(config: Config) -> int:
    """Peak bytes of the teacher's pass over a micro-batch, with its largest logits."""
    shape, own = teacher_shape(config), as_teacher(config)
    if shape is None:
        return 0
    # A float32 logit and an int64 id.
    top = 12 * (teacher_topk(config) or 0) * micro_batch(own, training=False).tokens
    return logprob_activations(own, shape, parallel_dims(own).pp - 1) + top


@cache
def _shape(name: str) -> ModelShape | None:
    try:
        return find_shape(name)
    except NoModelError as error:
        log.warning("the teacher's memory and seconds are not predicted: %s", error)
        return None

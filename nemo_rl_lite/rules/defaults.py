"""Defaults of `configs/` that follow from another key, as resolvers of OmegaConf."""

from omegaconf import OmegaConf

from nemo_rl_lite.models.embedded.reverse_digits import NAME as EMBEDDED
from nemo_rl_lite.models.shape import NoModelError, read_model_shape


def register_defaults() -> None:
    """Let `${default_length:MODEL,A,B}` be A tokens for the embedded model, and for others B or all their positions."""
    OmegaConf.register_new_resolver("default_length", _default_length, replace=True)


def _default_length(model: object, of_the_embedded: int, most: int) -> int:
    if model == EMBEDDED:
        return of_the_embedded
    try:
        shape = read_model_shape(str(model))
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError):
        # A rule reports it.
        return most
    # The shape of a hub model may not be known yet.
    return min(most, shape.max_positions) if shape else most

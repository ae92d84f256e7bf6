"""Defaults of `configs/` that follow from other keys, as resolvers of OmegaConf: one number for the embedded model, and
what follows from another number for others."""

from omegaconf import OmegaConf

from nemo_rl_lite.models.embedded.reverse_digits import NAME as EMBEDDED
from nemo_rl_lite.models.shape import NoModelError, read_model_shape


def register_defaults() -> None:
    """Let `${default_length:MODEL,A,B}` be A tokens for the embedded model, and for others B or all their positions;
    `${default_response:MODEL,A,B,LENGTH}` A tokens, and for others B or half of LENGTH;
    `${default_micro_batch:MODEL,A,B,LENGTH}` A sequences, and for others as many of LENGTH tokens as have B tokens;
    `${default_rate:MODEL,A,B,LORA}` A, also where LORA is true, and for all weights of others B."""
    for resolver in (_length, _response, _micro_batch, _rate):
        OmegaConf.register_new_resolver(f"default{resolver.__name__}", resolver, replace=True)


def _length(model: object, of_the_embedded: int, most: int) -> int:
    if model == EMBEDDED:
        return of_the_embedded
    try:
        shape = read_model_shape(str(model))
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError):
        # A rule reports it.
        return most
    # The shape of a hub model may not be known yet.
    return min(most, shape.max_positions) if shape else most


def _response(model: object, of_the_embedded: int, most: int, length: object) -> int:
    return of_the_embedded if model == EMBEDDED else max(1, min(most, _tokens(length, 2 * most) // 2))


def _micro_batch(model: object, of_the_embedded: int, tokens: int, length: object) -> int:
    return of_the_embedded if model == EMBEDDED else max(1, tokens // _tokens(length, tokens))


def _rate(model: object, of_the_embedded: float, of_others: float, trains_adapters: object) -> float:
    return of_the_embedded if model == EMBEDDED or trains_adapters is True else of_others


def _tokens(length: object, otherwise: int) -> int:
    """The length; `otherwise` where it is no number of tokens, which is reported as an error of its key."""
    return length if isinstance(length, int) and length > 0 else otherwise

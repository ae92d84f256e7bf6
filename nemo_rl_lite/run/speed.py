"""What the rates of a run are divided by: its ranks, and the most that their GPUs can do."""

from collections.abc import Callable

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus, policy_ranks
from nemo_rl_lite.host.devices import gpu_name
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.observability.speed import DecodingSpeed, PolicySpeed
from nemo_rl_lite.planning.gpus import Gpu, known_by_name
from nemo_rl_lite.planning.memory import DecodingBytes
from nemo_rl_lite.run.workers.recovery import RecoveringGeneration


def policy_speed(config: Config) -> PolicySpeed:
    gpu = _gpu(config)
    return PolicySpeed(policy_ranks(config), gpu.flops if gpu else None)


def decoding_speed(
    config: Config, shape: ModelShape | None, generation: RecoveringGeneration
) -> Callable[[], dict[str, float]]:
    """Return a function that gives the rates of the engines since its last call, and what speculation has done; no
    rates for a model of unknown shape."""
    speed, gpu = None, _gpu(config)
    if shape is not None:
        nbytes = DecodingBytes.of(config, shape)
        speed = DecodingSpeed(nbytes.step, nbytes.token, gpu.bandwidth if gpu else None)

    def take() -> dict[str, float]:
        decoded, seconds = generation.take_decoded()
        rates = speed.metrics(decoded.steps, decoded.cached, seconds) if speed else {}
        return rates | decoded.drafts.metrics()

    return take


def _gpu(config: Config) -> Gpu | None:
    """This machine's kind of GPU, which all machines of a run have."""
    return known_by_name(gpu_name()) if on_gpus(config) else None

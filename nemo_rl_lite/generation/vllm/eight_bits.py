"""FP8 weights: how vLLM rounds them."""

import os

# Whether DeepGEMM, which multiplies weights that share a scale by blocks, gets scales that are powers of two.
SCALES = "VLLM_USE_DEEP_GEMM_E8M0"
# The compute capability, in tenths, of the first GPUs whose hardware wants such scales.
_BLACKWELL = 100


def keep_first_scales() -> None:
    """Let GPUs that take scales of any value have them, unless the environment says otherwise. vLLM quantises weights
    with such scales first, and where it then makes them powers of two, it rounds the 8-bit weights a second time."""
    # It asks the driver; torch would open the GPU in this process, which with tensor parallelism does not compute.
    from vllm.platforms import current_platform

    if not current_platform.has_device_capability(_BLACKWELL):
        os.environ.setdefault(SCALES, "0")

"""FP8 weights: how vLLM rounds them."""

import os

import torch

# Whether DeepGEMM, which multiplies weights that share a scale by blocks, gets scales that are powers of two.
SCALES = "VLLM_USE_DEEP_GEMM_E8M0"
# The first GPUs whose hardware wants such scales.
_BLACKWELL = (10, 0)


def round_once() -> None:
    """Let GPUs that take scales of any value have them, unless the environment says otherwise. vLLM quantises weights
    with such scales first, and where it then makes them powers of two, it rounds the 8-bit weights a second time."""
    if torch.cuda.get_device_capability() < _BLACKWELL:
        os.environ.setdefault(SCALES, "0")

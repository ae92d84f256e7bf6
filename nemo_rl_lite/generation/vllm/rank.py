"""The `worker_extension_cls` of vLLM's worker processes, one for each rank. Only vLLM imports this module."""

from nemo_rl_lite.compat.vllm import offer_cascade_attention, prefer_second_runner
from nemo_rl_lite.compat.vllm_decoding import decode_with_own_kernels
from nemo_rl_lite.compat.vllm_warm_up import warm_up_own_kernels
from nemo_rl_lite.generation.vllm.extension import RefitExtension

__all__ = ["RefitExtension"]

prefer_second_runner()
offer_cascade_attention()
decode_with_own_kernels()
warm_up_own_kernels()

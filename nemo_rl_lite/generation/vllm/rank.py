"""The `worker_extension_cls` of vLLM's worker processes, one for each rank. Only vLLM imports this module."""

from nemo_rl_lite.compat.vllm import offer_cascade_attention, prefer_second_runner
from nemo_rl_lite.compat.vllm_batches import keep_batches
from nemo_rl_lite.compat.vllm_decoding import replace_decoding, takes_kernels
from nemo_rl_lite.compat.vllm_qk_norm import fuse_norms
from nemo_rl_lite.compat.vllm_warm_up import warm_up_own_kernels
from nemo_rl_lite.generation.vllm.extension import RefitExtension

__all__ = ["RefitExtension"]

prefer_second_runner()
offer_cascade_attention()
warm_up_own_kernels()
if takes_kernels():
    from nemo_rl_lite.generation.vllm.attention_kernel import attend
    from nemo_rl_lite.generation.vllm.sampling_kernel import sample

    replace_decoding(attend, sample)
    keep_batches()
    fuse_norms()

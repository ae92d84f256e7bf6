"""The repair of vLLM's experts on processors without AVX-512, which needs vLLM's CPU build."""

import pytest
import torch
from torch.nn.functional import silu

from nemo_rl_lite.compat.vllm import repair

pytest.importorskip("vllm")


def test_the_activation_of_experts_needs_no_configuration():
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    activations, x = cpu_fused_moe._CPU_MOE_ACT_FN, torch.randn(3, 8)
    own = activations[MoEActivation.SILU]
    # As in a forward pass: once vLLM allows this, the repair can go.
    with pytest.raises(AssertionError, match="config is not set"):
        own(x)
    try:
        repair()
        expected = silu(x[:, :4]) * x[:, 4:]
        torch.testing.assert_close(activations[MoEActivation.SILU](x), expected, rtol=0, atol=0)
    finally:
        activations[MoEActivation.SILU] = own

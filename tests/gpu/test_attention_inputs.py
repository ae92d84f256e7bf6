"""Queries, keys and values that are made at once: the kernels, and next to Transformer Engine's, one after another.

Whole policies: test_policy.py compares packs, which use the kernels, with padded rows, which do not.
"""

import pytest
import torch

from tests.attention_inputs_cases import SMALL, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_give_what_torch_gives(dtype, normed):
    for sizes in (*SMALL, (4099, 8, 2, 128), (2050, 2, 6, 64), (700, 1, 4, 256)):
        check(sizes, "cuda", dtype, normed)


def test_they_give_what_transformer_engine_gives():
    import transformer_engine.pytorch as te  # pyrefly: ignore[missing-import]
    from transformer_engine.pytorch.attention.rope import (  # pyrefly: ignore[missing-import]
        apply_rotary_pos_emb,
    )

    from nemo_rl_lite.policy.attention_inputs import _Separated, rotation
    from nemo_rl_lite.policy.attention_inputs_kernel import Heads

    torch.manual_seed(0)
    heads, tokens = Heads(8, 2, 128, 1e-6), 3000
    projected = torch.randn(tokens, 8 * 4 * 128, device="cuda", dtype=torch.bfloat16)
    boundaries = torch.tensor([0, 900, 901, 3000], device="cuda", dtype=torch.int32)
    embedding = torch.outer(torch.arange(2100.0), 1e6 ** -(torch.arange(64) / 64)).repeat(1, 2)[:, None, None].cuda()
    norms = [te.RMSNorm(128, eps=1e-6, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5)
    found = []
    for at_once in (True, False):
        leaf = projected.clone().requires_grad_()
        if at_once:
            turns = rotation(embedding, boundaries, tokens)
            made = _Separated.apply(leaf, *(norm.weight for norm in norms), *turns, heads)
        else:
            split = leaf.view(tokens, 8, 4, 128)
            parts = norms[0](split[:, :, :2].reshape(tokens, 16, 128)), norms[1](split[:, :, 2])
            options = {"tensor_format": "thd", "fused": True, "cu_seqlens": boundaries}
            made = *(apply_rotary_pos_emb(one, embedding, **options) for one in parts), split[:, :, 3]
        torch.autograd.backward(made, [one.detach().cos() for one in made])
        found.append([*made, leaf.grad, *(norm.weight.grad for norm in norms)])
        for norm in norms:
            norm.weight.grad = None
    for place, (ours, theirs) in enumerate(zip(*found, strict=True)):
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert error < (1e-2 if place < 4 else 2e-2), (place, error)


def test_the_gradient_of_swiglu_is_that_of_torch():
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from nemo_rl_lite.compat.megatron import differentiate_swiglu_in_one_pass

    differentiate_swiglu_in_one_pass()
    torch.manual_seed(0)
    ours = torch.randn(1000, 1, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(1000, 1, 512, device="cuda", dtype=torch.bfloat16)
    theirs = ours.detach().float().requires_grad_()
    gate, up = theirs.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(gradient.float())
    bias_swiglu_impl(ours, None).backward(gradient)
    assert ours.grad is not None and ours.grad.shape == ours.shape
    torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.01, atol=0.001)

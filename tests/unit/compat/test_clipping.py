"""Gradients that megatron-core clips by kernels for many tensors."""

import pytest
import torch

from nemo_rl_lite.compat.megatron import auto_bridge, clip_in_few_kernels


@pytest.fixture
def clip_grads(monkeypatch):
    auto_bridge()
    from megatron.core.optimizer import clip_grads

    for name in ("l2_norm_impl", "multi_tensor_scale_impl"):
        monkeypatch.setattr(clip_grads, name, getattr(clip_grads, name))
    return clip_grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_all_gradients_in_float32(clip_grads, dtype):
    clip_in_few_kernels()
    torch.manual_seed(0)
    grads = [torch.randn(size, dtype=dtype) for size in ((3, 4), (5,), (2, 2))]
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, None, [grads], False)
    wanted = torch.cat([grad.float().flatten() for grad in grads]).norm()
    torch.testing.assert_close(norm, wanted.view(1))


def test_gradients_are_scaled_in_place(clip_grads):
    clip_in_few_kernels()
    grads = [torch.ones(3), torch.full((2, 2), 4.0)]
    clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, None, [grads, grads], 0.5)
    assert [grad.unique().tolist() for grad in grads] == [[0.5], [2.0]]


def test_kernels_of_transformer_engine_stay(clip_grads):
    clip_grads.l2_norm_impl = own = object()
    clip_in_few_kernels()
    assert clip_grads.l2_norm_impl is own

"""The norm of gradients, and parameters that megatron-core copies, by kernels for many tensors."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.compat.megatron import add_norms_in_few_kernels, auto_bridge, copy_in_few_kernels


@pytest.fixture
def clip_grads(monkeypatch):
    auto_bridge()
    from megatron.core.optimizer import clip_grads

    monkeypatch.setattr(clip_grads, "l2_norm_impl", clip_grads.l2_norm_impl)
    return clip_grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_all_gradients_in_float32(clip_grads, dtype):
    add_norms_in_few_kernels()
    torch.manual_seed(0)
    grads = [torch.randn(size, dtype=dtype) for size in ((3, 4), (5,), (2, 2))]
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, None, [grads], False)
    wanted = torch.cat([grad.float().flatten() for grad in grads]).norm()
    torch.testing.assert_close(norm, wanted.view(1))


def test_kernels_of_transformer_engine_stay(clip_grads):
    clip_grads.l2_norm_impl = own = object()
    add_norms_in_few_kernels()
    assert clip_grads.l2_norm_impl is own


class Part:
    """A distributed optimizer's parameters on one rank: its shares of two in a bfloat16 bucket, and one in float32."""

    is_stub_optimizer = False
    ddp_config = SimpleNamespace(use_megatron_fsdp=False, fp8_param_gather=False, fp4_param_gather=False)
    RANGES = (range(4), range(4, 10), range(2, 5))

    def __init__(self, is_precision_aware: bool = False):
        torch.manual_seed(0)
        self.config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=is_precision_aware)
        data = torch.zeros(10, dtype=torch.bfloat16), torch.zeros(2, 4)
        self.buffers = [SimpleNamespace(buckets=[SimpleNamespace(param_data=one)]) for one in data]
        models = [torch.zeros(1, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)]
        self.model_float16_groups, self.model_fp32_groups = [models[:1], models[1:2]], [models[2:]]
        masters = [torch.randn(len(own)) for own in self.RANGES]
        self.shard_fp32_from_float16_groups, self.shard_fp32_groups = [masters[:1], masters[1:2]], [masters[2:]]
        self.ranges = dict(zip(map(id, models), self.RANGES, strict=True))
        places = (0, 0, 1)
        self.model_param_gbuf_map = {
            model: (buffer, model.dtype, 0) for model, buffer in zip(models, places, strict=True)
        }

    def _get_model_param_range_map(self, parameter):
        own = self.ranges[id(parameter)]
        return {"gbuf_world_in_bucket": SimpleNamespace(start=own.start, end=own.stop, size=len(own))}

    def _is_distopt_quantized_param(self, parameter):
        return False

    @property
    def data(self) -> list[torch.Tensor]:
        return [buffer.buckets[0].param_data for buffer in self.buffers]


@pytest.mark.parametrize("is_precision_aware", [False, True])
def test_the_models_parameters_are_those_that_megatron_core_copies(monkeypatch, is_precision_aware):
    auto_bridge()
    from megatron.core.optimizer import distrib_optimizer

    # Another test of this process may have changed the module.
    spec = importlib.util.find_spec(distrib_optimizer.__name__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    name, ours = "_copy_main_params_to_model_params", distrib_optimizer.DistributedOptimizer
    monkeypatch.setattr(ours, name, getattr(ours, name))
    copy_in_few_kernels()
    wanted, found = Part(is_precision_aware), Part(is_precision_aware)
    getattr(fresh.DistributedOptimizer, name)(wanted)
    getattr(ours, name)(found)
    assert getattr(fresh.DistributedOptimizer, name).__module__ != getattr(ours, name).__module__
    assert all(torch.equal(one, other) for one, other in zip(wanted.data, found.data, strict=True))
    assert [bool(one.any()) for one in found.data] == [not is_precision_aware] * 2

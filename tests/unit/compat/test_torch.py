"""CUDA tensors of another process, whose number for the device may differ."""

import inspect

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nemo_rl_lite.compat.torch import open_cuda_tensor


def test_a_tensor_is_opened_on_this_process_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)

    def rebuild(tensor_cls: type, storage_device: int, requires_grad: bool) -> tuple[object, ...]:
        return tensor_cls, storage_device, requires_grad

    assert open_cuda_tensor((rebuild, (torch.Tensor, 2, False))) == (torch.Tensor, 5, False)
    assert "storage_device" in inspect.signature(rebuild_cuda_tensor).parameters

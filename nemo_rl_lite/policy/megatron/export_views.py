"""Exported weights as views of the model's own parameters, found once.

megatron-bridge names, splits and gathers each weight anew whenever it exports, in Python. On a rank that has the whole
model nothing is gathered: a weight is a parameter, or a regular part of one, as queries are of fused queries, keys and
values. A view of that part shows the new values after every optimizer step, and after every move, since storages are
resized in place.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.refit.packing import same_bytes
from nemo_rl_lite.refit.report import Named

log = logging.getLogger(__name__)


class ExportViews:
    """Shown every weight of one export, `take` gives the views for later ones."""

    def __init__(self, parameters: Sequence[Tensor], tasks: Sequence[Any]):
        """`tasks`: megatron-bridge's conversion tasks."""
        self._storages = {parameter.untyped_storage()._cdata for parameter in parameters}
        named = [(name, task) for task in tasks if task is not None for name in _names(task)]
        counts = Counter(name for name, _ in named)
        # Of several tasks, such as those of experts in one tensor, none gives the weight alone.
        self._tasks = {name: task for name, task in named if counts[name] == 1}
        self._indices: dict[str, Tensor] = {}
        self._views: list[Named] | None = []

    def show(self, name: str, exported: Tensor) -> None:
        """Weights come in the order of the export."""
        if self._views is None:
            return
        view = exported.detach() if self._is_parameter(exported) else self._part(name, exported)
        if view is None:
            log.warning("weights are exported by megatron-bridge each time: %s is no view of a parameter", name)
            self._views = None
        else:
            self._views.append((name, view))

    def take(self) -> list[Named] | None:
        """None where a weight is no view: it is computed, or gathered from several ranks. A view may have its first
        dimension in two."""
        if self._views is not None:
            log.info("weights are exported as %d views of parameters", len(self._views))
        return self._views

    def _is_parameter(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def _part(self, name: str, exported: Tensor) -> Tensor | None:
        """The part of a parameter that was copied to make `exported`."""
        if name not in self._tasks:
            return None
        task = self._tasks[name]
        parameter = task.param_weight
        if parameter is None or not self._is_parameter(parameter) or not parameter.is_contiguous():
            return None
        if name not in self._indices:
            # Where each element comes from: the same conversion of the elements' own places.
            places = torch.arange(parameter.numel(), device=parameter.device).view_as(parameter)
            self._indices |= task.mapping.megatron_to_hf(places, task.megatron_module)
        index = self._indices.pop(name, None)
        layout = None if index is None or index.shape != exported.shape else strided(index, parameter.numel())
        if layout is None:
            return None
        sizes, strides, offset = layout
        view = parameter.detach().as_strided(sizes, strides, parameter.storage_offset() + offset)
        return view if same_bytes(view.reshape(exported.shape), exported) else None


def strided(index: Tensor, elements: int) -> tuple[list[int], list[int], int] | None:
    """Sizes, strides and offset of the view that has the elements `index` of a flat tensor of so many elements, its
    first dimension in two where there is a jump; None where it is not so regular."""
    if not index.dim() or not index.numel() or int(index.min()) < 0 or int(index.max()) >= elements:
        return None
    flat, row = index.flatten(), index[0].numel()
    steps = flat[1:] - flat[:-1]
    jumps = (steps != 1).nonzero().flatten()
    block = int(jumps[0]) + 1 if len(jumps) else flat.numel()
    blocks = flat.numel() // block
    if flat.numel() % block or block % row:
        return None
    begins = flat[::block]
    step = int(begins[1] - begins[0]) if blocks > 1 else block
    if step <= 0:
        return None
    expected = begins[0] + step * torch.arange(blocks, device=flat.device)[:, None]
    expected = expected + torch.arange(block, device=flat.device)
    if not torch.equal(flat.view(blocks, block), expected):
        return None
    shape, inner = list(index.shape), list(torch.empty(index.shape, device="meta").stride())
    if blocks == 1:
        return shape, inner, int(begins[0])
    return [blocks, block // row, *shape[1:]], [step, *inner], int(begins[0])


def _names(task: Any) -> list[str]:
    named = task.mapping.hf_param
    return [named] if isinstance(named, str) else list(named.values())

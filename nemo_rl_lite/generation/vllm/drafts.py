"""Draft models inside vLLM's worker processes, as their `worker_extension_cls`.

A draft keeps the weights of its checkpoint: refits bring the policy's only. A draft without its own embedding or
LM head uses the policy's modules, so it sees refitted ones. Only vLLM imports this module.
"""

from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.vllm import (
    capture_plain_decoding,
    load_only_drafts,
    rebuild_draft_buffers,
    shorten_drafts,
)
from nemo_rl_lite.generation.vllm.rank import RefitExtension

load_only_drafts()
if torch.cuda.is_available():
    capture_plain_decoding()


class DraftExtension(RefitExtension):
    """Refits, and a draft that sleeps and pauses."""

    _kept: list[Tensor] | None = None

    def keep_draft(self) -> None:
        """Copy the draft to host memory before the engine's first sleep, which drops the GPU's memory."""
        if self._kept is None:
            self._kept = [_host_copy(tensor) for tensor in self._draft_tensors()]

    def restore_draft(self) -> None:
        """Copy the draft back after the engine woke."""
        if self._kept is None:
            return
        for tensor, kept in zip(self._draft_tensors(), self._kept, strict=True):
            tensor.copy_(kept, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        rebuild_draft_buffers(self._draft())

    def shorten_drafts(self, shortened: bool) -> None:
        """Compute as few draft tokens as possible while the scheduler asks for none."""
        shorten_drafts(self.model_runner, shortened)

    def _draft(self) -> Any:
        return self.model_runner.get_draft_model()

    def _draft_tensors(self) -> list[Tensor]:
        """Return the draft's weights and buffers without those that are the policy's."""
        model, draft = self.model_runner.get_model(), self._draft()
        shared = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        own = {id(tensor): tensor for tensor in (*draft.parameters(), *draft.buffers()) if id(tensor) not in shared}
        return [tensor.data for tensor in own.values()]


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)

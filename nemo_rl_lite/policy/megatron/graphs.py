"""CUDA graphs of the training pass: the forward pass, loss and backward pass of a micro-batch are recorded once for
each shape, and launched as one afterwards. A small model's pass is thousands of short kernels, which Python launches
more slowly than the GPU runs them.

What is recorded reads its arguments, with the counts that a loss divides by, from tensors that stay where they are, and
adds gradients to megatron-core's buffers. The reduction of gradients and the optimizer's step are not recorded.
"""

import logging
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Loss, Normalizers
from nemo_rl_lite.policy.megatron import leftovers
from nemo_rl_lite.policy.megatron.memory import gradient_buffers
from nemo_rl_lite.policy.megatron.micro_batches import ModelInput
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.policy.megatron.one_pass import Trained, announced
from nemo_rl_lite.policy.megatron.recorded_pass import COUNTS, Arguments, Work, arguments_of, as_tensors, names_of
from nemo_rl_lite.policy.megatron.sending import packed, packed_bytes, sent_together, unpacked

log = logging.getLogger(__name__)

KEY = "policy.megatron_cfg.cuda_graph_impl"
# Passes of a shape before it is recorded: libraries choose and compile their kernels in the first.
WARM_UPS = 2
MOST_GRAPHS = 32


class Recorder(Protocol):
    """Records what a function does on the device."""

    def stream(self) -> AbstractContextManager[Any]:
        """Return a block for all work that is recorded, and for the same work where it is not."""
        ...

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record `function`, of which nothing runs yet; returns what runs it, and returns a copy of its result."""
        ...

    def forget(self) -> None:
        """Prepare for nothing that was recorded being run again."""
        ...


@dataclass
class _Shape:
    work: Work
    passes: int = 0
    given: Tensor | None = None
    """The arguments that the recorded pass reads, `packed`."""
    replay: Callable[[], Tensor] | None = None


class MicroBatchGraphs:
    """The graphs of a model's training passes, by shape. A shape's first passes run as they are."""

    def __init__(self, model: MegatronModel, recorder: Recorder):
        self._model, self._recorder = model, recorder
        self._shapes: dict[Any, _Shape] = {}
        self._tensors, self._places = [*model.state(), *gradient_buffers(model)], []
        self._is_full = False

    @property
    def recorded(self) -> int:
        """How many graphs there are."""
        return sum(shape.replay is not None for shape in self._shapes.values())

    def forward_backward(
        self,
        micro_batches: Sequence[ModelInput],
        batch: Batch,
        temperature: float,
        loss: Loss,
        counts: Normalizers,
        mismatch_counts: Normalizers | None,
    ) -> list[Trained]:
        """See `batches.forward_backward`; the micro-batches are in buckets."""
        self._drop_useless()
        both, parts, kind = (counts, mismatch_counts), [], (pickle.dumps(loss), temperature)
        of_counts: Arguments = {}
        for name, own in zip(COUNTS, both, strict=True):
            of_counts |= {} if own is None else as_tensors(name, own)
        names = [None if own is None else names_of(own) for own in both]
        with self._recorder.stream():
            for micro in announced(micro_batches):
                given = of_counts | arguments_of(micro, batch, self._model.device)
                key = (micro.bucket, kind, *names, *((name, one.shape, one.dtype) for name, one in given.items()))
                if key not in self._shapes:
                    self._shapes[key] = _Shape(Work(self._model, micro.bucket, temperature, loss, names))
                parts.append(self._shapes[key].work.trained(self._run(self._shapes[key], given)))
            self._model.finish_gradients(self._model.chunks)
        return parts

    def forget(self, reason: str) -> None:
        """Drop all graphs; the next passes of each shape run as they are, and it is recorded again."""
        if self.recorded:
            log.info("%s: %d graphs are dropped, because %s", KEY, self.recorded, reason)
            self._recorder.forget()
        self._shapes.clear()

    def _run(self, shape: _Shape, given: Arguments) -> Tensor:
        shape.passes += 1
        if shape.replay is None and shape.passes > WARM_UPS:
            self._is_full = self.recorded >= MOST_GRAPHS
            if not self._is_full:
                self._record(shape, given)
        if shape.replay is None or shape.given is None:
            return shape.work(sent_together(given, self._model.device))
        shape.given.copy_(packed(given, pin=self._model.device.type == "cuda"), non_blocking=True)
        return shape.replay()

    def _record(self, shape: _Shape, given: Arguments) -> None:
        """Record the pass. Raises TrainingError: it does something that a graph cannot hold."""
        whole = torch.zeros(packed_bytes(given), dtype=torch.uint8, device=self._model.device)
        own = unpacked(whole, given)
        log.info(
            "%s: graph %d records %d tokens in up to %d sequences of up to %d",
            *(KEY, self.recorded + 1, own["tokens_nS"].numel(), *own["batch.tokens"].shape),
        )
        # What a recording would otherwise leave in the graphs' memory, where a later replay overwrites it.
        leftovers.forget(self._model)
        try:
            shape.replay, shape.given = self._recorder.record(lambda: shape.work(own)), whole
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TrainingError(
                f"{KEY}: the training pass cannot be recorded, for example because its loss waits for the device: "
                f"{error.__context__ or error}; set {KEY}=none"
            ) from error
        finally:
            leftovers.forget(self._model)

    def _drop_useless(self) -> None:
        """Drop graphs where tensors that they read or write have moved, or where other shapes want to be recorded."""
        places = [one.data_ptr() for one in self._tensors]
        if places != self._places:
            self.forget("weights or gradients have moved")
        elif self._is_full:
            self.forget("passes have other shapes now")
        self._places, self._is_full = places, False


class CudaRecorder:
    """Records CUDA graphs that share their memory, which is safe because they run one after the other and nothing that
    one leaves there is used after it."""

    def __init__(self) -> None:
        from megatron.core.full_cuda_graph import get_shared_capture_stream

        # That of the nodes that accumulate gradients: see `model.build_model`.
        self._stream = get_shared_capture_stream()
        self._pool = torch.cuda.graph_pool_handle()

    def stream(self) -> AbstractContextManager[None]:
        return _OnStream(self._stream)

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and Ray may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()

        def replay() -> Tensor:
            graph.replay()
            return result.clone()

        return replay

    def forget(self) -> None:
        # Graphs that still run must end before their memory is freed; a freed pool cannot be used again.
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()


class _OnStream:
    """A block on another stream, after what the current one does and before what it does then."""

    def __init__(self, stream: Any):
        self._stream, self._block = stream, torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        self._block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)
        torch.cuda.current_stream().wait_stream(self._stream)

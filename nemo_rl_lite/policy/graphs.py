"""CUDA graphs of the training pass: the forward pass, loss and backward pass of a micro-batch are recorded once for
each shape, and launched as one afterwards. A small model's pass is thousands of short kernels, which Python launches
more slowly than the GPU runs them.

What is recorded reads its arguments, with the counts that a loss divides by, from tensors that stay where they are, and
adds gradients to megatron-core's buffers. The reduction of gradients and the optimizer's step are not recorded.

The pass that is recorded as a CUDA graph, a function of tensors alone: what it does, and what it is given.

Its arguments, with the counts that a loss divides by, are tensors that stay where they are.
"""

import logging
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Loss, Normalizers
from nemo_rl_lite.policy import memory
from nemo_rl_lite.policy.context import ContextRanks, Shard
from nemo_rl_lite.policy.logprobs import scores_of
from nemo_rl_lite.policy.memory import gradient_buffers
from nemo_rl_lite.policy.micro_batches import Bucket, ModelInput, packed, packed_bytes, sent_together, unpacked
from nemo_rl_lite.policy.micro_pass import Trained, announced, forward, rows_of, trained_on, view_of
from nemo_rl_lite.policy.model import MegatronModel

Arguments = dict[str, Tensor]

COUNTS, _INPUTS = ("counts", "mismatch_counts"), ("tokens_nS", "lengths", "starts")


class Work:
    """The pass over a micro-batch as a function of tensors alone, so that it can be recorded."""

    def __init__(
        self, model: MegatronModel, bucket: Bucket | None, temperature: float, loss: Loss, names: Sequence[Any]
    ):
        """`names`: the `names_of` the loss's counts and of the mismatch's, or None without a mismatch.

        Raises:
            ValueError: there is no bucket.
        """
        if bucket is None:
            raise ValueError("only packs in buckets can be recorded: see Layout.in_buckets")
        self._model, self._bucket, self._temperature, self._loss = model, bucket, temperature, loss
        self._of_counts, self._names = names, []

    def __call__(self, given: Arguments) -> Tensor:
        """Add to the gradients; returns the values of all metrics, float64, for `trained`."""
        from megatron.core.utils import get_model_config

        (chunk,), inputs = self._model.chunks, (given[name] for name in _INPUTS)
        micro = ModelInput(torch.empty(0), *inputs, own_lengths=(), packed=True, bucket=self._bucket)
        own = Batch(**{one.name: given.get(f"batch.{one.name}") for one in fields(Batch)})  # pyrefly: ignore
        counts, mismatch = (_as_counts(given, *one) for one in zip(COUNTS, self._of_counts, strict=True))
        wait_for, ids = self._model.gather.wait_for, own.teacher_topk_ids
        scores = scores_of(Shard.whole(micro), self._temperature, self._loss, wait_for, ids, self._model.keep_logits)
        found = forward(self._model, chunk, micro.tokens_nS, given, self._bucket.width, scores)
        value, trained = trained_on(found, own, self._loss, counts, mismatch)  # pyrefly: ignore  # counts are there
        # megatron-core averages over data-parallel ranks, and losses are shares of a sum.
        scaled = get_model_config(chunk).grad_scale_func(value * self._model.place.data_size)
        torch.autograd.backward(scaled)
        self._names = [list(trained.metrics), list(trained.mismatch)]
        measured = (*trained.metrics.values(), *trained.mismatch.values())
        return torch.stack([one.detach().reshape(()).to(scaled.device, torch.float64) for one in measured])

    def trained(self, values: Tensor) -> Trained:
        """The metrics by their names."""
        each = iter(values.unbind())
        return Trained(*({name: next(each) for name in names} for names in self._names))


def arguments_of(micro: ModelInput, batch: Batch, device: torch.device) -> Arguments:
    """All tensors of a pass but the counts, on the host."""
    of_batch = {f"batch.{name}": values for name, values in rows_of(micro, batch).present().items()}
    inputs = {name: getattr(micro, name) for name in _INPUTS}
    return {**inputs, **view_of(micro, device, ContextRanks()), **of_batch}


def names_of(counts: Normalizers) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What is counted besides tokens and sequences: ages, and what the loss counts itself."""
    return tuple(counts.tokens_by_age), tuple(counts.own)


def as_tensors(name: str, counts: Normalizers) -> Arguments:
    """Counts by the name of their argument. Those of the loss are float64, because values are compared with them."""
    whole = [counts.tokens, counts.sequences, *counts.tokens_by_age.values()]
    found = {name: torch.tensor(whole, dtype=torch.float32)}
    own = {f"{name}.own": torch.tensor(list(counts.own.values()), dtype=torch.float64)}
    return found | (own if counts.own else {})


def _as_counts(given: Arguments, name: str, names: Any) -> Normalizers | None:
    """Counts that are scalars on the device."""
    if names is None:
        return None
    (tokens, sequences, *by_age), (ages, of_loss) = given[name].unbind(), names
    own = given[f"{name}.own"].unbind() if of_loss else ()
    by_age, by_name = (dict(zip(keys, values, strict=True)) for keys, values in ((ages, by_age), (of_loss, own)))
    return Normalizers(tokens, sequences, by_age, by_name)  # pyrefly: ignore


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
        memory.clear_module_caches(self._model)
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
            memory.clear_module_caches(self._model)

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

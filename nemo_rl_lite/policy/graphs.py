"""CUDA graphs of the training pass: a micro-batch's forward pass, loss and backward pass, recorded once per shape.

A small model's pass has thousands of short kernels, which the GPU runs faster than Python launches them. A graph is one
launch. It reads its arguments, the loss's counts included, from tensors at fixed addresses, and adds gradients to
megatron-core's buffers. Gradient reduction and the optimizer step are not recorded.
"""

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Loss, Normalizers
from nemo_rl_lite.policy.context import ContextRanks, Shard
from nemo_rl_lite.policy.logprobs import scores_of
from nemo_rl_lite.policy.memory import clear_module_caches, gradient_buffers
from nemo_rl_lite.policy.micro_batches import Bucket, Layout, ModelInput, packed, packed_bytes, sent_together, unpacked
from nemo_rl_lite.policy.model import MegatronModel
from nemo_rl_lite.policy.passes import Trained, announced, cut_batch, forward, rows_of, trained_on, view_of

log = logging.getLogger(__name__)
KEY = "policy.megatron_cfg.cuda_graph_impl"

# Passes of a shape before its recording; libraries choose and compile kernels meanwhile.
WARM_UPS = 2
MOST_GRAPHS = 32
_COUNTS, _INPUTS = ("counts", "mismatch_counts"), ("tokens_nS", "lengths", "starts")
Arguments = dict[str, Tensor]
Results = tuple[Tensor, Mapping[str, Tensor]]


class MicroBatchPass:
    """Pass over a micro-batch as a function of only tensors, which a graph can record."""

    def __init__(
        self, model: MegatronModel, bucket: Bucket | None, temperature: float, loss: Loss, names: Sequence[Any]
    ):
        """`names`: `_names_of` the counts of the loss and of the mismatch; None without a mismatch. Raises ValueError:
        there is no bucket."""
        if bucket is None:
            raise ValueError("only packs in buckets can be recorded: see Layout.in_buckets")
        self._model, self._bucket, self._temperature, self._loss = model, bucket, temperature, loss
        self._of_counts, self._names = names, []

    def __call__(self, given: Arguments) -> Results:
        """Add to the gradients. Returns the values of all metrics (float64) and `Trained.scores`, for `trained`."""
        from megatron.core.utils import get_model_config

        (chunk,), inputs = self._model.chunks, (given[name] for name in _INPUTS)
        micro = ModelInput(torch.empty(0), *inputs, own_lengths=(), packed=True, bucket=self._bucket)
        own = Batch(**{one.name: given.get(f"batch.{one.name}") for one in fields(Batch)})  # pyrefly: ignore
        counts, mismatch = (_as_counts(given, *one) for one in zip(_COUNTS, self._of_counts, strict=True))
        wait_for, ids = self._model.gather.wait_for, own.teacher_topk_ids
        shard = Shard.whole(micro)
        scores = scores_of(shard, self._temperature, self._loss, wait_for, ids, self._model.keep_logits)
        found = forward(self._model, chunk, shard, given, micro.longest, scores)
        value, trained = trained_on(found, micro.rows, own, self._loss, counts, mismatch)  # pyrefly: ignore  # counts are there
        # megatron-core averages over data-parallel ranks, but losses are shares of a sum.
        scaled = get_model_config(chunk).grad_scale_func(value * self._model.place.data_size)
        torch.autograd.backward(scaled)
        self._names = [list(trained.metrics), list(trained.mismatch)]
        measured = (*trained.metrics.values(), *trained.mismatch.values())
        values = torch.stack([one.detach().reshape(()).to(scaled.device, torch.float64) for one in measured])
        return values, trained.scores

    def trained(self, rows: Tensor, values: Tensor, scores: Mapping[str, Tensor]) -> Trained:
        """Return the results of a pass with the metrics by name."""
        each = iter(values.unbind())
        metrics, mismatch = ({name: next(each) for name in names} for names in self._names)
        return Trained(rows, metrics, mismatch, scores)


def _names_of(counts: Normalizers) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the counts' ages and the names of the loss's own counts."""
    return tuple(counts.tokens_by_age), tuple(counts.own)


def _as_tensors(name: str, counts: Normalizers) -> Arguments:
    """Return counts as arguments. The loss's own are float64, because a loss may compare values with them."""
    whole = [counts.tokens, counts.sequences, *counts.tokens_by_age.values()]
    found = {name: torch.tensor(whole, dtype=torch.float32)}
    own = {f"{name}.own": torch.tensor(list(counts.own.values()), dtype=torch.float64)}
    return found | (own if counts.own else {})


def _as_counts(given: Arguments, name: str, names: Any) -> Normalizers | None:
    """Return counts as scalars on the device."""
    if names is None:
        return None
    (tokens, sequences, *by_age), (ages, of_loss) = given[name].unbind(), names
    own = given[f"{name}.own"].unbind() if of_loss else ()
    by_age, by_name = (dict(zip(keys, values, strict=True)) for keys, values in ((ages, by_age), (of_loss, own)))
    return Normalizers(tokens, sequences, by_age, by_name)  # pyrefly: ignore


@dataclass
class _Shape:
    run: MicroBatchPass
    passes: int = 0
    given: Tensor | None = None
    """`packed` arguments of the recorded pass."""
    replay: Callable[[], Results] | None = None


class MicroBatchGraphs:
    """Graphs of a model's training passes by shape. A shape's first passes run without a graph."""

    def __init__(self, model: MegatronModel, recorder: "CudaRecorder"):
        self._model, self._recorder = model, recorder
        self._shapes: dict[Any, _Shape] = {}
        self._tensors, self._places = [*model.state(), *gradient_buffers(model)], []
        self._is_full = False

    @property
    def recorded(self) -> int:
        return sum(shape.replay is not None for shape in self._shapes.values())

    def forward_backward(
        self,
        batch: Batch,
        layout: Layout,
        temperature: float,
        loss: Loss,
        counts: Normalizers,
        mismatch_counts: Normalizers | None,
    ) -> list[Trained]:
        """See `passes.forward_backward`. The layout is in buckets."""
        self._drop_stale()
        self._model.train_mode(True)
        micro_batches = cut_batch(self._model, batch.tokens, batch.lengths, layout)
        self._model.clock.begin()
        parts, kind = [], (pickle.dumps(loss), temperature)
        of_counts: Arguments = _as_tensors("counts", counts)
        names = [_names_of(counts), None]
        if mismatch_counts is not None:
            of_counts |= _as_tensors("mismatch_counts", mismatch_counts)
            names[1] = _names_of(mismatch_counts)
        with self._recorder.stream():
            for micro in announced(micro_batches):
                of_batch = {f"batch.{name}": values for name, values in rows_of(micro, batch).present().items()}
                inputs = {name: getattr(micro, name) for name in _INPUTS} | view_of(
                    micro, self._model.device, ContextRanks()
                )
                given = of_counts | inputs | of_batch
                key = (micro.bucket, kind, *names, *((name, one.shape, one.dtype) for name, one in given.items()))
                if key not in self._shapes:
                    self._shapes[key] = _Shape(MicroBatchPass(self._model, micro.bucket, temperature, loss, names))
                shape = self._shapes[key]
                parts.append(shape.run.trained(micro.rows, *self._run(shape, given)))
            self._model.finish_gradients(self._model.chunks)
        return parts

    def _run(self, shape: _Shape, given: Arguments) -> Results:
        shape.passes += 1
        if shape.replay is None and shape.passes > WARM_UPS:
            self._is_full = self.recorded >= MOST_GRAPHS
            if not self._is_full:
                self._record(shape, given)
        if shape.replay is None or shape.given is None:
            return shape.run(sent_together(given, self._model.device))
        shape.given.copy_(packed(given, pin=self._model.device.type == "cuda"), non_blocking=True)
        return shape.replay()

    def _record(self, shape: _Shape, given: Arguments) -> None:
        """Record the pass. Raises TrainingError: a graph cannot record it."""
        whole = torch.zeros(packed_bytes(given), dtype=torch.uint8, device=self._model.device)
        own = unpacked(whole, given)
        log.info(
            "%s: graph %d records %d tokens in up to %d sequences of up to %d",
            *(KEY, self.recorded + 1, own["tokens_nS"].numel(), *own["batch.tokens"].shape),
        )
        # Cached tensors would stay in the graphs' memory, where later replays overwrite them.
        clear_module_caches(self._model)
        try:
            shape.replay, shape.given = self._recorder.record(lambda: shape.run(own)), whole
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TrainingError(
                f"{KEY}: the training pass cannot be recorded, for example because its loss synchronizes with the "
                f"device: {error.__context__ or error}; set {KEY}=none"
            ) from error
        finally:
            clear_module_caches(self._model)

    def _drop_stale(self) -> None:
        """Drop all graphs if their tensors have moved, or if a new shape exceeded `MOST_GRAPHS`."""
        places = [one.data_ptr() for one in self._tensors]
        if places != self._places or self._is_full:
            if self.recorded:
                reason = "there are new shapes" if places == self._places else "weights or gradients have moved"
                log.info("%s: %d graphs are dropped, because %s", KEY, self.recorded, reason)
                self._recorder.clear()
            self._shapes.clear()
        self._places, self._is_full = places, False


class CudaRecorder:
    """Records CUDA graphs that share memory. They run sequentially, and their results are copied."""

    def __init__(self) -> None:
        from megatron.core.full_cuda_graph import get_shared_capture_stream

        # AccumulateGrad nodes use this stream too: see `model.build_model`.
        self._stream = get_shared_capture_stream()
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Make the recording stream current within the block, for passes with and without a graph."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """Record `function`. Returns a function that replays it and returns copies of its results."""
        graph = torch.cuda.CUDAGraph()
        # NCCL's and Ray's threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            values, scores = function()

        def replay() -> Results:
            graph.replay()
            return values.clone(), {name: one.clone() for name, one in scores.items()}

        return replay

    def clear(self) -> None:
        """Start with new memory; recorded graphs must not be replayed."""
        # Running graphs must end before their memory is freed.
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()

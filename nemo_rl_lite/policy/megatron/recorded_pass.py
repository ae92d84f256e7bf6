"""The pass that is recorded as a CUDA graph, a function of tensors alone: what it does, and what it is given.

Its arguments, with the counts that a loss divides by, are tensors that stay where they are.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Loss, Normalizers
from nemo_rl_lite.policy.megatron.buckets import Bucket
from nemo_rl_lite.policy.megatron.context import ContextRanks, Shard
from nemo_rl_lite.policy.megatron.micro_batches import ModelInput
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.policy.megatron.one_pass import Trained, forward, rows_of, trained_on, view_of
from nemo_rl_lite.policy.megatron.scores import scores_of

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

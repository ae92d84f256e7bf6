"""Batches and rows from tensors, and configurations, for tests of losses."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from nemo_rl_lite.config.schema_algorithm import DPOConfig, GRPOConfig, LossConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.interface import Normalizers
from nemo_rl_lite.validation.compose import compose_config


def batch_of(tensors: dict[str, Tensor]) -> Batch:
    """A batch with these fields, among them a mask; `logprobs`, which are no field, may be there too."""
    shape = tensors["mask"].shape
    own = {"tokens": torch.zeros(shape, dtype=torch.int64), "lengths": torch.full(shape[:1], shape[1])}
    return Batch(**(own | {name: values for name, values in tensors.items() if name != "logprobs"}))


def rows_of(mask_BT: Tensor) -> list[TokenRow]:
    return [TokenRow([0] * len(mask), (mask > 0).tolist()) for mask in mask_BT]


@cache
def _algorithm(name: str):
    return compose_config([f"algorithm={name}"]).algorithm


def loss_config(**changes) -> LossConfig:
    """GRPO's default loss, without its correction, with `changes`."""
    plain = {
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.0,
        "use_bias_correction_kl": True,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
        "use_importance_sampling_correction": False,
        "truncated_importance_sampling_ratio": None,
        "constant_length": 7,
    }
    config: GRPOConfig = _algorithm("grpo")
    return replace(config.loss_fn, **plain | changes)


def dpo_config(**changes) -> DPOConfig:
    return replace(_algorithm("dpo"), **{"reference_policy_kl_penalty": 0.1, "sft_loss_weight": 0.0} | changes)


def split_loss(loss, inputs: dict[str, Tensor], counts: Normalizers, size: int | None = None):
    """Value, gradient and metrics, summed over micro-batches of `size` rows; None: of all rows."""
    logprobs, shares = inputs["logprobs"].clone().requires_grad_(), []
    for part in torch.arange(len(logprobs)).split(size or len(logprobs)):
        shares.append(loss(logprobs[part], batch_of({name: one[part] for name, one in inputs.items()}), counts))
    total = sum(value for value, _ in shares)
    total.backward()
    return total.detach(), logprobs.grad, {name: sum(own[name] for _, own in shares).item() for name in shares[0][1]}

"""Queries, keys and values that are made at once, and by torch's operations one after another."""

from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.policy.attention_inputs import _Separated, rotation
from nemo_rl_lite.policy.attention_inputs_kernel import Heads

# Tokens, groups, queries per group, numbers per head.
SMALL = [(37, 2, 2, 16), (5, 1, 3, 32), (1, 2, 1, 64)]


def check(sizes: tuple[int, int, int, int], device: str, dtype: torch.dtype, normed: bool) -> None:
    """Compare results and gradients. In bfloat16, gradients differ by roundings of the steps in between."""
    tokens, groups, per_group, size = sizes
    heads, source = Heads(groups, per_group, size, 1e-6), torch.Generator().manual_seed(tokens)
    drawn = lambda *shape: torch.randn(*shape, generator=source).to(device, dtype)  # noqa: E731
    projected, weights = drawn(tokens, groups * (per_group + 2) * size), [1 + drawn(size) / 4, 1 + drawn(size) / 4]
    boundaries = torch.tensor([0, tokens // 3, tokens], device=device)
    embedding = torch.rand(tokens, 1, 1, size // 2, generator=source).mul(50).to(device).repeat(1, 1, 1, 2)
    turns = rotation(embedding, boundaries, tokens)
    positions = torch.cat([torch.arange(tokens // 3), torch.arange(tokens - tokens // 3)]).to(device)
    angles = embedding[positions, 0]
    found = []
    for at_once in (True, False):
        leaves = [one.clone().requires_grad_() for one in (projected, *weights[: 2 * normed])]
        given = leaves[1:] or [None, None]
        made = (
            _Separated.apply(leaves[0], *given, *turns, heads)
            if at_once
            else one_after_another(leaves[0], given, angles, heads)
        )
        torch.autograd.backward(made, [(place + 1) * one.detach().sin() for place, one in enumerate(made)])
        found.append([*made, *(leaf.grad for leaf in leaves)])
    # Gradients have larger errors, above all the weights', which are sums over all tokens.
    limits = [2e-6 if dtype == torch.float32 else 2e-2] * 3
    limits += [2 * limits[0], *[10 * limits[0]] * 2]
    for place, (ours, expected, limit) in enumerate(zip(*found, limits[: len(found[0])], strict=True)):
        scale = expected.float().abs().max().item() + 1e-6
        error = (ours.float() - expected.float()).abs().max().item() / scale
        assert error < limit, (place, error)
        assert ours.shape == expected.shape and ours.dtype == dtype


def one_after_another(projected: Tensor, weights: Any, angles: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    split = projected.view(len(projected), heads.groups, heads.per_group + 2, heads.size)
    query, key, value = split[:, :, : heads.per_group].flatten(1, 2), split[:, :, -2], split[:, :, -1]
    if weights[0] is not None:
        query, key = (
            torch.nn.functional.rms_norm(one.float(), (heads.size,), weight.float(), heads.eps).to(projected.dtype)
            for one, weight in zip((query, key), weights, strict=True)
        )

    def turned(one: Tensor) -> Tensor:
        first, second = one.float().chunk(2, -1)
        return (one.float() * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(one.dtype)

    return turned(query), turned(key), value

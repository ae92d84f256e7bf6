"""Measure logprobs from the last matrix in slices of the vocabulary, against logits as a whole.

linear_scores.py [--sizes 18048x2048x151936 ...] [--repeats 10]

Sizes are tokens x hidden x entries of the vocabulary. All ways get the same bfloat16 hidden states and matrix. The
whole is torch's cross entropy of float32 logits; it is left out where these and their gradient would take more than
half of the GPU. Slices are read by torch, by Triton's kernels, and by these with the logits kept for the backward pass
(on a CPU, by torch). The gradients of all are compared with those of the float32 matrix product, relative to the
largest of these.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import record
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.host.machine import free_port
from nemo_rl_lite.policy.megatron import linear_scores, slice_scores
from nemo_rl_lite.policy.megatron.linear_scores import LinearScores
from nemo_rl_lite.policy.megatron.slice_scores import Head

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
SIZES = ["18048x2048x151936", "8192x2048x151936", "65536x576x49152"]
WARM = 2
WHOLE, BY_TORCH, KERNELS, KEPT = "whole", "slices by torch", "slices by Triton", "slices by Triton, kept"


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    matrix: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, sizes: str, device: torch.device) -> "Inputs":
        count, hidden, vocabulary = (int(size) for size in sizes.split("x"))
        torch.manual_seed(0)
        return cls(
            torch.randn(count, hidden, device=device).bfloat16(),
            (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).bfloat16(),
            torch.randint(vocabulary, (count,), device=device),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    results, bars = [], []
    for sizes in given.sizes:
        inputs = Inputs.of(sizes, device)
        errors = {}
        for name, way in ways(inputs).items():
            measured = [timed(way, inputs) for _ in range(WARM + given.repeats)][WARM:]
            forward, both, peaks = zip(*measured, strict=True)
            config = f"{name}, {sizes}"
            results += [
                record.result("forward", config, "ms", [1e3 * seconds for seconds in forward]),
                record.result("forward and backward", config, "ms", [1e3 * seconds for seconds in both]),
                record.result("memory at its peak, besides inputs", config, "GiB", [one / 2**30 for one in peaks]),
            ]
            errors[name] = error(way, inputs)
            for what, value in errors[name].items():
                results.append(record.result(f"error of the gradient of the {what}", config, "", [value]))
            for one in results[-5:]:
                print(f"{one['name']:40s} {one['config']:44s} {one['median']:10.4g} {one['unit']}", flush=True)
        worst = max(errors[KERNELS][what] / errors[BY_TORCH][what] for what in errors[KERNELS])
        bars.append(record.bar(f"gradient error by Triton over torch's, {sizes}", worst, 1.1, False))
    print(record.write("speed-linear-scores", results, bars))


def ways(inputs: Inputs) -> dict[str, Way]:
    head = Head(1.0, None, False, 0, dist.group.WORLD)  # pyrefly: ignore
    sliced: dict[str, Way] = {
        BY_TORCH: by(slice_scores, head),
        KERNELS: by(None, head),
        KEPT: by(None, replace(head, keep=True)),
    }
    logits = len(inputs.hidden) * len(inputs.matrix)
    if inputs.hidden.is_cuda and 3 * 4 * logits > torch.cuda.get_device_properties(0).total_memory / 2:
        return sliced
    return {WHOLE: lambda h, w, t: -torch.nn.functional.cross_entropy((h @ w.T).float(), t, reduction="none")} | sliced


def by(module: Any, head: Head) -> Way:
    """`LinearScores` with the slices read by a module; None: the one that a run takes."""

    def way(hidden: Tensor, matrix: Tensor, tokens: Tensor) -> Tensor:
        return LinearScores.apply(hidden, matrix, tokens, None, head)[0]

    def way_of_module(hidden: Tensor, matrix: Tensor, tokens: Tensor) -> Tensor:
        found = Reading.apply(hidden, matrix, tokens, None, head)
        return found[0]

    class Reading(LinearScores):
        """Both passes with the module."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            with patch.object(linear_scores, "_ways", lambda *_: module):
                return LinearScores.forward(ctx, *given)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with patch.object(linear_scores, "_ways", lambda *_: module):
                return LinearScores.backward(ctx, *gradients)

    return way if module is None else way_of_module


def timed(way: Way, inputs: Inputs) -> tuple[float, float, float]:
    """Seconds of the forward pass and of both passes, and the bytes at their peak."""
    hidden, matrix = (values.detach().requires_grad_() for values in (inputs.hidden, inputs.matrix))
    before = torch.cuda.memory_allocated() if hidden.is_cuda else 0
    if hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    start = now(hidden)
    logprobs = way(hidden, matrix, inputs.tokens)
    middle = now(hidden)
    logprobs.sum().backward()
    end = now(hidden)
    peak = torch.cuda.max_memory_allocated() - before if hidden.is_cuda else 0
    return middle - start, end - start, float(peak)


def now(values: Tensor) -> float:
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def error(way: Way, inputs: Inputs) -> dict[str, float]:
    """The largest error of each gradient on a few tokens, relative to the largest entry."""
    some, wanted, found = slice(1024), {}, {}
    for precise in (True, False):
        h, w = (
            values.detach().to(torch.float32 if precise else values.dtype).requires_grad_()
            for values in (inputs.hidden[some], inputs.matrix)
        )
        if precise:
            torch.nn.functional.cross_entropy(h @ w.T, inputs.tokens[some], reduction="sum").neg().backward()
            wanted = {"hidden states": h.grad, "matrix": w.grad}
        else:
            way(h, w, inputs.tokens[some]).sum().backward()
            found = {"hidden states": h.grad, "matrix": w.grad}
    return {what: ((found[what].float() - own).abs().max() / own.abs().max()).item() for what, own in wanted.items()}


if __name__ == "__main__":
    main()

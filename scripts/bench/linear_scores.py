"""Measure logprobs from the last matrix in slices of the vocabulary, against logits as a whole.

linear_scores.py [--tokens 16384] [--hidden 2048] [--vocabulary 151936] [--repeats 10]

Both ways get the same bfloat16 hidden states and matrix. The whole is torch's cross entropy of float32 logits. The
gradients of both are compared with those of the float32 matrix product, relative to the largest of these.
"""

import argparse
import time
from collections.abc import Callable

import record
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.host.ports import free_port
from nemo_rl_lite.policy.megatron.linear_scores import Head, LinearScores

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 16384), ("hidden", 2048), ("vocabulary", 151936), ("repeats", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    head = Head(1.0, None, False, 0, dist.group.WORLD)
    torch.manual_seed(0)
    hidden = torch.randn(given.tokens, given.hidden, device=device).bfloat16()
    matrix = (torch.randn(given.vocabulary, given.hidden, device=device) / given.hidden**0.5).bfloat16()
    tokens = torch.randint(given.vocabulary, (given.tokens,), device=device)
    ways: dict[str, Way] = {
        "whole": lambda h, w, t: -torch.nn.functional.cross_entropy((h @ w.T).float(), t, reduction="none"),
        "slices": lambda h, w, t: LinearScores.apply(h, w, t, None, head)[0],
    }
    results, config = [], f"{given.tokens} tokens, hidden {given.hidden}, vocabulary {given.vocabulary}"
    for name, way in ways.items():
        forward, both, peaks = [], [], []
        for repeat in range(given.repeats + 2):
            h, w = (values.detach().requires_grad_() for values in (hidden, matrix))
            forward_s, whole_s, peak = timed(way, h, w, tokens)
            if repeat >= 2:
                forward.append(1e3 * forward_s)
                both.append(1e3 * whole_s)
                peaks.append(peak / 2**30)
        results.append(record.result("forward", f"{name}, {config}", "ms", forward))
        results.append(record.result("forward and backward", f"{name}, {config}", "ms", both))
        results.append(record.result("memory at its peak, besides inputs", f"{name}, {config}", "GiB", peaks))
    errors = {name: error(way, hidden, matrix, tokens) for name, way in ways.items()}
    for name, found in errors.items():
        for what, value in found.items():
            results.append(record.result(f"error of the gradient of the {what}", f"{name}, {config}", "", [value]))
    for one in results:
        print(f"{one['name']:45s} {one['config'].split(',')[0]:8s} {one['median']:10.4g} {one['unit']}", flush=True)
    worse = max(errors["slices"][what] / errors["whole"][what] for what in errors["whole"])
    print(
        record.write("speed-linear-scores", results, [record.bar("gradient error over the whole's", worse, 1.1, False)])
    )


def timed(way: Way, hidden: Tensor, matrix: Tensor, tokens: Tensor) -> tuple[float, float, float]:
    """Seconds of the forward pass and of both passes, and the bytes at their peak."""
    before = torch.cuda.memory_allocated() if hidden.is_cuda else 0
    if hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    start = now(hidden)
    logprobs = way(hidden, matrix, tokens)
    middle = now(hidden)
    logprobs.sum().backward()
    end = now(hidden)
    peak = torch.cuda.max_memory_allocated() - before if hidden.is_cuda else 0
    return middle - start, end - start, float(peak)


def now(values: Tensor) -> float:
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def error(way: Way, hidden: Tensor, matrix: Tensor, tokens: Tensor) -> dict[str, float]:
    """The largest error of each gradient on a few tokens, relative to the largest entry."""
    some, wanted = slice(1024), {}
    for precise in (True, False):
        h, w = (
            values.detach().to(torch.float32 if precise else values.dtype).requires_grad_()
            for values in (hidden[some], matrix)
        )
        if precise:
            torch.nn.functional.cross_entropy(h @ w.T, tokens[some], reduction="sum").neg().backward()
            wanted = {"hidden states": h.grad, "matrix": w.grad}
        else:
            way(h, w, tokens[some]).sum().backward()
            found = {"hidden states": h.grad, "matrix": w.grad}
    return {what: ((found[what].float() - own).abs().max() / own.abs().max()).item() for what, own in wanted.items()}


if __name__ == "__main__":
    main()

"""`LinearScores` by Triton's kernels against torch on the same inputs: on a GPU, and under Triton's interpreter."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.policy import logprobs as linear_scores
from nemo_rl_lite.policy import vocab_chunks
from nemo_rl_lite.policy.logprobs import LinearScores
from nemo_rl_lite.policy.vocab_chunks import LMHead, VocabReductions

CASES = (
    (torch.float32, 0.7, False),
    (torch.float32, 1.0, True),
    (torch.bfloat16, 1.0, False),
    (torch.bfloat16, 0.7, True),
)
Inputs = tuple[Tensor, Tensor, Tensor]
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a test; the slice is the vocabulary's."""

    positions: int
    entries: int
    hidden: int
    slice: int


# No number of positions is a multiple of a power of two, and no vocabulary one of its slice.
SMALL = Sizes(13, 70, 24, 32)


def alone(folder: Path) -> None:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "alone"), 1), rank=0, world_size=1)


def check_everything(kernels: ModuleType, device: str, sizes: Sizes = SMALL) -> None:
    """All that the kernels do, in both precisions."""
    for dtype, temperature, entropy in CASES:
        head = LMHead(temperature, None, entropy, 0, dist.group.WORLD)  # pyrefly: ignore
        inputs = _inputs(device, dtype, sizes)
        with patch.object(linear_scores, "VOCABULARY_SLICE", sizes.slice):
            check_slice(kernels, inputs, head, sizes.slice)
            check_whole(kernels, inputs, head)
            check_twice(kernels, inputs, replace(head, keep=True))
            check_measured(kernels, inputs, head)


def check_slice(kernels: ModuleType, inputs: Inputs, head: LMHead, width: int) -> None:
    """One slice: what is read of it, and each entry of its gradient to the rounding of its precision."""
    hidden, weight, own = inputs
    logits = (hidden @ weight.T)[:, :width].contiguous()
    start = width + 8
    readers = [module.Reader(own, head) for module in (kernels, vocab_chunks)]
    for reader in readers:
        # The same slice in two places: the second joins the first.
        reader.read(logits, 0)
        reader.read(logits, start)
    given, wanted = (reader.totals() for reader in readers)
    asked = 3 if head.entropy else 2
    torch.testing.assert_close(given[:asked], wanted[:asked], atol=1e-5, rtol=1e-5)
    log_total, chosen, entropy = wanted
    totals = VocabReductions(log_total, chosen - log_total, entropy, None)
    # The next token's part is computed from its logprob, which only tokens of the vocabulary have.
    gradients = [_some(len(own), own), _some(len(own), own).flip(0) if head.entropy else None, None, None]
    precise = vocab_chunks.Gradient(own, head, totals, gradients).of(logits.float(), start)
    if not head.entropy:
        precise = precise * -gradients[0][:, None]  # pyrefly: ignore
    given = kernels.Gradient(own, head, totals, gradients).of(logits.clone(), start)
    assert given.dtype == logits.dtype
    torch.testing.assert_close(given.float(), precise, atol=1e-7, rtol=_rounding(logits))


def check_whole(kernels: ModuleType, inputs: Inputs, head: LMHead) -> None:
    """All slices: values as torch's, gradients about as far from the float32 ones as torch's, and the same where the
    logits are kept."""
    hidden, weight, own = inputs
    # Megatron's ranks have tokens of others too; a rank that is alone has none, so that each has a logprob.
    inputs = hidden, weight, own.clamp(0, len(weight) - 1)
    by_torch, by_kernels = (_run(*inputs, head, module) for module in (vocab_chunks, kernels))
    precise = _run(*(one.float() if one.is_floating_point() else one for one in inputs), head, vocab_chunks)
    for name in ("logprobs", "entropy") if head.entropy else ("logprobs",):
        torch.testing.assert_close(by_kernels[name], by_torch[name], atol=1e-5, rtol=1e-5)
    for name in ("of hidden", "of weight"):
        if hidden.dtype == torch.float32:
            assert _error(by_kernels[name], by_torch[name]) < 1e-5
        else:
            error, allowed = (_error(found[name], precise[name]) for found in (by_kernels, by_torch))
            assert error < allowed + _rounding(hidden), (name, error, allowed)
    kept = replace(head, keep=True)
    for module, expected in ((vocab_chunks, by_torch), (kernels, by_kernels)):
        for name, values in _run(*inputs, kept, module).items():
            assert torch.equal(values, expected[name]), name


def check_twice(kernels: ModuleType, inputs: Inputs, head: LMHead) -> None:
    """A second backward pass through the same graph gives the same gradient, though kept logits serve once."""
    hidden, weight, own = inputs[0].clone().requires_grad_(), inputs[1], inputs[2].clamp(0, len(inputs[1]) - 1)
    with patch.object(linear_scores, "_implementation", lambda *_: kernels):
        total = LinearScores.apply(hidden, weight, own, None, head)[0].sum()
        first, second = (torch.autograd.grad(total, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def check_measured(kernels: ModuleType, inputs: Inputs, head: LMHead) -> None:
    """An entropy that is only measured leaves the gradient to the bit as it is without it."""
    hidden, weight, own = inputs[0], inputs[1], inputs[2].clamp(0, len(inputs[1]) - 1)
    for module in (vocab_chunks, kernels):
        found = []
        for entropy in (True, False):
            leaf = hidden.clone().requires_grad_()
            with patch.object(linear_scores, "_implementation", lambda *_, own=module: own):
                scores = LinearScores.apply(leaf, weight, own, None, replace(head, entropy=entropy))
            (gradient,) = torch.autograd.grad((scores[0] * _some(len(own), own)).sum(), leaf)
            found.append((scores[0].detach(), gradient))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _run(hidden: Tensor, weight: Tensor, own: Tensor, head: LMHead, module: ModuleType) -> Found:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with patch.object(linear_scores, "_implementation", lambda *_: module):
        logprobs, entropy, *_ = LinearScores.apply(hidden, weight, own, None, head)
        total = (logprobs * _some(len(own), own)).sum() + (0 if entropy is None else (0.3 * entropy).sum())
        total.backward()
    found = {"logprobs": logprobs.detach(), "of hidden": hidden.grad, "of weight": weight.grad}
    return found | ({} if entropy is None else {"entropy": entropy.detach()})  # pyrefly: ignore


def _inputs(device: str, dtype: torch.dtype, sizes: Sizes) -> Inputs:
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.positions, sizes.hidden, generator=source).to(device, dtype)
    weight = (3 * torch.randn(sizes.entries, sizes.hidden, generator=source) / sizes.hidden**0.5).to(device, dtype)
    # Some are those of other ranks, and one is nearly certain.
    own = torch.randint(-50, sizes.entries + 50, (sizes.positions,), generator=source).to(device)
    own[3] = 45
    hidden[3] = 2 * weight[45]
    return hidden, weight, own


def _some(count: int, like: Tensor) -> Tensor:
    """Gradients of either sign, and some that are 0, as those of a prompt."""
    values = torch.linspace(-1, 2, count, device=like.device)
    return torch.where(torch.arange(count, device=like.device) % 5 == 0, 0.0, values)


def _error(found: Tensor, precise: Tensor) -> float:
    return ((found.float() - precise).abs().max() / precise.abs().max()).item()


def _rounding(values: Tensor) -> float:
    """The relative error of an entry. Triton's interpreter cuts bfloat16 off, where a GPU rounds to the nearest."""
    if values.dtype == torch.float32:
        return 1e-5
    return 2**-8 if values.is_cuda else 2**-7

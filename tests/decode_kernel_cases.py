"""The kernels of a decoding step against torch: on a GPU, and under Triton's interpreter."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Of the vocabulary, in engines.
SLICE = 4096


@dataclass(frozen=True)
class Batch:
    """Requests whose caches have at most `tokens` tokens, the first one as many."""

    requests: int
    tokens: int
    heads: int
    key_heads: int
    size: int
    block: int = 16
    # Tokens that the engine's longest sequence may have; more than a batch's decide the number of parts.
    most: int = 0


# One part, several parts, a group of three, and more query heads than rows of the smallest product.
SMALL = (Batch(3, 70, 4, 2, 32), Batch(2, 700, 4, 2, 32, most=1200), Batch(3, 40, 6, 2, 64, 4), Batch(2, 20, 40, 2, 32))


def check_attention(batch: Batch, device: str, dtype: torch.dtype, heads_first: bool = False) -> None:
    """Each request attends to all tokens of its cache; a padded row is filled with zeros."""
    from nemo_rl_lite.generation.vllm.attention_kernel import attend

    lengths = torch.randint(1, batch.tokens + 1, (batch.requests + 1,))
    lengths[0], lengths[-1] = batch.tokens, 0
    used, width = -(-batch.tokens // batch.block), -(-max(batch.tokens, batch.most) // batch.block)
    table = torch.randint(0, 7, (len(lengths), width), dtype=torch.int32)
    table[:, :used] = torch.randperm(len(lengths) * used).view(-1, used)
    sizes = (len(lengths) * used, batch.block, batch.key_heads, 2 * batch.size)
    cache = torch.randn(sizes).to(device, dtype).transpose(1, 2)
    cache = cache.contiguous() if heads_first else cache
    # The projection's keys and values follow the queries in memory.
    query = torch.randn(len(lengths), batch.heads + 2, batch.size).to(device, dtype)[:, : batch.heads]
    output = torch.full((len(lengths), batch.heads, batch.size), torch.nan, dtype=dtype, device=device)
    attend(query, cache, table.to(device), lengths.int().to(device), 0.3, output)
    assert not output[-1].any()
    for row in range(batch.requests):
        blocks = cache[table[row, :used].long().to(device)].transpose(0, 1).flatten(1, 2)
        keys, values = blocks[:, : lengths[row]].double().split(batch.size, -1)
        queries = query[row].double().view(batch.key_heads, -1, batch.size)
        expected = (0.3 * queries @ keys.mT).softmax(-1) @ values
        wrong = (output[row].double() - expected.flatten(0, 1)).norm() / expected.norm()
        assert wrong < (1e-2 if dtype is torch.bfloat16 else 1e-5), (batch, row, float(wrong))


def check_samples(vocabulary: int, device: str, dtype: torch.dtype, width: int = SLICE) -> None:
    """Logprobs are exact, forbidden tokens are never drawn, and a seed and a position decide the draw. `width`: of a
    slice of the vocabulary."""
    from nemo_rl_lite.generation.vllm import sampling_kernel

    logits = (3 * torch.randn(6, vocabulary)).to(dtype)
    logits[0, torch.randperm(vocabulary)[5:]] = -torch.inf
    logits[5] = torch.nan
    # The last token is a padded one.
    states = torch.tensor([3, 0, 1, 1, 2, -1], dtype=torch.int32)
    temperatures, seeds = torch.tensor([1.0, 0.7, 0.0, 1.0]), torch.tensor([5, 2**40, 7, 9])
    positions = torch.tensor([4, 4, 4, 5, 6, 7])
    given = [one.to(device) for one in (logits, states, temperatures, seeds, positions)]
    tokens, logprobs = (found.cpu() for found in sampling_kernel.sample(*given, width=width))
    assert ((tokens >= 0) & (tokens < vocabulary)).all() and tokens[4] == logits[4].argmax()
    expected = logits[:5].float().log_softmax(-1).gather(1, tokens[:5, None])[:, 0]
    torch.testing.assert_close(logprobs[:5], expected, rtol=1e-5, atol=1e-5)
    order = torch.tensor([3, 1, 0])
    some = [one[order.to(device)] if len(one) == 6 else one for one in given]
    again, scores = (found.cpu() for found in sampling_kernel.sample(*some, width=width))
    assert torch.equal(again, tokens[order]) and torch.equal(scores, logprobs[order])


def check_distribution(draws: int, device: str, width: int = SLICE) -> None:
    """Frequencies of tokens in three slices are those of their probabilities, by a chi-squared test. Half of the draws
    differ in their seed, and half in their position."""
    from nemo_rl_lite.generation.vllm import sampling_kernel

    vocabulary = 2 * width + width // 2
    logits = torch.full((vocabulary,), -torch.inf)
    own = torch.arange(0, vocabulary, vocabulary // 10)
    # The probability doubles from token to token, and falls from slice to slice.
    logits[own] = 0.7 * (torch.arange(len(own)) % 4) - own // width
    half = draws // 2
    positions = torch.cat([torch.arange(half), torch.full((half,), 3)]).to(device)
    states = torch.cat([torch.zeros(half), 1 + torch.arange(half)]).to(device, torch.int32)
    rows, temperatures = logits.to(device).expand(2 * half, -1), torch.ones(half + 1, device=device)
    seeds = torch.randint(2**60, (half + 1,), device=device)
    tokens, _ = sampling_kernel.sample(rows, states, temperatures, seeds, positions, width=width)
    expected = half * logits[own].double().softmax(0)
    for drawn in tokens.cpu().split(half):
        counts: Tensor = drawn.bincount(minlength=vocabulary)[own].double()
        # Of 10 tokens, it exceeds 28 once in 1,000 times.
        assert ((counts - expected) ** 2 / expected).sum() < 28, (counts, expected)

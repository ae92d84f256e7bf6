"""Cascade attention by prompt gives what attention to each request's whole cache gives, and reads a prompt once."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from nemo_rl_lite.compat import vllm_cascade
from nemo_rl_lite.compat.vllm import offer_cascade_attention
from nemo_rl_lite.compat.vllm_cascade import MIN_BLOCKS, CascadeBackend, CascadeBuilder, CascadeImpl, divide, group_size

BLOCK, MOST, WIDTH = 4, 4, 40
HEADS, KV_HEADS, SIZE = 4, 2, 8


def requests(*prompts: tuple[int, int], system: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and tokens of requests: for each prompt its whole blocks after a system prompt, and its samples."""
    fresh = iter(torch.randperm(4000).add(1).tolist())
    first = [next(fresh) for _ in range(system)]
    rows, lengths = [], []
    for blocks, samples in prompts:
        prompt = [*first, *(next(fresh) for _ in range(blocks))]
        for sample in range(samples):
            rest = 1 + (3 * sample + blocks) % (2 * BLOCK)
            row = [*prompt, *(next(fresh) for _ in range(-(-rest // BLOCK)))]
            # What follows is of an earlier request.
            rows.append(row + [next(fresh) % 7 for _ in range(WIDTH - len(row))])
            lengths.append(len(prompt) * BLOCK + rest)
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)


def groups_of(division) -> list[tuple[int, int]]:
    """Requests and blocks of each group."""
    sizes = division.starts.diff().tolist()
    return [(size, length // BLOCK) for size, length in zip(sizes, division.lengths.tolist(), strict=True) if size]


@pytest.mark.parametrize(
    ("prompts", "system", "groups"),
    [
        ([(12, 4), (20, 3), (9, 2)], 0, [(4, 12), (3, 20), (2, 9)]),
        # A system prompt alone does not join samples of two prompts.
        ([(12, 3), (12, 3)], 8, [(3, 20), (3, 20)]),
        ([(4, 2), (4, 2)], 14, [(4, 14)]),
        # It is what single samples share.
        ([(1, 1), (2, 1), (1, 1)], 20, [(3, 20)]),
        # No group is larger than `MOST`; one request has no prefix to share.
        ([(12, 9)], 0, [(4, 12), (4, 12), (1, 0)]),
        ([(12, 1), (MIN_BLOCKS - 1, 3)], 0, [(1, 0)] * 4),
    ],
    ids=["prompts", "system prompt", "long system prompt", "single samples", "many samples", "short prompts"],
)
def test_groups(prompts, system, groups):
    table, lengths = requests(*prompts, system=system)
    division = divide(table, lengths, BLOCK, MOST)
    assert groups_of(division) == groups
    assert division.starts[-1] == len(table)


def test_a_prefix_ends_before_the_newest_token():
    table = torch.arange(1, 1 + WIDTH, dtype=torch.int32).repeat(2, 1)
    lengths = torch.tensor([10 * BLOCK, 10 * BLOCK + 1], dtype=torch.int32)
    division = divide(table, lengths, BLOCK, MOST)
    assert groups_of(division) == [(2, 9)]
    assert division.rest_lengths.tolist() == [BLOCK, BLOCK + 1]
    assert division.rest_table[:, 0].tolist() == [10, 10]


def test_padded_requests_have_a_token_of_the_first_block():
    table, lengths = requests((12, 2))
    table, lengths = torch.cat([table, torch.zeros_like(table)]), torch.cat([lengths, torch.zeros_like(lengths)])
    division = divide(table, lengths, BLOCK, MOST)
    assert groups_of(division) == [(2, 12), (1, 0), (1, 0)]
    assert division.rest_lengths[2:].tolist() == [1, 1] and not division.rest_table[2:].any()


def attend(
    q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, *, causal, max_seqlen_q, max_seqlen_k, **_
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to a paged cache, with the logarithms of the sums. The last query of a sequence is at its end."""
    output, sums = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -torch.inf)
    for number, (begin, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        count = int(seqused_k[number])
        assert end - begin <= max_seqlen_q and count <= max_seqlen_k
        if begin == end or count == 0:
            continue
        blocks = block_table[number, : -(-count // BLOCK)].long()
        keys, values = (
            one[blocks].flatten(0, 1)[:count].repeat_interleave(q.shape[1] // KV_HEADS, dim=1) for one in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * softmax_scale
        if causal:
            seen = torch.arange(count) <= torch.arange(count - (end - begin), count)[:, None]
            scores = scores.masked_fill(~seen, -torch.inf)
        output[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        sums[:, begin:end] = scores.logsumexp(-1)
    return output, sums


def merge(output, prefix, prefix_sums, rest, rest_sums) -> None:
    share = (prefix_sums - torch.logaddexp(prefix_sums, rest_sums)).exp().T[:, :, None]
    output.copy_(share * prefix + (1 - share) * rest)


@pytest.fixture
def builder(monkeypatch) -> CascadeBuilder:
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", lambda _, common, given, fast: given)
    own = object.__new__(CascadeBuilder)
    own._applies, own._kept, own.block_size, own.max_cudagraph_size = True, None, BLOCK, 16
    own.num_heads_q, own.num_heads_kv = HEADS, KV_HEADS
    own.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=12))
    return own


class Given(SimpleNamespace):
    def replace(self, **fields):
        return Given(**vars(self) | fields)


def decoding(table: torch.Tensor, lengths: torch.Tensor) -> Given:
    count = len(table)
    starts = torch.arange(count + 1, dtype=torch.int32)
    return Given(
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        causal=True,
        block_table_tensor=table,
        seq_lens=lengths,
        query_start_loc=starts,
        max_seq_len=WIDTH * BLOCK,
        max_num_splits=0,
        scheduler_metadata=None,
    )


def test_outputs_are_those_of_the_whole_cache(builder, monkeypatch):
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", attend, raising=False)
    monkeypatch.setattr(vllm_cascade, "merge_attn_states", merge)
    impl = object.__new__(CascadeImpl)
    impl.head_size, impl.scale, impl.logits_soft_cap, impl.vllm_flash_attn_version = SIZE, 0.3, 0, 3
    impl.num_queries_per_kv = HEADS // KV_HEADS
    cache = torch.randn(4001, KV_HEADS, BLOCK, 2 * SIZE)
    keys, values = cache.transpose(1, 2).split(SIZE, dim=-1)
    kept = set()
    # The second batch is larger than the first, the third smaller.
    for prompts in ([(12, 3), (9, 2)], [(20, 5), (3, 2), (10, 4)], [(11, 1), (15, 2)]):
        table, lengths = requests(*prompts)
        made = builder.build(0, decoding(table, lengths))
        assert made.block_table_tensor is made.division.rest_table and made.seq_lens is made.division.rest_lengths
        kept.add(tuple(one.data_ptr() for one in made.division))
        query = torch.randn(len(table), HEADS, SIZE)
        output = torch.empty_like(query)
        impl.forward(None, query, None, None, cache, made, output)
        most = {"causal": True, "max_seqlen_q": 1, "max_seqlen_k": WIDTH * BLOCK}
        expected, _ = attend(query, keys, values, made.query_start_loc, lengths, table, impl.scale, **most)
        torch.testing.assert_close(output, expected)
    assert len(kept) == 1


def test_other_batches_are_vllms(builder):
    table, lengths = requests((12, 4))
    for own in ({"max_query_len": 3}, {"causal": False}, {"num_actual_tokens": 3}):
        given = decoding(table, lengths).replace(**own)
        assert builder.build(0, given) is given
    builder._applies = False
    given = decoding(table, lengths)
    assert builder.build(0, given) is given


PLAIN = {"sliding_window": (-1, -1), "alibi_slopes": None, "sinks": None, "kv_cache_dtype": "auto"}


@pytest.mark.parametrize(
    ("layer", "others", "plain"),
    [
        ({}, {}, True),
        ({"sliding_window": (127, 0)}, {}, False),
        ({"alibi_slopes": torch.ones(HEADS)}, {}, False),
        ({"sinks": torch.ones(HEADS)}, {}, False),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, False),
        ({}, {"dcp_world_size": 2}, False),
        ({}, {"rswa_window": 128}, False),
    ],
)
def test_only_attention_to_all_tokens_is_divided(builder, layer, others, plain, monkeypatch):
    layers = {
        str(number): SimpleNamespace(impl=SimpleNamespace(**PLAIN | own)) for number, own in enumerate([{}, layer])
    }
    monkeypatch.setattr(vllm_cascade, "get_layers_from_vllm_config", lambda *_: layers)
    vars(builder).update({"layer_names": [], "dcp_world_size": 1, "rswa_window": None} | others)
    assert builder._is_plain() == plain


@pytest.mark.parametrize(("queries", "most"), [(2, 32), (8, 8), (128, 1)])
def test_a_group_fits_the_smallest_tile(queries, most):
    assert group_size(queries) == most


def test_engines_offer_it_by_the_name_of_custom_backends():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    offer_cascade_attention()
    chosen = AttentionBackendEnum.CUSTOM
    assert chosen.get_class() is CascadeBackend and AttentionBackendEnum[CascadeBackend.get_name()] is chosen
    assert CascadeBackend.get_builder_cls() is CascadeBuilder and CascadeBackend.get_impl_cls() is CascadeImpl
    # A graph of the whole model is only for batches of one token per request.
    assert CascadeBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert not CascadeBuilder.supports_update_block_table and not CascadeBackend.supports_batch_invariance()
    assert not object.__new__(CascadeBuilder).use_cascade_attention(128, num_reqs=8)


def test_other_versions_have_no_such_backend(monkeypatch):
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr("nemo_rl_lite.compat.vllm.fits", lambda *_: False)
    offer_cascade_attention()
    assert not registry._ATTN_OVERRIDES

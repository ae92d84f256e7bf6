"""Packs in buckets: few shapes, little padding, every token in a piece that is short enough."""

import random

import pytest
import torch

from nemo_rl_lite.config.sizes import batch_mode
from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.policy.micro_batches import PARTS, Bucket, Layout, cut
from nemo_rl_lite.policy.passes import rows_of
from nemo_rl_lite.validation.compose import compose_config


def lengths_of(count: int, longest: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randint(1, longest) for _ in range(count)]


@pytest.mark.parametrize(("count", "longest", "round_to"), [(1, 5, 1), (3, 40, 8), (300, 90, 64), (60, 1024, 64)])
def test_a_bucket_holds_its_sequences_with_little_padding(count, longest, round_to):
    for seed in range(50):
        lengths = lengths_of(count, longest, seed)
        bucket = Bucket.of(lengths, round_to, most=10**6)
        assert bucket.rows >= count and bucket.width >= max(lengths) and bucket.tokens % round_to == 0
        assert 0 <= bucket.tokens - sum(lengths) < sum(lengths) / PARTS + 2 * round_to
        pieces = bucket.pieces_of([*lengths, *[0] * (bucket.rows - count)])
        assert len(pieces) == bucket.pieces and sum(pieces) == bucket.tokens
        assert pieces[:count] == lengths and max(pieces) <= bucket.width and min(pieces) >= 0


def test_batches_of_one_kind_have_few_shapes():
    shapes = {Bucket.of(lengths_of(300, 90, seed), 64, most=65536) for seed in range(200)}
    assert len(shapes) <= 8
    counts = {Bucket.of(lengths_of(count, 90, count), 64, most=65536).rows for count in range(256, 513)}
    assert counts == {256, 320, 384, 448, 512}


def test_a_bucket_is_no_larger_than_the_layout_where_its_sequences_fit():
    assert Bucket.of([1000] * 49 + [200], 64, most=50_000).tokens == 50_048
    assert Bucket.of([1000] * 49 + [200], 64, most=10**6).tokens == 51_200
    # A sequence that is longer than the layout has a row of its own.
    assert Bucket.of([60_000], 64, most=50_000).tokens == 60_032


def test_sequences_of_a_bucket_keep_their_places():
    lengths = torch.tensor(lengths_of(11, 20, seed=3))
    tokens = torch.arange(11)[:, None] * 1000 + torch.arange(20)
    plain, padded = (cut(tokens, lengths, Layout("packed", 60, 8, in_buckets=on)) for on in (False, True))
    for one, other in zip(plain, padded, strict=True):
        count, total = len(one.rows), sum(one.own_lengths)
        assert torch.equal(one.rows, other.rows)
        assert torch.equal(other.lengths[:count], one.lengths) and not other.lengths[count:].any()
        assert torch.equal(other.starts[:count], one.starts)
        assert torch.equal(other.tokens_nS[:, :total], one.tokens_nS[:, :total])
        assert torch.equal(other.positions()[:, :total], one.positions()[:, :total])
        assert torch.equal(other.hidden_from()[..., :total, :total], one.hidden_from()[..., :total, :total])
        # Padding sees itself alone, and no sequence sees it.
        assert other.hidden_from()[..., :total, total:].all() and other.hidden_from()[..., total:, :total].all()
        assert int(other.boundaries()[-1]) == other.tokens_nS.numel()
        assert len(other.boundaries()) == other.bucket.pieces + 1
        values = torch.arange(other.tokens_nS.numel()).float()
        found = other.unpack(values)
        assert found.shape == (other.bucket.rows, other.bucket.width)
        assert torch.equal(found[:count, : one.width], one.unpack(values)) and not found[count:].any()


def test_the_batch_of_a_bucket_has_rows_that_count_nowhere():
    lengths = torch.tensor([5, 3, 4])
    batch = Batch(torch.ones(3, 5, dtype=torch.int64), lengths, torch.ones(3, 5), advantages=torch.ones(3))
    (micro,) = cut(batch.tokens, batch.lengths, Layout("packed", 60, 8, in_buckets=True))
    own = rows_of(micro, batch)
    assert own.tokens.shape == own.mask.shape == (micro.bucket.rows, micro.bucket.width)
    assert own.lengths.tolist() == [5, 3, 4, *[0] * (micro.bucket.rows - 3)]
    assert own.mask.sum() == 15 and own.advantages.sum() == 3 and own.ages is None


@pytest.mark.parametrize("graphs", ["none", "full_iteration"])
@pytest.mark.parametrize("purpose", ["train", "logprob"])
def test_the_layout_has_buckets_where_graphs_run_it(graphs, purpose):
    overrides = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=transformers"]
    overrides += ["policy.max_total_sequence_length=64", "generation.max_new_tokens=16"]
    config = compose_config([*overrides, f"policy.megatron_cfg.cuda_graph_impl={graphs}"])
    assert batch_mode(config.policy, on_gpu=True) == "packed"
    layout = Layout.configured(config.policy, purpose, on_gpu=True)
    assert layout.in_buckets is (graphs != "none" and purpose == "train")
    assert not Layout.configured(config.policy, purpose, on_gpu=False).in_buckets

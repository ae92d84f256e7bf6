"""How context-parallel ranks share packed sequences."""

from typing import Any

import pytest
import torch

from nemo_rl_lite.policy.context import ContextRanks, Shard, cut_by_length, own_places
from nemo_rl_lite.policy.micro_batches import Layout, ModelInput, cut
from nemo_rl_lite.validation.compose import compose_config

CPU = torch.device("cpu")
MEGATRON = "policy.megatron_cfg"


def packed(size: int, lengths: tuple[int, ...] = (11, 3, 16, 8)):
    layout = Layout("packed", 64, 8 * size, piece=2 * size)
    tokens = torch.arange(1, 1 + len(lengths) * 20).view(len(lengths), 20)
    (micro,) = cut(tokens, torch.tensor(lengths), layout)
    return micro


def test_the_order_is_transformer_engines():
    """The example in the docstring of its `attn_forward_func_with_cp`."""
    assert own_places([8, 4], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert own_places([8, 4], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_positions_that_megatron_core_rotates(size):
    """Against the rotary frequencies that megatron-core picks for a rank's tokens of a packed row."""
    from nemo_rl_lite.compat.megatron_cpu import prepare_import

    prepare_import()
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    micro = packed(size)
    places = torch.arange(64)
    for rank in range(size):
        context, rotated = ContextRanks(rank, size), []
        for piece in micro.pieces:
            of_piece = torch.zeros(piece // size)
            rotated.append(_get_thd_freqs_on_this_cp_rank(rank, size, of_piece, places))
        assert context.own(micro.positions(), micro).tolist() == [torch.cat(rotated).tolist()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_token_is_with_one_rank_that_knows_the_next(size):
    micro = packed(size)
    shards = [Shard.of(micro, ContextRanks(rank, size), CPU) for rank in range(size)]
    assert {own.tokens_nS.shape for own in shards} == {(1, micro.tokens_nS.shape[1] // size)}
    gathered = torch.cat([own.tokens_nS for own in shards], dim=1)[0]
    order = torch.arange(len(gathered)) if size == 1 else shards[0].order
    assert torch.equal(gathered[order], micro.tokens_nS[0])
    following = torch.cat([own.next_tokens_nS for own in shards], dim=1)[0][order]
    # Values about tokens, as a teacher's: unpacking what all ranks have packed gives them back.
    values_bTk = torch.arange(4 * micro.width * 2).view(4, micro.width, 2) + 1
    packed_back = micro.unpack(torch.cat([own.pack(values_bTk) for own in shards])[order])
    found = micro.unpack(following)
    for row, length in enumerate((11, 3, 16, 8)):
        first = 1 + 20 * row
        assert found[row, 1:length].tolist() == list(range(first + 1, first + length))
        assert torch.equal(packed_back[row, 1:length], values_bTk[row, 1:length])


def test_sequences_are_padded_to_equal_chunks():
    micro = packed(2)
    assert micro.own_lengths == (11, 3, 16, 8) and micro.starts.tolist() == [0, 12, 16, 32]
    assert micro.pieces == [12, 4, 16, 8, 8] and micro.boundaries().tolist() == [0, 12, 16, 32, 40, 48]
    # A sequence's own padding is behind it, where causal attention does not look.
    assert micro.tokens_nS[0, 11] == 0 and micro.positions()[0, 11] == 11
    with pytest.raises(ValueError, match="cannot share sequences of"):
        own_places([12, 6], 0, 2)


def test_packs_hold_the_padding_of_each_sequence():
    layout = Layout("packed", 16, 8, piece=8)
    # 4 x 8 tokens, where the sequences alone would fit one row.
    assert len(layout.groups([3, 3, 3, 3])) == 2
    assert len(Layout("packed", 16, 8).groups([3, 3, 3, 3])) == 1


@pytest.mark.parametrize(("size", "round_to"), [(1, 5), (2, 20), (4, 40)])
def test_the_configured_layout_gives_each_rank_halves_of_whole_tokens(size, round_to):
    own = [
        "policy=megatron_gpu",
        "policy.max_total_sequence_length=128",
        f"cluster.gpus_per_node={size}",
        "policy.sequence_length_round=5",
    ]
    config = compose_config([*own, f"{MEGATRON}.context_parallel_size={size}"])
    layout = Layout.configured(config.policy, "train", on_gpu=True)
    assert (layout.mode, layout.round_to, layout.piece) == ("packed", round_to, 2 * size if size > 1 else 1)


# Not used, but not None: single ranks may have micro-batches whole.
ALONE: Any = "group of one rank"


def by_length(size: int, lengths: list[int], together: int = 1, at_least: int = 1) -> list[list[ModelInput]]:
    """Each rank's micro-batches."""
    layout = Layout("packed", 32 * size, 8 * size, together, piece=2 * size)
    tokens = torch.arange(len(lengths) * 64).view(len(lengths), 64)
    given = tokens, torch.tensor(lengths), layout, Layout("packed", 32, 8, together)
    return [cut_by_length(*given, ContextRanks(rank, size, alone=ALONE), float, at_least) for rank in range(size)]


def counted(of_ranks: list[list[ModelInput]]) -> list[int]:
    """The rows whose results ranks report."""
    ranks = [ContextRanks(rank, len(of_ranks), alone=ALONE) for rank in range(len(of_ranks))]
    pairs = [(rank, micro) for rank, own in zip(ranks, of_ranks, strict=True) for micro in own]
    return sorted(row for rank, micro in pairs if rank.reports(micro) for row in micro.rows.tolist())


def test_pairs_stay_together_and_fill_single_ranks_by_tokens():
    of_ranks = by_length(2, [9, 8, 20, 20, 12, 4, 7, 7, 5, 9], together=2)
    assert counted(of_ranks) == list(range(10))
    # A pair of 40 tokens does not fit one rank.
    assert [[micro.rows.tolist() for micro in own] for own in of_ranks] == [
        [[2, 3], [0, 1, 8, 9]],
        [[2, 3], [4, 5, 6, 7]],
    ]
    assert [micro.piece for micro in of_ranks[0]] == [4, 1]
    first = of_ranks[0][1]
    assert first.tokens_nS[0, : first.own_lengths[0]].tolist() == list(range(9))


def test_a_rank_without_a_sequence_repeats_another():
    of_ranks = by_length(12, [6] * 11)
    assert [[(micro.rows.tolist(), micro.is_filler) for micro in own] for own in of_ranks] == [
        *[[([row], False)] for row in range(11)],
        [([0], True)],
    ]
    assert counted(of_ranks) == list(range(11))


@pytest.mark.parametrize("at_least", [1, 3, 5])
def test_all_ranks_make_the_same_number_of_micro_batches(at_least):
    of_ranks = by_length(2, [50, 6, 6, 6, 6, 18], at_least=at_least)
    assert len({len(own) for own in of_ranks}) == 1 and len(of_ranks[0]) >= at_least
    assert counted(of_ranks) == list(range(6))
    # Experts may be spread over the ranks, and shared ones communicate.
    assert all(one.piece == other.piece for one, other in zip(*of_ranks, strict=True))


def test_one_rank_has_as_many_tokens_as_its_part_of_a_shared_pack():
    own = ["policy=megatron_gpu", "cluster.gpus_per_node=4", "policy.sequence_packing.train_mb_tokens=8192"]
    own += [f"{MEGATRON}.context_parallel_size=4", f"{MEGATRON}.hybrid_context_parallel=true"]
    layout = Layout.configured(compose_config(own).policy, "train", on_gpu=True)
    assert layout.whole is not None and (layout.size, layout.whole.size, layout.whole.piece) == (8192, 2048, 1)
    assert layout.round_to == 4 * layout.whole.round_to

"""Layouts: every sequence once, within the limit, and back again."""

import random

import pytest
import torch

from nemo_rl_lite.policy.micro_batches import Layout, cut, packed, packed_bytes, unpacked

MODES = pytest.mark.parametrize("layout", [Layout("fixed", 3, 1), Layout("dynamic", 48, 4), Layout("packed", 40, 8)])


def sequences(count: int, longest: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that encode their row and position, and lengths from 1 on."""
    source = random.Random(seed)
    lengths = torch.tensor([source.randint(1, longest) for _ in range(count)])
    tokens = torch.arange(count)[:, None] * 1000 + torch.arange(longest)
    return torch.where(torch.arange(longest) < lengths[:, None], tokens, -1), lengths


@MODES
@pytest.mark.parametrize("at_least", [1, 9])
def test_every_sequence_is_in_one_micro_batch_whole_and_in_order(layout, at_least):
    tokens, lengths = sequences(17, 20)
    micro_batches = cut(tokens, lengths, layout, at_least)
    assert sorted(row for micro in micro_batches for row in micro.rows.tolist()) == list(range(17))
    own = len(cut(tokens, lengths, layout))
    assert len(micro_batches) == (own if layout.mode == "fixed" else max(own, at_least))
    for micro in micro_batches:
        flat = micro.tokens_nS.flatten()
        for row, start, length in zip(micro.rows, micro.starts, micro.lengths, strict=True):
            assert length == lengths[row]
            assert torch.equal(flat[start : start + length], tokens[row, :length])
        assert micro.width == micro.lengths.max()


@pytest.mark.parametrize("layout", [Layout("dynamic", 48, 4), Layout("packed", 40, 8)])
def test_token_limits_hold_and_shapes_are_round(layout):
    tokens, lengths = sequences(200, 20, seed=1)
    micro_batches = cut(tokens, lengths, layout)
    assert all(micro.tokens_nS.numel() <= layout.size for micro in micro_batches)
    assert all(micro.tokens_nS.shape[1] % layout.round_to == 0 for micro in micro_batches)
    total = int(lengths.sum())
    assert len(micro_batches) <= (1.2 if layout.mode == "packed" else 1.6) * total / layout.size


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_replicas_can_agree_on_a_number_of_micro_batches(mode):
    """Expert-parallel collectives come once a micro-batch: one more on one replica would hang the run."""
    source = random.Random(7)
    for _ in range(50):
        replicas = [
            [source.choice((source.randint(1, 60), source.randint(200, 256))) for _ in range(16)] for _ in range(4)
        ]
        layout = Layout(mode, 256, 4)
        most = max(len(layout.groups(lengths)) for lengths in replicas)
        assert {len(layout.groups(lengths, most)) for lengths in replicas} == {most}


def test_packs_are_even():
    tokens, lengths = sequences(300, 20, seed=2)
    sums = [int(micro.lengths.sum()) for micro in cut(tokens, lengths, Layout("packed", 400, 1))]
    assert max(sums) - min(sums) <= 2


@MODES
def test_logprobs_find_their_tokens_again(layout):
    """A model that gives token k the logprob -k, at the position before it."""
    tokens, lengths = sequences(11, 20, seed=3)
    for micro in cut(tokens, lengths, layout):
        following = micro.tokens_nS.roll(-1, dims=1).float().requires_grad_()
        found = micro.unpack(-following.flatten())
        for place, row in enumerate(micro.rows):
            length = lengths[row]
            expected = torch.zeros(micro.width)
            expected[1:length] = -tokens[row, 1:length].float()
            assert torch.equal(found[place], expected)
        found.sum().backward()
        # Every token but the first of its sequence counts once; what follows a sequence's end counts nowhere.
        assert following.grad.sum() == -(micro.lengths - 1).sum()


def test_packed_sequences_see_only_themselves_and_count_from_zero():
    tokens, lengths = sequences(3, 6, seed=4)
    (micro,) = cut(tokens, lengths, Layout("packed", 64, 16))
    owner = torch.cat([torch.full((int(n),), i) for i, n in enumerate(micro.lengths)])
    owner = torch.cat([owner, torch.full((micro.tokens_nS.numel() - len(owner),), 99)])
    place = torch.arange(len(owner))
    visible = (owner[:, None] == owner[None, :]) & (place[:, None] >= place[None, :])
    assert torch.equal(micro.hidden_from()[0, 0], ~visible)
    assert micro.boundaries().tolist() == [0, *micro.lengths.cumsum(0).tolist(), micro.tokens_nS.numel()]
    starts = torch.tensor([place[owner == one].min() for one in owner])
    assert torch.equal(micro.positions()[0], place - starts)


def test_padded_sequences_have_rows_of_their_own():
    tokens, lengths = sequences(4, 6, seed=5)
    (micro,) = cut(tokens, lengths, Layout("fixed", 4, 1))
    assert torch.equal(micro.tokens_nS, tokens)
    assert torch.equal(micro.positions(), torch.arange(6).expand(4, -1))
    assert torch.equal(micro.hidden_from()[0, 0], torch.ones(6, 6, dtype=torch.bool).triu(1))


@pytest.mark.parametrize("mode", ["fixed", "dynamic", "packed"])
@pytest.mark.parametrize("at_least", [1, 6])
def test_pairs_stay_together_and_within_the_limit(mode, at_least):
    size = 3 if mode == "fixed" else 60
    layout = Layout(mode, size, 4, together=2)
    tokens, lengths = sequences(20, 20, seed=2)
    micro_batches = cut(tokens, lengths, layout, at_least)
    rows = [row for micro in micro_batches for row in micro.rows.tolist()]
    assert sorted(rows) == list(range(20))
    assert all(even % 2 == 0 and odd == even + 1 for even, odd in zip(rows[::2], rows[1::2], strict=True))
    for micro in micro_batches:
        assert len(micro.rows) % 2 == 0
        assert len(micro.rows) <= 2 * size if mode == "fixed" else micro.tokens_nS.numel() <= size
    assert mode == "fixed" or len(micro_batches) >= at_least


def test_a_pair_that_is_longer_than_the_limit_has_a_micro_batch_of_its_own():
    tokens, lengths = torch.zeros(4, 20, dtype=torch.int64), torch.tensor([20, 20, 3, 4])
    micro_batches = cut(tokens, lengths, Layout("packed", 30, 1, together=2))
    assert sorted(sorted(micro.rows.tolist()) for micro in micro_batches) == [[0, 1], [2, 3]]


def test_what_arrives_in_one_copy_is_what_was_packed():
    values = {
        "tokens": torch.arange(35).reshape(5, 7),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "columns": torch.randn(6, 3)[:, 1],
        "one": torch.tensor(2.5, dtype=torch.float64),
        "experts": torch.arange(12, dtype=torch.int16).reshape(2, 3, 2).transpose(0, 1),
    }
    whole = packed(values, pin=False)
    assert whole.shape == (packed_bytes(values),)
    there = torch.empty_like(whole)
    # Only shapes and types matter, as of the tensors that a recorded pass was made with.
    views = unpacked(there, {name: torch.empty_like(one) for name, one in values.items()})
    there.copy_(whole)
    assert list(views) == list(values)
    assert all(views[name].dtype == one.dtype and torch.equal(views[name], one) for name, one in values.items())

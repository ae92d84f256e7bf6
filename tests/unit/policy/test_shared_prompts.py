"""Families of rows with a common prefix, their packs, and attention over them."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_rl_lite.policy import passes
from nemo_rl_lite.policy.context import ContextRanks
from nemo_rl_lite.policy.micro_batches import Layout, cut
from nemo_rl_lite.policy.passes import view_of
from nemo_rl_lite.policy.shared_prompts import Family, SharedKeys, _attend, _Copied, families_of, parts_of

LAYOUT = Layout("packed", 64, 4, least_saved=0.0)


def batch(*groups: tuple[int, tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of groups of a prompt's tokens and of its responses' tokens. No token occurs twice, except for prompts."""
    rows, fresh = [], iter(range(1, 100000))
    for prompt, responses in groups:
        first = [next(fresh) for _ in range(prompt)]
        rows += [first + [next(fresh) for _ in range(response)] for response in responses]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    return tokens, lengths


def groups_of(seed: int, most: int = 5) -> list[tuple[int, tuple[int, ...]]]:
    source = random.Random(seed)
    return [
        (source.randint(1, 30), tuple(source.randint(1, 30) for _ in range(source.randint(1, 6))))
        for _ in range(source.randint(1, most))
    ]


def test_responses_to_a_prompt_share_all_its_tokens_but_the_last():
    tokens, lengths = batch((9, (3, 5, 1)), (20, (4, 4)), (7, (6,)))
    families = families_of(tokens, lengths.tolist(), 1, 0.0)
    assert families == [Family(range(3), 8), Family(range(3, 5), 19), Family(range(5, 6), 0)]


def test_rows_share_what_saves_most():
    """All prompts begin with the same 5 tokens, but responses share more with their group."""
    tokens, lengths = batch((9, (3, 5, 1)), (20, (4, 4)))
    tokens[:, :5] = torch.arange(5)
    assert [one.rows for one in families_of(tokens, lengths.tolist(), 1, 0.0)] == [range(3), range(3, 5)]


def test_equal_rows_keep_one_token_each():
    tokens = torch.arange(6).expand(3, 6)
    assert families_of(tokens, [6, 6, 6], 1, 0.0) == [Family(range(3), 5)]


def test_pairs_stay_together():
    tokens, lengths = batch((9, (3, 5)), (9, (2, 2)), (20, (4, 4)))
    families = families_of(tokens, lengths.tolist(), 2, 0.0)
    assert [one.rows for one in families] == [range(2), range(2, 4), range(4, 6)]
    assert [one.rows for one in parts_of([Family(range(6), 3)], [20] * 6, 40, 2, 1)] == [
        range(2),
        range(2, 4),
        range(4, 6),
    ]


def test_little_common_text_is_not_shared():
    tokens, lengths = batch((3, (60, 60)))
    assert families_of(tokens, lengths.tolist(), 1, 0.05) == [Family(range(1)), Family(range(1, 2))]
    assert families_of(tokens, lengths.tolist(), 1, 0.0) == [Family(range(2), 2)]


@pytest.mark.parametrize("seed", range(20))
def test_logprobs_find_their_tokens_again(seed):
    """A model that gives token k the logprob -k, at the position before it. Gradients of shared tokens add up."""
    tokens, lengths = batch(*groups_of(seed))
    micro_batches = cut(tokens, lengths, LAYOUT)
    assert sorted(row for micro in micro_batches for row in micro.rows.tolist()) == list(range(len(tokens)))
    for micro in micro_batches:
        assert micro.tokens_nS.numel() <= 64
        following = micro.tokens_nS.roll(-1, dims=1).float().requires_grad_()
        found = micro.unpack(-following.flatten())
        for place, row in enumerate(micro.rows):
            expected = torch.zeros(micro.width)
            expected[1 : lengths[row]] = -tokens[row, 1 : lengths[row]].float()
            assert torch.equal(found[place], expected)
        found.sum().backward()
        assert following.grad.sum() == -(micro.lengths - 1).sum()


@pytest.mark.parametrize("seed", range(20))
def test_each_token_attends_to_its_row_up_to_itself(seed):
    tokens, lengths = batch(*groups_of(seed))
    for micro in cut(tokens, lengths, LAYOUT):
        seen, keys = ~micro.hidden_from()[0, 0], micro.keys() if micro.prefixes is not None else torch.arange(64)
        flat = micro.tokens_nS.flatten()
        for place, row in enumerate(micro.rows):
            for index, query in enumerate(micro.places_before(torch.arange(1, lengths[row] + 1))[place]):
                attended = flat[keys[: seen.shape[1]][seen[query]]]
                assert torch.equal(attended, tokens[row, : index + 1])
                assert micro.positions()[0, query] == index


@pytest.mark.parametrize("seed", range(20))
def test_values_of_first_tokens_are_laid_at_their_places(seed):
    tokens, lengths = batch(*groups_of(seed))
    for micro in cut(tokens, lengths, LAYOUT):
        own = (lengths[micro.rows] - 1).clamp(min=0)
        values = torch.cat([tokens[row, :count] for row, count in zip(micro.rows, own, strict=True)])
        laid = micro.lay(values, own, -1).flatten()
        assert torch.equal(laid[laid >= 0], micro.tokens_nS.flatten()[laid >= 0])
        assert set(laid[laid >= 0].tolist()) == set(values.tolist())


@pytest.mark.parametrize("without", [0, 4])
def test_a_shared_token_has_the_value_of_the_first_row_that_has_one(without):
    """Engines may choose other experts for equal tokens. Passes with other packs must choose the same."""
    prompt = 40_000
    tokens, lengths = batch((prompt, (2, 3, 4)))
    (micro,) = cut(tokens, lengths, Layout("packed", 60_000, 4, least_saved=0.0))
    counts = (lengths - 1).clone()
    counts[0] -= prompt * (without > 0)
    laid = micro.lay(torch.arange(3).repeat_interleave(counts), counts, -1).flatten()
    assert (laid[: prompt - 1][int(counts[0]) :] == 1).all() and (laid[: prompt - 1][: int(counts[0])] == 0).all()


def test_replicas_can_agree_on_a_number_of_micro_batches():
    for seed in range(10):
        replicas = [batch(*groups_of(4 * seed + replica, most=8)) for replica in range(4)]
        replicas = [(tokens, lengths) for tokens, lengths in replicas if len(tokens) >= 8]
        most = max((len(cut(*own, LAYOUT)) for own in replicas), default=0)
        reached = [own for own in replicas if len(own[1]) >= most]
        assert {len(cut(*own, LAYOUT, most)) for own in reached} <= {most}


def of_sequences(query, key, value, mask, attn_mask_type, packed_seq_params):
    """Attention of packed sequences whose last query sees the last key, as Transformer Engine's."""
    assert mask is None and attn_mask_type.name == "padding_causal_bottom_right"
    pieces, found = packed_seq_params, []
    for place in range(len(pieces.cu_seqlens_q) - 1):
        own, keys = (slice(*ends[place : place + 2]) for ends in (pieces.cu_seqlens_q, pieces.cu_seqlens_kv))
        queries, count = query[own].transpose(0, 1), keys.stop - keys.start
        assert len(query[own]) <= pieces.max_seqlen_q and count <= pieces.max_seqlen_kv
        scores = queries @ key[keys].permute(1, 2, 0)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + count - scores.shape[1])
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[keys].transpose(0, 1)
        found.append(mixed.transpose(0, 1).flatten(1))
    return torch.cat(found)


def of_row(query, key, value, mask):
    """Attention of a row with a mask, as megatron-core's."""
    queries, keys, values = (one[:, 0].transpose(0, 1) for one in (query, key, value))
    scores = (queries @ keys.transpose(1, 2)).masked_fill(mask[0], -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1).unsqueeze(1)


def test_attention_of_sequences_and_of_a_masked_row_agree():
    """GPUs get boundaries of packed sequences, CPUs a mask."""
    (micro,) = cut(*batch((9, (3, 5, 1)), (20, (4, 4)), (5, (6,))), Layout("packed", 96, 4, least_saved=0.0))
    source, results = torch.Generator().manual_seed(0), []
    drawn = torch.randn(3, micro.tokens_nS.numel(), 1, 2, 8, generator=source, dtype=torch.float64)
    for device, attend in (("cuda", of_sequences), ("cpu", of_row)):
        seen = view_of(micro, torch.device(device), ContextRanks())
        boundaries = seen.get("boundaries"), seen.get("key_boundaries")
        shared = SharedKeys(seen["positions"][0], seen["keys"], *micro.longest, *boundaries)
        inputs = [one.clone().requires_grad_() for one in drawn]
        found = _attend(attend, *inputs, seen.get("attention_mask"), packed_seq_params=shared)
        found.square().sum().backward()
        results.append([found, *(one.grad for one in inputs)])
    for ours, theirs in zip(*results, strict=True):
        # Gradients of keys are added in float32.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_gradients_of_copies_are_rounded_once():
    (micro,) = cut(*batch((9, (3,) * 40), (5, (6, 2))), Layout("packed", 256, 4, least_saved=0.0))
    shared = SharedKeys(micro.positions()[0], micro.keys(), *micro.longest)
    whole = torch.randn(micro.tokens_nS.numel(), 1, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    copies = _Copied.apply(whole, shared)
    gradient = torch.randn(copies.shape, dtype=torch.bfloat16)
    copies.backward(gradient)
    expected = torch.zeros(whole.shape, dtype=torch.float64).index_add(0, shared.keys_K, gradient.double())
    torch.testing.assert_close(whole.grad.double(), expected, rtol=2**-8, atol=1e-5)


def test_the_kernel_gives_what_torch_gives():
    """Under Triton's interpreter."""
    # Triton's interpreter runs kernels on a CPU; it must be asked for before Triton is imported.
    program = """
import torch
from nemo_rl_lite.policy.shared_prompts import _added
from nemo_rl_lite.policy.shared_prompts_kernel import add_rows

torch.manual_seed(0)
# Tokens with three rows, none, and one.
order, begins = torch.tensor([4, 0, 2, 3, 1]), torch.tensor([0, 3, 3, 4, 5])
for dtype in (torch.bfloat16, torch.float32):
    for width in (12, 1500):
        gradient = torch.randn(5, width).to(dtype)
        torch.testing.assert_close(add_rows(gradient, order, begins), _added(gradient, order, begins))
        turned = gradient.T.contiguous().T
        torch.testing.assert_close(add_rows(turned, order, begins), _added(gradient, order, begins))
"""
    root, environment = Path(__file__).parents[3], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_backward_pass_keeps_no_copies_of_keys():
    (micro,) = cut(*batch((40, (2,) * 8)), Layout("packed", 64, 1, least_saved=0.0))
    seen, kept = view_of(micro, torch.device("cpu"), ContextRanks()), []
    shared = SharedKeys(seen["positions"][0], seen["keys"], *micro.longest)

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value, mask):
            ctx.save_for_backward(query, key, value)
            return query.flatten(2).clone()

        @staticmethod
        def backward(ctx, gradient):
            kept.extend(ctx.saved_tensors)
            return gradient.view_as(ctx.saved_tensors[0]), *map(torch.ones_like, ctx.saved_tensors[1:]), None

    drawn = torch.randn(3, micro.tokens_nS.numel(), 1, 1, 8)
    query, key, value = (one.requires_grad_() for one in drawn.unbind())
    copies = []

    def attend(query, key, value, mask):
        copies.extend(StorageWeakRef(one.untyped_storage()) for one in (key, value))
        return Saving.apply(query, key, value, mask)

    found = _attend(attend, query, key, value, seen["attention_mask"], packed_seq_params=shared)
    assert [one.expired() for one in copies] == [True, True]
    # Only copies that are made again follow.
    drawn *= 2
    found.sum().backward()
    for ours, expected in zip(kept, (query, key[shared.keys_K], value[shared.keys_K]), strict=True):
        assert torch.equal(ours, expected)


def test_the_backward_pass_keeps_values_without_the_queries_and_keys_next_to_them():
    """megatron-core's values are a view of a projection's whole result."""
    (micro,) = cut(*batch((40, (2,) * 8)), Layout("packed", 64, 1, least_saved=0.0))
    shared = SharedKeys(micro.positions()[0], micro.keys(), *micro.longest)
    query, key = (torch.randn(micro.tokens_nS.numel(), 1, 1, 8).requires_grad_() for _ in range(2))
    projected = torch.randn(micro.tokens_nS.numel(), 1, 3, 8)
    found = _attend(of_row, query, key, projected[:, :, 2:], micro.hidden_from(), packed_seq_params=shared)
    whole = StorageWeakRef(projected.untyped_storage())
    del projected
    assert whole.expired() and found.requires_grad


def test_rows_with_teachers_ids_share_nothing(monkeypatch):
    layouts = []
    monkeypatch.setattr(passes, "cut_batch", lambda model, tokens, lengths, layout: layouts.append(layout) or 1 / 0)
    model, own = SimpleNamespace(train_mode=lambda _: None), SimpleNamespace(tokens=None, lengths=None)
    for needs in ((), ("student_topk_logprobs",)):
        with pytest.raises(ZeroDivisionError):
            passes.forward_backward(model, own, LAYOUT, 1.0, SimpleNamespace(needs=frozenset(needs)), None)
    assert [one.least_saved for one in layouts] == [0.0, None]

"""Routers take the experts that they are told, in the order of the micro-batches."""

import pytest
import torch

from nemo_rl_lite.losses.batch import RoutedExperts
from nemo_rl_lite.policy.context import ContextRanks
from nemo_rl_lite.policy.micro_batches import Layout, cut
from nemo_rl_lite.policy.moe import NO_EXPERT, ReplayedRouter, RouterReplay

LENGTHS = torch.tensor([5, 3, 6])
# Tokens with experts: the engine has not read the last one, and no token of the second sequence.
KNOWN = torch.tensor([4, 0, 5])
LAYERS = (1, 4)


def topk(scores, k, num_groups, group_topk):
    return torch.topk(scores, k, dim=1)


def chosen(router: ReplayedRouter, scores: torch.Tensor) -> torch.Tensor:
    return router.get_replay_topk(scores, 2, default_compute_topk=topk)[1]


def test_a_router_takes_what_it_is_told_and_chooses_where_nothing_was_told():
    router, scores = ReplayedRouter(0, recomputes=False), torch.rand(3, 6, requires_grad=True)
    told = torch.tensor([[5, 0], [NO_EXPERT, NO_EXPERT], [2, 3]], dtype=torch.int16)
    router.begin(told, trains=True)
    values, experts = router.get_replay_topk(scores, 2, default_compute_topk=topk)
    assert experts[0].tolist() == [5, 0] and experts[2].tolist() == [2, 3]
    assert torch.equal(experts[1], scores[1].topk(2).indices)
    assert torch.equal(values, scores.gather(1, experts))
    values.sum().backward()
    assert torch.equal(scores.grad, torch.zeros(3, 6).scatter(1, experts, 1.0))
    router.begin(None, trains=True)
    assert torch.equal(chosen(router, scores), scores.topk(2).indices)


def test_a_recomputed_micro_batch_gets_its_own_experts_again():
    """As in a pipeline, where a second micro-batch begins before the backward pass of the first."""
    router, scores = ReplayedRouter(0, recomputes=True), torch.rand(1, 6)
    first, second = torch.tensor([[4, 1]]), torch.tensor([[0, 3]])
    with torch.no_grad():
        for told in (first, second):
            router.begin(told, trains=True)
            assert torch.equal(chosen(router, scores), told)
    assert torch.equal(chosen(router, scores), first)
    assert torch.equal(chosen(router, scores), second)
    # A pass for logprobs leaves nothing to compute again.
    with torch.no_grad():
        router.begin(first, trains=False)
        assert torch.equal(chosen(router, scores), first)
    with torch.no_grad():
        router.begin(second, trains=True)
    assert torch.equal(chosen(router, scores), second)


@pytest.mark.parametrize("layout", [Layout("fixed", 2, 2), Layout("dynamic", 12, 4), Layout("packed", 12, 4)])
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_gets_the_experts_of_its_layers_and_positions(layout, size):
    """In the order in which megatron-core joins positions and rows: that of a tensor [S / ranks, n]."""
    tokens = torch.arange(1, 19).view(3, 6)
    # By token; 0 is padding.
    known = torch.cat([torch.tensor([False]), (torch.arange(6) < KNOWN[:, None]).flatten()])
    told = (tokens[:, :, None, None] * 10 + torch.tensor(LAYERS)[:, None] * 2 + torch.arange(2)).to(torch.uint8).numpy()
    experts = RoutedExperts.of([told[row, :count] for row, count in enumerate(KNOWN.tolist())])
    for micro in cut(tokens, LENGTHS, layout):
        inside = known[micro.tokens_nS]
        assert int(inside.sum()) == int(KNOWN[micro.rows].sum())
        expected = torch.where(inside, micro.tokens_nS, -1).transpose(0, 1)
        for rank in range(size):
            routers = [ReplayedRouter(layer, recomputes=False) for layer in LAYERS]
            replay = RouterReplay([routers], ContextRanks(), rank, size, torch.device("cpu"))
            assert replay.layers == LAYERS
            replay.begin(micro, experts, trains=False, chunk=0)
            own = expected.chunk(size)[rank].flatten()
            for router in routers:
                told = router._now
                assert torch.equal(told[:, 0], torch.where(own < 0, NO_EXPERT, own * 10 + router.layer * 2))
                assert torch.equal(told[:, 1], torch.where(own < 0, NO_EXPERT, own * 10 + router.layer * 2 + 1))


def test_without_experts_the_routers_choose():
    routers = [ReplayedRouter(layer, recomputes=False) for layer in LAYERS]
    (micro,) = cut(torch.zeros(3, 6, dtype=torch.long), LENGTHS, Layout("fixed", 3, 1))
    RouterReplay([routers], ContextRanks(), 0, 1, torch.device("cpu")).begin(micro, None, trains=True, chunk=0)
    scores = torch.rand(18, 6)
    assert all(torch.equal(chosen(router, scores), scores.topk(2).indices) for router in routers)

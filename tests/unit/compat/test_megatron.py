"""Changes to megatron-core's modules."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_rl_lite.compat.megatron import auto_bridge, leave_sorted_tokens


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (1, 2), (2, 1)])
def test_tokens_of_several_ranks_are_sorted_and_tokens_of_one_rank_are_not_copied(tp_size, ep_size):
    auto_bridge()
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = object.__new__(token_dispatcher.MoEAlltoAllTokenDispatcher)
    dispatcher.tp_size, dispatcher.ep_size = tp_size, ep_size
    dispatcher.sort_input_by_local_experts = dispatcher.restore_output_by_local_experts = torch.tensor([1, 0])
    layer = nn.Linear(1, 1)
    layer.token_dispatcher = dispatcher
    leave_sorted_tokens([nn.ModuleList([nn.Linear(1, 1), layer])])

    dispatcher.num_local_experts, dispatcher.drop_and_pad = 2, False
    dispatcher.num_global_tokens_per_local_expert = torch.tensor([1, 2])
    dispatcher.config = SimpleNamespace(moe_permute_fusion=False)
    dispatcher._maybe_dtoh_and_synchronize = lambda point, counts: counts
    dispatcher.tokens_per_expert = torch.tensor([1, 2])
    dispatcher.tp_size = 1
    tokens, probs = torch.tensor([[5.0], [6.0], [7.0]]), torch.tensor([0.1, 0.2, 0.3])
    sorted_tokens, counts, sorted_probs = dispatcher.dispatch_postprocess(tokens, probs)
    assert counts.tolist() == [1, 2]
    if tp_size * ep_size == 1:
        assert sorted_tokens is tokens and sorted_probs is probs
        assert dispatcher.combine_preprocess(tokens) is tokens
    else:
        assert sorted_tokens.flatten().tolist() == [6, 7, 5] and sorted_probs.tolist() == pytest.approx([0.2, 0.3, 0.1])
        assert dispatcher.combine_preprocess(tokens).flatten().tolist() == [6, 7, 5]

"""Triton's kernels for slices of logits give what torch gives, on a GPU."""

from typing import cast

import pytest
import torch
import torch.distributed as dist

from nemo_rl_lite.policy import vocab_chunks
from nemo_rl_lite.policy.vocab_chunks import LMHead, VocabReductions
from tests.linear_scores_cases import SMALL, Sizes, alone, check_everything

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    from nemo_rl_lite.policy import vocab_chunks_kernel

    alone(tmp_path_factory.mktemp("alone"))
    yield vocab_chunks_kernel
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [SMALL, Sizes(3001, 20011, 256, 8192), Sizes(4096, 16384, 512, 8192)], ids=str)
def test_the_kernels_give_what_torch_gives(sizes, kernels):
    check_everything(kernels, "cuda", sizes)


def test_a_slice_may_have_more_entries_than_an_int32_counts(kernels):
    rows, width = 2**31 // 8192 + 3, 8192
    logits = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = torch.randn(2, width, device="cuda")
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    own, head = torch.arange(rows, device="cuda") % width, LMHead(1.0, None, False, 0, world)
    found, expected = (
        module.Reader(own[part], head) for module, part in ((kernels, slice(None)), (vocab_chunks, slice(-2, None)))
    )
    found.read(logits, 0)
    expected.read(logits[-2:], 0)
    (log_total, chosen, entropy), wanted = found.totals(), expected.totals()
    torch.testing.assert_close(torch.stack([log_total, chosen])[:, -2:], wanted[:2], atol=1e-5, rtol=1e-5)
    of_logprob = torch.ones(rows, device="cuda")
    totals = VocabReductions(log_total, chosen - log_total, entropy, None)
    precise = -(logits[-2:].float() - log_total[-2:, None]).exp()
    precise.scatter_add_(1, own[-2:, None], torch.ones(2, 1, device="cuda"))
    gradient = kernels.Gradient(own, head, totals, [of_logprob, None, None, None]).of(logits, 0)
    torch.testing.assert_close(gradient[-2:].float(), precise, atol=1e-6, rtol=2**-8)

"""What a loss declares in `needs` is what torch computes from all logits, in every layout and vocabulary split."""

from pathlib import Path

import pytest

from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional


@pytest.mark.parametrize("ranks", [1, 2])
def test_entropy_and_largest_logits(ranks):
    run_ranks(Path(__file__).with_name("needs_rank.py"), [], ranks, timeout_s=300)

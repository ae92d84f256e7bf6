"""Lengths that a plan assumes, and the replicas that wait for the longest."""

from statistics import fmean

import pytest

from nemo_rl_lite.models.shape import KNOWN_MODELS, model_shape
from nemo_rl_lite.planning.lengths import SIGMA, Lengths, quantiles, shared_work, slowest_replica

SHAPE = model_shape(KNOWN_MODELS["meta-llama/Llama-3.1-8B-Instruct"])
TAIL = Lengths(prompt=130, mean=795, longest=3840)


@pytest.mark.parametrize(("mean", "most"), [(795, 3840), (1920, 3840), (3839, 3840), (1.5, 100)])
def test_quantiles_have_their_mean_and_their_tail(mean, most):
    lengths = quantiles(2048, mean, SIGMA, most)
    assert fmean(lengths) == pytest.approx(mean, rel=0.01)
    assert [*lengths] == sorted(lengths) and lengths[0] >= 1 and lengths[-1] <= most


def test_a_long_tail_reaches_the_longest():
    lengths = quantiles(2048, 795, SIGMA, 3840)
    assert lengths[1024] < 600 and lengths[-1] == lengths[-20] == 3840
    with pytest.raises(ValueError, match="is not possible"):
        quantiles(8, 200, SIGMA, 100)
    assert quantiles(3, 100, SIGMA, 100) == (100, 100, 100)


@pytest.mark.parametrize(("replicas", "idle"), [(8, 0.0), (128, 0.1), (256, 0.55), (512, 0.8)])
def test_replicas_wait_for_the_longest_sequence(replicas, idle):
    """512 sequences; the shares are those of lognormal sequences in the policy's own split of a batch."""
    assert 1 - 1 / slowest_replica(SHAPE, TAIL, 512, replicas) == pytest.approx(idle, abs=0.05)


def test_equal_sequences_leave_no_replica_idle():
    assert slowest_replica(SHAPE, Lengths(130, 512, 512), 512, 512) == 1


@pytest.mark.parametrize(
    ("sequences", "ranks", "most", "shared"),
    [(512, 2, 8192, 0.86), (512, 8, 8192, 1.0), (2048, 2, 8192, 0.11), (2048, 8, 8192, 0.17), (2048, 8, 2048, 0.31)],
)
def test_context_parallel_ranks_share_what_would_make_one_wait(sequences, ranks, most, shared):
    """On 512 GPUs, with one or four sequences each. One rank has up to `most` tokens."""
    assert shared_work(SHAPE, TAIL, sequences, 512 // ranks, ranks, most) == pytest.approx(shared, abs=0.03)

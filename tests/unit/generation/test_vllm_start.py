"""The sizes of CUDA graphs and the times of an engine's start; vLLM itself is not needed."""

import logging
from itertools import pairwise

import pytest

from nemo_rl_lite.generation.vllm.arguments import with_graph_sizes
from nemo_rl_lite.generation.vllm.worker import StartTimer
from nemo_rl_lite.observability.timer import SETUP


@pytest.mark.parametrize("most", [1, 2, 7, 8, 64, 100, 256, 300, 512, 600, 1024])
def test_graphs_reach_the_most_sequences_and_pad_little(most):
    sizes = with_graph_sizes({}, most)["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    for before, after in pairwise(sizes):
        # A batch of one more than `before` is padded to `after`.
        assert after <= max(2 * before, 2)
        assert after - before <= max(32, before / 4)


def test_graphs_of_steps_with_drafts_reach_the_most_sequences_too():
    sizes = with_graph_sizes({}, 64, tokens=4)["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    "own",
    [
        {"compilation_config": {"cudagraph_capture_sizes": [3]}},
        {"compilation_config": {"max_cudagraph_capture_size": 8}},
        {"compilation_config": 3},
        {"performance_mode": "interactivity"},
    ],
)
def test_a_user_who_decides_what_is_captured_wins(own):
    assert with_graph_sizes(own, 512) == own


def test_the_parts_of_a_start_end_where_vllm_says_so():
    SETUP.take()
    logger = logging.getLogger("vllm.v1.worker")
    level, logger.level = logger.level, logging.INFO
    try:
        with StartTimer():
            logger.info("Model loading took %s GiB memory and %.6f seconds", "0.1", 1.0)
            logger.info("something else")
            logger.info("Graph capturing finished in %.0f secs, took %.2f GiB", 2.0, 0.1)
    finally:
        logger.level = level
    assert list(SETUP.take()) == ["model", "cuda_graphs", "warm_up"]
    logger.error("Model loading took no time: the block is over")
    assert SETUP.take() == {}

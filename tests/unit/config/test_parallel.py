"""Parallel sizes, multiplied in one place."""

import itertools

import pytest
import torch

from nemo_rl_lite.config.sizes import ParallelDims

LAYOUTS = [
    ParallelDims(tp, pp, cp, ep, tp * pp * cp * dp)
    for tp, pp, cp, dp, ep in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 3), (1, 2))
    if tp * cp * dp % ep == 0
]


@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_ranks_are_those_of_megatron_core(dims):
    """Against megatron-core's own order of ranks, tensor fastest and pipeline slowest."""
    from nemo_rl_lite.compat.megatron_cpu import prepare_import

    prepare_import()
    from megatron.core.parallel_state import RankGenerator

    ranks = RankGenerator(tp=dims.tp, ep=1, dp=dims.dp, pp=dims.pp, cp=dims.cp, order="tp-cp-ep-dp-pp")
    for replica in ranks.get_ranks("tp-cp-pp"):
        assert len({dims.stage_and_replica(rank)[1] for rank in replica}) == 1
        assert sorted({dims.stage_and_replica(rank)[0] for rank in replica}) == list(range(dims.pp))
    for stage in range(dims.pp):
        assert {dims.stage_and_replica(rank)[0] for rank in dims.ranks_of_stage(stage)} == {stage}
    experts = RankGenerator(tp=1, ep=dims.ep, dp=dims.expert_dp, pp=dims.pp, cp=1, order="tp-cp-ep-dp-pp")
    assert {len(group) for group in experts.get_ranks("dp")} == {dims.expert_dp}
    assert dims.fills_world and dims.world == dims.replica * dims.dp == dims.stage * dims.pp
    assert {len(group) for group in ranks.get_ranks("dp-cp")} == {dims.dense_dp}
    assert dims.splits_weights == (dims.tp * dims.pp * dims.ep > 1)


def pipelined(stages, first, last=None, chunks=None):
    """megatron-core's configuration of 12 layers."""
    from nemo_rl_lite.compat.megatron_cpu import prepare_import

    prepare_import()
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=12,
        hidden_size=8,
        num_attention_heads=1,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )


@pytest.mark.parametrize(
    ("stages", "first", "last"),
    [(1, None, None), (2, None, None), (2, None, 5), (2, 7, 5), (3, None, 4), (4, 2, 4), (4, 3, None), (4, None, 3)],
)
def test_layers_are_spread_as_megatron_core_spreads_them(stages, first, last):
    config = pipelined(stages, first, last=last)
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    expected = [get_num_layers_to_build(config, pp_rank=stage) for stage in range(stages)]
    dims = ParallelDims(tp=1, pp=stages, cp=1, ep=1, world=stages, first_layers=first, last_layers=last)
    assert dims.stage_layers(12) == expected and sum(expected) == 12


@pytest.mark.parametrize(("stages", "chunks", "first"), [(2, 3, None), (3, 2, None), (2, 2, 4)])
def test_chunks_have_the_layers_that_megatron_core_gives_them(stages, chunks, first):
    config = pipelined(stages, first, chunks=chunks)
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    dims = ParallelDims(tp=1, pp=stages, cp=1, ep=1, world=stages, first_layers=first, chunks=chunks)
    for stage, spans in enumerate(dims.stage_spans(12)):
        for chunk, span in enumerate(spans):
            assert span.start == get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
    assert sorted(layer for spans in dims.stage_spans(12) for span in spans for layer in span) == list(range(12))


@pytest.mark.parametrize(
    ("stages", "first", "last"), [(5, None, None), (2, 6, 5), (3, None, 5), (2, None, 12), (3, 6, 6), (2, 13, None)]
)
def test_layers_that_stages_cannot_share(stages, first, last):
    dims = ParallelDims(tp=1, pp=stages, cp=1, ep=1, world=stages, first_layers=first, last_layers=last)
    with pytest.raises(ValueError, match=f"12 layers cannot be spread over {stages} pipeline stages"):
        dims.stage_layers(12)


def test_too_few_ranks_fill_nothing():
    assert not ParallelDims(tp=4, pp=1, cp=1, ep=1, world=2).fills_world
    assert ParallelDims(tp=4, pp=1, cp=1, ep=1, world=2).dp == 0
    assert ParallelDims(tp=4, pp=1, cp=1, ep=1, world=2).dense_dp == 1
    assert not ParallelDims(tp=2, pp=1, cp=1, ep=1, world=3).fills_world
    assert not ParallelDims(tp=1, pp=1, cp=1, ep=1, world=0).fills_world

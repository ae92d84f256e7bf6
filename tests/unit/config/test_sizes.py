"""What runs where, from the configuration alone."""

import pytest

from nemo_rl_lite.config.sizes import (
    adds_in_gemms,
    batch_mode,
    bucket_size,
    engine_capacity,
    engine_hosts,
    engine_ranks,
    engines,
    generation_gpus,
    on_gpus,
    parallel_dims,
    policy_ranks,
    spans_hosts,
    with_overlap,
)
from nemo_rl_lite.validation.compose import compose_config

APART = "generation.colocated.enabled=false"
RESOURCES, ENGINE = "generation.colocated.resources", "generation.vllm_cfg"
TENSOR_2 = "policy.megatron_cfg.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "ranks", "gpus", "number_of_engines", "replicas"),
    [
        ([], 1, 0, 1, 1),
        (["cluster.cpu_ranks=2", "generation.data_parallel_size=3"], 2, 0, 3, 2),
        ([APART], 1, 0, 1, 1),
        (["cluster.gpus_per_node=8"], 8, 8, 8, 8),
        (["cluster.gpus_per_node=8", TENSOR_2, "generation.vllm_cfg.tensor_parallel_size=4"], 8, 8, 2, 4),
        (["cluster.gpus_per_node=2", APART, f"{RESOURCES}.gpus_per_node=1"], 1, 1, 1, 1),
        (
            [
                "cluster.gpus_per_node=4",
                APART,
                f"{RESOURCES}.gpus_per_node=2",
                TENSOR_2,
                "generation.vllm_cfg.tensor_parallel_size=2",
            ],
            2,
            2,
            1,
            1,
        ),
        (["cluster.gpus_per_node=8", "cluster.num_nodes=4", APART, f"{RESOURCES}.num_nodes=1"], 24, 8, 8, 24),
        (["cluster.gpus_per_node=8", "algorithm=sft", APART, f"{RESOURCES}.gpus_per_node=2"], 8, 2, 2, 8),
    ],
)
def test_who_gets_how_many(overrides, ranks, gpus, number_of_engines, replicas):
    batches = ["algorithm.num_prompts_per_step=96", "policy.train_global_batch_size=768"]
    if "algorithm=sft" in overrides:
        batches = []
    micro = ["policy.train_micro_batch_size=1", "policy.precision=bfloat16"]
    config = compose_config([*overrides, *batches, *micro])
    found = (policy_ranks(config), generation_gpus(config), engines(config), parallel_dims(config).dp)
    assert found == (ranks, gpus, number_of_engines, replicas)
    assert on_gpus(config) == any("gpus_per_node" in override for override in overrides)


@pytest.mark.parametrize(
    ("nodes", "tensor", "pipeline", "expected"),
    [(1, 4, 2, (8, 1, 1)), (2, 8, 2, (16, 2, 1)), (4, 16, 1, (16, 2, 2)), (2, 2, 2, (4, 1, 4))],
)
def test_an_engine_of_more_gpus_than_a_node_has_spans_nodes(nodes, tensor, pipeline, expected):
    sizes = [f"{ENGINE}.tensor_parallel_size={tensor}", f"{ENGINE}.pipeline_parallel_size={pipeline}"]
    known = ["policy=megatron_gpu", "policy.model_name=Qwen/Qwen3-235B-A22B", "policy.train_global_batch_size=32"]
    config = compose_config([f"cluster.num_nodes={nodes}", "cluster.gpus_per_node=8", *known, *sizes])
    assert (engine_ranks(config), engine_hosts(config), engines(config)) == expected


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "mode"),
    [
        ([], False, "fixed"),
        ([], True, "fixed"),
        (["policy.precision=bfloat16"], True, "packed"),
        (["policy.precision=bfloat16"], False, "fixed"),
        (["policy=megatron_gpu"], True, "packed"),
        (["policy=megatron_gpu", "policy.sequence_packing.enabled=false"], True, "fixed"),
        (["policy=megatron_gpu", "policy.dynamic_batching.enabled=true"], True, "dynamic"),
        (["policy.sequence_packing.enabled=true"], False, "packed"),
        (["policy.dynamic_batching.enabled=true"], False, "dynamic"),
    ],
)
def test_packing_is_the_default_where_transformer_engine_can(overrides, on_gpu, mode):
    fits = ["policy.max_total_sequence_length=32"]
    assert batch_mode(compose_config([*overrides, *fits, "generation.max_new_tokens=8"]).policy, on_gpu) == mode


@pytest.mark.parametrize(
    ("ratio", "given", "memory", "nbytes"),
    [
        ("0.02", "null", 80 * 2**30, int(80 * 2**30 * 0.02)),
        ("0.5", "null", 2**40, 5 * 2**30),
        ("0.5", "1000", 2**40, 1000),
    ],
)
def test_a_bucket_of_a_refit_is_a_share_of_the_memory(ratio, given, memory, nbytes):
    config = compose_config([f"refit.buffer_memory_ratio={ratio}", f"refit.bucket_bytes={given}"])
    assert bucket_size(config.refit, memory) == nbytes


HOSTS = ["policy=megatron_gpu", "cluster.num_nodes=2", "cluster.gpus_per_node=8"]
MEGATRON = "policy.megatron_cfg"
GRADIENTS, WEIGHTS = (
    f"{MEGATRON}.distributed_data_parallel_config.overlap_{name}" for name in ("grad_reduce", "param_gather")
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (HOSTS, (True, True)),
        ([*HOSTS[1:2], "cluster.cpu_ranks=4"], (True, True)),
        (["policy=megatron_gpu", "cluster.gpus_per_node=8"], (False, False)),
        # Each host is a pipeline stage, whose replicas are there.
        ([*HOSTS, f"{MEGATRON}.pipeline_model_parallel_size=2"], (False, False)),
        ([*HOSTS, f"{MEGATRON}.optimizer.use_distributed_optimizer=false"], (True, False)),
        ([*HOSTS, f"{MEGATRON}.cuda_graph_impl=full_iteration"], (False, False)),
        ([*HOSTS, f"{GRADIENTS}=false"], (False, False)),
        ([f"{WEIGHTS}=true", "cluster.cpu_ranks=2"], (True, True)),
    ],
)
def test_communication_between_hosts_overlaps_by_default(overrides, expected):
    config = compose_config(overrides)
    options = with_overlap(config).policy.megatron_cfg.distributed_data_parallel_config
    assert (options.overlap_grad_reduce, options.overlap_param_gather) == expected
    assert spans_hosts(config) or not expected[1] or f"{WEIGHTS}=true" in overrides


def test_engines_with_partial_rollouts_have_a_share_of_one_rollout():
    partial = [
        *("algorithm.rollouts.source=queue", "generation.colocated.sleep=true", "generation.data_parallel_size=2"),
        "algorithm.loss_fn.use_importance_sampling_correction=true",
        "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
        *("algorithm.num_prompts_per_step=6", "policy.train_global_batch_size=48"),
        *("policy.train_micro_batch_size=48", "policy.logprob_batch_size=48"),
    ]
    most = compose_config().generation.vllm_cfg.max_num_seqs
    assert engine_capacity(compose_config(partial)) == 24 < most
    assert engine_capacity(compose_config([*partial, "generation.colocated.sleep=false"])) == most
    assert engine_capacity(compose_config([*partial, "algorithm.use_dynamic_sampling=true"])) == most
    assert engine_capacity(compose_config([*partial, f"{ENGINE}.max_num_seqs=8"])) == 8


@pytest.mark.parametrize(
    ("on_gpu", "overrides", "adds"),
    [
        (True, [], True),
        (False, [], False),
        (True, ["policy.megatron_cfg.peft.enabled=true"], False),
    ],
)
def test_gemms_add_gradients_on_gpus_but_not_those_of_adapters(on_gpu, overrides, adds):
    fused = "policy.megatron_cfg.gradient_accumulation_fusion=true"
    assert adds_in_gemms(compose_config([fused, *overrides]).policy.megatron_cfg, on_gpu) == adds

"""Who holds what and how batches are cut."""

from nemo_rl_lite.models.shape import KNOWN_MODELS, model_shape
from nemo_rl_lite.planning.page import batch_rows, parallel_rows, rank_rows
from nemo_rl_lite.validation.compose import compose_config

SHAPE = model_shape(KNOWN_MODELS["Qwen/Qwen3-8B"])
GPUS = ["policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=Qwen/Qwen3-8B"]
PARALLEL = "policy.megatron_cfg"


def test_stages_with_other_numbers_of_layers():
    four = ["cluster.gpus_per_node=4", f"{PARALLEL}.pipeline_model_parallel_size=4"]
    ends = [f"{PARALLEL}.num_layers_in_{end}_pipeline_stage={count}" for end, count in (("first", 10), ("last", 8))]
    rows = dict(parallel_rows(compose_config([*GPUS, *four, *ends]), SHAPE))
    assert [rows[f"stage {stage}"].partition(":")[0] for stage in range(4)] == [
        *("layers 0 to 9, embedding", "layers 10 to 18", "layers 19 to 27", "layers 28 to 35, output"),
    ]


def test_ranks_stages_and_engines():
    spread = [f"{PARALLEL}.tensor_model_parallel_size=2", f"{PARALLEL}.pipeline_model_parallel_size=2"]
    more = ["cluster.gpus_per_node=8", "generation.vllm_cfg.tensor_parallel_size=4"]
    config = compose_config([*GPUS, *spread, *more])
    rows = dict(parallel_rows(config, SHAPE))
    assert rows["policy"] == "8 ranks: tensor 2 x pipeline 2 x data 2"
    assert rows["stage 0"] == "layers 0 to 17, embedding: ranks 0-3"
    assert rows["stage 1"] == "layers 18 to 35, output: ranks 4-7"
    assert rows["engines"] == "2 of vllm, tensor 4, colocated"
    assert list(rank_rows(config)) == [
        ["node 0", "GPUs 0-1", "stage 0, replica 0", "engine 0"],
        ["node 0", "GPUs 2-3", "stage 0, replica 1", "engine 0"],
        ["node 0", "GPUs 4-5", "stage 1, replica 0", "engine 1"],
        ["node 0", "GPUs 6-7", "stage 1, replica 1", "engine 1"],
    ]


def test_an_engine_of_two_nodes():
    """The layout of NeMo-RL's grpo-qwen3-235b-16n8g, whose engines have 16 GPUs."""
    name = "Qwen/Qwen3-235B-A22B"
    sizes = {"tensor_model": 2, "pipeline_model": 8, "context": 2, "expert_model": 16}
    policy = [f"{PARALLEL}.{kind}_parallel_size={size}" for kind, size in sizes.items()]
    policy += [f"{PARALLEL}.num_layers_in_{end}_pipeline_stage=11" for end in ("first", "last")]
    engine = ["generation.vllm_cfg.tensor_parallel_size=16", "generation.vllm_cfg.expert_parallel=true"]
    nodes = ["cluster.num_nodes=16", "cluster.gpus_per_node=8", f"{PARALLEL}.sequence_parallel=true"]
    batch = ["algorithm.num_prompts_per_step=16", "algorithm.num_generations_per_prompt=32"]
    batch += ["policy.train_global_batch_size=512", "policy.max_total_sequence_length=8192"]
    config = compose_config([*GPUS, f"policy.model_name={name}", *policy, *engine, *nodes, *batch])
    rows = dict(parallel_rows(config, model_shape(KNOWN_MODELS[name])))
    assert rows["engines"] == "8 of vllm, tensor 16, experts spread, 2 nodes each, colocated"
    assert list(rank_rows(config))[2:5] == [
        ["node 1", "GPUs 0-3", "stage 0, replica 2", "engine 0"],
        ["node 1", "GPUs 4-7", "stage 0, replica 3", "engine 0"],
        ["node 2", "GPUs 0-3", "stage 1, replica 0", "engine 1"],
    ]


def test_context_parallel_ranks_share_a_replica():
    config = compose_config([*GPUS, f"{PARALLEL}.context_parallel_size=4", "cluster.gpus_per_node=8"])
    assert dict(parallel_rows(config, SHAPE))["policy"] == "8 ranks: tensor 1 x pipeline 1 x context 4 x data 2"
    assert {tuple(row[1:3]) for row in rank_rows(config)} >= {
        ("GPU 0", "stage 0, replica 0"),
        ("GPU 7", "stage 0, replica 1"),
    }
    assert "over 4 context-parallel ranks" in dict(batch_rows(config, 0, SHAPE))["micro-batch"]


def test_context_parallel_ranks_have_short_sequences_whole():
    own = [f"{PARALLEL}.context_parallel_size=2", f"{PARALLEL}.hybrid_context_parallel=true", "cluster.gpus_per_node=2"]
    config = compose_config([*GPUS, *own, "policy.sequence_packing.train_mb_tokens=4096"])
    row = dict(batch_rows(config, 0, SHAPE))["micro-batch"]
    assert "up to 2048 tokens, are on one rank; about 0% of the work is split" in row


def test_batches_add_up():
    sizes = ["algorithm.num_prompts_per_step=32", "algorithm.num_generations_per_prompt=8"]
    sizes += ["policy.train_global_batch_size=128", "policy.max_total_sequence_length=1024"]
    rows = dict(batch_rows(compose_config([*GPUS, *sizes, "cluster.gpus_per_node=2"]), 2**30, SHAPE))
    assert rows["step"] == "32 prompts x 8 responses = 256 samples, 2 optimizer steps"
    assert rows["engine"].startswith("128 samples of up to 512 tokens per turn, ")
    assert "holds 7 longest sequences" in rows["engine"]
    assert rows["optimizer step"] == "128 sequences of up to 1024 tokens, 64 per replica"
    assert "packed into one row" in rows["micro-batch"]
    preferences = dict(batch_rows(compose_config(["algorithm=dpo"]), 0, SHAPE))
    assert "pairs count twice" in preferences["optimizer step"] and "step" not in preferences

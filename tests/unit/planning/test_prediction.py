"""Predicted bytes against built models and against what was measured on GPUs."""

from dataclasses import replace

import pytest

from nemo_rl_lite.config.sizes import ParallelDims, parallel_dims
from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.models.shape import LatentShape, ModelShape, model_shape
from nemo_rl_lite.offload.residency import Component, Phase, Residency
from nemo_rl_lite.planning import memory
from nemo_rl_lite.planning.budget import render
from nemo_rl_lite.planning.memory import (
    Bytes,
    kept_activations,
    micro_batch,
    own_part,
    predict,
    slice_logits,
    token_cache_bytes,
    totals,
)
from nemo_rl_lite.planning.parameters import parameter_count, rank_parameters
from nemo_rl_lite.validation.compose import compose_config

GIB = 2**30
H100 = int(79.2 * GIB)
MEGATRON = "policy.megatron_cfg"
TENSOR, PIPELINE = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"
CHUNKS = f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"
ENGINE_TENSOR = "generation.vllm_cfg.tensor_parallel_size"
OPTIMIZER = f"{MEGATRON}.optimizer"
TWO_REPLICAS = ["cluster.cpu_ranks=2", "policy.train_micro_batch_size=64"]
SGD = [f"{OPTIMIZER}.optimizer=sgd", f"{OPTIMIZER}.use_distributed_optimizer=false"]
ONE_GPU = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu", "generation.max_new_tokens=32"]
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 96}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Latent attention, a dense layer, and two with routed experts and a shared one.
LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False}


def shape_of(model_type: str, **config: object) -> ModelShape:
    return model_shape({"model_type": model_type} | config)


SMOLLM2 = shape_of(
    "llama",
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
QWEN3 = shape_of(
    "qwen3",
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen3", MODEL_CONFIG),
        ("llama", SIZES | {"tie_word_embeddings": False}),
        ("qwen2", SIZES | {"tie_word_embeddings": True}),
        ("qwen3_moe", SIZES | EXPERTS),
        ("qwen3_moe", SIZES | EXPERTS | {"mlp_only_layers": [1]}),
        ("qwen2_moe", SIZES | EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
        ("deepseek_v3", SIZES | LATENT | {"q_lora_rank": 24}),
        ("deepseek_v3", SIZES | LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
        ("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_parameters_are_counted_as_transformers_builds_them(model_type, config):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    built = AutoConfig.for_model(model_type, **{name: value for name, value in config.items() if name != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(model_shape({"model_type": model_type} | config)) == count


def test_vllm_caches_compressed_keys_and_values_on_gpus():
    shape = shape_of("deepseek_v3", **SIZES | LATENT)
    gpus = [*ONE_GPU, "policy.model_name=a/latent", "cluster.gpus_per_node=2", f"{ENGINE_TENSOR}=2"]
    # On each tensor-parallel rank, in bfloat16.
    assert token_cache_bytes(compose_config(gpus), shape) == 3 * (20 + 8) * 2
    # The values are padded.
    whole = 3 * 4 * 2 * (12 + 8)
    assert token_cache_bytes(compose_config(["policy.model_name=a/latent"]), shape) == whole * 4


def test_ranks_together_hold_the_model():
    shape = shape_of("qwen3_moe", **SIZES | EXPERTS | {"num_hidden_layers": 4})
    overrides = [f"{TENSOR}=2", f"{PIPELINE}=2", f"{MEGATRON}.expert_model_parallel_size=4"]
    overrides += [f"{MEGATRON}.sequence_parallel=true", "cluster.gpus_per_node=8", "policy.model_name=a/moe"]
    dims = parallel_dims(compose_config([*ONE_GPU, *overrides]))
    first, last = (rank_parameters(shape, dims, stage) for stage in (0, 1))
    assert 4 * 2 * first.experts == 4 * 8 * 3 * 64 * 32
    # Norms and routers are on both tensor-parallel ranks.
    replicated = 4 * (2 * 64 + 2 * 16 + 64 * 8) + 64
    assert 2 * (first.dense + last.dense) - replicated + 8 * first.experts == parameter_count(shape)
    tied = replace(shape, tied_embeddings=True)
    assert rank_parameters(tied, dims, 1) == last and parameter_count(tied) < parameter_count(shape)


# GiB, from docs/benchmarks/runs: policy_peak_bytes of steady steps; what of it was there before the phase is in `rest`
# (policy_peak_bytes/probe, with the refit's buffer).
COLOCATED = ["policy.sequence_packing.train_mb_tokens=8192", "policy.sequence_packing.logprob_mb_tokens=16384"]
APART = ["generation.colocated.enabled=false", "policy.sequence_packing.train_mb_tokens=8192"]
THIRTEEN = [f"policy.sequence_packing.{phase}_mb_tokens={13 * 558}" for phase in ("train", "logprob")]
TWO_GPUS = ["cluster.gpus_per_node=2", "generation.colocated.resources.gpus_per_node=1"]
TWO_RANKS = ["cluster.gpus_per_node=4", f"{TENSOR}=2", "generation.vllm_cfg.tensor_parallel_size=2"]
MEASURED = {
    # grpo-chain-sum-1x-h100
    "smollm2": (SMOLLM2, ["policy.max_total_sequence_length=128"], {Phase.TRAIN: 14.9, Phase.LOGPROB: 5.98}, 2.64),
    # offload-prepare-1x-h100, states stay; no engine on the GPU. 13 sequences of 558 tokens are the longest pack there.
    "qwen3": (
        QWEN3,
        ["generation.colocated.enabled=false", *TWO_GPUS, "policy.max_total_sequence_length=640", *THIRTEEN],
        {Phase.TRAIN: 48.9, Phase.LOGPROB: 34.2},
        28.9,
    ),
    # The runs below were measured with a gated MLP that was not fused, which makes no difference to logprobs.
    # grpo-qwen3-1.7b-1x-h100
    "qwen3 colocated": (
        QWEN3,
        [*COLOCATED, "policy.max_total_sequence_length=640", "policy.train_global_batch_size=512"],
        {Phase.LOGPROB: 42.4},
        32.1,
    ),
    # grpo-qwen3-1.7b-noncolocated-2x-h200
    "qwen3 apart": (
        QWEN3,
        [*APART, *TWO_GPUS],
        {Phase.LOGPROB: 34.7},
        29.0,
    ),
    # grpo-qwen3-1.7b-noncolocated-4x-h200
    "qwen3 tensor parallel": (
        QWEN3,
        [*APART, *TWO_RANKS, "generation.colocated.resources.gpus_per_node=2"],
        {Phase.LOGPROB: 17.4},
        14.5,
    ),
}
# Each kind of place is in its table.
EVERYWHERE = [
    "offload=max_memory",
    f"{MEGATRON}.activation_checkpointing=false",
    f"{MEGATRON}.fine_grained_activation_offloading=true",
    f"{MEGATRON}.offload_modules=[core_attn,attn_proj]",
]
BATCH = ["algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"]
BATCH += ["policy.train_global_batch_size=256", "policy.model_name=a/model"]


@pytest.mark.parametrize("name", MEASURED)
def test_predictions_agree_with_what_was_measured(name, monkeypatch):
    """When these were measured, all logits existed at the same time, and the logprob phase kept gradient buffers."""
    monkeypatch.setattr(memory, "VOCABULARY_SLICE", 10**9)
    shape, overrides, peaks, rest = MEASURED[name]
    config = compose_config([*ONE_GPU, *BATCH, *overrides])
    prediction = predict(config, shape, H100)
    for phase, peak in peaks.items():
        # In logprob inference also those of the micro-batch before, and 2,048 tokens had them in float32.
        batch = micro_batch(config, training=False)
        logits = slice_logits(config, shape, batch) / GIB
        more = logits * (4 * 2048 / batch.tokens - 2) if phase is Phase.LOGPROB else 0.0
        gradients = prediction[Phase.TRAIN, Component.GRADIENTS] if phase is Phase.LOGPROB else Bytes()
        assert (totals(prediction)[phase].device + gradients.device) / GIB + more == pytest.approx(peak, rel=0.15)
        activations = prediction[phase, Component.ACTIVATIONS].device / GIB
        assert activations + more == pytest.approx(peak - rest, rel=0.06)


def tiny(*overrides: str, shape: ModelShape | None = None, device_bytes: int | None = None):
    return predict(compose_config(list(overrides)), shape or model_shape(MODEL_CONFIG), device_bytes)


@pytest.mark.parametrize(
    ("overrides", "bytes_a_parameter"),
    [
        ([], 8),
        (["policy.precision=bfloat16"], 12),
        (TWO_REPLICAS, 4),
        ([*TWO_REPLICAS, f"{OPTIMIZER}.use_distributed_optimizer=false"], 8),
        (SGD, 4),
        ([*SGD, f"{OPTIMIZER}.sgd_momentum=0.0"], 0),
    ],
)
def test_optimizer_states_are_sharded_over_replicas_and_follow_the_precision(overrides, bytes_a_parameter):
    states = tiny(*overrides)[Phase.TRAIN, Component.OPTIMIZER_STATES]
    assert states == Bytes(bytes_a_parameter * parameter_count(model_shape(MODEL_CONFIG)))


def test_a_part_of_the_optimizer_can_live_on_the_host():
    away = f"{OPTIMIZER}.optimizer_offload_fraction=0.5"
    config = [
        *ONE_GPU,
        *BATCH,
        "policy.max_total_sequence_length=128",
        "offload=cpu_optimizer",
        away,
    ]
    prediction, parameters = predict(compose_config(config), SMOLLM2, H100), parameter_count(SMOLLM2)
    for phase in Phase:
        assert prediction[phase, Component.OPTIMIZER_STATES] == Bytes(6 * parameters, 8 * parameters)


def test_what_is_released_takes_nothing_and_what_left_is_on_the_host():
    prediction = predict(
        compose_config([*ONE_GPU, *BATCH, "policy.max_total_sequence_length=128", "offload=colocated"]), SMOLLM2, H100
    )
    parameters = parameter_count(SMOLLM2)
    assert prediction[Phase.GENERATE, Component.PARAMETERS] == Bytes(host=2 * parameters)
    assert prediction[Phase.GENERATE, Component.GRADIENTS] == prediction[Phase.TRAIN, Component.KV_CACHE] == Bytes()
    generating = totals(prediction)[Phase.GENERATE]
    # The engine's share of the GPU is all that is taken of it.
    assert generating.device == int(0.5 * H100) and generating.host == 14 * parameters


def test_recomputation_and_offloading_keep_less_on_the_device():
    base = [*ONE_GPU, *BATCH, "policy.max_total_sequence_length=128"]
    plain, recomputed, offloaded = (
        predict(compose_config([*base, *overrides]), SMOLLM2, H100)[Phase.TRAIN, Component.ACTIVATIONS]
        for overrides in ([], [f"{MEGATRON}.activation_checkpointing=true"], ["offload=activations"])
    )
    assert plain.host == recomputed.host == 0
    # Layers' inputs, the last norm's two tensors, a slice of the logits, the hidden states' gradient and the matrix's.
    assert recomputed.device == 16384 * (30 * 2 * 576 + 2 * 2 * 576 + 6 * 8192 + 4 * 576) + 2 * 576 * 49152
    assert offloaded.host > 0 and offloaded.device + offloaded.host == plain.device


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["recompute_method=block", "recompute_num_layers=10"], 20 / 30),
        (["recompute_num_layers=30"], 0.0),
        (["recompute_granularity=selective", "recompute_modules=[mlp]"], 1 - (3 * 1536 + 576) / 8466),
    ],
)
def test_recomputation_of_some_layers_or_parts_keeps_the_others(options, kept):
    """The inputs of what is recomputed are kept, too. A layer of SmolLM2 keeps 8,466 elements per token."""
    on = [f"{MEGATRON}.activation_checkpointing=true", *(f"{MEGATRON}.{one}" for one in options)]
    base = [*ONE_GPU, *BATCH, "policy.max_total_sequence_length=128"]
    plain, config = compose_config(base), compose_config([*base, *on])
    batch = own_part(config, training=True)
    whole = kept_activations(plain, SMOLLM2, batch, layers=30)
    assert kept_activations(config, SMOLLM2, batch, layers=30) == pytest.approx(kept * whole, abs=0.04 * whole)


def test_logits_that_are_kept_add_their_bytes():
    recomputed = [*ONE_GPU, *BATCH, "policy.max_total_sequence_length=128", f"{MEGATRON}.activation_checkpointing=true"]
    for overrides, ranks in ((recomputed, 1), ([*recomputed, "cluster.gpus_per_node=2", f"{TENSOR}=2"], 2)):
        again, undecided, kept = (
            predict(compose_config([*overrides, f"{MEGATRON}.keep_logits={keep}"]), SMOLLM2, H100)
            for keep in ("false", "auto", "true")
        )
        training = Phase.TRAIN, Component.ACTIVATIONS
        assert undecided == again
        assert kept[training].device - again[training].device == 16384 * 49152 * 2 // ranks
        assert again == kept | {training: again[training]}


# offload-activations-1x-h100: one sequence of 8192 tokens a micro-batch; GiB of the peak that a set of modules saves.
SAVED = {"core_attn,attn_proj": 2.53, "mlp": 9.27, "qkv_linear,core_attn,attn_proj,mlp": 14.75}


@pytest.mark.parametrize("modules", SAVED)
def test_offloaded_activations_are_what_was_measured(modules):
    long = ["policy.max_total_sequence_length=8192", "policy.sequence_packing.train_mb_tokens=8192"]
    chosen = ["offload=activations", f"{MEGATRON}.offload_modules=[{modules}]"]
    config = compose_config([*ONE_GPU, *BATCH, *long, *chosen, "generation.vllm_cfg.gpu_memory_utilization=0.3"])
    offloaded = predict(config, QWEN3, H100)[Phase.TRAIN, Component.ACTIVATIONS].host
    assert offloaded / GIB == pytest.approx(SAVED[modules], rel=0.01)


def test_the_fullest_stage_of_a_pipeline_is_taken():
    wide = replace(model_shape(MODEL_CONFIG), vocabulary=10**6)
    first_fullest = tiny("cluster.cpu_ranks=2", f"{PIPELINE}=2")
    last_fullest = tiny("cluster.cpu_ranks=2", f"{PIPELINE}=2", shape=wide)
    dims = parallel_dims(compose_config(["cluster.cpu_ranks=2", f"{PIPELINE}=2"]))
    for prediction, shape, stage in ((first_fullest, model_shape(MODEL_CONFIG), 0), (last_fullest, wide, 1)):
        held = rank_parameters(shape, dims, stage).total
        assert prediction[Phase.REFIT, Component.PARAMETERS] == Bytes(4 * held)


LOW = f"{OPTIMIZER}.use_precision_aware_optimizer=true"


@pytest.mark.parametrize(
    ("overrides", "states", "gradients"),
    [
        ([], 12, 4),
        ([f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32=false"], 12, 2),
        ([LOW], 10, 4),
        ([LOW, f"{OPTIMIZER}.exp_avg_dtype=bfloat16"], 8, 4),
        ([LOW, f"{OPTIMIZER}.exp_avg_dtype=bfloat16", f"{OPTIMIZER}.exp_avg_sq_dtype=bfloat16"], 6, 4),
    ],
)
def test_low_precision_takes_fewer_bytes_per_parameter(overrides, states, gradients):
    """Master weights of the precision-aware optimizer are 16 bits that complete the bfloat16 weights."""
    config = compose_config([*ONE_GPU, *BATCH, "policy.max_total_sequence_length=128", *overrides])
    prediction, parameters = predict(config, SMOLLM2, H100), parameter_count(SMOLLM2)
    assert prediction[Phase.TRAIN, Component.OPTIMIZER_STATES].device == states * parameters
    assert prediction[Phase.TRAIN, Component.GRADIENTS].device == gradients * parameters


def test_copies_of_narrow_moments_count_where_activations_are_smaller():
    def activations(*more: str) -> int:
        config = compose_config([*ONE_GPU, *BATCH, "policy.max_total_sequence_length=128", LOW, *more])
        return predict(config, SMOLLM2, H100)[Phase.TRAIN, Component.ACTIVATIONS].device

    narrow, few = f"{OPTIMIZER}.exp_avg_dtype=bfloat16", "policy.sequence_packing.train_mb_tokens=128"
    assert activations() == activations(narrow) > 4 * parameter_count(SMOLLM2)
    assert activations(few) < activations(few, narrow) == 4 * parameter_count(SMOLLM2)
    # A captured pass keeps its activations during the step.
    graphs = f"{MEGATRON}.cuda_graph_impl=full_iteration"
    assert activations(graphs, narrow) - activations(graphs) == 4 * parameter_count(SMOLLM2)


def test_split_experts_are_counted_in_parts():
    shape, layout = model_shape(MODEL_CONFIG | EXPERTS), {"tp": 1, "pp": 1, "cp": 1, "world": 2}
    whole, spread, split = (
        rank_parameters(shape, ParallelDims(**layout, ep=ep, etp=etp), stage=0) for ep, etp in ((1, 1), (2, 1), (1, 2))
    )
    assert spread == split and 2 * split.experts == whole.experts and split.dense == whole.dense


def test_interleaved_stages_keep_more_micro_batches():
    """The first of 2 stages keeps 2 micro-batches. Of 2 chunks it keeps 5: 2 per further stage, 2 of the first chunk,
    and one in its backward pass."""
    base = ["cluster.cpu_ranks=2", f"{PIPELINE}=2", f"{MEGATRON}.activation_checkpointing=true"]
    shape = replace(model_shape(MODEL_CONFIG), layers=4, dense_layers=4)
    plain, interleaved = compose_config(base), compose_config([*base, CHUNKS])
    inputs = memory.hidden_bytes(plain, shape, own_part(plain, training=True))
    devices = [memory.training_activations(config, shape, stage=0)[0] for config in (plain, interleaved)]
    assert devices[1] - devices[0] == pytest.approx(5 * 1 * inputs - 2 * 2 * inputs, abs=1)


def test_the_table_says_how_much_is_where():
    config = compose_config([*ONE_GPU, *BATCH, "policy.max_total_sequence_length=128", *EVERYWHERE])
    table = Residency.of(config)
    rows = {row[0]: row[1:] for row in render(table, predict(config, SMOLLM2, H100))}
    assert rows["parameters"] == ["257 MiB host", "257 MiB device", "257 MiB device", "257 MiB device"]
    assert rows["gradients"] == ["-", "-", "513 MiB device", "-"]
    assert rows["optimizer states"] == ["2.0 GiB host"] * 4
    assert rows["activations"][0] == "-" and " device\n" in rows["activations"][2]
    assert rows["sum on the device"][0] == "39.6 GiB" and rows["sum on the host"][0] == "2.3 GiB"


def test_context_parallel_ranks_share_activations_and_optimizer_states():
    batch = [*BATCH, "policy.max_total_sequence_length=32768"]
    limits = [f"policy.sequence_packing.{phase}_mb_tokens=32768" for phase in ("train", "logprob")]
    two = ["cluster.gpus_per_node=2", "policy.sequence_packing.shared_prompts=false", *limits]
    alone, shared = (
        predict(compose_config([*ONE_GPU, *batch, *two, *own]), replace(QWEN3, max_positions=40960), H100)
        for own in ([], [f"{MEGATRON}.context_parallel_size=2"])
    )
    for phase in (Phase.TRAIN, Phase.LOGPROB):
        ours, whole = (one[phase, Component.ACTIVATIONS].device for one in (shared, alone))
        # The gradient of the last matrix is not shared. Values are kept once less, without the kernel for one rank.
        assert 0.48 * whole < ours < 0.53 * whole
    for component in (Component.PARAMETERS, Component.GRADIENTS, Component.OPTIMIZER_STATES):
        assert shared[Phase.TRAIN, component] == alone[Phase.TRAIN, component]


def test_shared_prompts_take_copies_of_keys_in_one_layer_at_a_time():
    """8 responses of 256 tokens to a prompt of 3,584."""
    own = [*BATCH, "policy.max_total_sequence_length=4096", "generation.max_new_tokens=512"]
    own += ["policy.sequence_packing.train_mb_tokens=16384", "policy.sequence_packing.shared_prompts"]
    plain, shared = (
        predict(compose_config([*ONE_GPU, *own[:-1], f"{own[-1]}={value}"]), QWEN3, H100) for value in ("false", "auto")
    )
    keys = 16384 * (3584 + 8 * 3840) / (3584 + 8 * 256) * QWEN3.kv_heads * QWEN3.head_dim
    for phase, most in ((Phase.TRAIN, 12 * keys), (Phase.LOGPROB, 4 * keys)):
        ours, before = (one[phase, Component.ACTIVATIONS].device for one in (shared, plain))
        # The LM head may take more than a layer.
        assert before <= ours <= before + most + 1
    assert shared[Phase.TRAIN, Component.ACTIVATIONS].device > plain[Phase.TRAIN, Component.ACTIVATIONS].device


@pytest.mark.parametrize(
    "keys", [EVERYWHERE[2:], [f"{MEGATRON}.moe_router_bias_update_rate=0.1"]], ids=["offloaded", "biases"]
)
def test_settings_that_share_no_prompts_are_planned_without(keys):
    own = [*ONE_GPU, *BATCH, "policy.max_total_sequence_length=4096", "generation.max_new_tokens=512", *keys]
    plain, shared = (
        memory.key_copies(compose_config([*own, f"policy.sequence_packing.shared_prompts={value}"]), QWEN3, True)
        for value in ("false", "auto")
    )
    assert shared == plain == 0


def test_latent_attention_shares_no_prompts():
    config = compose_config(
        [*ONE_GPU, *BATCH, "policy.max_total_sequence_length=4096", "generation.max_new_tokens=512"]
    )
    latent = replace(QWEN3, latent=LatentShape(queries=0, keys=512, rotary=64, values=128))
    assert memory.siblings_per_pack(config, QWEN3, 2048, 512, training=True) > 2
    assert memory.siblings_per_pack(config, latent, 2048, 512, training=True) == 1

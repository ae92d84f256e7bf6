"""Phase times, against figures computed by hand."""

import importlib
from dataclasses import replace
from statistics import median

import pytest

from nemo_rl_lite.config.sizes import policy_ranks
from nemo_rl_lite.models.shape import KNOWN_MODELS, model_shape
from nemo_rl_lite.planning.budget import Gpu
from nemo_rl_lite.planning.lengths import SIGMA, Lengths, quantiles
from nemo_rl_lite.planning.parameters import parameter_count
from nemo_rl_lite.planning.time import (
    ADAPTER_MOVES,
    ENGINE_STEP_S,
    LAUNCH_S,
    MFU,
    POLICY_READS,
    PROMPT_READS,
    RATE_BETWEEN,
    RATE_LINK,
    READS,
    REFIT_APART_S,
    REQUEST_S,
    SAMPLE_S,
    SERVED_ADAPTER_S,
    TOKEN_FIRST_RUNNER_S,
    TOKEN_S,
    exchange_seconds,
    free_seconds,
    generation_seconds,
    logprob_seconds,
    optimizer_step_seconds,
    predict_step,
    refit_links,
)
from nemo_rl_lite.validation.compose import compose_config

SHAPE = model_shape(KNOWN_MODELS["Qwen/Qwen3-8B"])
# Qwen3-8B: 36 layers; 8.19 B parameters, of which 0.62 B are the embedding, where nothing is multiplied. Queries are
# 4096 wide. A token takes 2 x 36 x 8 x 128 x 2 bytes of the KV cache.
MATRICES, LAYERS, QUERIES, CACHE = 7.568e9, 36, 4096, 147456
VOCABULARY, LAST = 151936 * 4096, "policy.megatron_cfg.num_layers_in_last_pipeline_stage"
LENGTHS = Lengths(prompt=100, mean=300, longest=500)
# Of an engine with 32 requests that begin together.
OWN_S = 500 * ENGINE_STEP_S + 9600 * TOKEN_S + 32 * REQUEST_S
# 32 prompts x 8 samples of 400 tokens.
TOKENS = 102_400
GPUS = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=Qwen/Qwen3-8B", "cluster.gpus_per_node=8"),
    *("algorithm.num_prompts_per_step=32", "algorithm.num_generations_per_prompt=8", "generation.max_new_tokens=512"),
    *("policy.max_total_sequence_length=1024", "policy.train_global_batch_size=256"),
    *("policy.sequence_packing.train_mb_tokens=8192", "policy.sequence_packing.logprob_mb_tokens=8192"),
    "policy.sequence_packing.shared_prompts=false",
]
SLOW_TO_COMPUTE, SLOW_TO_READ = Gpu("", 0, 1e13, 1e30), Gpu("", 0, 1e30, 1e12)
MEMORY = 80 * 2**30


def test_the_policys_phases_take_their_flops():
    config = compose_config(GPUS)
    forward = TOKENS / 8 * (2 * MATRICES + 2 * LAYERS * QUERIES * 400) / (MFU * 1e13)
    assert logprob_seconds(config, SHAPE, SLOW_TO_COMPUTE, LENGTHS) == pytest.approx(forward, rel=1e-3)
    training = 3 * forward + exchange_seconds(config, SHAPE)
    assert optimizer_step_seconds(config, SHAPE, SLOW_TO_COMPUTE, LENGTHS) == pytest.approx(training, rel=1e-3)


BLOCK = ["recompute_method=block", f"recompute_num_layers={LAYERS // 2}"]


@pytest.mark.parametrize(
    ("keys", "again"),
    [
        (["activation_checkpointing=true"], 1),
        (["activation_checkpointing=true", *BLOCK], 0.5),
        (["activation_checkpointing=true", "recompute_granularity=selective", "recompute_modules=[layernorm]"], 0),
        (["tensor_model_parallel_size=2"], 0),
    ],
)
def test_what_training_computes_again_or_not_at_all(keys, again):
    """Layers are recomputed, and the vocabulary's matrix is not. Tensor parallel ranks have half of the matrices and
    twice the tokens."""
    config = compose_config([*GPUS, *(f"policy.megatron_cfg.{key}" for key in keys)])
    layers = 2 * (MATRICES - VOCABULARY) + 2 * LAYERS * QUERIES * 400
    expected = TOKENS / 8 * ((3 + again) * layers + 3 * 2 * VOCABULARY) / (MFU * 1e13)
    expected += exchange_seconds(config, SHAPE)
    assert optimizer_step_seconds(config, SHAPE, SLOW_TO_COMPUTE, LENGTHS) == pytest.approx(expected, rel=2e-3)


def test_a_shared_prompt_takes_its_flops_once():
    """Each rank has 4 prompts of 100 tokens with 8 responses of 300, in packs of 3 groups at most."""
    config = compose_config([*GPUS, "policy.sequence_packing.shared_prompts=auto"])
    attention = 2 * LAYERS * QUERIES * (8 * 400 * 400 - 7 * 100 * 100)
    forward = 4 * (2500 * 2 * MATRICES + attention) / (MFU * 1e13)
    assert logprob_seconds(config, SHAPE, SLOW_TO_COMPUTE, LENGTHS) == pytest.approx(forward, rel=1e-3)
    training = 3 * forward + exchange_seconds(config, SHAPE)
    assert optimizer_step_seconds(config, SHAPE, SLOW_TO_COMPUTE, LENGTHS) == pytest.approx(training, rel=1e-3)
    short = Lengths(prompt=10, mean=300, longest=500)
    plain = compose_config(GPUS)
    assert logprob_seconds(config, SHAPE, SLOW_TO_COMPUTE, short) == logprob_seconds(
        plain, SHAPE, SLOW_TO_COMPUTE, short
    )


def test_replicas_on_several_hosts_exchange_gradients_and_weights():
    """A ring sends 6 bytes per parameter, without a GPU's own share. Overlapped, it takes longer than fast passes."""
    one = compose_config([*GPUS, "cluster.gpus_per_node=4"])
    key = "policy.megatron_cfg.distributed_data_parallel_config"
    apart, overlapped = (
        compose_config([*GPUS, "cluster.num_nodes=2", "cluster.gpus_per_node=4", *own])
        for own in ([f"{key}.overlap_grad_reduce=false"], [])
    )
    exchanged = 7 / 8 * 6 * parameter_count(SHAPE) / RATE_BETWEEN
    assert exchange_seconds(apart, SHAPE) == pytest.approx(exchanged)
    inside = exchange_seconds(one, SHAPE)
    assert inside == pytest.approx(3 / 4 * 6 * parameter_count(SHAPE) / RATE_LINK)
    passes = [optimizer_step_seconds(config, SHAPE, SLOW_TO_COMPUTE, LENGTHS) for config in (one, apart, overlapped)]
    passes[0] -= inside
    assert passes[1] == pytest.approx(passes[0] / 2 + exchanged, rel=1e-3)
    assert passes[2] == pytest.approx(max(passes[0] / 2, exchanged), rel=1e-3)


def test_a_refit_between_machines_takes_all_links_unless_weights_are_computed():
    """Four policy GPUs, and an engine of two: two links, and each carries half of the weights."""
    apart = [*GPUS, "cluster.num_nodes=2", "cluster.gpus_per_node=4", "generation.colocated.enabled=false"]
    apart += ["generation.colocated.resources.num_nodes=1", "generation.colocated.resources.gpus_per_node=4"]
    links = {
        1: [],
        2: ["generation.vllm_cfg.tensor_parallel_size=2"],
        4: ["generation.vllm_cfg.tensor_parallel_size=4"],
    }
    for count, own in links.items():
        config = compose_config([*apart, *own])
        assert policy_ranks(config) == 4 and refit_links(config) == count
        seconds = predict_step(config, SHAPE, 80 * 10**9, LENGTHS).refit
        assert seconds == pytest.approx(REFIT_APART_S + 2 * parameter_count(SHAPE) / (count * RATE_BETWEEN))
    merged = ["policy.megatron_cfg.peft.enabled=true", "generation.vllm_cfg.lora=merged"]
    for computed in (["+generation.vllm_kwargs.quantization=fp8_per_channel"], merged):
        assert refit_links(compose_config([*apart, *links[4], *computed])) == 1


def test_interleaved_stages_wait_less():
    """A replica's 128 sequences are 7 packs, which interleaved stages make 8 smaller ones. Filling 4 stages takes 3
    passes, or one with 3 chunks."""
    stages = [*GPUS, "policy.megatron_cfg.pipeline_model_parallel_size=4"]
    chunks = [*stages, "policy.megatron_cfg.virtual_pipeline_model_parallel_size=3"]
    plain, interleaved = (
        logprob_seconds(compose_config(overrides), SHAPE, SLOW_TO_COMPUTE, LENGTHS) for overrides in (stages, chunks)
    )
    assert plain / interleaved == pytest.approx((7 + 3) / 7 / ((8 + 1) / 8), rel=1e-3)


def test_small_micro_batches_take_their_launches():
    """A rank has 12,800 tokens, which are two packs; padded, its 32 sequences are 16 pairs."""
    packed = compose_config(GPUS)
    assert logprob_seconds(packed, SHAPE, SLOW_TO_READ, LENGTHS) == pytest.approx(2 * LAYERS * LAUNCH_S)
    training = 2 * 2 * LAYERS * LAUNCH_S + exchange_seconds(packed, SHAPE)
    assert optimizer_step_seconds(packed, SHAPE, SLOW_TO_READ, LENGTHS) == pytest.approx(training)
    sizes = ["policy.train_micro_batch_size=2", "policy.logprob_batch_size=2"]
    padded = compose_config([*GPUS, "policy.sequence_packing.enabled=false", *sizes])
    assert logprob_seconds(padded, SHAPE, SLOW_TO_READ, LENGTHS) == pytest.approx(16 * LAYERS * LAUNCH_S)


def test_each_micro_batch_reads_weights_and_adds_to_gradients():
    """Two packs per rank. A forward pass reads 2 bytes per parameter, training reads and writes 16."""
    config, gpu = compose_config(GPUS), Gpu("", 0, 1e30, 1e10)
    read = 2 * 2 * parameter_count(SHAPE) / (POLICY_READS * 1e10)
    assert logprob_seconds(config, SHAPE, gpu, LENGTHS) == pytest.approx(read, rel=1e-3)
    training = 8 * read + exchange_seconds(config, SHAPE)
    assert optimizer_step_seconds(config, SHAPE, gpu, LENGTHS) == pytest.approx(training, rel=1e-3)


@pytest.mark.parametrize(("nodes", "rate"), [(1, RATE_LINK), (4, RATE_BETWEEN)])
def test_tensor_parallel_ranks_exchange_hidden_states(nodes, rate):
    """A ring of 4 sums 2 outputs per layer, each of 1.5 times the hidden states of a replica's tokens."""
    plain = [*GPUS, f"cluster.num_nodes={nodes}", f"cluster.gpus_per_node={8 // nodes}"]
    config = compose_config([*plain, "policy.megatron_cfg.tensor_model_parallel_size=4"])
    slow = Gpu("", 0, 1e14, 1e30)
    moved = LAYERS * 2 * 1.5 * TOKENS / 2 * 4096 * 2 / rate
    alone = logprob_seconds(compose_config(plain), SHAPE, slow, LENGTHS)
    assert logprob_seconds(config, SHAPE, slow, LENGTHS) - alone == pytest.approx(moved, rel=0.05)


def test_expert_parallel_ranks_send_tokens_to_experts_and_back():
    moe = model_shape(KNOWN_MODELS["Qwen/Qwen3-30B-A3B"])
    few, many = (
        logprob_seconds(
            compose_config([*GPUS, f"policy.megatron_cfg.expert_model_parallel_size={size}"]),
            moe,
            Gpu("", 0, 1e11, 1e30),
            LENGTHS,
        )
        for size in (1, 8)
    )
    sent = moe.layers * 2 * moe.experts_per_token * 7 / 8 * TOKENS / 8 * moe.hidden * 2
    assert many - few == pytest.approx(sent / RATE_LINK, rel=1e-3)


def test_a_pipeline_is_as_fast_as_its_busiest_stage():
    """The last stage has the vocabulary's matrix, too. With 16 layers, instead of 18, it is less busy than the first,
    which has 20."""
    two = [*GPUS, "policy.megatron_cfg.pipeline_model_parallel_size=2"]
    layer = (2 * (MATRICES - VOCABULARY) / LAYERS) + 2 * QUERIES * 400
    for own, busiest in (([], 18 * layer + 2 * VOCABULARY), ([f"{LAST}=16"], 20 * layer), ([f"{LAST}=4"], 32 * layer)):
        seconds = logprob_seconds(compose_config([*two, *own]), SHAPE, SLOW_TO_COMPUTE, LENGTHS)
        # Four replicas, of which each has four packs, and the fill of the pipeline.
        assert seconds == pytest.approx(TOKENS / 4 / 4 * 5 * busiest / (MFU * 1e13), rel=1e-3)
    seconds = logprob_seconds(compose_config([*two, f"{LAST}=12"]), SHAPE, SLOW_TO_READ, LENGTHS)
    assert seconds == pytest.approx(5 * 24 * LAUNCH_S)


@pytest.mark.parametrize(
    ("prompt", "overrides", "share"),
    # Samples of a short prompt are on different engines.
    [(100, [], 1), (600, [], PROMPT_READS), (600, ["+generation.vllm_kwargs.attention_backend=CUSTOM"], 1 / 8)],
)
def test_engines_read_weights_and_caches(prompt, overrides, share):
    """Each of 8 engines has 32 requests, and room for all. A response of n tokens reads its cache n times, which has n
    / 2 of them on average."""
    config, squares = compose_config([*GPUS, *overrides]), sum(one * one for one in quantiles(32, 300, SIGMA, 500))
    assert squares > 1.2 * 32 * 300**2
    read = 500 * 2 * MATRICES + (9600 * prompt * share + squares / 2) * CACHE
    lengths = replace(LENGTHS, prompt=prompt)
    seconds = generation_seconds(config, SHAPE, SLOW_TO_READ, MEMORY, lengths)
    assert seconds == pytest.approx(read / (READS * 1e12) + 9600 * SAMPLE_S, rel=1e-3)
    free = free_seconds(config, SHAPE, SLOW_TO_READ, MEMORY, lengths)
    assert free == 0 and seconds > OWN_S


def test_adapters_move_the_inputs_and_outputs_of_their_layers():
    lora = [*GPUS, "policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.dim=16"]
    slow = Gpu("", 0, 1e30, 1e10)
    plain, adapted = (logprob_seconds(compose_config(own), SHAPE, slow, LENGTHS) for own in (GPUS, lora))
    # qkv, proj, gate and up, down. A rank has an eighth of the tokens.
    elements = LAYERS * (4096 + 6144 + 4096 + 4096 + 4096 + 2 * 12288 + 12288 + 4096)
    moved_s = TOKENS / 8 * elements * ADAPTER_MOVES * 2 / (POLICY_READS * slow.bandwidth)
    assert adapted - plain == pytest.approx(moved_s, rel=1e-3)


def test_engines_apply_adapters_in_each_step():
    lora = [*GPUS, "policy.megatron_cfg.peft.enabled=true"]
    merged, applied = (
        generation_seconds(
            compose_config([*lora, f"generation.vllm_cfg.lora={way}"]), SHAPE, SLOW_TO_READ, MEMORY, LENGTHS
        )
        for way in ("merged", "adapters")
    )
    # Four adapters per layer.
    assert applied - merged == pytest.approx(500 * LAYERS * 4 * SERVED_ADAPTER_S)


def test_engines_compute_where_that_takes_longer():
    """The 32 prompts of an engine are computed once, and each of its 9,600 tokens."""
    config = compose_config(GPUS)
    linear = (3200 + 9600) * 2 * MATRICES + 3200 * 2 * LAYERS * QUERIES * 100
    attention = 32 * 2 * LAYERS * QUERIES * (400 * 400 - 100 * 100)
    seconds = generation_seconds(config, SHAPE, SLOW_TO_COMPUTE, MEMORY, LENGTHS)
    assert seconds == pytest.approx((linear + attention) / (MFU * 1e13) + 9600 * SAMPLE_S, rel=1e-3)


@pytest.mark.parametrize("replay", [False, True])
def test_engines_that_record_experts_take_longer_per_token(replay):
    moe, gpu = model_shape(KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]), Gpu("", 0, 1e30, 1e30)
    config = compose_config([*GPUS, f"policy.router_replay.enabled={replay}"])
    seconds = generation_seconds(config, moe, gpu, 2 * MEMORY, LENGTHS)
    assert seconds == pytest.approx(OWN_S + 9600 * (TOKEN_FIRST_RUNNER_S - TOKEN_S) * replay)


def test_fast_gpus_wait_for_the_scheduler():
    config, gpu = compose_config(GPUS), Gpu("", 0, 1e30, 1e30)
    assert generation_seconds(config, SHAPE, gpu, MEMORY, LENGTHS) == pytest.approx(OWN_S)
    assert free_seconds(config, SHAPE, gpu, MEMORY, LENGTHS) == pytest.approx(OWN_S - 9600 * SAMPLE_S)


@pytest.mark.parametrize("limit", ["requests", "memory"])
def test_requests_wait_for_room(limit):
    """With room for 8 of 32 requests, an engine takes 4 x 300 + 200 steps instead of 500."""
    cache_of_8 = 8 * 400 * CACHE
    memory = int((2 * 8.19e9 + cache_of_8 + CACHE * 10) / 0.5) if limit == "memory" else MEMORY
    more = ["generation.vllm_cfg.max_num_seqs=8"] if limit == "requests" else []
    config = compose_config([*GPUS, "generation.vllm_cfg.gpu_memory_utilization=0.5", *more])
    seconds = generation_seconds(config, SHAPE, Gpu("", 0, 1e30, 1e30), memory, LENGTHS)
    assert seconds == pytest.approx(1400 * ENGINE_STEP_S + 9600 * TOKEN_S + 32 * REQUEST_S, rel=1e-2)


def apart(engines: int) -> list[str]:
    return ["generation.colocated.enabled=false", f"generation.colocated.resources.gpus_per_node={engines}"]


def test_more_engines_never_take_longer_and_never_does_a_policy_of_more_gpus():
    config = {engines: compose_config([*GPUS, *apart(engines)]) for engines in (4, 6, 7)}
    for gpu in (SLOW_TO_COMPUTE, SLOW_TO_READ, Gpu("", 0, 1e15, 3e12)):
        generation = [generation_seconds(one, SHAPE, gpu, MEMORY, LENGTHS) for one in config.values()]
        assert generation == sorted(generation, reverse=True)
        training = [optimizer_step_seconds(one, SHAPE, gpu, LENGTHS) for one in config.values()]
        assert training == sorted(training)


@pytest.fixture(scope="module")
def plan_check():
    """scripts/bench/plan_check.py, which imports more than the other tests."""
    return importlib.import_module("plan_check")


@pytest.fixture(scope="module")
def compared(plan_check):
    """Run -> phase -> predicted and measured seconds, of the recorded runs."""
    return {run["name"]: {row[0]: row[2:] for row in plan_check.of_run(run)} for run in plan_check.runs()}


def test_held_out_records_of_dense_models_are_within_15_percent(plan_check):
    held_out = [one for one in plan_check.RECORDS if not one.fitted and one.kind == "dense"]
    assert len(held_out) >= 7
    for one in held_out:
        measured = {phase: one.measured(phase) for phase in one.predicted()}
        compared = {phase: seconds for phase, seconds in measured.items() if seconds and seconds > plan_check.MUCH_S}
        assert compared and {phase: one.predicted()[phase] for phase in compared} == pytest.approx(compared, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("experts", 7), ("tensor parallel", 3), ("pipeline", 3), ("prompts of 2,048", 3), ("adapters", 6)],
)
def test_held_out_records_of_larger_models_are_near(plan_check, kind, count):
    held_out = [one for one in plan_check.RECORDS if not one.fitted and one.kind.startswith(kind)]
    ratios = [
        seconds / one.measured(phase)
        for one in held_out
        for phase, seconds in one.predicted().items()
        if (one.measured(phase) or 0) > plan_check.MUCH_S
    ]
    assert ratios == pytest.approx([1] * count, rel=0.15)


def test_the_chosen_split_of_a_measured_grid_is_within_5_percent_of_the_fastest(plan_check):
    measured = {one.setting: one.measured("step time") for one in plan_check.GRID}
    chosen = min(plan_check.GRID, key=lambda one: one.predicted()["step time"])
    assert measured[chosen.setting] <= 1.05 * min(measured.values()) < 0.7 * max(measured.values())


@pytest.mark.parametrize(("phase", "most"), [("generation", 1.5), ("logprob", 1.9), ("train", 1.5)])
def test_predictions_are_near_what_runs_measured(compared, phase, most):
    """The newest runs compute logprobs faster than those that the constants were chosen from."""
    found = [run[phase] for run in compared.values() if phase in run]
    ratios = [predicted / measured for predicted, measured in found]
    assert len(ratios) >= 20 and 0.85 < median(ratios) < 1 + (most - 1) / 3
    assert sum(2 / 3 < ratio < most for ratio in ratios) >= 0.9 * len(ratios)


def test_a_division_is_compared_better_than_its_seconds(compared):
    """Two H200 that take turns, against one for each side."""
    runs = ("qwen3-1.7b-noncolocated-1-1", "refit-dp2-2")
    predicted, measured = zip(*(compared[name]["step time"] for name in runs), strict=True)
    assert predicted[0] / predicted[1] == pytest.approx(measured[0] / measured[1], rel=0.1)

"""What `auto` becomes is what the predicted bytes leave room for."""

from dataclasses import replace

import pytest

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import engine_share, keeps_partial_rollouts, with_overlap
from nemo_rl_lite.models.shape import KNOWN_MODELS, model_shape
from nemo_rl_lite.offload.residency import Component, Phase
from nemo_rl_lite.planning.automatic import KEEPING_SHARE, MOST_TOKENS, USED, resolve_auto
from nemo_rl_lite.planning.budget import budget, speed_of
from nemo_rl_lite.planning.lengths import assumed_lengths
from nemo_rl_lite.planning.time import optimizer_step_seconds
from nemo_rl_lite.validation.compose import compose_config

GPU = 80 * 2**30
SHARED = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu"]
BATCH = ["algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"]
BATCH += ["policy.train_global_batch_size=512"]
CORRECTED = [
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
]
SHARE = ["generation.vllm_cfg.gpu_memory_utilization=0.4"]
ASLEEP = "generation.colocated.sleep=true"
SHORT = ["policy.max_total_sequence_length=128"]
KEEP = "policy.megatron_cfg.keep_logits"
SMALL, MIDDLE, LARGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B"


def settled(model: str, *overrides: str, gpu_bytes: int = GPU) -> tuple[Config, list[str]]:
    config = compose_config([*SHARED, *BATCH, f"policy.model_name={model}", *overrides])
    found = resolve_auto(config, model_shape(KNOWN_MODELS[model]), gpu_bytes)
    return found.config, list(found.reasons)


def share(model: str, config: Config, phase: Phase) -> float:
    return budget(config, model_shape(KNOWN_MODELS[model]), GPU).device[phase] / GPU


def test_engines_of_a_small_model_stay_awake():
    config, (moves, share_of_it, tokens, logits) = settled(SMALL, "offload=auto")
    assert isinstance(config.generation.vllm_cfg.gpu_memory_utilization, float) and "of its GPU" in share_of_it
    assert config.generation.colocated.sleep is False and config.policy.offload_for_generation == []
    packing = config.policy.sequence_packing
    assert packing.train_mb_tokens == packing.logprob_mb_tokens and 16384 < packing.train_mb_tokens <= MOST_TOKENS
    assert "awake" in moves and "fit a GPU together" in moves and f"{packing.train_mb_tokens:,}" in tokens
    assert config.policy.megatron_cfg.keep_logits is True and "are kept for the backward pass" in logits


def test_the_largest_micro_batch_is_the_largest_that_fits():
    config, _ = settled(MIDDLE, f"{KEEP}=false")
    assert config.generation.colocated.sleep is True
    packing = config.policy.sequence_packing
    assert isinstance(packing.train_mb_tokens, int) and packing.train_mb_tokens < MOST_TOKENS
    more = f"policy.sequence_packing.train_mb_tokens={packing.train_mb_tokens + 1024}"
    larger, _ = settled(MIDDLE, f"{KEEP}=false", more)
    assert config.generation.vllm_cfg.gpu_memory_utilization == 0.5
    assert share(MIDDLE, config, Phase.TRAIN) <= USED < share(MIDDLE, larger, Phase.TRAIN)


def test_logits_are_kept_where_micro_batches_stay_nearly_as_large():
    """Micro-batches that fill the GPU leave no room for them, so these shrink a little; given ones do not."""
    recomputed, _ = settled(MIDDLE, f"{KEEP}=false")
    tokens = recomputed.policy.sequence_packing.train_mb_tokens
    config, reasons = settled(MIDDLE)
    most = config.policy.sequence_packing.train_mb_tokens
    assert config.policy.megatron_cfg.keep_logits is True and KEEPING_SHARE * tokens <= most < tokens
    assert f"{most:,} tokens" in reasons[-1] and share(MIDDLE, config, Phase.TRAIN) <= USED
    asked, reasons = settled(MIDDLE, f"{KEEP}=true")
    assert asked.policy.sequence_packing.train_mb_tokens == most and "logits" not in "".join(reasons)
    for given, kept in ((most, True), (most + 1024, False)):
        config, reasons = settled(MIDDLE, f"policy.sequence_packing.train_mb_tokens={given}")
        assert config.policy.megatron_cfg.keep_logits is kept and "GiB" in reasons[-1]


def test_no_more_leaves_than_what_makes_room():
    middle, (moves, *_) = settled(MIDDLE, "offload=auto")
    assert middle.policy.offload_for_generation == ["gradients"]
    assert share(MIDDLE, middle, Phase.GENERATE) <= USED < share(MIDDLE, settled(MIDDLE)[0], Phase.GENERATE)
    assert "gradients are offloaded" in moves and "phase train" in moves
    large, _ = settled(LARGE, "offload=auto")
    assert set(large.policy.offload_for_generation) == {"gradients", "parameters", "optimizer_states"}
    roomy, _ = settled(MIDDLE, "offload=auto", gpu_bytes=600 * 2**30)
    assert roomy.generation.colocated.sleep is False
    assert roomy.policy.sequence_packing.train_mb_tokens == MOST_TOKENS


def test_recorded_training_passes_have_room_in_all_phases_and_what_they_use_stays():
    graphs, plain = "policy.megatron_cfg.cuda_graph_impl=full_iteration", settled(MIDDLE, "offload=auto", ASLEEP)[0]
    config, _ = settled(MIDDLE, "offload=auto", ASLEEP, graphs)
    assert set(config.policy.offload_for_generation) <= {"optimizer_states"}
    own, others = (one.policy.sequence_packing.train_mb_tokens for one in (config, plain))
    assert 1024 <= own < others
    assert all(share(MIDDLE, config, phase) <= USED for phase in Phase)
    bytes_of = budget(config, model_shape(KNOWN_MODELS[MIDDLE]), GPU).prediction
    assert bytes_of[Phase.GENERATE, Component.ACTIVATIONS] == bytes_of[Phase.TRAIN, Component.ACTIVATIONS]
    assert bytes_of[Phase.LOGPROB, Component.ACTIVATIONS].device > bytes_of[Phase.TRAIN, Component.ACTIVATIONS].device


@pytest.mark.parametrize("model", [SMALL, LARGE])
def test_engines_that_generate_ahead_stay_awake(model):
    config, (moves, *_) = settled(model, "algorithm.rollouts.source=one_step_off", *CORRECTED)
    assert config.generation.colocated.sleep is False
    assert ("although" in moves) == (model == LARGE)


@pytest.mark.parametrize("model", [SMALL, LARGE])
def test_engines_of_a_queue_sleep_if_they_do_not_fit_beside_the_policy(model):
    config, (moves, *_) = settled(model, "algorithm.rollouts.source=queue", *CORRECTED)
    assert keeps_partial_rollouts(config) is config.generation.colocated.sleep is (model == LARGE)
    assert ("because policy and awake engines need" in moves) == (model == LARGE)
    own = "algorithm.rollouts.in_flight_weight_updates=false"
    of_one_version, _ = settled(model, "algorithm.rollouts.source=queue", own, *CORRECTED)
    assert of_one_version.generation.colocated.sleep is False


def test_what_a_command_says_stays():
    packs = "policy.sequence_packing"
    config, reasons = settled(
        SMALL,
        *SHARE,
        "generation.colocated.sleep=true",
        f"{KEEP}=false",
        f"{packs}.train_mb_tokens=4096",
        f"{packs}.logprob_mb_tokens=8192",
    )
    limits = config.policy.sequence_packing
    assert (limits.train_mb_tokens, limits.logprob_mb_tokens) == (4096, 8192) and not reasons
    assert config.generation.colocated.sleep is True and engine_share(config.generation) == 0.4
    # The command wants room for engines that wake up, so these sleep.
    assert settled(SMALL, "offload=pinned")[0].generation.colocated.sleep is True
    held, _ = settled(SMALL, "offload=auto", ASLEEP)
    assert held.generation.colocated.sleep is True and held.policy.offload_for_generation == []


def test_an_engine_takes_what_its_sequences_need_as_far_as_there_is_room():
    """Twice as many tokens of cache take twice the bytes; more than all sequences need is left to the policy."""
    lengths = ([f"policy.max_total_sequence_length={n}", "generation.max_new_tokens=128"] for n in (256, 512))
    short, long = (engine_share(settled(SMALL, *own)[0].generation) for own in lengths)
    assert 0.03 < short < long < 0.5
    cache = 512 * 256 * 2 * 30 * 3 * 64 * 2 / GPU
    assert long - short == pytest.approx(cache, abs=0.011)
    # What leaves the GPU while engines generate makes room for more than half of it.
    middle = ["policy.max_total_sequence_length=4096", "generation.max_new_tokens=2048"]
    moved, _ = settled(MIDDLE, *middle, "offload=pinned")
    assert engine_share(moved.generation) > 0.7 and share(MIDDLE, moved, Phase.GENERATE) <= USED
    assert engine_share(settled(MIDDLE, *middle, "offload=none")[0].generation) == 0.5


def test_more_leaves_for_a_cache_that_holds_more_requests_if_the_host_has_room():
    """Engines of two nodes hold half of their requests beside the optimizer states, if all are long."""
    config = compose_config(["recipes=grpo-qwen3-235b-a22b-16n8g-ep16"])
    shape = model_shape(KNOWN_MODELS[config.policy.model_name])
    much, little = (resolve_auto(config, shape, GPU, host_bytes=gib * 2**30) for gib in (1024, 200))
    assert much.config.policy.offload_for_generation == ["gradients", "parameters", "optimizer_states"]
    assert any("larger KV cache" in reason for reason in much.reasons)
    assert little.config.policy.offload_for_generation == ["gradients", "parameters"]
    assert not any("larger KV cache" in reason for reason in little.reasons)
    cache = [
        budget(one.config, shape, GPU).prediction[Phase.GENERATE, Component.KV_CACHE].device for one in (much, little)
    ]
    assert cache[0] > 1.5 * cache[1]


def test_nothing_more_leaves_if_the_cache_holds_all_requests():
    config, reasons = settled(MIDDLE, *SHORT, "generation.max_new_tokens=64")
    assert "optimizer_states" not in config.policy.offload_for_generation
    assert not any("larger KV cache" in reason for reason in reasons)


def test_without_engines_on_the_gpu_only_micro_batches_are_chosen():
    apart = ["cluster.gpus_per_node=2", "generation.colocated.enabled=false"]
    config, (tokens, _) = settled(SMALL, *apart, "generation.colocated.resources.gpus_per_node=1", "offload=auto")
    assert config.policy.offload_for_generation == [] and "65,536" in tokens
    assert engine_share(config.generation) == 0.9
    supervised = compose_config(
        ["algorithm=sft", "cluster.gpus_per_node=1", "policy=megatron_gpu", "offload=auto", *SHORT]
    )
    found = resolve_auto(supervised, model_shape(KNOWN_MODELS[SMALL]), GPU)
    assert len(found.reasons) == 2 and isinstance(found.config.policy.sequence_packing.train_mb_tokens, int)


def test_only_overlap_is_settled_without_facts():
    config = compose_config([*SHARED, f"policy.model_name={SMALL}", "offload=auto"])
    shape = model_shape(KNOWN_MODELS[SMALL])
    overlap = with_overlap(config)
    assert resolve_auto(config, None, GPU).config == resolve_auto(config, shape, None).config == overlap
    on_cpus = compose_config(["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=auto"])
    assert resolve_auto(on_cpus, shape, None).config == with_overlap(on_cpus)


def test_a_run_on_several_hosts_says_that_communication_overlaps():
    config, reasons = settled(SMALL, "cluster.num_nodes=2", "offload=none")
    assert config.policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce is True
    assert any("because they are on several hosts" in reason for reason in reasons)
    assert not any("several hosts" in reason for reason in settled(SMALL, "offload=none")[1])


def test_ranks_that_share_sequences_have_larger_micro_batches():
    two = ["cluster.gpus_per_node=2", "policy.max_total_sequence_length=1024"]
    tokens = [
        settled(SMALL, *two, f"policy.megatron_cfg.context_parallel_size={ranks}")[
            0
        ].policy.sequence_packing.train_mb_tokens
        for ranks in (1, 2)
    ]
    assert tokens[0] <= MOST_TOKENS < tokens[1] <= 2 * MOST_TOKENS


def test_pipeline_stages_train_on_smaller_micro_batches_that_save_time():
    few = ["policy.train_global_batch_size=64", "cluster.gpus_per_node=2", "offload=auto"]
    few += ["policy.max_total_sequence_length=4096", "generation.max_new_tokens=2048"]
    stages = "policy.megatron_cfg.pipeline_model_parallel_size=2"
    config, reasons = settled(MIDDLE, *few, stages)
    assert config.policy.sequence_packing.train_mb_tokens <= config.policy.sequence_packing.logprob_mb_tokens / 2
    assert any(reason.endswith("so that pipeline stages wait less") for reason in reasons)
    shape, gpu = model_shape(KNOWN_MODELS[MIDDLE]), speed_of(GPU)[1]

    def seconds(factor: float) -> float:
        packs = config.policy.sequence_packing
        packs = replace(packs, train_mb_tokens=int(factor * int(packs.train_mb_tokens)))
        changed = replace(config, policy=replace(config.policy, sequence_packing=packs))
        return optimizer_step_seconds(changed, shape, gpu, assumed_lengths(config))

    assert seconds(2) > 1.02 * seconds(1) and seconds(0.5) > 0.98 * seconds(1)
    settled(MIDDLE, *few, stages, "generation.max_new_tokens=1")
    kept = settled(MIDDLE, *few, stages, "policy.sequence_packing.train_mb_tokens=8192")
    assert kept[0].policy.sequence_packing.train_mb_tokens == 8192

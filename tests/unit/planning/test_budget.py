"""What is added to the predicted components, and what fits."""

import json

import pytest

from nemo_rl_lite.models.shape import KNOWN_MODELS, model_shape
from nemo_rl_lite.offload.residency import Component, Phase
from nemo_rl_lite.planning.budget import (
    OVERHEAD_ALONE,
    OVERHEAD_APART,
    OVERHEAD_SHARED,
    budget,
    engines_copy,
    refit_bytes,
)
from nemo_rl_lite.planning.memory import Bytes, engine_weights, token_cache_bytes
from nemo_rl_lite.planning.page import largest_micro_batch, preset_budgets
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.pages import ROOT

GPU = int(79.2 * 2**30)
MODEL = model_shape(KNOWN_MODELS["Qwen/Qwen3-1.7B"])
ONE = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=Qwen/Qwen3-1.7B"]
SFT = ["algorithm=sft", "cluster.gpus_per_node=1", "policy=megatron_gpu", "policy.model_name=Qwen/Qwen3-1.7B"]
THROUGH_A_BUFFER = ["refit.cuda_ipc=false"]
APART = [
    "cluster.gpus_per_node=2",
    "generation.colocated.enabled=false",
    "generation.colocated.resources.gpus_per_node=1",
]


def planned(overrides, gpu=GPU):
    return budget(compose_config(overrides), MODEL, gpu)


def test_buckets_contexts_and_components_add_up():
    one = planned([*ONE, *THROUGH_A_BUFFER, "refit.bucket_bytes=1000000000"])
    assert set(one.buffers.values()) == {2_000_000_000} and one.overhead == OVERHEAD_SHARED
    training = sum(nbytes.device for (phase, _), nbytes in one.prediction.items() if phase is Phase.TRAIN)
    assert one.device[Phase.TRAIN] == training + 2_000_000_000 + one.overhead
    assert one.policy[Phase.TRAIN] == training + 2_000_000_000


def test_a_bucket_is_as_large_as_the_largest_tensor_and_no_larger_than_the_model():
    embedding, weights = 151936 * 2048 * 2, 3_440_000_000
    one = [*ONE, *THROUGH_A_BUFFER]
    assert planned([*one, "refit.bucket_bytes=1000"]).policy_buffers == 2 * embedding
    assert planned([*one, "refit.bucket_bytes=90000000000"]).policy_buffers == pytest.approx(weights, rel=0.01)
    three = [*ONE, *APART, "refit.num_buffers=3", "refit.bucket_bytes=1000000000"]
    assert planned(three).policy_buffers == 3_000_000_000


def test_an_engines_share_has_room_for_its_draft(tmp_path):
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_hidden_layers": 1, "head_dim": 128}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    own = ["generation.speculation=eagle3", f"generation.draft_model={tmp_path}"]
    plain, drafts = compose_config(ONE), compose_config([*ONE, *own])
    assert engine_weights(drafts, MODEL) - engine_weights(plain, MODEL) == 1000
    assert token_cache_bytes(drafts, MODEL) - token_cache_bytes(plain, MODEL) == 2 * 8 * 128 * 2
    tensor = "generation.vllm_cfg.tensor_parallel_size=2"
    split = compose_config([*ONE, *own, tensor, "cluster.gpus_per_node=2"])
    assert token_cache_bytes(split, MODEL) == token_cache_bytes(drafts, MODEL) / 2
    assert planned([*ONE, *own]).engine_room < planned(ONE).engine_room


def test_layers_for_multi_token_prediction_are_a_draft_too(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"vocab_size": 100, "max_position_embeddings": 64, "num_nextn_predict_layers": 1, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    shape, length = model_shape(sizes), ["policy.max_total_sequence_length=64", "generation.max_new_tokens=16"]
    plain = compose_config([*ONE, f"policy.model_name={tmp_path}", *length])
    drafts = compose_config([*ONE, f"policy.model_name={tmp_path}", *length, "generation.speculation=mtp"])
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert engine_weights(drafts, shape) - engine_weights(plain, shape) == (layer + 2 * 64 * 64) * 2
    assert token_cache_bytes(drafts, shape) == token_cache_bytes(plain, shape) / 3 * 4


def test_an_engine_that_copies_has_one_bucket_in_the_refit():
    one = planned([*ONE, "refit.bucket_bytes=1000000000"])
    assert one.buffers == {Phase.GENERATE: 0, Phase.LOGPROB: 0, Phase.TRAIN: 0, Phase.REFIT: 1_000_000_000}
    assert one.policy_buffers == 0


def test_an_engine_that_applies_adapters_has_them_next_to_its_weights():
    lora = [*ONE, "policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.dim=16"]
    merged, adapters = ([*lora, f"generation.vllm_cfg.lora={way}"] for way in ("merged", "adapters"))
    # The inputs and outputs of a layer's seven projections, in bfloat16.
    own = 28 * 16 * (3 * 2048 + 4096 + 2048 + 2048 + 2 * 2048 + 2 * 6144 + 6144 + 2048) * 2
    assert refit_bytes(compose_config(adapters), MODEL) == own
    held = [planned(way).prediction[Phase.GENERATE, Component.GENERATION_WEIGHTS].device for way in (merged, adapters)]
    assert held[1] - held[0] == own and held[0] == refit_bytes(compose_config(merged), MODEL)
    asleep = [planned(way).prediction[Phase.TRAIN, Component.GENERATION_WEIGHTS] for way in (merged, adapters)]
    assert asleep == [Bytes(), Bytes(host=held[1])]
    assert engines_copy(compose_config(adapters)) and not engines_copy(compose_config(merged))


def test_an_engine_that_stays_awake_shares_the_frozen_weights_after_the_start():
    lora = [*ONE, "policy.megatron_cfg.peft.enabled=true", "generation.vllm_cfg.lora=adapters"]
    awake = [*lora, "generation.colocated.sleep=false"]
    shares, keeps = planned(awake), planned([*awake, *THROUGH_A_BUFFER])
    training = [one.prediction[Phase.TRAIN, Component.PARAMETERS].device for one in (shares, keeps)]
    attention = 28 * (16 + 2 * 8) * 128 * 2048 * 2
    shared = refit_bytes(compose_config([*ONE, "policy.megatron_cfg.peft.enabled=true"]), MODEL) - attention
    assert training[1] - training[0] == shared
    # The start has both copies.
    assert shares.buffers[Phase.TRAIN] == 0 and shares.buffers[Phase.REFIT] > shared
    of_engine = [one.prediction[Phase.TRAIN, Component.GENERATION_WEIGHTS] for one in (shares, keeps)]
    assert of_engine[0] == of_engine[1]


PARALLEL = "policy.megatron_cfg.{}_parallel_size"


@pytest.mark.parametrize(
    ("more", "copies"),
    [
        ([], True),
        (
            ["cluster.num_nodes=1", PARALLEL.format("tensor_model") + "=2", PARALLEL.format("pipeline_model") + "=4"],
            True,
        ),
        ([PARALLEL.format("tensor_model") + "=4", PARALLEL.format("expert_model") + "=8"], True),
        ([PARALLEL.format("tensor_model") + "=2", PARALLEL.format("pipeline_model") + "=2"], False),
        (THROUGH_A_BUFFER, False),
        (["policy.megatron_cfg.peft.enabled=true"], False),
        (["generation.colocated.enabled=false", "generation.colocated.resources.num_nodes=1"], False),
    ],
)
def test_engines_copy_where_one_machine_has_the_whole_model(more, copies):
    two_machines = ["cluster.num_nodes=2", "cluster.gpus_per_node=8", "policy=megatron_gpu", "generation=vllm_gpu"]
    model = "policy.model_name=Qwen/Qwen3-30B-A3B"
    assert engines_copy(compose_config([*two_machines, model, *more])) == copies
    assert not engines_copy(compose_config([]))


def test_without_engines_on_the_gpu_less_is_beside():
    assert set(planned(SFT).buffers.values()) == {0} and planned(SFT).overhead == OVERHEAD_ALONE
    assert planned([*ONE, *APART]).overhead == OVERHEAD_APART
    assert planned([], None).overhead == 0 and planned([], None).fits_device


def test_reference_weights_wait_on_the_host():
    kl = "algorithm.loss_fn.reference_policy_kl_penalty"
    without, compared = planned([*ONE, f"{kl}=0"]), planned([*ONE, f"{kl}=0.1"])
    assert compared.host - without.host == pytest.approx(2 * 2 * 1.72e9, rel=0.01)


def test_a_budget_is_for_the_fullest_phase():
    assert planned(ONE, 2**38).fits_device
    small = planned(ONE, 30 * 2**30)
    assert not small.fits_device and small.device[small.peak_phase] == max(small.device.values())


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    room = [*ONE, "policy.max_total_sequence_length=4096", "policy.train_global_batch_size=512"]
    limit = largest_micro_batch(compose_config(room), MODEL, GPU)
    assert limit.key == "policy.sequence_packing.train_mb_tokens" and limit.most > 4096 and not limit.whole
    first, second = (
        planned([*room, f"{limit.key}={tokens}"]).device[Phase.TRAIN] for tokens in (limit.most, limit.most + 256)
    )
    assert first <= GPU < second


def test_none_fits_a_small_gpu_and_all_fits_a_large_one():
    config = compose_config(ONE)
    assert largest_micro_batch(config, MODEL, 20 * 2**30).most == 0
    assert largest_micro_batch(config, MODEL, 10**13).whole


def test_presets_are_those_of_the_configuration():
    packs = "policy.sequence_packing.train_mb_tokens=8192"
    budgets = dict(preset_budgets([*ONE, packs, "offload=none"], MODEL, GPU, None))
    assert set(budgets) == {path.stem for path in (ROOT / "configs" / "offload").glob("*.yaml")}
    assert budgets["pinned"].device[Phase.GENERATE] < budgets["none"].device[Phase.GENERATE]
    assert budgets["cpu_optimizer"].device[Phase.TRAIN] < budgets["none"].device[Phase.TRAIN]
    adapters = dict(preset_budgets([*SFT, "policy.megatron_cfg.peft.enabled=true"], MODEL, GPU, None))
    assert "incompatible with LoRA" in adapters["activations"]


def test_plans_are_within_a_tenth_of_what_runs_measured():
    """The allocator's peak in training, of the runs that were kept since the refit's buffers are as they are."""
    import plan_check

    names = [*(path.stem for path in plan_check.RUNS.glob("preset-*.json")), "refit-tp2-tp2", "refit-pp2-tp2"]
    names += ["refit-dp2-2", "sft-gsm8k-epoch", "plan-sft-1.7b-2048", "dpo-gsm8k", "chain-sum-seed42"]
    assert len(names) == 14
    for name in names:
        run = json.loads((plan_check.RUNS / f"{name}.json").read_text())
        expected, measured = plan_check.compared(run)["policy, train"]
        assert expected == pytest.approx(measured, rel=0.05), name

"""A plan counts the teacher: its weights, its micro-batches, its process, its seconds."""

from dataclasses import replace

import pytest

from nemo_rl_lite.config.sizes import as_teacher
from nemo_rl_lite.models.shape import KNOWN_MODELS, model_shape
from nemo_rl_lite.offload.residency import Component, Phase
from nemo_rl_lite.planning.budget import OVERHEAD_SHARED, OVERHEAD_TEACHER, budget, speed_of
from nemo_rl_lite.planning.lengths import assumed_lengths
from nemo_rl_lite.planning.memory import Bytes, teacher_activation_bytes, teacher_shape
from nemo_rl_lite.planning.time import logprob_seconds, predict_step
from nemo_rl_lite.validation.compose import compose_config

GPU = int(79.2 * 2**30)
POLICY, TEACHER = (model_shape(KNOWN_MODELS[f"Qwen/Qwen3-{size}"]) for size in ("0.6B", "8B"))
COMMON = [
    *("cluster.gpus_per_node=2", "policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=Qwen/Qwen3-0.6B"),
    *("algorithm.num_generations_per_prompt=8", "policy.sequence_packing.train_mb_tokens=8192"),
    "algorithm.loss_fn.reference_policy_kl_penalty=0.0",
]
TAUGHT = [*COMMON, "algorithm=distillation", "teacher.model_name=Qwen/Qwen3-8B"]
PARALLEL = "teacher.megatron_cfg.tensor_model_parallel_size=2"
# Of Qwen3-8B, in bfloat16.
WEIGHTS = 2 * 8_190_735_360


def weights(overrides: list[str], phase: Phase) -> Bytes:
    return budget(compose_config(overrides), POLICY, GPU).prediction[phase, Component.TEACHER_WEIGHTS]


def test_the_teachers_weights_are_on_the_device_to_score_and_always_in_host_memory():
    training, scoring = weights(TAUGHT, Phase.TRAIN), weights(TAUGHT, Phase.LOGPROB)
    assert training == Bytes(host=training.host) and training.host == pytest.approx(WEIGHTS, rel=1e-3)
    assert scoring == Bytes(device=training.host, host=training.host)
    assert weights([*TAUGHT, "teacher.offload=false"], Phase.TRAIN) == Bytes(device=training.host)


def test_the_teacher_has_a_layout_of_its_own():
    whole, half = (weights(own, Phase.LOGPROB).device for own in (TAUGHT, [*TAUGHT, PARALLEL]))
    # Norms are on both ranks.
    assert half == pytest.approx(whole / 2, rel=1e-3) and half > whole / 2
    alone = budget(compose_config(COMMON), POLICY, GPU)
    taught = budget(compose_config([*TAUGHT, PARALLEL]), POLICY, GPU)
    for part in (Component.PARAMETERS, Component.OPTIMIZER_STATES):
        assert taught.prediction[Phase.TRAIN, part] == alone.prediction[Phase.TRAIN, part]


def test_its_process_and_its_micro_batches_take_memory():
    config = compose_config(TAUGHT)
    one, without = budget(config, POLICY, GPU), budget(compose_config(COMMON), POLICY, GPU)
    assert one.overhead == OVERHEAD_SHARED + OVERHEAD_TEACHER and without.overhead == OVERHEAD_SHARED
    scoring = Phase.LOGPROB, Component.ACTIVATIONS
    assert one.prediction[scoring].device == teacher_activation_bytes(config) > without.prediction[scoring].device
    largest = compose_config([*TAUGHT, "algorithm.topk_logits_k=64"])
    assert teacher_activation_bytes(largest) == teacher_activation_bytes(config) + 12 * 64 * 8192


def test_of_several_teachers_the_largest_is_on_the_device_and_all_are_in_host_memory():
    small = weights([*COMMON, "algorithm=distillation", "teacher.model_name=Qwen/Qwen3-0.6B"], Phase.LOGPROB).device
    large = weights(TAUGHT, Phase.LOGPROB).device
    # Two sources share the run's teacher.
    both = [*TAUGHT, "data.sources.a.weight=1", "data.sources.b.weight=1"]
    both += ["data.sources.c.teacher.model_name=Qwen/Qwen3-0.6B"]
    assert weights(both, Phase.LOGPROB) == Bytes(device=large, host=large + small)
    assert weights([*both, "teacher.offload=false"], Phase.TRAIN) == Bytes(device=large + small)


def test_its_pass_takes_seconds():
    config, plain = compose_config(TAUGHT), compose_config(COMMON)
    lengths, (_, gpu) = assumed_lengths(plain), speed_of(GPU)
    more = predict_step(config, POLICY, GPU, lengths).logprob - predict_step(plain, POLICY, GPU, lengths).logprob
    assert more == pytest.approx(logprob_seconds(as_teacher(config), TEACHER, gpu, lengths)) and more > 0


def test_a_model_without_a_shape_is_not_counted(tmp_path):
    config = compose_config(TAUGHT)
    unknown = replace(config, teacher=replace(config.teacher, model_name=str(tmp_path / "nowhere")))
    assert teacher_shape(unknown) is None and teacher_shape(compose_config(COMMON)) is None
    assert budget(unknown, POLICY, GPU).prediction[Phase.TRAIN, Component.TEACHER_WEIGHTS] == Bytes()

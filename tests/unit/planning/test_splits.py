"""The search for a division of the GPUs."""

import pytest

from nemo_rl_lite.models.known import KNOWN_MODELS
from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.planning.splits import Refusal, Search, Split
from nemo_rl_lite.planning.step_time import StepTime
from nemo_rl_lite.planning.waiting import Basis, as_json, lines, predict_waiting, rows
from nemo_rl_lite.rules.compose import compose_config

SHAPE = model_shape(KNOWN_MODELS["Qwen/Qwen3-8B"])
GPUS = ["policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=Qwen/Qwen3-8B", "cluster.gpus_per_node=8"]
# 3,840 sequences can be divided by any number of replicas below 7.
SIZES = ["algorithm.num_prompts_per_step=480", "policy.train_global_batch_size=3840"]
APART = ["generation.colocated.enabled=false", "generation.colocated.resources.gpus_per_node=4"]
OFF = [
    *("algorithm.rollouts.source=one_step_off", "algorithm.loss_fn.use_importance_sampling_correction=true"),
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
]


def shares(generation: float, train: float):
    """Predict that the work of the two sides is divided evenly by their GPUs."""

    def predict(config) -> StepTime:
        split = Search(config, (), lambda _: StepTime(0, 0, 0, 0), lambda _: True).present()
        return StepTime(generation / split.engine_gpus, 0, train / split.policy_gpus, 0)

    return predict


def search(overrides, predict, fits=lambda _: True) -> Search:
    return Search(compose_config(overrides), overrides, predict, fits)


@pytest.mark.parametrize(("generation", "train", "engines"), [(60, 20, 6), (40, 40, 4), (20, 60, 2)])
def test_both_sides_get_the_gpus_that_their_work_needs(generation, train, engines):
    found = [one for one in search([*GPUS, *SIZES], shares(generation, train)).apart() if isinstance(one, Split)]
    best = min(found, key=lambda one: one.seconds)
    assert (best.engine_gpus, best.policy_gpus, best.seconds) == (engines, 8 - engines, pytest.approx(10))


@pytest.mark.parametrize(
    "overrides",
    [
        [*GPUS, *SIZES, *APART],
        [*GPUS, *SIZES, *APART, *OFF],
        [*GPUS, *SIZES, "offload=pinned"],
        [*GPUS, *SIZES, "policy.offload_for_generation=[gradients]"],
    ],
)
def test_the_overrides_are_accepted_as_they_are(overrides):
    one = search(overrides, shares(10, 10))
    found = [split for split in (one.colocated(), *one.apart()) if isinstance(split, Split)]
    assert len(found) == 7
    for split in found:
        kept = [override for override in overrides if override not in split.instead_of]
        again = Search(compose_config([*kept, *split.overrides]), (), shares(10, 10), lambda _: True).present()
        assert (again.engine_gpus, again.colocated, again.overlaps) == (
            split.engine_gpus,
            split.colocated,
            not split.colocated,
        )


def test_only_what_changes_has_to_be_typed():
    one = search([*GPUS, *SIZES, *APART, *OFF], shares(10, 10))
    five = next(split for split in one.apart() if split.engine_gpus == 5)
    assert isinstance(five, Split)
    assert five.overrides == ("generation.colocated.resources.gpus_per_node=5",)
    assert five.instead_of == (APART[1],)


def test_whole_machines_where_there_are_several():
    one = search([*GPUS, "cluster.num_nodes=4", "policy.train_global_batch_size=512"], shares(10, 10))
    found = {split.engine_gpus: split for split in one.apart()}
    assert list(found) == [8, 16, 24] and isinstance(found[16], Split)
    assert found[16].overrides[:2] == (APART[0], "generation.colocated.resources.num_nodes=2")


def test_what_the_rules_refuse_or_does_not_fit_has_its_reason():
    tensor = ["policy.megatron_cfg.tensor_model_parallel_size=4", "policy.train_global_batch_size=512"]
    one = search([*GPUS, *tensor], shares(10, 10), lambda config: False)
    reasons = {split.engine_gpus: split.reason for split in one.apart() if isinstance(split, Refusal)}
    assert len(reasons) == 7 and reasons[4] == "it does not fit the GPUs' memory"
    assert "must divide the 7 policy ranks" in reasons[1]


def waiting(*overrides: str):
    """What is said of Qwen3-8B on H200s with responses of 400 tokens."""
    command = [*GPUS, "policy.megatron_cfg.activation_checkpointing=true", *overrides]
    config = compose_config(command)
    return predict_waiting(config, command, SHAPE, 141 * 2**30, Basis.assumed(config, 400)), config


def test_a_colocated_run_with_a_long_tail_is_told_how_to_split():
    """The longest response decides how long the engines take, so half of them take hardly longer."""
    tensor, longest = ["policy.megatron_cfg.tensor_model_parallel_size=2"], ["generation.max_new_tokens=7000"]
    longest += ["policy.max_total_sequence_length=8192", "policy.sequence_packing.train_mb_tokens=8192"]
    found, config = waiting(*tensor, *longest, "offload=pinned", "policy.sequence_packing.logprob_mb_tokens=8192")
    said = "\n".join(lines(found, config))
    assert found.present.colocated and not found.shortest.colocated, said
    assert "take turns on the same GPUs" in said and "algorithm.rollouts.source=one_step_off" in said
    assert "in place of: offload=pinned" in said
    assert as_json(found)["shortest"]["overlapped"] == found.shortest.seconds < 0.9 * found.present.seconds


def test_a_run_whose_policy_takes_the_step_is_told_to_share():
    tensor = ["policy.megatron_cfg.tensor_model_parallel_size=4", "algorithm.num_prompts_per_step=512"]
    found, config = waiting(*APART, *tensor, "generation.max_new_tokens=400", "policy.train_global_batch_size=4096")
    said = "\n".join(lines(found, config))
    assert "in which the policy waits" in said and found.present.time.policy > 5 * found.present.time.generation
    assert found.shortest.colocated and "generation.colocated.enabled=true" in said


LONG = [
    *("policy.max_total_sequence_length=4096", "generation.max_new_tokens=4000", "algorithm.num_prompts_per_step=16"),
    *("policy.sequence_packing.train_mb_tokens=4096", "policy.sequence_packing.logprob_mb_tokens=4096"),
]


@pytest.mark.parametrize(
    ("who", "overrides"),
    [
        ("the engines wait {} s for the policy", ["policy.megatron_cfg.tensor_model_parallel_size=4"]),
        ("the policy waits {} s for the engines", LONG),
    ],
)
def test_one_step_off_one_side_waits(who, overrides):
    found, config = waiting(*APART, *OFF, *overrides)
    time = found.present.time
    seconds = abs(time.generation - time.policy)
    assert who.format(f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}") in lines(found, config)[1]
    assert [row[0] for row in rows(found)] == ["all 8", "1", "2", "3", "4 (now)", "5", "6", "7"]


def test_no_legal_division_is_no_advice():
    found, config = waiting("policy.megatron_cfg.tensor_model_parallel_size=8", "offload=pinned")
    said = lines(found, config)
    assert found.shortest is found.present and [row[-1] for row in rows(found)] == ["-", *["refused"] * 7]
    assert "must divide the 7 policy ranks" in said[2] and "no other division" in said[-1]


def test_one_gpu_is_not_divided():
    found, config = waiting("cluster.gpus_per_node=1")
    assert len(rows(found)) == 1 and "one GPU cannot be divided" in lines(found, config)[-1]


def test_engines_that_work_beside_the_policy_on_its_gpu_are_predicted_in_turn_as_the_most():
    own = ["policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=Qwen/Qwen3-8B", "cluster.gpus_per_node=1"]
    command = [*own, "generation.colocated.sleep=false", *OFF]
    config = compose_config(command)
    waiting = predict_waiting(config, command, SHAPE, 80 * 2**30, Basis.assumed(config))
    assert waiting.present.seconds == waiting.present.time.in_turn
    said = "\n".join(lines(waiting, config))
    assert "s at most: policy and engines work at the same time on the same GPUs" in said and "take turns" not in said

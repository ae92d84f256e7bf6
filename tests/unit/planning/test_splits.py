"""Who waits for whom, and the search for a division of the GPUs."""

import pytest

from nemo_rl_lite.models.shape import KNOWN_MODELS, model_shape
from nemo_rl_lite.planning.time import GpuSplits, assumed_lengths, lines, rows
from nemo_rl_lite.validation.compose import compose_config

SHAPE = model_shape(KNOWN_MODELS["Qwen/Qwen3-8B"])
GPUS = ["policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=Qwen/Qwen3-8B", "cluster.gpus_per_node=8"]
GPUS += ["policy.megatron_cfg.activation_checkpointing=true", "policy.sequence_packing.shared_prompts=false"]
# 3,840 sequences can be divided by any number of replicas below 7.
SIZES = ["algorithm.num_prompts_per_step=480", "policy.train_global_batch_size=3840"]
APART = ["generation.colocated.enabled=false", "generation.colocated.resources.gpus_per_node=4"]
OFF = [
    *("algorithm.rollouts.source=one_step_off", "algorithm.loss_fn.use_importance_sampling_correction=true"),
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
]
TENSOR = "policy.megatron_cfg.tensor_model_parallel_size"


def divisions(*overrides: str, gib: int = 141):
    """Return the present division, the others, and what is said of them, for responses of 400 tokens."""
    config = compose_config([*GPUS, *overrides])
    found = GpuSplits(config, [*GPUS, *overrides], SHAPE, gib * 2**30, assumed_lengths(config, 400))
    present = found.present()
    others = list(found.others(present))
    return present, others, "\n".join(lines(present, others))


@pytest.mark.parametrize(
    "own", [[*APART], [*APART, *OFF], ["offload=pinned"], ["policy.offload_for_generation=[gradients]"]]
)
def test_the_overrides_are_accepted_as_they_are(own):
    _, others, _ = divisions(*SIZES, *own)
    assert len(others) == (8 if own[0] == APART[0] else 7)
    for split in (one for one in others if one.time):
        kept = [override for override in [*GPUS, *SIZES, *own] if override not in split.instead_of]
        config = compose_config([*kept, *split.overrides])
        again = GpuSplits(config, (), SHAPE, 141 * 2**30, assumed_lengths(config, 400)).present()
        assert (again.engine_gpus, again.colocated) == (split.engine_gpus, split.colocated)
        assert again.overlaps is not split.colocated and again.seconds == split.seconds


def test_only_what_changes_has_to_be_typed():
    five = next(split for split in divisions(*SIZES, *APART, *OFF)[1] if split.engine_gpus == 5)
    assert five.overrides == ["generation.colocated.resources.gpus_per_node=5"] and five.instead_of == [APART[1]]


def test_whole_machines_where_there_are_several():
    _, others, _ = divisions("cluster.num_nodes=4", "policy.train_global_batch_size=512")
    assert [one.engine_gpus for one in others] == [8, 16, 24]
    assert list(others[1].overrides[:2]) == [APART[0], "generation.colocated.resources.num_nodes=2"]


def test_what_the_rules_refuse_or_does_not_fit_has_its_reason():
    present, others, said = divisions(f"{TENSOR}=4", "policy.train_global_batch_size=512", gib=20)
    assert [row[-1] for row in rows(present, others)] == ["-", *["refused, see below"] * 7]
    assert others[3].refusal == "the GPUs' memory is too small" and "must divide the number of policy ranks (7)" in said
    assert "no other split" in said


def test_a_colocated_run_with_a_long_tail_is_told_how_to_split():
    """The longest response decides how long the engines take, so half of them take hardly longer."""
    longest = ["generation.max_new_tokens=7000", "policy.max_total_sequence_length=8192", "offload=pinned"]
    packs = [f"policy.sequence_packing.{phase}_mb_tokens=8192" for phase in ("train", "logprob")]
    present, others, said = divisions(f"{TENSOR}=2", *longest, *packs)
    best = min(others, key=lambda one: one.seconds)
    assert present.colocated and not best.colocated and best.seconds < 0.9 * present.seconds
    assert "work alternately on the same GPUs" in said and "algorithm.rollouts.source=one_step_off" in said


def test_a_run_whose_policy_takes_the_step_is_told_to_share():
    batch = ["algorithm.num_prompts_per_step=512", "policy.train_global_batch_size=4096"]
    present, _, said = divisions(*APART, *batch, f"{TENSOR}=4", "generation.max_new_tokens=400")
    assert present.time.policy > 5 * present.time.generation
    assert "; the policy waits" in said and "generation.colocated.enabled=true" in said


def test_one_step_off_one_side_waits():
    present, others, said = divisions(*APART, *OFF, f"{TENSOR}=4")
    late = present.time.policy - present.time.generation
    assert late > 5 and f"waits 0.00 s for the engines, and the engines wait {late:.1f} s for the policy" in said
    assert [row[0] for row in rows(present, others)] == ["all 8", "1", "2", "3", "4 (now)", "5", "6", "7"]


def test_one_gpu_is_not_divided():
    awake = ["cluster.gpus_per_node=1", "generation.colocated.sleep=false", *OFF]
    present, others, said = divisions(*awake, gib=80)
    assert not others and "one GPU cannot be split" in said
    # Engines that work beside the policy are predicted in turn as the most.
    assert present.seconds == present.time.synchronous and "s at most; engines and policy work concurrently" in said

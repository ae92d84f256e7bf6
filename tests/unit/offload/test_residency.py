"""The residency table follows from the configuration alone."""

import pytest

from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency
from nemo_rl_lite.validation.compose import compose_config

GPU = ["cluster.gpus_per_node=2", "policy=megatron_gpu", "generation=vllm_gpu"]
GPU += ["policy.max_total_sequence_length=64", "generation.max_new_tokens=16"]
APART = ["generation.colocated.enabled=false", "generation.colocated.resources.gpus_per_node=1"]
D, H, R = Place.DEVICE, Place.HOST, Place.RELEASED


def residency(*overrides: str) -> Residency:
    return Residency.of(compose_config(list(overrides)))


def row(table: Residency, component: Component) -> tuple[Place, ...]:
    """Return the component's places in generate, logprob, train, refit."""
    return tuple(table.place(phase, component) for phase in Phase)


@pytest.mark.parametrize(
    ("overrides", "parameters", "gradients", "optimizer_states"),
    [
        (["offload=none"], (D, D, D, D), (D, R, D, D), (D, D, D, D)),
        (["offload=logprob"], (D, D, D, D), (D, R, D, D), (D, H, D, D)),
        (["offload=colocated"], (H, D, D, D), (R, R, D, R), (H, H, D, H)),
        (["offload=pinned"], (H, D, D, D), (R, R, D, R), (H, H, D, H)),
        (["offload=cpu_optimizer"], (D, D, D, D), (D, R, D, D), (H, H, H, H)),
        (["offload=max_memory"], (H, D, D, D), (R, R, D, R), (H, H, H, H)),
        (["policy.offload_for_generation=[gradients]"], (D, D, D, D), (R, R, D, R), (D, D, D, D)),
    ],
)
def test_what_the_policy_holds_where(overrides, parameters, gradients, optimizer_states):
    table = residency(*GPU, *overrides)
    assert row(table, Component.PARAMETERS) == parameters
    assert row(table, Component.GRADIENTS) == gradients
    assert row(table, Component.OPTIMIZER_STATES) == optimizer_states
    assert row(table, Component.ACTIVATIONS) == (R, D, D, R)


def test_a_recorded_training_pass_keeps_its_memory():
    graphs = "policy.megatron_cfg.cuda_graph_impl=full_iteration"
    recorded = residency(*GPU, graphs)
    assert row(recorded, Component.ACTIVATIONS) == row(recorded, Component.GRADIENTS) == (D, D, D, D)
    assert row(residency(graphs), Component.ACTIVATIONS) == (R, D, D, R)


def test_engines_sleep_where_they_share_a_gpu():
    table = residency(*GPU)
    assert table.engines_share_device
    assert row(table, Component.GENERATION_WEIGHTS) == (D, R, R, D)
    assert row(table, Component.KV_CACHE) == (D, R, R, R)


@pytest.mark.parametrize(("lora", "away"), [("merged", R), ("adapters", H)])
def test_sleeping_engines_keep_the_weights_that_no_refit_brings(lora, away):
    table = residency(*GPU, "policy.megatron_cfg.peft.enabled=true", f"generation.vllm_cfg.lora={lora}")
    assert row(table, Component.GENERATION_WEIGHTS) == (D, away, away, D)
    assert row(table, Component.KV_CACHE) == (D, R, R, R) and table.engines_sleep


def test_engines_on_gpus_of_their_own_are_not_in_the_table_and_nothing_leaves_for_them():
    engines = ["policy.train_global_batch_size=128", *APART]
    table = residency(*GPU, *engines, "offload=logprob")
    assert not table.engines_share_device
    assert table.components == tuple(Component)[:4]
    assert row(table, Component.GRADIENTS) == (D, R, D, D) and row(table, Component.OPTIMIZER_STATES) == (D, H, D, D)
    with pytest.raises(ValueError, match="no kv_cache in the phase train"):
        table.place(Phase.TRAIN, Component.KV_CACHE)


def test_sft_has_two_phases_and_no_engines():
    table = residency("algorithm=sft", "offload=logprob")
    assert table.phases == (Phase.LOGPROB, Phase.TRAIN) and table.components == tuple(Component)[:4]
    assert table.policy_places(Phase.LOGPROB) == {
        Component.PARAMETERS: D,
        Component.GRADIENTS: R,
        Component.OPTIMIZER_STATES: H,
    }
    with pytest.raises(ValueError, match=r"in the phase generate, but .* in logprob, train"):
        table.policy_places(Phase.GENERATE)


@pytest.mark.parametrize(("offload", "places"), [("true", (H, D, H, H)), ("false", (D, D, D, D))])
def test_a_teacher_is_on_the_device_to_score(offload, places):
    own = ["algorithm=distillation", "teacher.model_name=embedded:reverse-digits", f"teacher.offload={offload}"]
    table = residency(*own)
    assert row(table, Component.TEACHER_WEIGHTS) == places
    assert Component.TEACHER_WEIGHTS not in residency().components

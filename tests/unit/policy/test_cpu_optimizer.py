import pytest

from nemo_rl_lite.policy.optimizer import fair_share, megatron_options, stays_on_host
from nemo_rl_lite.validation.compose import compose_config

GPU = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=transformers"]
ON_HOST = [
    *GPU,
    "policy.max_total_sequence_length=64",
    "generation.max_new_tokens=16",
    "offload=cpu_optimizer",
]
OPTIMIZER = "policy.megatron_cfg.optimizer"


@pytest.mark.parametrize("fraction", ["0.1", "1.0"])
def test_its_states_stay_on_the_host_at_every_fraction(fraction):
    settings = compose_config([*ON_HOST, f"{OPTIMIZER}.optimizer_offload_fraction={fraction}"]).policy.megatron_cfg
    assert stays_on_host(settings.optimizer)
    assert megatron_options(settings.optimizer)["optimizer_offload_fraction"] == float(fraction)


def test_states_of_the_usual_optimizer_may_move():
    settings = compose_config().policy.megatron_cfg.optimizer
    assert not stays_on_host(settings)
    assert megatron_options(settings) == {}


def test_ranks_on_the_same_cpus_share_them():
    first, second = ("a", tuple(range(48))), ("a", tuple(range(48, 96)))
    elsewhere = ("b", tuple(range(48)))
    places = [first, first, first, second, elsewhere]
    assert fair_share(first, places) == 16
    assert fair_share(second, places) == 48
    assert fair_share(elsewhere, places) == 48
    assert fair_share(("c", (0,)), [("c", (0,))] * 3) == 1

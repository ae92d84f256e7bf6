import os
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.compat.megatron_cpu import prepare_import
from nemo_rl_lite.offload import cpu_optimizer
from nemo_rl_lite.offload.cpu_optimizer import fair_share, megatron_options, stays_on_host, step_threads
from nemo_rl_lite.policy.megatron import optimizer
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.rules.compose import compose_config

GPU = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=transformers"]
ON_HOST = [
    *GPU,
    "policy.max_total_sequence_length=64",
    "generation.max_new_tokens=16",
    "offload=cpu_optimizer",
]
OPTIMIZER = "policy.megatron_cfg.optimizer"


@pytest.fixture
def built(monkeypatch):
    """Return the options that `build_optimizer` gives megatron-core, for command-line arguments."""
    prepare_import()
    import megatron.core.optimizer

    given, given_classes = [], []

    def remember(options, chunks):
        given.append(options)
        groups = [{"params": [], "lr": 1e-5, "cpu_optimizer_cls": object, "gpu_optimizer_cls": object}]
        given_classes.append(groups)
        return SimpleNamespace(param_groups=groups, scale_loss=None, optimizer=SimpleNamespace(param_groups=groups))

    monkeypatch.setattr(megatron.core.optimizer, "get_megatron_optimizer", remember)
    monkeypatch.setattr(cpu_optimizer, "release_copies_of_construction", lambda: given.append("released"))
    device, place = torch.device("cpu"), None

    def build(*arguments: str):
        policy = compose_config(arguments).policy
        optimizer.build_optimizer(policy, MegatronModel(None, [], place, device, policy.precision != "float32"))
        # Classes in a checkpoint could not be read back.
        on_host = policy.megatron_cfg.optimizer.optimizer_cpu_offload
        assert all(("cpu_optimizer_cls" in group) == (not on_host) for group in given_classes[0])
        return given

    return build


def test_megatron_core_is_told_all_that_its_cpu_optimizer_needs(built):
    overlapped = f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"
    options, then = built(*ON_HOST, f"{OPTIMIZER}.optimizer_offload_fraction=0.5", overlapped)
    assert then == "released"
    assert options.optimizer_cpu_offload and options.overlap_cpu_optimizer_d2h_h2d
    assert options.optimizer_offload_fraction == 0.5
    # Gradients are read from `decoupled_grad`, and masters are not also on the GPU.
    assert options.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    dtypes = (options.main_grads_dtype, options.main_params_dtype, options.exp_avg_dtype, options.exp_avg_sq_dtype)
    assert set(dtypes) == {torch.float32}
    assert options.decoupled_weight_decay and options.pin_cpu_grads and options.use_distributed_optimizer


def test_without_it_nothing_changes(built):
    (options,) = built()
    assert not options.optimizer_cpu_offload and not options.use_precision_aware_optimizer


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


def test_a_rank_alone_has_the_cpus_it_may_use(monkeypatch):
    def gather(places, own):
        places[:] = [own]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    assert step_threads() == len(os.sched_getaffinity(0))

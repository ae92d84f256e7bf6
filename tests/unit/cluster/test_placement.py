import pytest

from nemo_rl_lite.cluster.runtime import Placement, check_nodes, place
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.validation.compose import compose_config


def test_on_cpus_nothing_is_reserved():
    config = compose_config(["cluster.cpu_ranks=2", "policy.train_micro_batch_size=64"])
    assert place(config, engines=3) == Placement([{}, {}], [], [{}, {}, {}])


def test_gpus_spread_otherwise_than_the_layout_counts_on_are_an_error():
    check_nodes(["a"] * 8 + ["b"] * 8, 8)
    with pytest.raises(WorkerError, match=r"gpus_per_node = 8, but the free GPUs of the nodes are 5 \+ 5 \+ 6"):
        check_nodes(["a"] * 5 + ["b"] * 5 + ["c"] * 6, 8)

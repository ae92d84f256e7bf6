"""The measurements of replicas, combined into one."""

import pytest

from nemo_rl_lite.run.workers.replicas import idle_shares


def test_the_slowest_replica_of_each_pass_is_waited_for():
    own = [{"train": [3.0, 1.0], "logprob": [2.0]}, {"train": [1.0, 2.0], "logprob": [2.0]}]
    expected = {"train": 5.0, "idle_share/train": 0.3, "logprob": 2.0, "idle_share/logprob": 0.0}
    assert idle_shares(own) == pytest.approx(expected)

"""Rates and shares of a GPU's limits, by hand."""

import pytest

from nemo_rl_lite.observability.timer import DecodingSpeed, PolicySpeed
from nemo_rl_lite.planning.budget import KNOWN

H100 = KNOWN["H100"]


def test_a_policy_on_two_gpus_that_works_at_two_fifths_of_the_peak():
    """In 5 s, two H100 could compute 9890 TFLOPs."""
    metrics = PolicySpeed(2, H100.flops).training(0.4 * 9890e12, 5.0)
    assert metrics == pytest.approx({"train_flops_per_gpu": 395.6, "train_fp_utilization": 0.4})


def test_engines_that_read_at_half_of_the_bandwidth():
    """Engines took 500 steps in 3 s, all in all; weights of 10 GB, and 100 kB for each cached token."""
    metrics = DecodingSpeed(1e10, 1e5, H100.bandwidth).metrics(500, 250_000, 3.0)
    assert metrics["generation_read_gb_per_sec_per_gpu"] == pytest.approx(1675)
    assert metrics["generation_bandwidth_share"] == pytest.approx(0.5)


def test_without_a_known_limit_there_are_rates_and_no_shares():
    assert set(PolicySpeed(1, None).training(1e12, 1.0)) == {"train_flops_per_gpu"}
    assert set(DecodingSpeed(1.0, 1.0, None).metrics(1, 0, 1.0)) == {"generation_read_gb_per_sec_per_gpu"}

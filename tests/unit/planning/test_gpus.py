"""The size of a GPU."""

import pytest

from nemo_rl_lite.planning import budget


def test_sizes_and_names():
    assert budget.parse_size("80GiB") == 80 * 2**30 and budget.parse_size("1.5 tb") == 1_500_000_000_000
    assert budget.size_of("h200") == ("H200", 143771 * 2**20)
    assert budget.size_of("A100")[0] == "A100-80GB" and budget.size_of("A100-40GB")[0] == "A100-40GB"
    assert budget.size_of("NVIDIA H100 80GB")[0] == "H100" and budget.size_of("A10")[0] == "A10"
    assert budget.size_of("24GiB") == ("a GPU of 24GiB", 24 * 2**30)


@pytest.mark.parametrize("text", ["H1000", "80", "eighty GiB", "-3GiB"])
def test_an_unknown_gpu_is_an_error(text):
    with pytest.raises(ValueError, match=r"neither a known GPU .*H100"):
        budget.size_of(text)


def test_this_machines_or_an_assumed_one(monkeypatch):
    monkeypatch.setattr(budget.machine, "gpu_bytes", lambda: 5)
    assert budget.size_of(None) == ("this machine's GPU", 5)
    monkeypatch.setattr(budget.machine, "gpu_bytes", lambda: None)
    assert budget.size_of(None) == ("H100 (assumed)", budget.KNOWN["H100"].mib * 2**20)


def test_only_a_gpu_whose_rates_are_known_has_rates():
    assert budget.known_by_name("NVIDIA H100 80GB HBM3") == budget.KNOWN["H100"]
    assert {budget.known_by_name(name) for name in ("NVIDIA H100 PCIe", "H100", None)} == {None}


@pytest.mark.parametrize(("size", "name"), [("80GB", "H100"), ("141GiB", "H200"), ("24GiB", "RTX4090")])
def test_a_size_alone_gets_the_rates_of_the_nearest_gpu(size, name):
    assert budget.speed_of(budget.parse_size(size)) == (name, budget.KNOWN[name])

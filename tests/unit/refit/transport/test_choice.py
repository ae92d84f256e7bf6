from dataclasses import replace

import pytest

from nemo_rl_lite.refit.interface import TransportFacts, choose_transport

ALL_TRUE = TransportFacts(shares_device=True, on_gpu=True, direct=True, has_recipe=True)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, "direct"),
        ({"on_gpu": False}, "shared"),
        ({"direct": False}, "shared"),
        ({"has_recipe": False}, "shared"),
        ({"one_machine": False}, "shared"),
        ({"memory_opens": False}, "shared"),
        ({"one_machine": False, "memory_opens": False}, "shared"),
        ({"on_gpu": False, "has_recipe": False}, "shared"),
        ({"shares_device": False}, "broadcast"),
        ({"shares_device": False, "on_gpu": False}, "broadcast"),
        ({"shares_device": False, "direct": False}, "broadcast"),
        ({"shares_device": False, "has_recipe": False}, "broadcast"),
    ],
)
def test_engines_copy_parameters_only_where_everything_allows_it(changed, kind):
    assert choose_transport(replace(ALL_TRUE, **changed)) == kind

import os
import sys
from types import SimpleNamespace

import pytest

from nemo_rl_lite.compat.vllm import SCALES, keep_first_scales


@pytest.mark.parametrize(
    ("capability", "given", "found"),
    [(90, None, "0"), (89, None, "0"), (90, "1", "1"), (100, None, None), (120, None, None)],
)
def test_scales_are_powers_of_two_where_the_gpu_wants_them_or_the_user_does(monkeypatch, capability, given, found):
    platform = SimpleNamespace(has_device_capability=lambda least: capability >= least)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    # Set first, so that what the function sets is undone.
    monkeypatch.setenv(SCALES, given or "")
    if given is None:
        monkeypatch.delenv(SCALES)
    keep_first_scales()
    assert os.environ.get(SCALES) == found

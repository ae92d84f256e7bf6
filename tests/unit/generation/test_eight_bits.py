import os

import pytest

from nemo_rl_lite.generation.vllm.eight_bits import SCALES, round_once


@pytest.mark.parametrize(
    ("capability", "given", "found"),
    [((9, 0), None, "0"), ((8, 9), None, "0"), ((9, 0), "1", "1"), ((10, 0), None, None), ((12, 0), None, None)],
)
def test_scales_are_powers_of_two_where_the_gpu_wants_them_or_the_user_does(monkeypatch, capability, given, found):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    # Set first, so that what the function sets is undone.
    monkeypatch.setenv(SCALES, given or "")
    if given is None:
        monkeypatch.delenv(SCALES)
    round_once()
    assert os.environ.get(SCALES) == found

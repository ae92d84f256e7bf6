from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.cluster.weight_sync import PROBE_PROMPT, PROBE_TOKENS, ProbeSettings, WeightSync
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import Completion


def sync_with(engine_logprobs: list[float]) -> WeightSync:
    """A connected refit whose policy gives every token -1 and whose engines give these."""
    sync = object.__new__(WeightSync)
    sync._probe = ProbeSettings(temperature=1.0, tolerance=1e-3, rows=4)
    sync._policy = SimpleNamespace(logprobs=lambda tokens: torch.full(tokens.shape, -1.0))

    def generate(prompts, sampling):
        assert prompts == [PROBE_PROMPT] * len(engine_logprobs)
        assert sampling.top_p == 1 and sampling.top_k is None
        return [Completion((7,) * PROBE_TOKENS, (value,) * PROBE_TOKENS, "length") for value in engine_logprobs]

    sync._generation = SimpleNamespace(group=[None] * len(engine_logprobs), generate=generate)
    return sync


def test_a_probe_that_agrees_reports_the_difference():
    assert sync_with([-1.0, -1.0005]).probe()["probe_logprob_diff"] == pytest.approx(5e-4, rel=1e-3)


def test_a_probe_that_disagrees_names_the_engine():
    with pytest.raises(RefitError, match=r"generation rank 1 .* differ by up to 0.0100 nats"):
        sync_with([-1.0, -1.01]).probe()

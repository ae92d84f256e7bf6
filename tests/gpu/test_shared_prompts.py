"""Packs that compute a prompt once train as packs with a prompt in each row, in bfloat16 with Transformer Engine.

tests/functional/test_shared_prompts.py compares to 1e-5, in float32 and with megatron-core's attention.
`-o log_cli_level=INFO` shows what is compared.
"""

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.functional.ranks import run_ranks
from tests.functional.test_shared_prompts import COMMON, PLAIN, RECOMPUTED, SHARED, TENSOR

pytestmark = pytest.mark.gpu
log = logging.getLogger(__name__)

SCRIPT = Path(__file__).parents[1] / "functional" / "shared_prompts_rank.py"
GPU = [*COMMON, "policy=megatron_gpu", "policy.max_total_sequence_length=64", "generation.max_new_tokens=32"]
# megatron-core runs tensor parallelism with sequence parallelism on GPUs.
TWO = ["cluster.gpus_per_node=2", TENSOR, "policy.megatron_cfg.sequence_parallel=true"]
LAYOUTS = {
    1: {"plain": [PLAIN], "shared": [SHARED], "recomputed": [SHARED, RECOMPUTED]},
    2: {"tensor 2": [*TWO, SHARED]},
}
CASES = [pytest.param(name, marks=pytest.mark.gpu(ranks)) for ranks, own in LAYOUTS.items() for name in own]


@pytest.fixture(scope="module")
def outcome(gpu_model, tmp_path_factory):
    folder, done = tmp_path_factory.mktemp("shared-prompts"), set()

    def run(layout: str) -> dict:
        ranks = next(ranks for ranks, own in LAYOUTS.items() if layout in own)
        if ranks not in done:
            place = [*GPU, f"cluster.gpus_per_node={ranks}"]
            cases = json.dumps({name: place + own for name, own in LAYOUTS[ranks].items()})
            run_ranks(SCRIPT, [str(gpu_model), str(folder), cases], ranks, timeout_s=400)
            done.add(ranks)
        return torch.load(folder / layout.replace(" ", "-"), weights_only=False)

    return run


@pytest.mark.parametrize("layout", CASES[1:])
def test_logprobs_and_loss(layout, outcome):
    ours, plain = outcome(layout), outcome("plain")
    difference = (ours["scores"][0] - plain["scores"][0]).abs()
    log.info("%s: logprobs differ by %.2e on average, %.2e at most", layout, difference.mean(), difference.max())
    assert plain["scores"][0].std() > 0.5
    assert difference.mean() < 0.03 and difference.max() < 0.4
    found, expected = ours["metrics"][0], plain["metrics"][0]
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.01)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
    assert sum(ours["tokens"]) < 0.7 * sum(plain["tokens"])


@pytest.mark.parametrize("layout", ["shared", "recomputed"])
def test_gradients_of_each_parameter(layout, outcome):
    (found,), (expected,) = outcome(layout)["gradients"], outcome("plain")["gradients"]
    assert found.keys() == expected.keys()
    distances = {name: ((found[name] - values).norm() / values.norm()).item() for name, values in expected.items()}
    worst, middle = max(distances, key=distances.__getitem__), sorted(distances.values())[len(distances) // 2]
    log.info("%s: gradients differ by %.4f, of %s by %.4f", layout, middle, worst, distances[worst])
    # A wrong factor would be a difference of half or more.
    assert distances[worst] < 0.1 and middle < 0.04

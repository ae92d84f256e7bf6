"""An engine with FP8 weights: what a refit brings is quantised as the first weights were, in the same memory."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.functional.test_engines import LEFT_OUT, Producer, load, refitted

pytestmark = pytest.mark.functional

# vLLM's parts of each fused layer.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
BLOCK, LARGEST = 128, 448.0


@pytest.fixture(scope="module")
def seen(model_folder, engine_environment, tmp_path_factory):
    """What an engine process saw (quantized_process.py), and the weights that it got."""
    folder = tmp_path_factory.mktemp("quantized")
    old = {name: weight.detach().bfloat16() for name, weight in load(model_folder).named_parameters()}
    generator = torch.Generator().manual_seed(5)
    new = {name: weight + 0.02 * torch.randn(weight.shape, generator=generator) for name, weight in old.items()}
    new = {name: weight.bfloat16() for name, weight in new.items()}
    partial = [(name, weight) for name, weight in new.items() if name != LEFT_OUT]
    refits = [
        Producer(".new", list(new.items()), shared=True),
        Producer(".broadcast", list(old.items())),
        Producer(".partial", partial),
    ]
    for producer in refits:
        (folder / f"source{producer.name}").write_bytes(pickle.dumps(producer.sources[0]))
    script = Path(__file__).with_name("quantized_process.py")
    arguments = [model_folder, folder / "source", folder / "seen"]
    reports = refitted(script, arguments, engine_environment, folder / "log", refits)
    sent = {name: report.checksums for name, report in reports.items()}
    return torch.load(folder / "seen", weights_only=False) | sent | {"old": old, "new": new}


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 weights and a scale for each block of 128 x 128: its largest magnitude over the largest of the format."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp(1e-4) / LARGEST
    scaled = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return scaled.flatten(2, 3).flatten(0, 1)[:rows, :columns], scales


def check(linears: dict[str, tuple[Tensor, Tensor]], weights: dict[str, Tensor]) -> None:
    assert len(linears) == 4 * 4
    for name, (weight, scales) in linears.items():
        before, _, last = name.rpartition(".")
        whole = torch.cat([weights[f"{before}.{part}.weight"] for part in FUSED.get(last, (last,))])
        expected, expected_scales = quantized(whole)
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0, msg=name)
        # A value between two FP8 numbers may be rounded to either of them.
        assert (weight.float() != expected.float()).float().mean() < 0.01, name
        torch.testing.assert_close(weight.float(), expected.float(), rtol=0.13, atol=0.01, msg=name)


def test_what_a_refit_brings_is_quantised(seen):
    check(seen["loaded"], seen["old"])
    check(seen["linears.new"], seen["new"])
    check(seen["linears.broadcast"], seen["old"])


def test_the_bytes_that_arrived_are_those_that_were_sent(seen):
    assert seen["checksums.new"] == seen["sent.new"] and seen["checksums.broadcast"] == seen["sent.broadcast"]


def test_a_refit_writes_to_the_memory_that_graphs_read(seen):
    assert not seen["moved"]


def test_the_engine_computes_with_the_new_weights(seen):
    first, new, back = (seen[name].logprobs.tolist() for name in ("sampled", "sampled.new", "sampled.broadcast"))
    assert first == back != new


def test_a_weight_that_was_not_sent_is_an_error(seen):
    assert "did not update 1 weights of the engine" in seen["partial"] and LEFT_OUT in seen["partial"]

"""Training passes that are padded to few shapes and recorded give what other passes give, with every loss."""

import json
from pathlib import Path

import pytest
import torch

from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

OVERRIDES = [
    *("policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=40"),
    *("policy.sequence_length_round=8", "policy.train_global_batch_size=12", "algorithm.num_prompts_per_step=6"),
    *("algorithm.num_generations_per_prompt=2", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"),
    # A step of Adam would make what is a rounding error of a gradient of 0 as large as other gradients.
    *("policy.megatron_cfg.optimizer.optimizer=sgd", "policy.megatron_cfg.optimizer.use_distributed_optimizer=false"),
]


@pytest.fixture(scope="module")
def found(model_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("graphs") / "found"
    script = Path(__file__).with_name("graphs_rank.py")
    run_ranks(script, [str(model_folder), str(output), json.dumps(OVERRIDES), json.dumps(["plain", "again"])], 1)
    return torch.load(output, weights_only=False)


def test_losses_gradients_and_metrics_are_the_same(found):
    ours, theirs = (found[way]["measured"] for way in ("again", "plain"))
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, step), (_, expected) in zip(ours, theirs, strict=True):
        assert expected["grad_norm"] > 1e-3
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_weights_are_the_same(found):
    for name, values in found["again"]["weights"].items():
        assert not torch.equal(values, found["again"]["initial"][name]), name
        torch.testing.assert_close(values, found["plain"]["weights"][name], rtol=1e-5, atol=1e-6, msg=name)


def test_every_loss_is_recorded_and_reads_no_tensor(found):
    *with_each, after_a_move = found["again"]["recorded"]
    assert all(before < after for before, after in zip([0, *with_each], with_each, strict=False))
    assert found["again"]["reads"] == {}
    assert after_a_move < with_each[-1]


def test_what_cannot_be_recorded_is_told(found):
    assert "not permitted when stream is capturing" in found["again"]["refused"]
    assert "set policy.megatron_cfg.cuda_graph_impl=none" in found["again"]["refused"]

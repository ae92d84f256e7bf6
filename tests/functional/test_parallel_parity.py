"""Tensor, pipeline and data parallel policies give what one rank gives, and one rank what transformers gives."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_lite.losses.interface import combine_metrics
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

BATCHES = [
    "algorithm.num_prompts_per_step=2",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=4",
    "policy.logprob_batch_size=4",
    "algorithm.loss_fn.reference_policy_kl_penalty=0.1",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    # Many buckets, of all sorts.
    "refit.bucket_bytes=60000",
]
# 40 tokens hold three to five of the test's sequences of 7 to 12; rounding to 8 leaves padding behind them.
ROUNDED = ["policy.sequence_length_round=8"]
PACKED = ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=40", *ROUNDED]
DYNAMIC = ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=40", *ROUNDED]
OFFLOADED = ["offload=pinned", "policy.offload_optimizer_states_for_logprob=true"]
DDP = "policy.megatron_cfg.distributed_data_parallel_config"
RECOMPUTED = ["policy.megatron_cfg.activation_checkpointing=true"]
PARTS = [*RECOMPUTED, "policy.megatron_cfg.recompute_granularity=selective"]
VIRTUAL = [
    "cluster.cpu_ranks=2",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size=2",
]
LAYOUTS = {
    "one rank": [],
    "layers recomputed two at a time": [*RECOMPUTED, "policy.megatron_cfg.recompute_num_layers=2"],
    "first layer recomputed": [*RECOMPUTED, "policy.megatron_cfg.recompute_method=block"],
    "parts recomputed": [*PARTS, "policy.megatron_cfg.recompute_modules=[core_attn,layernorm,mlp]"],
    "tensor 2": ["cluster.cpu_ranks=2", "policy.megatron_cfg.tensor_model_parallel_size=2"],
    "pipeline 2": ["cluster.cpu_ranks=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"],
    "pipeline 2, fewer layers at the end": [
        "cluster.cpu_ranks=2",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage=1",
    ],
    "pipeline 2 of 2 chunks": VIRTUAL,
    "pipeline 2 of 2 chunks, packed": [*VIRTUAL, *PACKED],
    "pipeline 2 of 2 chunks, one micro-batch": [
        *VIRTUAL,
        "policy.train_micro_batch_size=16",
        "policy.logprob_batch_size=16",
    ],
    "data 2": ["cluster.cpu_ranks=2"],
    "data 2, optimizer not sharded": [
        "cluster.cpu_ranks=2",
        "policy.megatron_cfg.optimizer.use_distributed_optimizer=false",
    ],
    "packed": PACKED,
    "dynamic": DYNAMIC,
    "tensor 2, packed": ["cluster.cpu_ranks=2", "policy.megatron_cfg.tensor_model_parallel_size=2", *PACKED],
    "pipeline 2, packed": ["cluster.cpu_ranks=2", "policy.megatron_cfg.pipeline_model_parallel_size=2", *PACKED],
    "pipeline 2, dynamic": ["cluster.cpu_ranks=2", "policy.megatron_cfg.pipeline_model_parallel_size=2", *DYNAMIC],
    "data 2, packed": ["cluster.cpu_ranks=2", *PACKED],
    "bfloat16": ["policy.precision=bfloat16"],
    "bfloat16, also gradients": ["policy.precision=bfloat16", f"{DDP}.grad_reduce_in_fp32=false"],
    "one rank, offloaded": OFFLOADED,
    "one rank, offloaded one after the other": ["offload=colocated"],
    "bfloat16, offloaded": ["policy.precision=bfloat16", *OFFLOADED],
    "data 2, offloaded": ["cluster.cpu_ranks=2", *OFFLOADED],
    "tensor 2, pipeline 2, offloaded": [
        "cluster.cpu_ranks=4",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
        *OFFLOADED,
    ],
    "pipeline 2 of 2 chunks, data 2, overlapped": [
        *VIRTUAL[1:],
        "cluster.cpu_ranks=4",
        f"{DDP}.overlap_grad_reduce=true",
        f"{DDP}.overlap_param_gather=true",
        *PACKED,
    ],
    "tensor 2, states offloaded for logprobs": [
        "cluster.cpu_ranks=2",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "offload=logprob",
    ],
    "clipped": [
        "policy.megatron_cfg.optimizer.optimizer=sgd",
        "policy.megatron_cfg.optimizer.use_distributed_optimizer=false",
        "policy.megatron_cfg.optimizer.sgd_momentum=0",
        "policy.megatron_cfg.optimizer.lr=1",
        "policy.megatron_cfg.optimizer.weight_decay=0",
        "policy.max_grad_norm=0.01",
    ],
}


@dataclass
class Outcome:
    logprobs: np.ndarray
    reference: np.ndarray
    after: np.ndarray
    reference_after: np.ndarray
    own_after: np.ndarray
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor
    lengths: torch.Tensor
    temperature: float
    assembled: list[list[tuple[bool, int, int]]]
    """By rank, and by who wants the weights (all ranks, the first, the last): whether what was put together is what is
    exported, the buckets, and the collectives they take."""
    kept: list[tuple[torch.Tensor, torch.Tensor]]
    """By replica: the logprobs that training passes have kept, and those of separate passes before them."""
    experts: torch.Tensor | None
    """The experts that the policy was told to take, [B, T, layers, k]."""


@pytest.fixture(scope="module")
def outcomes(model_folder, tmp_path_factory):
    """Each layout run once, all that need as many ranks in the same processes."""
    folder = tmp_path_factory.mktemp("parity")
    for ranks in (1, 2, 4):
        layouts = {name: BATCHES + own for name, own in LAYOUTS.items() if ranks_of(own) == ranks}
        script = Path(__file__).with_name("policy_rank.py")
        run_ranks(script, [str(model_folder), str(folder), json.dumps(layouts)], ranks)
    return lambda layout: read(folder / layout.replace(" ", "-"))


def ranks_of(layout: list[str]) -> int:
    return next((int(one.split("=")[1]) for one in layout if one.startswith("cluster.cpu_ranks=")), 1)


def read(output: Path) -> Outcome:
    from safetensors.torch import load_file

    saved = torch.load(output, weights_only=False)
    *scores, steps = zip(*saved["replicas"], strict=True)
    metrics = []
    for replicas in zip(*steps, strict=True):
        whole = {name: replicas[0][name] for name in ("grad_norm", "lr", "wd")}
        metrics.append(combine_metrics(replicas) | whole)
    return Outcome(
        *map(np.concatenate, scores),
        metrics,
        load_file(f"{output}.hf/model.safetensors"),
        saved["tokens"],
        saved["lengths"],
        saved["temperature"],
        saved["assembled"],
        saved["kept"],
        saved["experts"],
    )


def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(outcomes, model_folder):
    from transformers import AutoModelForCausalLM

    outcome = outcomes("one rank")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(outcome.tokens).logits / outcome.temperature
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, outcome.tokens[:, 1:, None]).squeeze(-1)
    inside = torch.arange(1, outcome.tokens.shape[1]) < outcome.lengths[:, None]
    np.testing.assert_allclose(outcome.logprobs[:, 1:], torch.where(inside, expected, 0.0).numpy(), atol=1e-5)
    assert (outcome.logprobs[:, 0] == 0).all()


def test_before_the_first_step_the_ratio_is_exactly_one_and_the_kl_exactly_zero(outcomes):
    for layout in LAYOUTS:
        outcome = outcomes(layout)
        assert np.array_equal(outcome.reference, outcome.logprobs), layout
        first = outcome.metrics[0]
        assert first["kl_penalty"] == 0, layout
        assert first["probs_ratio_min"] == first["probs_ratio_max"] == 1, layout
        assert outcome.metrics[1]["kl_penalty"] > 0, layout


@pytest.mark.parametrize(
    ("moved", "still"),
    [
        ("one rank, offloaded", "one rank"),
        ("one rank, offloaded one after the other", "one rank"),
        ("layers recomputed two at a time", "one rank"),
        ("first layer recomputed", "one rank"),
        ("bfloat16, offloaded", "bfloat16"),
        ("data 2, offloaded", "data 2"),
        ("tensor 2, states offloaded for logprobs", "tensor 2"),
    ],
)
def test_what_moves_or_is_recomputed_stays_the_same_to_the_bit(outcomes, moved, still):
    ours, theirs = outcomes(moved), outcomes(still)
    assert ours.metrics == theirs.metrics
    for name in ("logprobs", "reference", "after", "reference_after", "own_after"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    for name, weight in theirs.weights.items():
        assert torch.equal(ours.weights[name], weight), name


@pytest.mark.parametrize(
    "layout",
    [name for name in LAYOUTS if name not in ("one rank", "clipped") and not name.startswith("bfloat16")],
)
def test_layouts_agree_in_float32(outcomes, layout):
    one, other = outcomes("one rank"), outcomes(layout)
    np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-5)
    for ours, theirs in zip(other.metrics, one.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name
    np.testing.assert_allclose(other.after, one.after, atol=2e-4)
    assert other.weights.keys() == one.weights.keys()
    # Two Adam steps of 3e-4 may go either way where a gradient is next to nothing; a wrong shard is off by far more.
    for name, weight in one.weights.items():
        np.testing.assert_allclose(other.weights[name], weight, atol=1.5e-3, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_pass_keeps_the_logprobs_that_a_separate_pass_gives(outcomes, layout):
    """With two optimizer steps on a batch, those of each row before its own step."""
    for kept, expected in outcomes(layout).kept:
        inside = expected != 0
        assert inside.float().mean() > 0.5 and not kept[~inside].any()
        np.testing.assert_allclose(kept, expected, atol=0.05 if layout.startswith("bfloat16") else 1e-5)


def test_the_reference_weights_leave_no_trace(outcomes):
    for layout in LAYOUTS:
        outcome = outcomes(layout)
        assert np.array_equal(outcome.reference_after, outcome.logprobs), layout
        assert np.array_equal(outcome.own_after, outcome.after), layout


def test_training_changes_the_weights_and_export_has_them(outcomes, model_folder):
    from safetensors.torch import load_file

    outcome, before = outcomes("one rank"), load_file(model_folder / "model.safetensors")
    assert outcome.weights.keys() == before.keys()
    assert not np.allclose(outcome.after, outcome.logprobs, atol=1e-3)
    assert all(not torch.equal(outcome.weights[name], before[name]) for name in before)


@pytest.mark.parametrize("layout", ["bfloat16", "bfloat16, also gradients"])
def test_bfloat16_is_near_float32(outcomes, layout):
    half, full = outcomes(layout), outcomes("one rank")
    assert np.abs(half.logprobs - full.logprobs).max() < 0.05
    assert np.abs(half.after - full.after).max() < 0.2
    assert half.metrics[0]["loss"] == pytest.approx(full.metrics[0]["loss"], abs=0.02)
    assert half.weights["model.norm.weight"].dtype == torch.bfloat16


def test_the_gradient_is_clipped_to_its_limit(outcomes, model_folder):
    """Two SGD steps with a learning rate of 1 move the weights by at most twice the largest norm allowed."""
    from safetensors.torch import load_file

    outcome, before = outcomes("clipped"), load_file(model_folder / "model.safetensors")
    assert all(metrics["grad_norm"] > 0.1 for metrics in outcome.metrics)
    moved = sum((outcome.weights[name] - before[name]).square().sum() for name in before).sqrt().item()
    assert 0.005 < moved <= 0.0201


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_refit_sends_is_what_the_bridge_exports_after_training_and_moves(layout, outcomes):
    for wanting in zip(*outcomes(layout).assembled, strict=True):
        assert all(same for same, _, _ in wanting)


@pytest.mark.parametrize("wanting", ["all", "first", "last"])
def test_a_refit_takes_few_collectives(wanting, outcomes):
    collectives = {}
    for layout in LAYOUTS:
        _, buckets, collectives[layout] = outcomes(layout).assembled[0][["all", "first", "last"].index(wanting)]
        assert buckets > 10
    assert all(collectives[layout] == 0 for layout in LAYOUTS if not layout.startswith(("tensor", "pipeline")))
    # At most one for each rank that has a part of a bucket; where stages meet in one, both have.
    assert 0 < collectives["tensor 2"] <= 2 * buckets
    assert 0 < collectives["pipeline 2"] <= buckets + 2
    assert 0 < collectives["tensor 2, pipeline 2, offloaded"] <= 2 * buckets + 6

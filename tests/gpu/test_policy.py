"""The Megatron policy with Transformer Engine in bfloat16: every batch layout gives what transformers gives."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_lite.losses.interface import combine_metrics
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.gpu

RANK_SCRIPT = Path(__file__).parents[1] / "functional" / "policy_rank.py"
COMMON = [
    "policy=megatron_gpu",
    "algorithm.num_prompts_per_step=2",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=4",
    "policy.logprob_batch_size=4",
    "policy.sequence_length_round=16",
    "policy.max_total_sequence_length=40",
    "algorithm.loss_fn.reference_policy_kl_penalty=0.1",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    "refit.bucket_bytes=60000",
]
PACKED = ["policy.sequence_packing.train_mb_tokens=48"]
DYNAMIC = ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=48"]
MEGATRON = "policy.megatron_cfg"
PARTS = [f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=selective"]
MOMENTS = [f"{MEGATRON}.optimizer.{name}=bfloat16" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
SUMS = f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32=false"
LAYOUTS = {
    "fixed": (1, ["policy.sequence_packing.enabled=false"]),
    "packed": (1, PACKED),
    "packed, recomputed": (1, [*PACKED, "policy.megatron_cfg.activation_checkpointing=true"]),
    "packed, parts recomputed": (1, [*PACKED, *PARTS, f"{MEGATRON}.recompute_modules=[core_attn,layernorm,mlp]"]),
    "packed, first layers recomputed": (
        1,
        [*PACKED, PARTS[0], f"{MEGATRON}.recompute_method=block", f"{MEGATRON}.recompute_num_layers=2"],
    ),
    "packed, gradients in bfloat16": (1, [*PACKED, SUMS]),
    "packed, gradients added apart": (1, [*PACKED, f"{MEGATRON}.gradient_accumulation_fusion=false"]),
    "packed, moments in bfloat16": (1, [*PACKED, *MOMENTS, f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true"]),
    "dynamic": (1, DYNAMIC),
    "packed, offloaded": (
        1,
        [*PACKED, "offload=pinned", "policy.offload_optimizer_states_for_logprob=true"],
    ),
    "packed, offloaded one after the other": (1, [*PACKED, "offload=colocated"]),
    "data 2": (2, PACKED),
    "tensor 2": (2, [*PACKED, "policy.megatron_cfg.tensor_model_parallel_size=2"]),
    "tensor 2, sequence parallel": (
        2,
        [*PACKED, "policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.sequence_parallel=true"],
    ),
    "context 2": (2, [*PACKED, "policy.megatron_cfg.context_parallel_size=2"]),
    "context 2, by heads": (
        2,
        [*PACKED, "policy.megatron_cfg.context_parallel_size=2", "policy.megatron_cfg.cp_comm_type=a2a"],
    ),
    "pipeline 2": (2, [*PACKED, "policy.megatron_cfg.pipeline_model_parallel_size=2"]),
    "pipeline 2 of 2 chunks": (
        2,
        [
            *PACKED,
            f"{MEGATRON}.pipeline_model_parallel_size=2",
            f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
        ],
    ),
    "context 2, tensor 2, sequence parallel": (
        4,
        [
            *PACKED,
            "policy.megatron_cfg.context_parallel_size=2",
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "policy.megatron_cfg.sequence_parallel=true",
        ],
    ),
    "pipeline 2, tensor 2": (
        4,
        [
            *PACKED,
            "policy.megatron_cfg.pipeline_model_parallel_size=2",
            "policy.megatron_cfg.tensor_model_parallel_size=2",
        ],
    ),
}


@dataclass
class Outcome:
    saved: dict
    scores: list[np.ndarray]
    """Logprobs [B, T]: at the start, of the reference, after two steps; then of the reference and the policy again."""
    steps: list[dict[str, float]]


@pytest.fixture(scope="module")
def outcomes(gpu_model, tmp_path_factory):
    """Each layout run once, all that need as many ranks in the same processes."""
    folder, done = tmp_path_factory.mktemp("policy"), set()

    def outcome(layout: str) -> Outcome:
        ranks, _ = LAYOUTS[layout]
        if ranks not in done:
            together = {
                name: [*COMMON, f"cluster.gpus_per_node={ranks}", *own]
                for name, (size, own) in LAYOUTS.items()
                if size == ranks
            }
            run_ranks(RANK_SCRIPT, [str(gpu_model), str(folder), json.dumps(together)], ranks, timeout_s=400)
            done.add(ranks)
        saved = torch.load(folder / layout.replace(" ", "-"), weights_only=False)
        *scores, steps = zip(*saved["replicas"], strict=True)
        whole = [
            combine_metrics(replicas) | {"grad_norm": replicas[0]["grad_norm"]} for replicas in zip(*steps, strict=True)
        ]
        return Outcome(saved, [np.concatenate(parts) for parts in scores], whole)

    return outcome


def test_logprobs_are_those_of_transformers(outcomes, gpu_model):
    from transformers import AutoModelForCausalLM

    saved, first = outcomes("fixed").saved, outcomes("fixed").scores[0]
    model = AutoModelForCausalLM.from_pretrained(gpu_model, dtype=torch.float32)
    tokens = saved["tokens"]
    with torch.no_grad():
        logits = model(tokens).logits / saved["temperature"]
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    inside = torch.arange(1, tokens.shape[1]) < saved["lengths"][:, None]
    difference = np.abs(first[:, 1:] - torch.where(inside, expected, 0.0).numpy())
    assert expected.std() > 0.5
    assert difference.mean() < 0.03 and difference.max() < 0.25


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.gpu(LAYOUTS[name][0])) for name in LAYOUTS])
def test_the_reference_weights_leave_no_trace(layout, outcomes):
    first, _, after, reference_after, own_after = outcomes(layout).scores
    assert np.abs(reference_after - first).max() < 0.1
    assert np.abs(own_after - after).max() < 0.1
    assert np.abs(reference_after - after).max() > 0.1


@pytest.mark.parametrize("moved", ["packed, offloaded", "packed, offloaded one after the other"])
def test_what_moves_between_phases_stays_the_same(moved, outcomes):
    ours, theirs = outcomes(moved), outcomes("packed")
    # Forward passes repeat to the bit, so weights that came back are those that left.
    for name, values, others in zip(("first", "reference"), ours.scores, theirs.scores, strict=False):
        assert np.array_equal(values, others), name
    assert np.array_equal(ours.scores[3], theirs.scores[3])
    # Backward passes may add up in another order.
    assert ours.steps[0]["loss"] == theirs.steps[0]["loss"]
    for step, expected in zip(ours.steps, theirs.steps, strict=True):
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    assert np.abs(ours.scores[2] - theirs.scores[2]).mean() < 0.01


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.gpu(LAYOUTS[name][0])) for name in LAYOUTS if name != "fixed"]
)
def test_layouts_agree_within_bfloat16(layout, outcomes):
    ours, theirs = outcomes(layout), outcomes("fixed")
    for values, others in zip(ours.scores, theirs.scores, strict=True):
        # bfloat16 keeps 8 bits of a logit, and these logits reach 30.
        assert np.abs(values - others).mean() < 0.01 * np.abs(others).mean()
        assert np.abs(values - others).max() < 0.6
    first, first_expected = ours.steps[0], theirs.steps[0]
    assert abs(first["kl_penalty"]) < 1e-3
    assert first["probs_ratio"] == pytest.approx(1, abs=1e-3)
    assert first["loss"] == pytest.approx(first_expected["loss"], abs=0.02)
    assert first["grad_norm"] == pytest.approx(first_expected["grad_norm"], rel=0.1)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.gpu(LAYOUTS[name][0])) for name in LAYOUTS])
def test_what_a_refit_sends_is_what_the_bridge_exports(layout, outcomes):
    """After training and moves, for any rank that wants the weights; NCCL gathers what gloo broadcasts."""
    for wanting in zip(*outcomes(layout).saved["assembled"], strict=True):
        assert all(same for same, _, _ in wanting)

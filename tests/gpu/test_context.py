"""Ranks that share each sequence train as one rank does, in bfloat16: with both ways to exchange keys and values, and
together with the other ways to split a model.

Attention over ranks rounds partial results that one rank keeps in float32. The limits are wider than what bfloat16
makes of float32 with the same model on a CPU, where gradients differ by 1.5 % (the median of parameters) to 2.8 %.
tests/functional/test_context.py compares to 1e-5, in float32 and without Transformer Engine. `-o log_cli_level=INFO`
shows what is compared.
"""

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.gpu
log = logging.getLogger(__name__)

MEGATRON = "policy.megatron_cfg"
CONTEXT, EXPERTS = f"{MEGATRON}.context_parallel_size=2", "experts"
# All layouts take the same experts, which the rows tell.
REPLAY = "policy.router_replay.enabled=true"
COMMON = [
    "policy=megatron_gpu",
    "algorithm.num_prompts_per_step=1",
    "algorithm.num_generations_per_prompt=8",
    "policy.train_global_batch_size=8",
    "policy.max_total_sequence_length=1024",
    "policy.sequence_packing.train_mb_tokens=1280",
    "algorithm.loss_fn.reference_policy_kl_penalty=0.1",
    f"{MEGATRON}.scheduler.lr_warmup_iters=0",
    f"{MEGATRON}.optimizer.lr=1.0e-5",
    "policy.max_grad_norm=1000000",
]
# Whole gradients are on each rank, and stay as they are.
WHOLE = [f"{MEGATRON}.optimizer.use_distributed_optimizer=false"]
SHARDED = [
    f"{MEGATRON}.distributed_data_parallel_config.overlap_{name}=true" for name in ("grad_reduce", "param_gather")
]
LAYOUTS = {
    "alone": (1, WHOLE),
    "ring": (2, [*WHOLE, CONTEXT]),
    "hybrid": (2, [*WHOLE, CONTEXT, f"{MEGATRON}.hybrid_context_parallel=true"]),
    "heads": (2, [*WHOLE, CONTEXT, f"{MEGATRON}.cp_comm_type=a2a"]),
    "recomputed": (2, [*WHOLE, CONTEXT, f"{MEGATRON}.activation_checkpointing=true"]),
    "sharded optimizer": (2, [CONTEXT, *SHARDED]),
    "data 2": (4, [*WHOLE, CONTEXT]),
    "tensor 2": (
        4,
        [*WHOLE, CONTEXT, f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.sequence_parallel=true"],
    ),
    "pipeline 2": (4, [*WHOLE, CONTEXT, f"{MEGATRON}.pipeline_model_parallel_size=2"]),
    "context 4": (4, [*WHOLE, f"{MEGATRON}.context_parallel_size=4"]),
    "experts alone": (1, [*WHOLE, REPLAY]),
    "hybrid 4": (4, [*WHOLE, f"{MEGATRON}.context_parallel_size=4", f"{MEGATRON}.hybrid_context_parallel=true"]),
    "hybrid heads": (2, [*WHOLE, CONTEXT, f"{MEGATRON}.cp_comm_type=a2a", f"{MEGATRON}.hybrid_context_parallel=true"]),
    "experts 2": (2, [*WHOLE, REPLAY, CONTEXT, f"{MEGATRON}.expert_model_parallel_size=2"]),
    "experts hybrid": (
        2,
        [
            *WHOLE,
            REPLAY,
            CONTEXT,
            f"{MEGATRON}.hybrid_context_parallel=true",
            f"{MEGATRON}.expert_model_parallel_size=2",
        ],
    ),
}
SHARED = [name for name in LAYOUTS if not name.endswith("alone")]
CASES = [pytest.param(name, marks=pytest.mark.gpu(LAYOUTS[name][0])) for name in SHARED]

# Layouts in which rank 0 has whole gradients of some parameters, and those in which it has all.
WITH_GRADIENTS = [case for case in CASES if case.values[0] not in ("sharded optimizer", "tensor 2")]
OF_WHOLE_MODELS = [
    case for case in WITH_GRADIENTS if case.values[0] not in ("pipeline 2", "experts 2", "experts hybrid")
]


@pytest.fixture(scope="module")
def outcome(gpu_model, gpu_experts_model, tmp_path_factory):
    """Each layout run once, all of a model that need as many ranks in the same processes."""
    folder, done = tmp_path_factory.mktemp("context"), set()

    def run(layout: str) -> dict:
        ranks, experts = LAYOUTS[layout][0], layout.startswith(EXPERTS)
        if (ranks, experts) not in done:
            together = {
                name: [*COMMON, f"cluster.gpus_per_node={ranks}", *own]
                for name, (size, own) in LAYOUTS.items()
                if size == ranks and name.startswith(EXPERTS) == experts
            }
            model = gpu_experts_model if experts else gpu_model
            arguments = [str(model), str(folder), json.dumps(together)]
            run_ranks(Path(__file__).with_name("context_rank.py"), arguments, ranks, timeout_s=400)
            done.add((ranks, experts))
        return torch.load(folder / layout.replace(" ", "-"), weights_only=False)

    return run


def both(layout: str, outcome) -> tuple[dict, dict]:
    return outcome(layout), outcome("experts alone" if layout.startswith(EXPERTS) else "alone")


def distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, as a share of the norm of what is expected."""
    return ((ours - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("layout", CASES)
def test_logprobs_and_loss(layout, outcome):
    ours, alone = both(layout, outcome)
    differences = torch.cat([(a - b).abs() for a, b in zip(ours["logprobs"], alone["logprobs"], strict=True)])
    log.info("%s: logprobs differ by %.2e on average, %.2e at most", layout, differences.mean(), differences.max())
    assert torch.cat(alone["logprobs"]).std() > 0.5
    assert differences.mean() < 0.03 and differences.max() < 0.4
    for step, (found, expected) in enumerate(zip(ours["metrics"], alone["metrics"], strict=True)):
        for name in ("loss", "grad_norm"):
            log.info("%s, step %d: %s %.6f, alone %.6f", layout, step, name, found[name], expected[name])
        assert found["loss"] == pytest.approx(expected["loss"], abs=0.01)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)


@pytest.mark.parametrize("layout", WITH_GRADIENTS)
def test_gradients_of_each_parameter(layout, outcome):
    """A pipeline stage has some of the parameters, an expert-parallel rank some of the experts."""
    ours, alone = both(layout, outcome)
    for step, (found, expected) in enumerate(zip(ours["gradients"], alone["gradients"], strict=True)):
        shared = [name for name in found if name in expected and found[name].shape == expected[name].shape]
        assert len(shared) > 8
        distances = {name: distance(found[name], expected[name]) for name in shared}
        worst = max(distances, key=distances.__getitem__)
        middle = sorted(distances.values())[len(distances) // 2]
        log.info("%s, step %d: gradients differ by %.4f, of %s by %.4f", layout, step, middle, worst, distances[worst])
        # A wrong factor would be a difference of half or more.
        assert distances[worst] < 0.1 and middle < 0.04


@pytest.mark.parametrize("layout", OF_WHOLE_MODELS)
def test_both_steps_move_the_weights_alike(layout, outcome):
    """The optimizer's float32 weights. Adam moves each by its gradient's sign, which rounding decides where the
    gradient is small."""
    ours, alone = both(layout, outcome)
    found, expected = (torch.cat([own.flatten() for own in one["moved"]]) for one in (ours, alone))
    log.info("%s: the weights' changes differ by %.4f", layout, distance(found, expected))
    assert expected.norm() > 0
    assert distance(found, expected) < 0.3

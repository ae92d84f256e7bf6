"""megatron-core's CPU optimizer and activation offload train as without them; a rank finds its GPU's NUMA node.

As a script, one policy rank: test_offload_features.py MODEL_FOLDER OUTPUT_FOLDER, all variants one after another.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.policy import activation_offload, optimizer
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.system import numa
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import policy_arguments
from tests.functional.rank import leave
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.gpu

OPTIMIZER, MODULES = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.offload_modules"
LEARNING_RATE = 1e-3
# Long enough that a micro-batch has tensors of a million elements, from which on megatron-core offloads them.
ROWS, LENGTH = 16, 512
# The second step has more micro-batches than the first, the third fewer than the second.
STEPS = (slice(0, 8), slice(0, 16), slice(8, 16))
COMMON = [
    "cluster.gpus_per_node=1",
    "policy=megatron_gpu",
    f"policy.max_total_sequence_length={LENGTH}",
    "policy.sequence_packing.train_mb_tokens=4096",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    f"{OPTIMIZER}.lr={LEARNING_RATE}",
    # Large enough to be seen after one step.
    f"{OPTIMIZER}.weight_decay=1.0",
]


def on_cpu(fraction: float, overlap: str) -> list[str]:
    share, copies = f"{OPTIMIZER}.optimizer_offload_fraction", f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d"
    return ["offload=cpu_optimizer", f"{share}={fraction}", f"{copies}={overlap}"]


CPU_OPTIMIZERS = {
    "cpu 0.5": on_cpu(0.5, "false"),
    "cpu 0.5, overlapped": on_cpu(0.5, "true"),
    "cpu 1.0": on_cpu(1.0, "false"),
    "cpu 1.0, overlapped": on_cpu(1.0, "true"),
}
OFFLOADED = {
    "activations": ["offload=activations"],
    "activations, attention whole": ["offload=activations", f"{MODULES}=[qkv_linear,core_attn,attn_proj]"],
    "activations, MLP alone": ["offload=activations", f"{MODULES}=[mlp]"],
    "activations, all": ["offload=activations", f"{MODULES}=[qkv_linear,core_attn,attn_proj,mlp]"],
}
VARIANTS = {"plain": [], **CPU_OPTIMIZERS, **OFFLOADED}


@pytest.fixture(scope="module")
def results(gpu_model, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What each variant's rank saved."""
    folder = tmp_path_factory.mktemp("offload")
    run_ranks(Path(__file__), [str(gpu_model), str(folder)], 1, timeout_s=500)
    return {name: torch.load(folder / name, weights_only=False) for name in VARIANTS}


@pytest.mark.parametrize("variant", ["plain", *CPU_OPTIMIZERS])
def test_masters_are_the_loaded_weights(variant, results):
    """Otherwise the first step would write other weights back."""
    assert results[variant]["masters_are_weights"]


@pytest.mark.parametrize("variant", CPU_OPTIMIZERS)
def test_the_cpu_has_its_share(variant, results):
    share, fraction = results[variant]["share_on_cpu"], float(variant.split()[1].rstrip(","))
    # Parameters are not split: the largest is an eighth of this model.
    assert fraction <= share <= min(1, fraction + 0.15)
    assert results[variant]["threads"] >= 1


@pytest.mark.parametrize("variant", CPU_OPTIMIZERS)
def test_the_first_step_is_that_of_the_gpu(variant, results):
    ours, theirs = results[variant], results["plain"]
    before, expected = theirs["masters"][0], theirs["masters"][1]
    assert (expected - before).abs().mean() > LEARNING_RATE / 2
    # Where a gradient is almost 0, the order of a sum decides on the direction of Adam's first step.
    assert (ours["masters"][1] - expected).abs().mean() < LEARNING_RATE / 50
    assert (ours["weights"] - theirs["weights"]).abs().mean() < LEARNING_RATE / 50
    # What the model computes with are its masters, rounded.
    torch.testing.assert_close(ours["weights"], ours["masters"][1].bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("variant", [*CPU_OPTIMIZERS, *OFFLOADED])
def test_training_goes_on_as_without_it(variant, results):
    for own, expected in zip(results[variant]["steps"], results["plain"]["steps"], strict=True):
        assert own["loss"] == pytest.approx(expected["loss"], rel=5e-3)
        assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-2)


@pytest.mark.parametrize("variant", OFFLOADED)
def test_activation_offload_does_not_change_the_first_pass(variant, results):
    own, expected = results[variant]["steps"][0], results["plain"]["steps"][0]
    assert own["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("variant", OFFLOADED)
def test_activation_offload_leaves_logprobs_alone(variant, results):
    before, after = results[variant]["logprobs"]
    expected_before, expected_after = results["plain"]["logprobs"]
    torch.testing.assert_close(before, expected_before, rtol=0, atol=1e-4)
    assert (after - expected_after).abs().mean() < 0.03


@pytest.mark.parametrize("variant", OFFLOADED)
def test_activations_were_offloaded_in_every_micro_batch(variant, results):
    offloaded, micro_batches = results[variant]["offloaded"]
    # At least queries and attention's outputs of a micro-batch of 3392 tokens, in all layers but the last.
    assert offloaded >= 2 * 3 * 3392 * 512 * 2
    # Those of the longest pass; passes for logprobs are not among them.
    assert micro_batches == 2


def test_a_rank_says_what_became_of_its_numa_binding(results):
    assert "bound to" in results["plain"]["binding"]


def main(model_folder: str, output_folder: str) -> None:
    # Transformer Engine reads it while it is imported; it does nothing where nothing is offloaded.
    os.environ.update(
        activation_offload.environment(
            compose_config([f"policy.model_name={model_folder}", *COMMON, "offload=activations"]).policy.megatron_cfg
        )
    )
    for name, overrides in VARIANTS.items():
        torch.save(run(model_folder, [*COMMON, *overrides]), Path(output_folder) / name)
        forget_pattern()


def run(model_folder: str, overrides: list[str]) -> dict[str, Any]:
    config = compose_config([f"policy.model_name={model_folder}", *overrides])
    binding = numa.bind(numa.gpu_address())
    worker = MegatronWorker(**policy_arguments(config, Path(model_folder)) | {"threads": 4})
    source = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(4, 60, (ROWS, LENGTH), generator=source)
    lengths_B = torch.randint(300, LENGTH + 1, (ROWS,), generator=source)
    batch = [
        TokenRow(tokens[:own].tolist(), [True] * own) for tokens, own in zip(tokens_BT, lengths_B.tolist(), strict=True)
    ]

    def logprobs() -> Tensor:
        worker.prepare_for_logprob()
        scores_BT = worker.logprobs(tokens_BT, lengths_B, "logprob")
        assert scores_BT is not None
        return torch.from_numpy(scores_BT)

    def step(rows: slice) -> dict[str, float] | None:
        worker.prepare_for_training()
        worker.put_batch(batch[rows])
        trained = worker.train(SFTLoss(), SFTLoss().counts(batch[rows]))
        return trained and trained[0]

    result: dict[str, Any] = {
        "binding": binding.describe(),
        "threads": optimizer.rank_threads(),
        "masters_are_weights": torch.equal(masters(worker), weights(worker)),
        "share_on_cpu": share_on_cpu(worker),
    }
    scores, copies = [logprobs()], [masters(worker)]
    steps = [step(STEPS[0])]
    copies.append(masters(worker))
    result["weights"] = weights(worker)
    logprobs()
    steps += [step(rows) for rows in STEPS[1:]]
    scores.append(logprobs())
    result |= {"steps": steps, "logprobs": scores, "masters": copies, "offloaded": offloaded()}
    leave(worker)
    return result


def pairs(worker: MegatronWorker) -> list[tuple[Tensor, Tensor]]:
    """The one optimizer's parameters as the model has them, flat, each with its float32 master."""
    (distributed,) = worker._optimizer.chained_optimizers
    on_host = getattr(distributed.optimizer, "param_to_fp32_param", None)
    shards = [shard for group in distributed.shard_float16_groups for shard in group]
    if on_host is not None:
        return [(shard, on_host[shard]) for shard in shards]
    return list(
        zip(shards, [main for group in distributed.shard_fp32_from_float16_groups for main in group], strict=True)
    )


def weights(worker: MegatronWorker) -> Tensor:
    return torch.cat([shard.detach().float().cpu() for shard, _ in pairs(worker)])


def masters(worker: MegatronWorker) -> Tensor:
    return torch.cat([master.detach().cpu().clone() for _, master in pairs(worker)])


def share_on_cpu(worker: MegatronWorker) -> float:
    both = [master for _, master in pairs(worker)]
    return sum(master.numel() for master in both if not master.is_cuda) / sum(master.numel() for master in both)


def offloaded() -> tuple[int, int] | None:
    """Bytes that one pass offloads, and its micro-batches; None where activations stay."""
    manager = manager_class().OFFLOAD_MGR
    if manager is None or not manager._cached_chunks_forward:
        return None
    return manager.offload_summary_total_bytes, len(manager._cached_chunks_forward)


def forget_pattern() -> None:
    """The next variant's modules are others; a run has but one model a process."""
    manager_class().OFFLOAD_MGR = None


def manager_class() -> Any:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    return PipelineOffloadManager


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Whole runs on GPUs through the command line: policy and engines on the same GPUs, and on different ones."""

import re
from pathlib import Path

import pytest

from nemo_rl_lite.compat.versions import since
from nemo_rl_lite.config.engines import VLLM_QUANTIZATIONS
from tests.functional.conftest import train

SMALL = [
    "policy=megatron_gpu",
    "generation=vllm_gpu",
    "algorithm.max_num_steps=3",
    "algorithm.num_prompts_per_step=8",
    "algorithm.max_val_samples=20",
    "policy.train_global_batch_size=32",
    "policy.max_total_sequence_length=64",
    "generation.max_new_tokens=16",
    "generation.vllm_cfg.gpu_memory_utilization=0.3",
    "generation.vllm_cfg.max_num_seqs=64",
    "refit.bucket_bytes=4000000",
]
APART = ["generation.colocated.enabled=false", "generation.colocated.resources.gpus_per_node"]


def run(folder: Path, model: Path, gpus: int, *overrides: str) -> list[dict]:
    """A small run's metrics."""
    return train(folder, model, *SMALL, f"cluster.gpus_per_node={gpus}", *overrides, timeout_s=400)[1]


def check(metrics: list[dict]) -> None:
    """Every refit was compared on both sides, and policy and engine agree on every step's samples."""
    refits = [line for line in metrics if "refit/seconds" in line]
    assert len(refits) == 4
    assert all(line["refit/buckets"] > 2 for line in refits)
    probed = [line["refit/probe_logprob_diff"] for line in metrics if "refit/probe_logprob_diff" in line]
    assert len(probed) == 4 and max(probed) < 0.2
    steps = [line for line in metrics if "train/loss" in line]
    assert len(steps) == 3
    for line in steps:
        assert line["train/token_mult_prob_error"] < 1.1
        assert line["train/probs_ratio"] == pytest.approx(1, abs=0.02)
        assert line["memory/policy_reserved_bytes/train"] >= line["memory/policy_peak_bytes/train"] > 0


def check_ways(folder: Path, shared: bool) -> None:
    """No refit exported weights one by one, since vLLM's loader only copies. On shared GPUs there were no buckets."""
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    assert f"transport of refits: {'direct' if shared else 'broadcast'}" in logs
    assert "megatron-bridge exports all weights" not in logs
    assert "the engine's loader loads at each refit" not in logs and "every refit goes through buckets" not in logs
    assert ("copies out of the policy's parameters" in logs) == shared


@pytest.mark.gpu
def test_colocated_engines_sleep_while_the_policy_works(gpu_model, tmp_path):
    metrics = run(tmp_path / "run", gpu_model, 1, "generation.colocated.sleep=true")
    check(metrics)
    check_ways(tmp_path / "run", shared=True)
    steps = [line for line in metrics if "train/loss" in line]
    for line in steps:
        # The KV cache and the weights are 0.3 of the GPU; asleep, a CUDA context and graphs are left.
        assert line["memory/device_bytes/train"] < line["memory/device_bytes/generate"] / 2
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.gpu
def test_colocated_engines_stay_awake_where_both_fit(gpu_model, tmp_path):
    packs = ["policy.sequence_packing.train_mb_tokens=auto", "policy.sequence_packing.logprob_mb_tokens=auto"]
    metrics = run(tmp_path / "run", gpu_model, 1, "offload=auto", *packs)
    check(metrics)
    check_ways(tmp_path / "run", shared=True)
    for line in metrics:
        if "train/loss" in line:
            # The engine keeps 0.3 of the GPU.
            assert line["memory/device_bytes/train"] > 0.25 * 79 * 2**30


def read_shared_prompts(folder: Path, model: Path, gpus: int, own: str) -> None:
    """Run with long prompts, and check that engines read each once for its samples."""
    long = ["policy.max_total_sequence_length=1024", f"data.system_prompt='{'a long prompt ' * 50}'"]
    check(run(folder, model, gpus, "+generation.vllm_kwargs.attention_backend=CUSTOM", *long, own))
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    assert "decoding steps use cascade attention by prompt" in logs


@pytest.mark.gpu
@pytest.mark.parametrize("sleeps", ["false", "true"])
def test_an_engine_reads_a_shared_prompt_once(sleeps, gpu_model, tmp_path):
    read_shared_prompts(tmp_path / "run", gpu_model, 1, f"generation.colocated.sleep={sleeps}")


@pytest.mark.gpu(2)
def test_a_tensor_parallel_engine_reads_a_shared_prompt_once(gpu_model, tmp_path):
    read_shared_prompts(tmp_path / "run", gpu_model, 2, "generation.vllm_cfg.tensor_parallel_size=2")


@pytest.mark.gpu
@pytest.mark.parametrize("way", VLLM_QUANTIZATIONS)
def test_an_engine_quantises_what_it_gets(way, gpu_model, tmp_path):
    metrics = run(tmp_path / "run", gpu_model, 1, f"+generation.vllm_kwargs.quantization={way}")
    probed = [line["refit/probe_logprob_diff"] for line in metrics if "refit/probe_logprob_diff" in line]
    assert len(probed) == 4 and max(probed) > 0
    # Rounding alone makes up to 1.4 of it in such a model: tests/functional/test_eight_bits.py.
    assert max(line["train/token_mult_prob_error"] for line in metrics if "train/loss" in line) < 1.45


@pytest.mark.gpu
def test_engines_above_the_mismatch_budget_restart_with_plain_settings(gpu_model, tmp_path):
    quantized = "++generation.vllm_kwargs.quantization=fp8_per_channel"
    metrics = run(tmp_path / "run", gpu_model, 1, quantized, "generation.max_gen_kl=1e-9", "algorithm.max_num_steps=4")
    assert [line["step"] for line in metrics if "refit/fell_back" in line] == [3]
    errors = [line["train/gen_kl_error"] for line in metrics if "train/loss" in line]
    assert len(errors) == 4 and errors[3] < min(errors[:3]) / 2


@pytest.mark.gpu
def test_an_engine_that_speculates_gives_exact_logprobs(gpu_model, tmp_path):
    speculation = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1, prompt_lookup_max: 2}"
    metrics = run(tmp_path / "run", gpu_model, 1, f"+generation.vllm_kwargs.speculative_config={speculation}")
    check(metrics)
    assert all(0 <= line["performance/speculation_acceptance"] <= 1 for line in metrics if "train/loss" in line)


@pytest.mark.gpu(2)
def test_engines_on_gpus_of_their_own_get_weights_over_nccl(gpu_model, tmp_path):
    check(run(tmp_path / "run", gpu_model, 2, f"{APART[1]}=1", APART[0]))
    check_ways(tmp_path / "run", shared=False)


PARALLEL = "policy.megatron_cfg.{}_parallel_size=2"
LAYOUTS = {
    "TP 2": [PARALLEL.format("tensor_model")],
    "PP 2": [PARALLEL.format("pipeline_model")],
    "CP 2": [PARALLEL.format("context")],
    "DP 2": [],
}


@pytest.mark.gpu(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_policy_ranks_send_a_tensor_parallel_engine_its_windows(layout, gpu_model, tmp_path):
    """After the first refit, each engine rank receives half of the weights and all norms, without the loader."""
    folder = tmp_path / "run"
    tensor = "generation.vllm_cfg.tensor_parallel_size=2"
    metrics = run(folder, gpu_model, 4, f"{APART[1]}=2", APART[0], tensor, *LAYOUTS[layout])
    check(metrics)
    check_windows(folder, metrics, share=0.5)


@pytest.mark.gpu(4)
def test_two_policy_replicas_send_their_halves_to_two_engines(gpu_model, tmp_path):
    folder = tmp_path / "run"
    metrics = run(folder, gpu_model, 4, f"{APART[1]}=2", APART[0])
    check(metrics)
    check_windows(folder, metrics, share=1)


@pytest.mark.gpu(4)
def test_experts_go_to_the_engine_ranks_that_have_them(gpu_experts_model, tmp_path):
    folder, split = (
        tmp_path / "run",
        ["generation.vllm_cfg.expert_parallel=true", "+generation.vllm_kwargs.moe_backend=triton"],
    )
    tensor = ["generation.vllm_cfg.tensor_parallel_size=2", "policy.megatron_cfg.expert_model_parallel_size=2"]
    metrics = run(folder, gpu_experts_model, 4, f"{APART[1]}=2", APART[0], *tensor, *split)
    check(metrics)
    check_windows(folder, metrics, share=0.5)


def check_windows(folder: Path, metrics: list[dict], share: float) -> None:
    """Engine ranks have received this share of the weights, and the policy has sent all of them once."""
    logs = "".join(path.read_text() for path in sorted((folder / "logs").iterdir()))
    sent = [int(one) for one in re.findall(r"windows, (\d+) bytes to", logs)]
    received = [int(one) for one in re.findall(r"windows, (\d+) bytes from", logs)]
    whole, *later = [line["refit/bytes"] for line in metrics if "refit/bytes" in line]
    assert len(sent) == len(received) == 2
    assert sum(sent) == pytest.approx(whole, rel=0.05)
    assert max(received) <= 1.05 * share * whole
    assert later == pytest.approx([max(received)] * len(later), rel=0.01)
    assert "every refit goes through policy rank 0" not in logs


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_parallel_engine_on_the_policys_gpus_copies_its_parts(layout, gpu_model, tmp_path):
    folder = tmp_path / "run"
    check(run(folder, gpu_model, 2, "generation.vllm_cfg.tensor_parallel_size=2", *LAYOUTS[layout]))
    check_ways(folder, shared=True)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", ["TP 2", "PP 2", "DP 2"])
def test_each_pipeline_stage_of_an_engine_copies_its_layers(layout, gpu_model, tmp_path):
    folder = tmp_path / "run"
    check(run(folder, gpu_model, 2, "generation.vllm_cfg.pipeline_parallel_size=2", *LAYOUTS[layout]))
    check_ways(folder, shared=True)


@pytest.mark.gpu(2)
def test_engine_ranks_with_different_experts_copy_their_own(gpu_experts_model, tmp_path):
    folder, triton = tmp_path / "run", "+generation.vllm_kwargs.moe_backend=triton"
    spread = ["generation.vllm_cfg.tensor_parallel_size=2", "generation.vllm_cfg.expert_parallel=true"]
    check(run(folder, gpu_experts_model, 2, *spread, triton))
    check_ways(folder, shared=True)


@pytest.mark.gpu
@pytest.mark.parametrize("records", [False, True])
def test_engines_with_experts_use_the_second_runner_unless_they_record(records, gpu_experts_model, tmp_path):
    folder, replay = tmp_path / "run", f"policy.router_replay.enabled={str(records).lower()}"
    own = ["generation.colocated.sleep=true", "+generation.vllm_kwargs.moe_backend=triton", replay]
    check(run(folder, gpu_experts_model, 1, *own))
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    # From 0.31 on, the second runner records experts.
    assert ("Using V2 Model Runner" in logs) == (not records or since("vllm", "0.31"))


@pytest.mark.gpu(2)
def test_engines_copy_experts_that_two_gpus_have(gpu_experts_model, tmp_path):
    folder, triton = tmp_path / "run", "+generation.vllm_kwargs.moe_backend=triton"
    check(run(folder, gpu_experts_model, 2, PARALLEL.format("expert_model"), triton))
    check_ways(folder, shared=True)

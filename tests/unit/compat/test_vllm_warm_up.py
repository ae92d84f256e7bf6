"""The kernels that an engine compiles at its start: vLLM's own warm-up, with what the patches pass to it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.warmup import kernel_warmup
from vllm.sampling_params import SamplingParams
from vllm.v1.worker import gpu_model_runner, gpu_worker

from nemo_rl_lite.compat.versions import since
from nemo_rl_lite.compat.vllm_warm_up import warm_up_own_kernels, warm_up_with
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.generation.vllm.arguments import sampling_arguments

PLAIN = Sampling(1.0, 1.0, None, 8, (), ())
FILTERED = Sampling(0.7, 0.9, 20, 8, (), (), min_p=0.1)
EVERY_KIND = SamplingParams.for_sampler_warmup()
ROUTERS = "_warmup_ll_bf16_router_gemm"


@pytest.fixture(autouse=True)
def unpatched(monkeypatch):
    """Undo the patches after each test."""
    monkeypatch.setenv("NRL_WARM_UP_SAMPLING", "{}")
    for owner, name in (
        (gpu_worker, "warmup_kernels"),
        (gpu_worker, "kernel_warmup"),
        (gpu_model_runner.GPUModelRunner, "_dummy_sampler_run"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def configured(sampling: Sampling | None) -> Any:
    if sampling is not None:
        warm_up_with(sampling_arguments(sampling))
    return SimpleNamespace(is_mm_encoder_only=False, num_lookahead_tokens=0)


def requested(monkeypatch, sampling: Sampling | None) -> tuple[SamplingParams, list[Any]]:
    """Run runner V2's warm-up; return what its requests sample with, and the grammars of its steps."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    spec = SimpleNamespace(block_size=16)
    runner = SimpleNamespace(
        vllm_config=configured(sampling),
        num_speculative_steps=0,
        decode_query_len=1,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=64),
        model_state=SimpleNamespace(),
        is_encoder_decoder=False,
        is_pooling_model=False,
        is_last_pp_rank=True,
        scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=64),
        model_config=SimpleNamespace(get_vocab_size=lambda: 64),
        kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
        # From 0.31 on.
        **dict.fromkeys(("adaptive_verification", "rejection_sampler", "kv_block_zeroer")),
        max_model_len=64,
    )
    steps, grammars = list[Any](), list[Any]()
    gpu_worker.warmup_kernels(runner, steps.append, grammars.append)
    (found, same) = (request.sampling_params for request in steps[0].scheduled_new_reqs)
    assert found == same
    return found, grammars


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED])
def test_the_warm_up_samples_as_the_runs_requests_do(monkeypatch, sampling):
    warm_up_own_kernels()
    found, grammars = requested(monkeypatch, sampling)
    assert found == SamplingParams(**sampling_arguments(sampling))
    assert found.logprobs == 0 and found.prompt_logprobs is None and found.logit_bias is None and found.min_tokens == 0
    assert set(grammars) == {None}
    assert SamplingParams.for_sampler_warmup() == EVERY_KIND


def test_an_engine_without_a_run_warms_up_as_vllm_does(monkeypatch):
    warm_up_own_kernels()
    found, grammars = requested(monkeypatch, None)
    assert found == EVERY_KIND and grammars[0] is not None


def test_vllms_requests_come_back_after_an_error():
    def fail(runner: Any, execute: Any, sample: Any) -> None:
        raise RuntimeError("out of memory")

    gpu_worker.warmup_kernels = fail
    warm_up_own_kernels()
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu_worker.warmup_kernels(SimpleNamespace(vllm_config=configured(PLAIN)), None, None)
    assert SamplingParams.for_sampler_warmup() == EVERY_KIND


@pytest.mark.parametrize(
    ("sampling", "top_p", "top_k"),
    [(PLAIN, False, False), (FILTERED, True, True), (Sampling(1.0, 0.9, None, 8, (), ()), True, False), (None, 1, 1)],
)
def test_the_older_runner_filters_only_if_the_run_does(sampling, top_p, top_k):
    warm_up_own_kernels()
    batches = list[Any]()

    class Sampler:
        logprobs_mode = "processed_logprobs"

        def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> None:
            batches.append(sampling_metadata)

    config = configured(sampling)
    config.model_config = SimpleNamespace(multimodal_config=None)
    runner: Any = SimpleNamespace(
        vllm_config=config,
        model=SimpleNamespace(compute_logits=lambda hidden: hidden),
        device=torch.device("cpu"),
        sampler=Sampler(),
        speculative_config=None,
    )
    gpu_model_runner.GPUModelRunner._dummy_sampler_run(runner, torch.zeros(8, 16))
    (batch,) = batches
    assert (batch.top_p is not None, batch.top_k is not None) == (bool(top_p), bool(top_k))
    assert isinstance(batch, gpu_model_runner.SamplingMetadata)


@pytest.mark.skipif(since("vllm", "0.31"), reason="vLLM compiles the model's own")
@pytest.mark.parametrize("routes", [False, True])
def test_router_kernels_of_published_models_are_compiled_for_models_with_such_routers(monkeypatch, routes):
    compiled, layer = list[str](), nn.Linear(1, 1)
    monkeypatch.setattr(kernel_warmup, ROUTERS, lambda: compiled.append("routers"))
    gpu_worker.kernel_warmup = lambda worker: getattr(kernel_warmup, ROUTERS)()
    layer.allow_ll_bf16_gemm = routes
    warm_up_own_kernels()
    gpu_worker.kernel_warmup(SimpleNamespace(get_model=lambda: nn.Sequential(nn.Linear(1, 1), layer)))
    assert compiled == ["routers"] * routes
    getattr(kernel_warmup, ROUTERS)()
    assert compiled == ["routers"] * (routes + 1)


def test_the_installed_vllm_has_all_that_is_changed(caplog):
    """After an upgrade: recheck `compat/vllm_warm_up.py`."""

    def changed() -> list[Any]:
        routers = [] if since("vllm", "0.31") else [gpu_worker.kernel_warmup]
        return [gpu_worker.warmup_kernels, gpu_model_runner.GPUModelRunner._dummy_sampler_run, *routers]

    before = changed()
    with caplog.at_level(logging.INFO):
        warm_up_own_kernels()
    assert caplog.messages == [] and not set(before) & set(changed())


def test_a_release_without_a_part_keeps_its_own_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.delattr(gpu_model_runner, "SamplingMetadata")
    own = gpu_model_runner.GPUModelRunner._dummy_sampler_run
    with caplog.at_level(logging.INFO):
        warm_up_own_kernels()
    (line,) = caplog.messages
    assert "SamplingMetadata" in line and gpu_model_runner.GPUModelRunner._dummy_sampler_run is own
    assert requested(monkeypatch, PLAIN)[0] == SamplingParams(**sampling_arguments(PLAIN))

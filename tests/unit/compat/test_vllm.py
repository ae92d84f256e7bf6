"""The choice of a scheduler, the scales of FP8 weights, and the repair of vLLM's CPU build."""

import logging
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.config import vllm as vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

from nemo_rl_lite.compat import versions
from nemo_rl_lite.compat.vllm import (
    COMPARED,
    SCALES,
    SchedulerCache,
    absorb_weights,
    absorbed_weights,
    decode_scheduler,
    keep_first_scales,
    prefer_second_runner,
)


@pytest.mark.parametrize("version", [*COMPARED, f"{COMPARED[0]}+cu130"])
def test_our_scheduler_is_used_on_a_version_on_which_it_was_compared(monkeypatch, version):
    monkeypatch.setattr(versions, "version", lambda _: version)
    assert decode_scheduler() == "nemo_rl_lite.compat.vllm_scheduler.DecodeScheduler"


@pytest.mark.parametrize("version", ["0.26.1", "0.27.0", "0.31.0rc1"])
def test_on_any_other_version_vllms_own_is_used_and_the_log_says_so(monkeypatch, caplog, version):
    monkeypatch.setattr(versions, "version", lambda _: version)
    with caplog.at_level(logging.INFO):
        assert decode_scheduler() is None
    (line,) = caplog.messages
    assert "using vLLM's scheduler" in line and version in line and all(one in line for one in COMPARED)


@pytest.mark.parametrize(
    ("capability", "given", "found"),
    [(90, None, "0"), (89, None, "0"), (90, "1", "1"), (100, None, None), (120, None, None)],
)
def test_scales_are_powers_of_two_where_the_gpu_wants_them_or_the_user_does(monkeypatch, capability, given, found):
    platform = SimpleNamespace(has_device_capability=lambda least: capability >= least)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    # Set first, so that what the function sets is undone.
    monkeypatch.setenv(SCALES, given or "")
    if given is None:
        monkeypatch.delenv(SCALES)
    keep_first_scales()
    assert os.environ.get(SCALES) == found


def _configured(architecture: str, records: bool, drafts: str | None) -> VllmConfig:
    """Return what vLLM's choice of a runner reads of an engine's configuration."""
    model = {"architectures": [architecture], "runner_type": "generate", "is_moe": True, "is_diffusion": False}
    model |= {"logits_processors": None, "enable_prompt_embeds": False, "enable_return_routed_experts": records}
    parallel = {"prefill_context_parallel_size": 1, "tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    parallel |= {"distributed_executor_backend": "mp", "enable_dbo": False, "enable_elastic_ep": False}
    config = VllmConfig.__new__(VllmConfig)
    vars(config).update(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(mode=0, pass_config=SimpleNamespace(enable_sp=False)),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        speculative_config=None if drafts is None else SimpleNamespace(method=drafts, parallel_drafting=False),
        ec_transfer_config=None,
    )
    return config


@pytest.fixture
def with_our_list(monkeypatch):
    """A list like vLLM's with our names, for this test alone, as on a GPU."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(vllm_config, "HAS_TRITON", True)
    monkeypatch.setattr(vllm_config, "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", frozenset({"Qwen2MoeForCausalLM"}))
    prefer_second_runner()


@pytest.mark.skipif(versions.since("vllm", "0.31"), reason="vLLM has no list")
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Qwen2MoeForCausalLM"])
@pytest.mark.parametrize(
    ("records", "drafts", "second"),
    [
        (False, None, True),
        (False, "eagle3", True),
        (False, "mtp", True),
        (True, None, False),
        (False, "ngram", False),
        (False, "suffix", False),
        (False, "draft_model", False),
    ],
)
def test_models_with_experts_use_the_second_runner_unless_a_feature_needs_the_first(
    with_our_list, architecture, records, drafts, second
):
    assert _configured(architecture, records, drafts).use_v2_model_runner == second


@pytest.mark.skipif(versions.since("vllm", "0.31"), reason="vLLM has no list")
def test_other_models_and_the_environment_decide_as_before(with_our_list, monkeypatch):
    assert not _configured("GptOssForCausalLM", records=False, drafts=None).use_v2_model_runner
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert not _configured("Qwen3MoeForCausalLM", records=False, drafts=None).use_v2_model_runner


class _Engine:
    """An engine that empties its cache only while it is paused, as vLLM 0.31 does with recorded experts."""

    def __init__(self, state: str, fails: bool):
        self._fails = fails
        self.scheduler = SimpleNamespace(
            pause_state=state, set_pause_state=self.set_state, _preempt_request=lambda request, timestamp: None
        )
        core = SimpleNamespace(scheduler=self.scheduler, pause_scheduler=lambda mode, clear_cache: self.set_state(mode))
        self.engine_core = SimpleNamespace(engine_core=core)

    def set_state(self, state: str) -> None:
        self.scheduler.pause_state = state

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        assert self.scheduler.pause_state == "keep" and reset_running_requests
        self.scheduler._preempt_request("one", timestamp=0.0)
        if self._fails:
            raise RuntimeError("it failed")


@pytest.mark.parametrize("state", ["running", "asleep"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_pauses_while_its_cache_is_emptied_and_goes_on_as_before(state, fails):
    engine = _Engine(state, fails)
    cache = SchedulerCache(engine)
    with pytest.raises(RuntimeError, match="it failed") if fails else nullcontext():
        cache.drop_all()
    assert engine.scheduler.pause_state == state
    if not fails:
        # Only a full cache counts.
        assert cache.preemptions == 0
        engine.scheduler._preempt_request("one", 0.0)
        assert cache.preemptions == 1


def test_a_probe_starts_before_requests_whose_caches_were_dropped():
    engine = _Engine("running", fails=False)
    waiting = engine.scheduler.waiting = create_request_queue(SchedulingPolicy.FCFS)
    engine.scheduler.requests = {name: SimpleNamespace(name=name) for name in ("dropped", "other", "probe")}
    for request in engine.scheduler.requests.values():
        waiting.add_request(request)
    SchedulerCache(engine).put_first("probe")
    assert [request.name for request in waiting] == ["probe", "dropped", "other"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_absorbed_matrices_follow_the_weights_in_their_memory(dtype):
    """Bitwise those of a fresh load: views of the weights in their own precision, or copies in another."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    heads, keys, plain, values = 2, 8, 4, 6

    def loaded(weight: torch.Tensor) -> torch.nn.Module:
        model, layer = torch.nn.Module(), MLAAttention.__new__(MLAAttention)
        torch.nn.Module.__init__(layer)
        layer.num_heads, layer.kv_lora_rank, layer.qk_nope_head_dim, layer.v_head_dim = heads, keys, plain, values
        layer.is_aiter_triton_fp4_bmm_enabled = layer.is_aiter_triton_fp8_bmm_enabled = False
        layer.quant_config, layer.layer_name = None, "attention"
        set_default_quant_scales(layer, register_buffer=True)
        projection = torch.nn.Linear(keys, heads * (plain + values), bias=False, dtype=torch.bfloat16)
        projection.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        projection.quant_method = UnquantizedLinearMethod()
        model.kv_b_proj = layer.kv_b_proj = projection
        model.attention = layer
        absorb_weights(model, dtype)
        return model

    first, second = torch.randn(2, heads * (plain + values), keys).bfloat16()
    model = loaded(first)
    assert absorbed_weights(model) == {"attention.W_UV", "attention.W_UK_T"}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    model.kv_b_proj.weight.copy_(second)
    absorb_weights(model, dtype)
    fresh = dict(loaded(second).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fresh[name]) and parameter.data_ptr() == places[name], name

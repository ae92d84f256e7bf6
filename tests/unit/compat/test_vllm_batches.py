"""A decoding step of the requests of the step before keeps vLLM's batch."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from nemo_rl_lite.compat import vllm_batches, vllm_decoding

NAMES = ["a", "b", "c"]
GRAPH = SimpleNamespace(cg_mode=CUDAGraphMode.FULL)


@dataclass
class Inputs:
    """The fields of vLLM's batch that count, of three requests in a graph for four."""

    req_ids: list[str] = field(default_factory=lambda: list(NAMES))
    num_reqs: int = 3
    num_tokens: int = 3
    num_reqs_after_padding: int = 4
    num_draft_tokens: int = 0
    has_structured_output_reqs: bool = False
    prompt_lens: torch.Tensor | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    max_seq_len_np: np.ndarray | None = None
    is_prefilling_np: np.ndarray = field(default_factory=lambda: np.zeros(3, bool))
    idx_mapping_np: np.ndarray = field(default_factory=lambda: np.array([4, 0, 2]))
    idx_mapping: str = "rows"
    query_start_loc: str = "starts"
    seq_lens: str = "lengths"
    cu_num_logits: str = "counts"


def step(**changes) -> SchedulerOutput:
    """A scheduler's step of the three requests, of which the second one needs a cache block."""
    cached = CachedRequestData(
        req_ids=list(NAMES),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None, ([7],), None],
        num_computed_tokens=[10, 16, 30],
        num_output_tokens=[5, 6, 7],
    )
    made = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(NAMES, 1),
        total_num_scheduled_tokens=3,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )
    for name, value in changes.items():
        setattr(cached if hasattr(cached, name) else made, name, value)
    return made


@pytest.fixture
def runner(monkeypatch):
    """A runner with vLLM's methods replaced by records of their calls, in `calls`."""
    calls: list = []
    inputs: list = [Inputs()]

    def recorded(name, result=None):
        return lambda self, *given, **named: calls.append(name) or (result and result())

    for name in ("add_requests", "update_requests", "_dummy_run"):
        monkeypatch.setattr(model_runner.GPUModelRunner, name, recorded(name))
    monkeypatch.setattr(model_runner.GPUModelRunner, "prepare_inputs", recorded("prepare_inputs", lambda: inputs[-1]))
    for name in ("prepare_pos_seq_lens", "combine_sampled_and_draft_tokens"):
        monkeypatch.setattr(model_runner, name, lambda *given, name=name: calls.append(name))
    vllm_batches.keep_batches()
    made = object.__new__(model_runner.GPUModelRunner)
    on_gpu = SimpleNamespace(gpu="numbers")
    vars(made).update(
        calls=calls,
        inputs=inputs,
        speculator=None,
        pcp_manager=None,
        model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
        input_buffers=SimpleNamespace(positions="positions", seq_lens="lengths", input_ids="tokens"),
        req_states=SimpleNamespace(
            num_computed_tokens_np=np.zeros(6, np.int32),
            num_computed_tokens=on_gpu,
            prefill_len=on_gpu,
            last_sampled_tokens="last",
            draft_tokens="drafts",
        ),
        block_tables=SimpleNamespace(append_block_ids=lambda *given, **named: calls.append((given, named))),
    )
    return made


def run(runner, given: SchedulerOutput, graph=GRAPH):
    """Do what `execute_model` does before the model, and return the batch and the calls."""
    runner.calls.clear()
    runner.add_requests(given)
    runner.update_requests(given)
    return runner.prepare_inputs(given, graph), list(runner.calls)


PREPARED = ["update_requests", "prepare_inputs"]
ADVANCED = [((0, ([7],)), {"overwrite": False}), "prepare_pos_seq_lens", "combine_sampled_and_draft_tokens"]


def test_a_repeated_batch_advances_by_one_token(runner):
    first, calls = run(runner, step())
    assert calls == PREPARED
    again, calls = run(runner, step())
    assert again is first and calls == ADVANCED
    assert runner.req_states.num_computed_tokens_np.tolist() == [16, 0, 30, 0, 10, 0]
    assert again.num_computed_tokens_np.tolist() == [10, 16, 30]
    # The graph's fourth row has no request.
    assert again.seq_lens_cpu_upper_bound.tolist() == [11, 17, 31, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"req_ids": ["a", "c", "b"]},
        {"req_ids": ["a", "b"], "total_num_scheduled_tokens": 2},
        {"total_num_scheduled_tokens": 4},
        {"resumed_req_ids": {"a"}},
        {"finished_req_ids": {"z"}},
        {"preempted_req_ids": {"z"}},
        {"scheduled_spec_decode_tokens": {"a": [1]}},
        {"has_structured_output_requests": True},
        {"new_block_ids_to_zero": [1]},
        {"kv_cache_block_copies": [object()]},
    ],
)
def test_other_steps_are_prepared(runner, changes):
    run(runner, step())
    _, calls = run(runner, step(**changes))
    assert calls == PREPARED


def test_new_requests_are_added(runner):
    run(runner, step())
    _, calls = run(runner, step(scheduled_new_reqs=[object()]))
    assert calls == ["add_requests", *PREPARED]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 4},
        {"is_prefilling_np": np.array([False, False, True])},
        {"num_draft_tokens": 1},
        {"has_structured_output_reqs": True},
        {"prompt_lens": torch.ones(3)},
        {"dcp_local_seq_lens": torch.ones(3)},
        {"max_seq_len_np": np.ones(3)},
    ],
)
def test_only_decoding_batches_are_kept(runner, changes):
    runner.inputs[0] = Inputs(**changes)
    run(runner, step())
    _, calls = run(runner, step())
    assert calls == PREPARED


@pytest.mark.parametrize("graph", [SimpleNamespace(cg_mode=CUDAGraphMode.NONE), SimpleNamespace(cg_mode=None)])
def test_only_batches_of_one_graph_are_kept(runner, graph):
    run(runner, step(), graph)
    _, calls = run(runner, step(), graph)
    assert calls == PREPARED
    _, calls = run(runner, step())
    assert calls == PREPARED
    _, calls = run(runner, step(), graph)
    # `update_requests` does not know the graph yet.
    assert calls == [ADVANCED[0], "prepare_inputs"]


@pytest.mark.parametrize("name", ["speculator", "pcp_manager"])
def test_runners_with_more_work_keep_no_batch(runner, name):
    setattr(runner, name, object())
    run(runner, step())
    _, calls = run(runner, step())
    assert calls == PREPARED


def test_a_dummy_run_ends_the_repetition(runner):
    run(runner, step())
    runner._dummy_run(8)
    _, calls = run(runner, step())
    assert calls == PREPARED


@pytest.mark.parametrize(
    ("mode", "builder", "is_plain", "builds"),
    [
        (CUDAGraphMode.FULL, FlashAttentionMetadataBuilder, True, 1),
        (CUDAGraphMode.FULL, FlashAttentionMetadataBuilder, False, 2),
        (CUDAGraphMode.FULL, type("Cascade", (FlashAttentionMetadataBuilder,), {}), True, 2),
        (CUDAGraphMode.NONE, FlashAttentionMetadataBuilder, True, 2),
    ],
)
def test_metadata_that_no_graph_reads_is_kept(monkeypatch, mode, builder, is_plain, builds):
    built: list = []
    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda self, *given: built.append(given) or len(built))
    vllm_decoding.keep_metadata()
    made = object.__new__(builder)
    setattr(made, vllm_decoding._ALL_PLAIN, is_plain)
    group, batch, state = (
        SimpleNamespace(get_metadata_builder=lambda: made),
        Inputs(),
        object.__new__(DefaultModelState),
    )
    found = [state.prepare_attn(batch, mode, "tables", "slots", [[group]], "cache") for _ in range(2)]
    assert found == [1, builds] and len(built) == builds
    # Another batch has its own.
    assert state.prepare_attn(Inputs(), mode, "tables", "slots", [[group]], "cache") == builds + 1

"""Decoding steps with the requests of the step before, without preparing the batch again.

In each step vLLM's second runner sorts the requests, copies their numbers to the GPU and describes their attention.
This takes longer than a small model's step on the GPU. If a step repeats the requests of the last one, only positions,
lengths, input tokens and cache blocks change. Kernels update them on the GPU.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "vllm", "0.26")

# Attribute of a runner.
_LAST = "nemo_rl_lite_last"


class _Last(NamedTuple):
    """The last batch of a runner, if it had one token of each request and a CUDA graph."""

    inputs: Any
    """vLLM's `InputBatch`."""
    graph: Any
    """vLLM's `BatchExecutionDescriptor`."""


def keep_batches() -> None:
    """Make runner V2 prepare a repeated batch by two kernels. Each rank calls this."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import model_runner

    runners: Any = model_runner.GPUModelRunner
    add, update, prepare, run_dummy = (
        runners.add_requests,
        runners.update_requests,
        runners.prepare_inputs,
        runners._dummy_run,
    )

    def add_new(self: Any, step: Any) -> None:
        # vLLM would copy the sampling parameters of all requests.
        if step.scheduled_new_reqs:
            add(self, step)

    def update_all(self: Any, step: Any) -> None:
        last = getattr(self, _LAST, None)
        if last is None or not repeats(last.inputs, step):
            update(self, step)
            return
        given, rows = step.scheduled_cached_reqs, last.inputs.idx_mapping_np
        self.req_states.num_computed_tokens_np[rows] = given.num_computed_tokens
        for place, blocks in enumerate(given.new_block_ids):
            if blocks is not None:
                self.block_tables.append_block_ids(int(rows[place]), blocks, overwrite=False)

    def prepare_or_advance(self: Any, step: Any, graph: Any) -> Any:
        last = getattr(self, _LAST, None)
        if last is not None and last.graph == graph and repeats(last.inputs, step):
            advance(self, last.inputs, model_runner)
            return last.inputs
        inputs = prepare(self, step, graph)
        kept = graph.cg_mode is CUDAGraphMode.FULL and can_repeat(self, inputs)
        setattr(self, _LAST, _Last(inputs, graph) if kept else None)
        return inputs

    def forget_and_run_dummy(self: Any, *args: Any, **named: Any) -> Any:
        # It overwrites the buffers.
        setattr(self, _LAST, None)
        return run_dummy(self, *args, **named)

    runners.add_requests, runners.update_requests = add_new, update_all
    runners.prepare_inputs, runners._dummy_run = prepare_or_advance, forget_and_run_dummy


def can_repeat(runner: Any, inputs: Any) -> bool:
    """Return whether a batch has one new token of each request, and nothing else."""
    return (
        inputs.num_tokens == inputs.num_reqs
        and not inputs.is_prefilling_np.any()
        and not inputs.num_draft_tokens
        and not inputs.has_structured_output_reqs
        and inputs.prompt_lens is inputs.dcp_local_seq_lens is inputs.max_seq_len_np is None
        and runner.speculator is runner.pcp_manager is None
    )


def repeats(inputs: Any, step: Any) -> bool:
    """Return whether a scheduler's step has one new token of each request of a decoding batch, in its order."""
    given = step.scheduled_cached_reqs
    return (
        step.total_num_scheduled_tokens == len(inputs.req_ids)
        and given.req_ids == inputs.req_ids
        and not step.scheduled_new_reqs
        and not given.resumed_req_ids
        and not step.finished_req_ids
        and not step.preempted_req_ids
        and not step.scheduled_spec_decode_tokens
        and not step.has_structured_output_requests
        and not step.new_block_ids_to_zero
        and not step.kv_cache_block_copies
    )


def advance(runner: Any, inputs: Any, kernels: Any) -> None:
    """Move a batch by one token. `kernels`: vLLM's module with the kernels of `prepare_inputs`."""
    states, buffers = runner.req_states, runner.input_buffers
    kernels.prepare_pos_seq_lens(
        inputs.idx_mapping,
        inputs.query_start_loc,
        states.num_computed_tokens.gpu,
        buffers.positions,
        buffers.seq_lens,
    )
    kernels.combine_sampled_and_draft_tokens(
        buffers.input_ids,
        inputs.idx_mapping,
        states.last_sampled_tokens,
        inputs.query_start_loc,
        inputs.seq_lens,
        states.prefill_len.gpu,
        states.draft_tokens,
        inputs.cu_num_logits,
        inputs.num_reqs,
        runner.model_state.num_new_sampled_tokens_per_step,
    )
    computed = states.num_computed_tokens_np[inputs.idx_mapping_np]
    lengths = np.zeros(inputs.num_reqs_after_padding, np.int32)
    lengths[: inputs.num_reqs] = computed + 1
    inputs.num_computed_tokens_np, inputs.seq_lens_cpu_upper_bound = computed, torch.from_numpy(lengths)

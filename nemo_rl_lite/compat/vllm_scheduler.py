"""A fast path of vLLM's scheduler for steps in which every request samples one more token.

vLLM's scheduler handles every feature of every request in each step. With 512 requests this takes about as long as a
small model's step on the GPU. In nearly all steps of a rollout each request computes one token in its current cache
block. The fast path handles these steps in two short loops. All other steps use vLLM's methods, on the same state.
`vllm.decode_scheduler` selects it on the versions of vLLM on which a test compares both.
"""

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from nemo_rl_lite.compat.versions import since, written_for

written_for(__name__, "vllm", "0.26", "0.31")

# The second queue of waiting requests; of a preempted request, the count of outputs in flight; what adds to outputs.
if since("vllm", "0.31"):
    _QUEUE, _LATE, _ADDS = (
        "kv_holding_waiting",
        "num_stale_output_tokens",
        ("aux_output_connector", "return_sampling_mask"),
    )
else:
    _QUEUE, _LATE, _ADDS = "skipped_waiting", "async_tokens_to_discard", ("enable_return_routed_experts",)


class DecodeScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler with a fast path. There, `EngineCoreOutput.new_logprobs` is a list of the sampled
    tokens' logprobs, without events, prefill statistics and trace headers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._plain = _is_plain(self)
        self._preempted: set[Request] = set()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        waiting = self.waiting or getattr(self, _QUEUE) or self.reset_preempted_req_ids
        nothing_else = not waiting and self._pause_state is PauseState.UNPAUSED
        enough = len(self.running) <= self.max_num_scheduled_tokens
        step = self._one_token_each() if self._plain and nothing_else and enough else None
        return super().schedule(throttle_prefills) if step is None else step

    def _one_token_each(self) -> SchedulerOutput | None:
        """Schedule one token per running request. Return None, without changes, if a request needs more or the cache
        has too few blocks."""
        scheduled: list[Request] = []
        computed_before, sampled_before, without_room = [], [], []
        size, last = self.block_size, self.max_model_len - 1
        for request in self.running:
            computed, pending = request.num_computed_tokens, request.num_output_placeholders
            if pending and computed + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
                # Its last token is in flight.
                continue
            if len(request._all_token_ids) + pending - computed != 1 or _has_more(request):
                return None
            if computed >= last:
                continue
            if computed % size == 0:
                without_room.append(len(scheduled))
            scheduled.append(request)
            computed_before.append(computed)
            sampled_before.append(len(request._output_token_ids) + pending)
        manager = self.kv_cache_manager
        if not scheduled or len(without_room) > manager.block_pool.get_num_free_blocks():
            return None
        manager.new_step_starts()
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(scheduled)
        for place in without_room:
            blocks = manager.allocate_slots(scheduled[place], 1)
            if blocks is None:
                raise RuntimeError("vLLM's cache has fewer free blocks than it reports")
            new_blocks[place] = blocks.get_block_ids(allow_none=True)
        for request in scheduled:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        self.current_step += 1
        finished, self.finished_req_ids = self.finished_req_ids, set()
        names = [request.request_id for request in scheduled]
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_blocks,
                num_computed_tokens=computed_before,
                num_output_tokens=sampled_before,
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=manager.get_num_common_prefix_blocks(self.running[0].request_id),
            preempted_req_ids=set(),
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if not self._plain or self._is_special(scheduler_output) or _says_more(model_runner_output):
            return super().update_from_output(scheduler_output, model_runner_output)
        ended: set[Request] = set()
        outputs = list(self._sampled(scheduler_output, model_runner_output, ended))
        if ended:
            self.running = remove_all(self.running, ended)
            if preempted := [request for request in ended if request in self.waiting]:
                self.waiting.remove_requests(preempted)
        return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._preempted.add(request)

    def _is_special(self, step: SchedulerOutput) -> bool:
        """Return whether a step has grammars or preempted requests' outputs, or vLLM ends a request with an error."""
        if self._preempted:
            unfinished = (request for request in self._preempted if not request.is_finished())
            self._preempted = {request for request in unfinished if getattr(request, _LATE)}
        return step.has_structured_output_requests or bool(self._preempted or self.grammar_compile_error_reqs)

    def _sampled(
        self, step: SchedulerOutput, result: ModelRunnerOutput, ended: set[Request]
    ) -> Iterator[EngineCoreOutput]:
        """Give each request its token and yield the engine's outputs. Add finished requests to `ended`."""
        size, places, sampled = self.block_size, result.req_id_to_index, result.sampled_token_ids
        logprobs = None if result.logprobs is None else result.logprobs.logprobs[:, :1].tolist()
        for name, count in step.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None:
                # Aborted while the model computed.
                continue
            request.num_in_flight_tokens -= count
            if request.is_finished():
                continue
            place = places[name]
            tokens = sampled[place] if sampled else []
            if not tokens:
                # A chunk of the prompt, not the last.
                continue
            if request.status is not RequestStatus.RUNNING or len(tokens) > 1:
                tokens, stopped = self._update_request_with_output(request, tokens)
                if not tokens:
                    continue
            else:
                request._output_token_ids.append(tokens[0])
                request._all_token_ids.append(tokens[0])
                if len(request._all_token_ids) % size == 0:
                    request.update_block_hashes()
                stopped = self._may_stop(request, tokens[0]) and check_stop(request, self.max_model_len)
                request.num_output_placeholders -= 1
                committed = request.num_computed_tokens - request.num_output_placeholders
                if committed % size == 0:
                    self.kv_cache_manager.cache_blocks(request, committed)
            # vLLM takes it with the first token, and expects None when a request recomputes its prompt.
            request.prefill_stats = None
            reason = None
            if stopped:
                reason = request.get_finished_reason()
                ended.add(request)
                self._free_request(request)
            own = None if logprobs is None else logprobs[place]
            yield EngineCoreOutput(name, tokens, own, finish_reason=reason, stop_reason=request.stop_reason)  # pyrefly: ignore

    def _may_stop(self, request: Request, token: int) -> bool:
        """Return whether `check_stop` may return True."""
        parameters = request.sampling_params
        return (
            parameters is None
            or token == parameters.eos_token_id
            or token in (parameters.stop_token_ids or ())
            or len(request._output_token_ids) >= request.max_tokens
            or len(request._all_token_ids) >= self.max_model_len
            or parameters.repetition_detection is not None
        )


def _is_plain(scheduler: AsyncScheduler) -> bool:
    """Return whether steps can only compute one token per running request, in a cache with one kind of block."""
    groups, parallel = scheduler.kv_cache_config.kv_cache_groups, scheduler.parallel_config
    # vLLM's scheduler manages the blocks of both alike.
    one_kind = len(groups) == 1 and type(groups[0].kv_cache_spec) in (FullAttentionSpec, MLAAttentionSpec)
    return (
        one_kind
        and groups[0].kv_cache_spec.block_size == scheduler.block_size
        and scheduler.use_v2_model_runner
        and scheduler.num_sampled_tokens_per_step == 1
        and parallel.pipeline_parallel_size == scheduler.dcp_world_size == scheduler.pcp_world_size == 1
        and not scheduler.num_spec_tokens
        and not scheduler.needs_kv_cache_zeroing
        and not any(getattr(scheduler, name) for name in _ADDS)
        and not scheduler.enable_kv_cache_events
        and not scheduler.is_encoder_decoder
        and not scheduler.log_stats
        and scheduler.connector is scheduler.ec_connector is scheduler.finished_req_ids_dict is None
    )


def _has_more(request: Request) -> bool:
    """Return whether the request's next token needs more than plain sampling."""
    return (
        request.is_prefill_chunk
        or request.structured_output_request is not None
        or bool(request.mm_features)
        or request.resumable
    )


def _says_more(result: ModelRunnerOutput) -> bool:
    """Return whether a step's result has more than sampled tokens and one logprob each."""
    logprobs = result.logprobs
    grouped = logprobs is not None and (
        logprobs.cu_num_generated_tokens is not None or logprobs.logprob_token_ids.shape[1] > 1
    )
    parts = (result.kv_connector_output, result.num_nans_in_logits, result.cudagraph_stats)
    return (
        grouped
        or any(part is not None for part in parts)
        or any(part is not None for part in result.pooler_output or ())
        or any(part is not None for part in result.prompt_logprobs_dict.values())
    )

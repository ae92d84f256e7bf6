"""A fast path of vLLM's scheduler for steps in which every request samples one more token.

vLLM's scheduler handles every feature of every request in each step. With 512 requests this takes about as long as a
small model's step on the GPU. In nearly all steps of a rollout each request computes one token in its current cache
block. The fast path handles these steps in two short loops. If a step repeats the requests of the one before, arrays
hold what the loops would look up. All other steps use vLLM's methods, on the same state. `vllm.decode_scheduler`
selects it on the versions of vLLM on which a test compares both.
"""

from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from msgspec import field
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


# Attribute of a request.
_ENDS = "nemo_rl_lite_ends"


class _Ends(NamedTuple):
    """Constants of a running request."""

    tokens: frozenset[int | None]
    """Tokens that may end it."""
    length: int
    """Tokens, with the prompt's, from which on it may end at any token."""
    has_more: bool
    """True if its tokens need more than plain sampling."""


class Samples(EngineCoreOutputs):
    """The outputs of a step with one token for each request, none of which it ends."""

    names: list[str] = field(default_factory=list)
    """The requests; steps with the same requests share the list."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def each(self) -> list[EngineCoreOutput]:
        """Return one output per request."""
        rows = zip(self.names, self.tokens, self.logprobs, strict=True)
        return [EngineCoreOutput(name, [token], [logprob]) for name, token, logprob in rows]  # pyrefly: ignore


class _Batch:
    """The requests of the last step, if it computed one token of each running request."""

    def __init__(self, running: list[Request], names: list[str], computed: list[int]):
        self._running, self.requests, self.names = running, list(running), names
        self.computed = np.array(computed)
        """(R) Tokens of each request that are computed or in flight."""

    def is_running(self, running: list[Request]) -> bool:
        """Return whether the scheduler still runs these requests alone."""
        # It removes requests from its list, or replaces the list. Others join only in vLLM's `schedule`.
        return running is self._running and len(running) == len(self.names)

    @cached_property
    def prompts(self) -> np.ndarray:
        """(R) Tokens of the prompts."""
        return np.array([request.num_prompt_tokens for request in self.requests])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(R) Tokens, with the prompt's, from which on a request may end at any token."""
        return np.array([getattr(request, _ENDS).length for request in self.requests])

    @cached_property
    def stops(self) -> frozenset[int | None]:
        """Tokens that may end one of the requests."""
        return frozenset().union(*{getattr(request, _ENDS).tokens for request in self.requests})


class DecodeScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler with a fast path. There, `EngineCoreOutput.new_logprobs` is a list of the sampled
    tokens' logprobs, without events, prefill statistics and trace headers. The outputs of most steps are `Samples`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._plain = _is_plain(self)
        self._preempted: set[Request] = set()
        self._batch: _Batch | None = None

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        waiting = self.waiting or getattr(self, _QUEUE) or self.reset_preempted_req_ids
        nothing_else = not waiting and self._pause_state is PauseState.UNPAUSED
        enough = len(self.running) <= self.max_num_scheduled_tokens
        if self._plain and nothing_else and enough and (step := self._repeat() or self._one_token_each()) is not None:
            return step
        self._batch = None
        return super().schedule(throttle_prefills)

    def _repeat(self) -> SchedulerOutput | None:
        """Schedule one more token of each request of the last step. Return None, without changes, if `_one_token_each`
        might not schedule one token of each of them."""
        batch = self._batch
        if batch is None or not batch.is_running(self.running):
            return None
        computed = batch.computed
        # At the tokens below, the last one is in flight.
        if (computed + 1 >= batch.lengths).any():
            return None
        without_room = np.flatnonzero(computed % self.block_size == 0).tolist()
        if len(without_room) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        before = computed.tolist()
        computed += 1
        return self._step(batch.requests, batch.names, before, (computed - batch.prompts).tolist(), without_room)

    def _one_token_each(self) -> SchedulerOutput | None:
        """Schedule one token per running request. Return None, without changes, if a request needs more or the cache
        has too few blocks."""
        scheduled: list[Request] = []
        computed_before: list[int] = []
        without_room: list[int] = []
        size, last = self.block_size, self.max_model_len - 1
        for request in self.running:
            computed, pending = request.num_computed_tokens, request.num_output_placeholders
            if pending and computed + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
                # Its last token is in flight.
                continue
            if len(request._all_token_ids) + pending - computed != 1 or request.is_prefill_chunk:
                return None
            if (getattr(request, _ENDS, None) or self._find_ends(request)).has_more:
                return None
            if computed >= last:
                continue
            if computed % size == 0:
                without_room.append(len(scheduled))
            scheduled.append(request)
            computed_before.append(computed)
        if not scheduled or len(without_room) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        names = [request.request_id for request in scheduled]
        sampled_before = [
            computed + 1 - request.num_prompt_tokens
            for request, computed in zip(scheduled, computed_before, strict=True)
        ]
        self._batch = None
        if len(scheduled) == len(self.running):
            self._batch = _Batch(self.running, names, [computed + 1 for computed in computed_before])
        return self._step(scheduled, names, computed_before, sampled_before, without_room)

    def _step(
        self,
        scheduled: list[Request],
        names: list[str],
        computed_before: list[int],
        sampled_before: list[int],
        without_room: list[int],
    ) -> SchedulerOutput:
        """Return a step with one token of each request, of which those at `without_room` need another cache block."""
        manager = self.kv_cache_manager
        manager.new_step_starts()
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(scheduled)
        for place in without_room:
            # `allocate_slots` would also free and hash blocks, of which such a step has none.
            tokens = computed_before[place] + 1
            blocks = manager.coordinator.allocate_new_blocks(scheduled[place].request_id, tokens, tokens)
            new_blocks[place] = tuple([block.block_id for block in own] for own in blocks)
        for request, computed in zip(scheduled, computed_before, strict=True):
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        self.current_step += 1
        finished, self.finished_req_ids = self.finished_req_ids, set()
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
        if (samples := self._sampled_again(scheduler_output, model_runner_output)) is not None:
            return {0: samples}
        ended: set[Request] = set()
        outputs = self._sampled(scheduler_output, model_runner_output, ended)
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

    def _sampled_again(self, step: SchedulerOutput, result: ModelRunnerOutput) -> Samples | None:
        """Give each request of a repeated step its token. Return None, without changes, if one of them may end."""
        batch, given = self._batch, step.scheduled_cached_reqs
        if batch is None or given.req_ids is not batch.names or not batch.is_running(self.running):
            return None
        if result.logprobs is None or result.req_ids != batch.names:
            return None
        tokens = list(chain.from_iterable(result.sampled_token_ids))
        committed = np.array(given.num_computed_tokens) + 1
        may_end = (committed + 1 >= batch.lengths).any() or not batch.stops.isdisjoint(tokens)
        if may_end or len(tokens) != len(batch.names):
            return None
        for request, token in zip(batch.requests, tokens, strict=True):
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= 1
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
        for place in np.flatnonzero((committed + 1) % self.block_size == 0).tolist():
            batch.requests[place].update_block_hashes()
        for place in np.flatnonzero(committed % self.block_size == 0).tolist():
            self.kv_cache_manager.cache_blocks(batch.requests[place], int(committed[place]))
        return Samples(names=batch.names, tokens=tokens, logprobs=result.logprobs.logprobs[:, 0].tolist())

    def _sampled(self, step: SchedulerOutput, result: ModelRunnerOutput, ended: set[Request]) -> list[EngineCoreOutput]:
        """Give each request its token and return the engine's outputs. Add finished requests to `ended`."""
        # Attribute lookups and calls cost as much as the work on a token.
        size, requests = self.block_size, self.requests
        places, sampled = result.req_id_to_index, result.sampled_token_ids
        logprobs = None if result.logprobs is None else result.logprobs.logprobs[:, :1].tolist()
        running, cache_blocks = RequestStatus.RUNNING, self.kv_cache_manager.cache_blocks
        outputs: list[EngineCoreOutput] = []
        for name, count in step.num_scheduled_tokens.items():
            request = requests.get(name)
            if request is None:
                # Aborted while the model computed.
                continue
            request.num_in_flight_tokens -= count
            is_running = request.status is running
            if not is_running and request.is_finished():
                continue
            place = places[name]
            tokens = sampled[place] if sampled else []
            if not tokens:
                # A chunk of the prompt, not the last.
                continue
            if not is_running or len(tokens) > 1:
                tokens, stopped = self._update_request_with_output(request, tokens)
                if not tokens:
                    continue
            else:
                token, known = tokens[0], request._all_token_ids
                request._output_token_ids.append(token)
                known.append(token)
                length = len(known)
                if length % size == 0:
                    request.update_block_hashes()
                ends = getattr(request, _ENDS, None) or self._find_ends(request)
                stopped = (length >= ends.length or token in ends.tokens) and check_stop(request, self.max_model_len)
                request.num_output_placeholders -= 1
                committed = request.num_computed_tokens - request.num_output_placeholders
                if committed % size == 0:
                    cache_blocks(request, committed)
            if request.prefill_stats is not None:
                # vLLM takes it with the first token, and expects None when a request recomputes its prompt.
                request.prefill_stats = None
            own = None if logprobs is None else logprobs[place]
            if stopped:
                reason, token = request.get_finished_reason(), request.stop_reason
                ended.add(request)
                self._free_request(request)
                given = EngineCoreOutput(name, tokens, own, finish_reason=reason, stop_reason=token)  # pyrefly: ignore
            else:
                given = EngineCoreOutput(name, tokens, own)  # pyrefly: ignore
            outputs.append(given)
        return outputs

    def _find_ends(self, request: Request) -> "_Ends":
        """Return, and keep, what ends the request."""
        parameters = request.sampling_params
        if parameters is None or parameters.repetition_detection is not None or request.resumable:
            ends = _Ends(frozenset(), 0, request.resumable)
        else:
            tokens = frozenset((parameters.eos_token_id, *(parameters.stop_token_ids or ())))
            length = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            ends = _Ends(tokens, length, request.structured_output_request is not None or bool(request.mm_features))
        setattr(request, _ENDS, ends)
        return ends


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

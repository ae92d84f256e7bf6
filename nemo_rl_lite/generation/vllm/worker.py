"""A vLLM engine replica.

Responses are read from vLLM's engine core. `LLMEngine.step` would build logprob objects and detokenize each token, in
the thread that schedules the next step. Here each token and its logprob are appended to lists.
"""

import ctypes
import gc
import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from nemo_rl_lite.compat.vllm import (
    PARTS,
    SchedulerCache,
    continued_draws,
    finish_begun_steps,
    on_lost_rank,
    record_cpu_experts,
    request_errors,
    without_tool_servers,
)
from nemo_rl_lite.config.engines import EngineHost, engines_serve_adapters, has_draft_model, speculation
from nemo_rl_lite.config.schema import GenerationConfig, PolicyConfig
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import (
    CacheUse,
    Completion,
    Decoded,
    Drafts,
    EngineLoad,
    Request,
    RequestError,
    Unfinished,
    Versions,
    joined_versions,
)
from nemo_rl_lite.generation.vllm import extension
from nemo_rl_lite.generation.vllm.arguments import RANDOM, engine_arguments, engine_config, sampling_arguments
from nemo_rl_lite.generation.vllm.switch import DecodeStep, Drafting
from nemo_rl_lite.observability.timer import SETUP
from nemo_rl_lite.refit.engine import Source, WeightsState
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.ipc import SharedWeights
from nemo_rl_lite.refit.trace import Recipe
from nemo_rl_lite.refit.windows import Piece, WindowRoutes
from nemo_rl_lite.system.peers import end_process, end_with_others

# vLLM's sleep levels: keep nothing if refits bring all weights, or the weights in host memory if they bring adapters.
KEEPS_NOTHING, KEEPS_WEIGHTS = 2, 1
GIB = 2**30

# Request number of `sample_now`; the numbers of `submit` are not negative.
_NOW = -1


def preload() -> None:
    """Import slow packages, without vLLM's servers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # With several GPUs, vLLM starts other processes for them.
    if visible and "," not in visible:
        threading.Thread(target=_open_device, name="open-device", daemon=True).start()
    with without_tool_servers():
        from vllm.engine.arg_utils import EngineArgs  # noqa: F401
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401


class VLLMEngine:
    """An `Engine` over vLLM."""

    def __init__(
        self,
        generation: GenerationConfig,
        policy: PolicyConfig,
        model_path: str,
        seed: int,
        on_gpu: bool,
        host: EngineHost | None = None,
    ):
        """Start the engine. With a `host`, its first, this process ends when a rank or one of the hosts is lost."""
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        # At every refit vLLM warns about rotary tables, which have no weights.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        settings = generation.vllm_cfg
        drafts, self._has_draft = speculation(generation), has_draft_model(generation)
        arguments = engine_arguments(generation, policy, model_path, seed, on_gpu, host)
        self._sleeps = arguments.enable_sleep_mode
        self._lora = policy.megatron_cfg.peft if engines_serve_adapters(generation, policy) else None
        self._weights = WeightsState(complete=arguments.load_format not in RANDOM and self._lora is None)
        with StartTimer():
            configured = engine_config(arguments, generation)
            # vLLM's statistics have the accepted draft tokens.
            quiet = drafts is None
            # Stepped in this thread: a separate process for the engine core is slower.
            self._engine: Any = LLMEngine.from_vllm_config(configured, UsageContext.LLM_CLASS, disable_log_stats=quiet)
        if host is not None:
            end_with_others(host.addresses[1:])
            on_lost_rank(self._engine, partial(end_process, "a rank of this host has ended"))
        if policy.router_replay.enabled and not on_gpu:
            self._engine.apply_model(record_cpu_experts)
        self._engine.collective_rpc("skip_draws")
        self.version = 0
        self.max_length: int = self._engine.vllm_config.model_config.max_model_len
        self._recomputes = settings.recompute_kv_cache_after_weight_updates
        self._cache = SchedulerCache(self._engine)
        # Preemptions that `load` has returned.
        self._told = 0
        self._adapter = None if self._lora is None else extension.adapter_request()
        self._unfinished: dict[str, UnfinishedResponse] = {}
        self._finished: dict[int, Completion | RequestError] = {}
        self._decoded = Decoded()
        self._batch: _Batch | None = None
        self._drafting = None if drafts is None else Drafting(self._engine, self._has_draft, generation.pause_drafts)
        # Exclude hundreds of thousands of long-lived objects from later garbage collections.
        gc.freeze()

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Add requests. Raises RefitError: a refit has failed halfway."""
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        self._weights.require()
        engine, tasks = self._engine, self._engine.get_supported_tasks()
        for number, request in requests.items():
            # The salt separates the prefix caches of different weights. A conversation keeps its own.
            salt = str(self.version if request.cache_version is None else request.cache_version)
            begun = [] if request.begun is None else request.begun.tokens.tolist()
            prompt = TokensPrompt(prompt_token_ids=[*request.prompt, *begun], cache_salt=salt)
            try:
                core_request = engine.input_processor.process_inputs(
                    str(number), prompt, _parameters(engine, request), supported_tasks=tasks, lora_request=self._adapter
                )
            except request_errors() as error:
                if not request.sampling.options.changed():
                    raise
                self._finished[number] = RequestError(str(error))
                continue
            detokenizer = None
            if request.sampling.stop_strings:
                # Otherwise a stop string would be missed that the tokens so far begin.
                original = msgspec.structs.replace(core_request, prompt_token_ids=list(request.prompt))
                detokenizer = IncrementalDetokenizer.from_new_request(engine.get_tokenizer(), original)
                detokenizer.update(begun, False)
            self._unfinished[str(number)] = UnfinishedResponse(request, detokenizer)
            engine.engine_core.add_request(core_request)

    def step(self) -> dict[int, Completion | RequestError]:
        if self._unfinished:
            self._step()
        finished, self._finished = self._finished, {}
        return finished

    def new_tokens(self, of_all: bool) -> dict[int, Unfinished]:
        wanted = [
            (name, one)
            for name, one in self._unfinished.items()
            if one.has_new and (one.request.streams or (of_all and one.request.continues))
        ]
        return {int(name): one.new_tokens(self.version) for name, one in wanted}

    def load(self) -> EngineLoad:
        tokens = sum(len(response.tokens) for response in self._unfinished.values())
        cache, preempted = self._cache, self._cache.preemptions - self._told
        self._told = cache.preemptions
        return EngineLoad(tokens, cache.running, cache.waiting, cache.held_tokens, cache.usage, preempted)

    def abort(self, numbers: Sequence[int]) -> None:
        names = [str(number) for number in numbers]
        self._engine.engine_core.abort_requests(names)
        for name in names:
            self._unfinished.pop(name, None)

    def sample_now(self, request: Request) -> Completion:
        """Sample one response while the other requests continue."""
        decoded = self._decoded
        self.submit({_NOW: request})
        self._cache.put_first(str(_NOW))
        while _NOW not in self._finished:
            self._step()
        # Do not count this as work on submitted requests.
        self._decoded = decoded
        completion = self._finished.pop(_NOW)
        if isinstance(completion, RequestError):
            raise completion
        return completion

    def take_decoded(self) -> Decoded:
        taken, self._decoded = self._decoded, Decoded()
        return taken

    def memory(self) -> dict[str, int]:
        return max(self._engine.collective_rpc("memory"), key=lambda held: held.get("device", 0))

    def sleep(self) -> None:
        """Free the GPU's memory for the policy; unfinished requests keep their tokens. Does nothing on a CPU or if the
        engine has its own GPU."""
        if self._sleeps and not self._engine.is_sleeping():
            if self._unfinished:
                finish_begun_steps(self._engine, self._step)
                # The KV caches are lost, so the next steps compute them again.
                self._cache.drop_all()
            if self._lora is None:
                self._weights.discard()
            if self._has_draft and self._lora is None:
                self._engine.collective_rpc("keep_draft")
            # Unfinished requests stay.
            self._engine.sleep(level=KEEPS_NOTHING if self._lora is None else KEEPS_WEIGHTS, mode="keep")

    def wake_weights(self) -> None:
        if self._wake("weights", "generation_weights") and self._has_draft:
            self._engine.collective_rpc("restore_draft")

    def wake_cache(self) -> None:
        self._wake("kv_cache", "kv_cache")

    def _wake(self, tag: str, part: str) -> bool:
        """Allocate the memory of one kind; return False if it was not asleep."""
        if not self._sleeps or not self._engine.is_sleeping():
            return False
        held = self.memory()
        try:
            self._engine.wake_up(tags=[tag])
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            # vLLM's error does not help.
            raise RuntimeError(
                f"no room for the {held[part] / GIB:.1f} GiB of the engine's {tag.replace('_', ' ')}: "
                f"{held['device'] / GIB:.1f} GiB of its GPU are in use; set a smaller "
                "generation.vllm_cfg.gpu_memory_utilization, or offload=pinned"
            ) from error
        return True

    def join_refit(self, sources: Sequence[Source]) -> None:
        scaling = None if self._lora is None else self._lora.alpha / self._lora.dim
        self._engine.collective_rpc("refit_join", args=(list(sources), scaling))

    def needed_pieces(self, recipe: Recipe) -> list[Sequence[Piece] | None]:
        return self._engine.collective_rpc("refit_pieces", args=(recipe,))

    def join_windows(self, routes: Sequence[WindowRoutes]) -> list[str | None]:
        return self._engine.collective_rpc("refit_join_windows", args=(list(routes),))

    def share_weights(self) -> list[SharedWeights]:
        return self._engine.collective_rpc("share_weights")

    def receive_weights(self, version: int) -> list[RefitReport]:
        started = time.perf_counter()
        if self._unfinished:
            # Asynchronous scheduling may have started a step.
            finish_begun_steps(self._engine, self._step)
            for response in self._unfinished.values():
                response.note_version(self.version)
        # After a restart from a checkpoint, the weights of a version may differ from those that filled the cache.
        goes_back, self.version = version <= self.version, version
        with self._weights.replacing():
            reports: list[RefitReport] = self._engine.collective_rpc("refit_receive")
            # Without this, only conversations of the old weights use their cache, which has their salt.
            if self._recomputes or goes_back:
                self._cache.drop_all()
        for report in reports:
            report.seconds["load"] = time.perf_counter() - started - report.seconds["transfer"]
        return reports

    def _step(self) -> None:
        """Run one step: each running request gets a token, or several if drafts are accepted."""
        before = self._cache.preemptions
        stopped, cached, prompts, started = [], 0, 0, time.perf_counter()
        unfinished, given = self._unfinished, self._engine.engine_core.get_output()
        outputs, rows = given.outputs, len(given.outputs)
        # `Samples` of `compat/vllm_scheduler.py`.
        if (names := getattr(given, "names", None)) is None:
            self._batch = None
        else:
            if self._batch is None or names is not self._batch.names:
                self._batch = _Batch(names, unfinished)
            rows = len(names)
            if self._batch.is_plain:
                cached = self._batch.add(given.tokens, given.logprobs)
            else:
                outputs = given.each()
        for output in outputs:
            response = unfinished.get(output.request_id)
            # A step in flight samples one more token of a finished or aborted request.
            if response is None:
                continue
            if count := len(response.tokens):
                cached += response.prompt_length + count
            else:
                prompts += 1
            if response.is_plain and output.finish_reason is None and type(output.new_logprobs) is list:
                # The usual case. Function calls would double its time.
                response.tokens.extend(output.new_token_ids)
                response.logprobs.extend(output.new_logprobs)
                continue
            if output.routed_experts is not None:
                response.routed_experts.append(output.routed_experts)
            response.add_alternatives(output.new_logprobs)
            reason = None if output.finish_reason is None else str(output.finish_reason)
            if response.add(output.new_token_ids, _logprobs(output.new_logprobs), reason == "stop"):
                if reason is None:
                    stopped.append(output.request_id)
                reason = "stop"
            if reason is not None:
                del self._unfinished[output.request_id]
                self._finished[int(output.request_id)] = response.completion(reason, self.version)
        self._engine.engine_core.abort_requests(stopped)
        drafts = Drafts()
        if self._drafting is not None:
            tokens = sum(len(output.new_token_ids) for output in outputs)
            step = DecodeStep(time.perf_counter() - started, rows, tokens)
            drafts = self._drafting.count(step, decodes=not prompts, statistics=given.scheduler_stats)
        # With asynchronous scheduling, the first call returns no outputs.
        sampled, usage = int(rows > 0), self._cache.usage
        use = CacheUse(usage * sampled, usage, self._cache.preemptions - before)
        self._decoded += Decoded(sampled, cached, drafts, use)


class UnfinishedResponse:
    """Tokens and logprobs of one response so far; versions of the tokens before the last refit."""

    def __init__(self, request: Request, detokenizer: Any):
        self.request = request
        # Arrays of C's int and float, which a completion copies without a loop.
        self.tokens, self.logprobs = array("i"), array("f")
        self.versions: Versions = ()
        self.alternatives: list[tuple[tuple[int, float], ...]] = []
        # First of the prompt's tokens, then of each step's tokens.
        self.routed_experts: list[np.ndarray] = []
        # vLLM's incremental detokenizer, if the request has stop strings.
        self.detokenizer = detokenizer
        self.prompt_length = len(request.prompt)
        self.is_plain = detokenizer is None and not request.sampling.options.top_logprobs
        if (begun := request.begun) is not None:
            self.tokens.extend(begun.tokens.tolist())
            self.logprobs.extend(begun.logprobs.tolist())
            self.versions = begun.versions
        # Number of tokens that `new_tokens` has returned, or that the request came with.
        self._told = len(self.tokens)

    def add(self, tokens: list[int], logprobs: list[float], ended: bool) -> bool:
        """Add one step's tokens. `ended`: the last one is a stop token. Return whether a stop string ends the response;
        tokens after it are dropped."""
        if self.detokenizer is None:
            self.tokens.extend(tokens)
            self.logprobs.extend(logprobs)
            return False
        for place, token in enumerate(tokens):
            self.tokens.append(token)
            self.logprobs.extend(logprobs[place : place + 1])
            if self.detokenizer.update([token], ended and place == len(tokens) - 1):
                return True
        return False

    def add_alternatives(self, given: Any) -> None:
        """Add the most likely tokens of one step's positions, from vLLM's arrays, whose column 0 is the sampled token.
        Tokens with a probability of 0 are left out."""
        if (count := self.request.sampling.options.top_logprobs) and given is not None:
            for tokens, logprobs in zip(given.logprob_token_ids.tolist(), given.logprobs.tolist(), strict=True):
                pairs = zip(tokens[1 : count + 1], logprobs[1 : count + 1], strict=True)
                self.alternatives.append(tuple(pair for pair in pairs if pair[1] > -math.inf))

    def note_version(self, version: int) -> None:
        """Give the tokens without a version this one."""
        self.versions = self._versions(version)

    @property
    def has_new(self) -> bool:
        return len(self.tokens) > self._told

    def new_tokens(self, version: int) -> Unfinished:
        """Return the tokens since the last call."""
        start, self._told = self._told, len(self.tokens)
        tokens, logprobs = np.array(self.tokens[start:], np.int32), np.array(self.logprobs[start:], np.float32)
        versions, before = list[tuple[int, int]](), start
        for own, count in self._versions(version):
            if count > before:
                versions.append((own, count - before))
            before = max(before - count, 0)
        return Unfinished(tokens, logprobs, "length", tuple(versions), None, self._alternatives()[start:])

    def completion(self, finish_reason: str, version: int) -> Completion:
        if len(self.logprobs) != len(self.tokens):
            raise RuntimeError(f"vLLM gave {len(self.logprobs)} logprobs for {len(self.tokens)} tokens")
        experts = None
        if self.routed_experts:
            # No step has seen the last token; tokens after a stop string were dropped.
            experts = np.concatenate(self.routed_experts)[: len(self.request.prompt) + len(self.tokens) - 1]
            if not experts.any():
                raise EngineError(
                    "vLLM's kernel does not record the chosen experts: set "
                    "+generation.vllm_kwargs.moe_backend=triton, or policy.router_replay.enabled=false"
                )
        reason = "stop" if finish_reason == "stop" else "length"
        top = self._alternatives()
        return Completion(*self._sampled(), reason, self._versions(version), experts, top)

    def _sampled(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)

    def _versions(self, version: int) -> Versions:
        new = len(self.tokens) - sum(count for _, count in self.versions)
        return joined_versions((*self.versions, (version, new))) if new else self.versions

    def _alternatives(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        return tuple(self.alternatives[: len(self.tokens)])


class _Batch:
    """The responses of successive steps with the same requests."""

    def __init__(self, names: list[str], unfinished: Mapping[str, UnfinishedResponse]):
        self.names = names
        responses = [unfinished[name] for name in names if name in unfinished]
        self.is_plain = len(responses) == len(names) and all(response.is_plain for response in responses)
        """True if a step adds one token to each response and does nothing else."""
        self._columns = [(response.tokens, response.logprobs) for response in responses]
        self._known = sum(response.prompt_length + len(response.tokens) for response in responses)

    def add(self, tokens: list[int], logprobs: list[float]) -> int:
        """Add one token to each response. Return the tokens of prompts and responses before."""
        for (own, values), token, logprob in zip(self._columns, tokens, logprobs, strict=True):
            own.append(token)
            values.append(logprob)
        known, self._known = self._known, self._known + len(tokens)
        return known


def _logprobs(given: Any) -> list[float]:
    """Return the sampled tokens' logprobs: column 0 of vLLM's array, or the list of `compat/vllm_scheduler.py`."""
    if given is None or isinstance(given, list):
        return given or []
    return given.logprobs[:, 0].tolist()


def _parameters(engine: Any, request: Request) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    sampling, options = request.sampling, request.sampling.options
    schema, drawn = options.json_schema, 0 if request.begun is None else len(request.begun.tokens)
    seed, skipped = continued_draws(engine, request.seed, drawn)
    return SamplingParams(
        **sampling_arguments(sampling),
        max_tokens=sampling.max_new_tokens - drawn,
        seed=seed,
        extra_args=skipped,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings) or None,
        detokenize=bool(sampling.stop_strings),
        # vLLM adds the end tokens of generation_config.json, which must not end a probe.
        ignore_eos=not sampling.stop_token_ids,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        output_kind=RequestOutputKind.FINAL_ONLY,
        # The object is not shared, so vLLM need not copy it.
        skip_clone=True,
    )


class StartTimer(logging.Handler):
    """Times the parts of an engine's start in `SETUP`. vLLM's log messages in `PARTS` end them."""

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        logging.getLogger("vllm").addHandler(self)

    def __exit__(self, *error: object) -> None:
        logging.getLogger("vllm").removeHandler(self)
        self._end("warm_up")

    def emit(self, record: logging.LogRecord) -> None:
        part = next((part for text, part in PARTS.items() if str(record.msg).startswith(text)), None)
        if part is not None:
            self._end(part)

    def _end(self, part: str) -> None:
        now = time.perf_counter()
        SETUP.add(part, now - self._began)
        self._began = now


def _open_device() -> None:
    """Create the CUDA context of the first GPU while the process imports. Errors recur when the engine starts."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    context = ctypes.c_void_p()
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)

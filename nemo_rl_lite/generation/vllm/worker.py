"""A vLLM engine replica, a plain class that `cluster/` hosts in an actor.

Responses are read from vLLM's engine core: `LLMEngine.step` keeps logprobs with ranks and a detokenizer for every
token, in the thread which also schedules and launches the next step. Here a token and its logprob are appended to
two lists, and the rest is done when the response ends.
"""

import ctypes
import gc
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_lite.compat.vllm import (
    PARTS,
    decode_scheduler,
    finish_begun_steps,
    import_model_class,
    keep_first_scales,
    record_cpu_experts,
    repair_cpu_build,
    without_tool_servers,
)
from nemo_rl_lite.config.engines import engines_quantize, engines_serve_adapters
from nemo_rl_lite.config.schema import GenerationConfig, PolicyConfig
from nemo_rl_lite.config.sizes import engine_share
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion, Decoded, Drafts, Request, RequestError, Unfinished
from nemo_rl_lite.generation.vllm import extension
from nemo_rl_lite.observability.timer import SETUP
from nemo_rl_lite.refit.engine import Source, WeightsState
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.ipc import SharedWeights

EXTENSION = "nemo_rl_lite.generation.vllm.extension.RefitExtension"

# vLLM's sleep levels: it keeps nothing if the next refit brings all weights, and weights and adapters in host memory if
# refits bring adapters alone.
KEEPS_NOTHING, KEEPS_WEIGHTS = 2, 1
GIB = 2**30

# The number of the request of `sample_now`; those of `submit` begin with 0.
_NOW = -1


def preload() -> None:
    """Import slow packages. vLLM's front end `LLM` would import its servers too."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # With several GPUs the engine runs in processes of its own.
    if visible and "," not in visible:
        threading.Thread(target=_open_device, name="open-device", daemon=True).start()
    with without_tool_servers():
        from vllm.engine.arg_utils import EngineArgs  # noqa: F401
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401


class VLLMEngine:
    """vLLM with exact sampling logprobs and weights that a refit replaces."""

    def __init__(
        self,
        generation: GenerationConfig,
        policy: PolicyConfig,
        model_path: str,
        seed: int,
        on_gpu: bool,
    ):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        # Rotary tables have no weights to load; vLLM warns about them at every refit.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        settings = generation.vllm_cfg
        import_model_class(Path(model_path))
        self._sleeps = on_gpu and generation.colocated.enabled and generation.colocated.sleep is not False
        self._lora = policy.megatron_cfg.peft if engines_serve_adapters(generation, policy) else None
        if on_gpu:
            # The first refit comes before the first prompt, and leaving out a weight is an error: if refits bring all
            # weights, start with dummy ones.
            load_format = "dummy" if self._lora is None else "auto"
            own: dict[str, Any] = {"enable_sleep_mode": self._sleeps, "load_format": load_format}
        else:
            # vLLM's sampler on CPUs fails where a request has a seed and its prompt is cut into chunks.
            own = {"enable_chunked_prefill": False}
        own |= {"max_model_len": policy.max_total_sequence_length} | _configured(generation.vllm_kwargs)
        if self._lora is not None:
            own |= extension.engine_options(self._lora, settings.tensor_parallel_size)
        if on_gpu and not settings.enforce_eager:
            own = with_graph_sizes(own, settings.max_num_seqs)
        speculates = own.get("speculative_config") is not None
        if on_gpu and not speculates and own.get("async_scheduling") is not False:
            # None is vLLM's own.
            own.setdefault("scheduler_cls", decode_scheduler())
        if on_gpu and engines_quantize(generation):
            keep_first_scales()
        if not on_gpu:
            repair_cpu_build()
        self._weights = WeightsState(complete=own.get("load_format") != "dummy" and self._lora is None)
        ranks = settings.tensor_parallel_size
        arguments = EngineArgs(
            model=model_path,
            dtype=policy.precision,
            tensor_parallel_size=ranks,
            # Inside a placement group vLLM would ask Ray for workers, and wait for GPUs that the engine itself holds.
            distributed_executor_backend="mp" if ranks > 1 else "uni",
            enforce_eager=settings.enforce_eager,
            max_num_seqs=settings.max_num_seqs,
            gpu_memory_utilization=engine_share(generation),
            seed=seed,
            logprobs_mode="processed_logprobs",
            worker_extension_cls=EXTENSION,
            # Requests from outside may have stop strings too.
            skip_tokenizer_init=not (generation.stop_strings or generation.serve.enabled),
            # vLLM counts accepted tokens among its statistics.
            disable_log_stats=not speculates,
            enable_return_routed_experts=policy.router_replay.enabled,
            **own,
        )
        with StartTimer():
            # Stepped in this thread: an engine core in a process of its own is slower.
            self._engine: Any = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        if policy.router_replay.enabled and not on_gpu:
            self._engine.apply_model(record_cpu_experts)
        self.version = 0
        """The step that made the weights."""
        self.max_length: int = self._engine.vllm_config.model_config.max_model_len
        self._recomputes = settings.recompute_kv_cache_after_weight_updates
        self._adapter = None if self._lora is None else extension.adapter_request()
        self._unfinished: dict[str, UnfinishedResponse] = {}
        self._finished: dict[int, Completion | RequestError] = {}
        self._decoded = Decoded()
        # Every later garbage collection would walk through hundreds of thousands of long-lived objects.
        gc.freeze()

    def submit(self, requests: Mapping[int, Request]) -> None:
        """See `Engine.submit`. Raises RefitError: the engine's weights are not those of one policy."""
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        self._weights.require()
        engine, tasks = self._engine, self._engine.get_supported_tasks()
        for number, request in requests.items():
            # The salt separates the prefix caches of different weights.
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt), cache_salt=str(self.version))
            try:
                core_request = engine.input_processor.process_inputs(
                    str(number), prompt, _parameters(request), supported_tasks=tasks, lora_request=self._adapter
                )
            except ValueError as error:
                if not request.sampling.options.changed():
                    raise
                self._finished[number] = RequestError(str(error))
                continue
            detokenizer = None
            if request.sampling.stop_strings:
                detokenizer = IncrementalDetokenizer.from_new_request(engine.get_tokenizer(), core_request)
            self._unfinished[str(number)] = UnfinishedResponse(request, detokenizer)
            engine.engine_core.add_request(core_request)

    def poll(self, seconds: float) -> dict[int, Completion | RequestError]:
        """See `Engine.poll`."""
        ends = time.perf_counter() + seconds
        while self._unfinished and time.perf_counter() < ends:
            self._step()
        begun = ((name, one) for name, one in self._unfinished.items() if one.request.streams and one.tokens)
        so_far = {int(name): one.so_far(self.version) for name, one in begun}
        finished, self._finished = self._finished, {}
        return {**so_far, **finished}

    def unfinished_tokens(self) -> int:
        """See `Engine.unfinished_tokens`."""
        return sum(len(response.tokens) for response in self._unfinished.values())

    def abort(self, numbers: Sequence[int]) -> None:
        """See `Engine.abort`."""
        names = [str(number) for number in numbers]
        self._engine.engine_core.abort_requests(names)
        for name in names:
            self._unfinished.pop(name, None)

    def sample_now(self, request: Request) -> Completion:
        """See `Engine.sample_now`. The other requests continue meanwhile."""
        decoded = self._decoded
        self.submit({_NOW: request})
        while _NOW not in self._finished:
            self._step()
        # Little or nothing here is work for the requests that were submitted.
        self._decoded = decoded
        completion = self._finished.pop(_NOW)
        if isinstance(completion, RequestError):
            raise completion
        return completion

    def take_decoded(self) -> Decoded:
        """See `Engine.take_decoded`."""
        taken, self._decoded = self._decoded, Decoded()
        return taken

    def memory(self) -> dict[str, int]:
        """See `Engine.memory`."""
        return max(self._engine.collective_rpc("memory"), key=lambda held: held.get("device", 0))

    def sleep(self) -> None:
        """Free the GPU's memory for the policy. Does nothing if the engine has its own device, or on a CPU."""
        if self._sleeps and not self._engine.is_sleeping():
            if self._lora is None:
                self._weights.discard()
            self._engine.sleep(level=KEEPS_NOTHING if self._lora is None else KEEPS_WEIGHTS)

    def wake_weights(self) -> None:
        """See `Engine.wake_weights`. The memory is empty if refits bring all weights."""
        self._wake("weights", "generation_weights")

    def wake_cache(self) -> None:
        """See `Engine.wake_cache`."""
        self._wake("kv_cache", "kv_cache")

    def _wake(self, tag: str, part: str) -> None:
        if not self._sleeps or not self._engine.is_sleeping():
            return
        held = self.memory()
        try:
            self._engine.wake_up(tags=[tag])
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            # vLLM's own error names a line of C++.
            raise RuntimeError(
                f"no room for the {held[part] / GIB:.1f} GiB of the engine's {tag.replace('_', ' ')}: "
                f"{held['device'] / GIB:.1f} GiB of its fullest GPU were in use; set a smaller "
                "generation.vllm_cfg.gpu_memory_utilization, or offload=pinned if it is not set"
            ) from error

    def join_refit(self, sources: Sequence[Source]) -> None:
        scaling = None if self._lora is None else self._lora.alpha / self._lora.dim
        self._engine.collective_rpc("refit_join", args=(list(sources), scaling))

    def share_weights(self) -> list[SharedWeights]:
        """Share each rank's weights; see `ipc.share_weights`."""
        return self._engine.collective_rpc("share_weights")

    def receive_weights(self, version: int) -> list[RefitReport]:
        started = time.perf_counter()
        if self._unfinished:
            # Asynchronous scheduling may have begun a step.
            finish_begun_steps(self._engine, self._step)
            for response in self._unfinished.values():
                response.note_version(self.version)
        self.version = version
        with self._weights.replacing():
            reports: list[RefitReport] = self._engine.collective_rpc("refit_receive")
            # Without this, vLLM keeps the caches of unfinished requests, which it cannot reset.
            was_reset = self._engine.reset_prefix_cache(reset_running_requests=self._recomputes)
            if not was_reset and not self._unfinished:
                raise RuntimeError("vLLM kept its prefix cache, which belongs to the old weights")
        for report in reports:
            report.seconds["load"] = time.perf_counter() - started - report.seconds["transfer"]
        return reports

    def _step(self) -> None:
        """Sample a token of each running request, or several if drafts are accepted."""
        stopped, cached, given = [], 0, self._engine.engine_core.get_output()
        for output in given.outputs:
            response = self._unfinished.get(output.request_id)
            # A step that began before a request ended or was aborted samples one more token for it.
            if response is None:
                continue
            if response.tokens:
                cached += len(response.request.prompt) + len(response.tokens)
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
        statistics = None if given.scheduler_stats is None else given.scheduler_stats.spec_decoding_stats
        drafts = Drafts()
        if statistics is not None:
            drafts = Drafts(statistics.num_drafts, statistics.num_draft_tokens, statistics.num_accepted_tokens)
        # The first call of asynchronous scheduling returns no outputs.
        self._decoded += Decoded(int(bool(given.outputs)), cached, drafts)


class UnfinishedResponse:
    """One response's tokens so far, their logprobs, and the weights' versions of the tokens before the last refit."""

    def __init__(self, request: Request, detokenizer: Any):
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: tuple[int, ...] = ()
        self.alternatives: list[tuple[tuple[int, float], ...]] = []
        # Of the prompt's tokens, then of the tokens that each step has seen.
        self.routed_experts: list[np.ndarray] = []
        # vLLM's own incremental detokenizer, where stop strings end the response; else None.
        self.detokenizer = detokenizer

    def add(self, tokens: list[int], logprobs: list[float], ended: bool) -> bool:
        """Add one step's tokens (several if a draft was accepted). `ended`: the last one is a stop token. Return
        whether a stop string ends the response; tokens after it are dropped."""
        if self.detokenizer is None:
            self.tokens += tokens
            self.logprobs += logprobs
            return False
        for place, token in enumerate(tokens):
            self.tokens.append(token)
            self.logprobs += logprobs[place : place + 1]
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
        """Note that `version` sampled the tokens without a version."""
        self.versions += (version,) * (len(self.tokens) - len(self.versions))

    def so_far(self, version: int) -> Unfinished:
        """Return the tokens so far of a response that streams."""
        versions = self.versions + (version,) * (len(self.tokens) - len(self.versions))
        return Unfinished(tuple(self.tokens), tuple(self.logprobs), "length", versions, None, self._alternatives())

    def completion(self, finish_reason: str, version: int) -> Completion:
        if len(self.logprobs) != len(self.tokens):
            raise RuntimeError(f"vLLM gave {len(self.logprobs)} logprobs for {len(self.tokens)} tokens")
        self.note_version(version)
        experts = None
        if self.routed_experts:
            # Tokens after a stop string are dropped, and no step has seen the last token.
            experts = np.concatenate(self.routed_experts)[: len(self.request.prompt) + len(self.tokens) - 1]
            if not experts.any():
                raise EngineError(
                    "vLLM chose experts inside of a kernel that does not record them: set "
                    "+generation.vllm_kwargs.moe_backend=triton, or policy.router_replay.enabled=false"
                )
        reason = "stop" if finish_reason == "stop" else "length"
        top = self._alternatives()
        return Completion(tuple(self.tokens), tuple(self.logprobs), reason, self.versions, experts, top)

    def _alternatives(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        return tuple(self.alternatives[: len(self.tokens)])


def _logprobs(given: Any) -> list[float]:
    """Return the sampled tokens' logprobs: a list from `compat/vllm_scheduler.py`, column 0 of vLLM's array."""
    if given is None or isinstance(given, list):
        return given or []
    return given.logprobs[:, 0].tolist()


def _parameters(request: Request) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    sampling, options = request.sampling, request.sampling.options
    schema = options.json_schema
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        max_tokens=sampling.max_new_tokens,
        seed=request.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings) or None,
        detokenize=bool(sampling.stop_strings),
        # vLLM adds the end tokens of the model's generation_config.json, but nothing ends a probe.
        ignore_eos=not sampling.stop_token_ids,
        # 0: the logprob of the sampled token only.
        logprobs=options.top_logprobs,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Nobody else has this object, so vLLM need not copy it deeply.
        skip_clone=True,
    )


def _configured(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with vLLM's own objects for dictionaries that `vllm.LLM` converts and `EngineArgs` does
    not."""
    from vllm import config

    kinds = {
        "structured_outputs_config": config.StructuredOutputsConfig,
        "profiler_config": config.ProfilerConfig,
        "kv_transfer_config": config.KVTransferConfig,
    }
    made = {name: kinds[name](**value) for name, value in options.items() if name in kinds and isinstance(value, dict)}
    return {**options, **made}


def with_graph_sizes(options: Mapping[str, Any], max_num_seqs: int) -> dict[str, Any]:
    """Return an engine's options with the batch sizes for which it captures CUDA graphs, unless they already decide
    that.

    A batch is padded to the next size. vLLM's own list has every eighth number up to 256. Decoding reads the weights
    and the cache, so padding costs little, and each graph costs time at start.
    """
    compilation = options.get("compilation_config") or {}
    decides = not isinstance(compilation, Mapping) or any("cudagraph_capture_size" in name for name in compilation)
    if decides or "performance_mode" in options or "speculative_config" in options:
        return dict(options)
    steps = [1, 2, 4, 8, 16, *range(32, 256, 32), *range(256, 512, 64), *range(512, max_num_seqs, 128)]
    sizes = [size for size in steps if size < max_num_seqs] + [max_num_seqs]
    return {**options, "compilation_config": {**compilation, "cudagraph_capture_sizes": sizes}}


class StartTimer(logging.Handler):
    """Times in `SETUP` the parts of an engine's start in this process, in a `with` block. vLLM's log messages in
    `PARTS` end them."""

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
    """Retain the primary context of the first GPU, which CUDA's runtime and so torch will use, while the process
    imports. Errors come again when the engine uses the device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    context = ctypes.c_void_p()
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)

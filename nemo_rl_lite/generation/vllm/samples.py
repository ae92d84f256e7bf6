"""Responses under way in a vLLM engine, read from its engine core.

`LLMEngine.step` keeps logprobs with ranks and a detokenizer for every token, in the thread which also has to schedule
and launch the next step. Here a token and its logprob are appended to two lists, and nothing else is done until the
response ends.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from nemo_rl_lite.compat.vllm import finish_begun_steps
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion, Decoded, Drafts, Request


class _Sample:
    """One response under way: its tokens, their logprobs, and the versions of the weights that sampled the first of
    them (those tokens that a refit has found)."""

    def __init__(self, prompt: int, detokenizer: Any):
        self.prompt = prompt
        """Its number of tokens."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: tuple[int, ...] = ()
        self.routed_experts: list[np.ndarray] = []
        """Those of the prompt's tokens, then those of the tokens that each step has seen."""
        # vLLM's own incremental detokenizer, where stop strings end the response; else None.
        self.detokenizer = detokenizer

    def add(self, tokens: list[int], logprobs: list[float], ended: bool) -> bool:
        """Add what a step sampled: one token, or several where a draft was accepted. `ended`: the last of them is a
        stop token. Returns whether the response has a stop string, which ends it: tokens after it are dropped."""
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

    def note_version(self, version: int) -> None:
        """The tokens that have no version yet were sampled by `version`."""
        self.versions += (version,) * (len(self.tokens) - len(self.versions))

    def completion(self, finish_reason: str, version: int) -> Completion:
        if len(self.logprobs) != len(self.tokens):
            raise RuntimeError(f"vLLM gave {len(self.logprobs)} logprobs for {len(self.tokens)} tokens")
        self.note_version(version)
        reason = "stop" if finish_reason == "stop" else "length"
        return Completion(tuple(self.tokens), tuple(self.logprobs), reason, self.versions, self._experts())

    def _experts(self) -> np.ndarray | None:
        if not self.routed_experts:
            return None
        # Tokens after a stop string are dropped, and no step has seen the last token.
        seen = np.concatenate(self.routed_experts)[: self.prompt + len(self.tokens) - 1]
        if not seen.any():
            raise EngineError(
                "vLLM chose experts inside of a kernel that does not record them: set "
                "+generation.vllm_kwargs.moe_backend=triton, or policy.router_replay.enabled=false"
            )
        return seen


class Samples:
    """The unfinished requests of an engine core in this process, and the responses that nobody has taken yet."""

    def __init__(self, engine: Any, adapter: Any = None):
        """`engine`: vLLM's `LLMEngine`, whose core is in this process. `adapter`: vLLM's `LoRARequest` of all requests,
        if any."""
        self._engine, self._adapter = engine, adapter
        self._under_way: dict[str, _Sample] = {}
        self._finished: dict[int, Completion] = {}
        self._decoded = Decoded()

    @property
    def unfinished(self) -> bool:
        return bool(self._under_way)

    def add(self, number: int, request: Request, version: int) -> None:
        """`version` keeps apart what weights of different versions have computed of the same prompt."""
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        engine, name = self._engine, str(number)
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt), cache_salt=str(version))
        tasks = engine.get_supported_tasks()
        core_request = engine.input_processor.process_inputs(
            name, prompt, _parameters(request), supported_tasks=tasks, lora_request=self._adapter
        )
        detokenizer = None
        if request.sampling.stop_strings:
            detokenizer = IncrementalDetokenizer.from_new_request(engine.get_tokenizer(), core_request)
        self._under_way[name] = _Sample(len(request.prompt), detokenizer)
        engine.engine_core.add_request(core_request)

    def step(self, version: int) -> None:
        """Sample a token of each running request, or several where drafts are accepted, with the weights of
        `version`."""
        stopped, cached, given = [], 0, self._engine.engine_core.get_output()
        for output in given.outputs:
            sample = self._under_way.get(output.request_id)
            # A step that was begun before a request ended or was aborted samples one more token for it.
            if sample is None:
                continue
            if sample.tokens:
                cached += sample.prompt + len(sample.tokens)
            if output.routed_experts is not None:
                sample.routed_experts.append(output.routed_experts)
            reason = None if output.finish_reason is None else str(output.finish_reason)
            if sample.add(output.new_token_ids, _logprobs(output.new_logprobs), reason == "stop"):
                if reason is None:
                    stopped.append(output.request_id)
                reason = "stop"
            if reason is not None:
                del self._under_way[output.request_id]
                self._finished[int(output.request_id)] = sample.completion(reason, version)
        self._engine.engine_core.abort_requests(stopped)
        # vLLM answers nothing when it begins a step ahead.
        self._decoded += Decoded(int(bool(given.outputs)), cached, _drafts(given.scheduler_stats))

    def end_step(self, version: int) -> None:
        """Wait for the step that vLLM has begun ahead (asynchronous scheduling), and note what `version` sampled."""
        finish_begun_steps(self._engine, lambda: self.step(version))
        for sample in self._under_way.values():
            sample.note_version(version)

    def abort(self, numbers: Iterable[int]) -> None:
        names = [str(number) for number in numbers]
        self._engine.engine_core.abort_requests(names)
        for name in names:
            self._under_way.pop(name, None)

    def take_decoded(self) -> Decoded:
        """What the steps since the last call have done."""
        taken, self._decoded = self._decoded, Decoded()
        return taken

    def take(self) -> dict[int, Completion]:
        """The responses that have ended since the last call."""
        finished, self._finished = self._finished, {}
        return finished

    def take_one(self, number: int) -> Completion | None:
        """The response to this request if it has ended, else None."""
        return self._finished.pop(number, None)


def _logprobs(given: Any) -> list[float]:
    """The sampled tokens' logprobs: `compat/vllm_scheduler.py` gives them as they are, vLLM in column 0 of an array."""
    if given is None or isinstance(given, list):
        return given or []
    return given.logprobs[:, 0].tolist()


def _drafts(statistics: Any) -> Drafts:
    """`statistics`: those of vLLM's scheduler on one step; None where it keeps none."""
    own = None if statistics is None else statistics.spec_decoding_stats
    return Drafts() if own is None else Drafts(own.num_drafts, own.num_draft_tokens, own.num_accepted_tokens)


def _parameters(request: Request) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
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
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Nobody else has this object, so vLLM need not copy it deeply.
        skip_clone=True,
    )

"""A vLLM engine replica. A plain class; `cluster/` runs it in an actor."""

import logging
import time
from typing import Any

from nemo_rl_lite.config.schema import GenerationConfig, PolicyConfig, RefitConfig
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.refit.broadcast import RefitReport
from nemo_rl_lite.refit.plan import RefitPlan

EXTENSION = "nemo_rl_lite.generation.vllm.extension.RefitExtension"


def environment(config: GenerationConfig) -> dict[str, str]:
    """What vLLM needs in the environment of its process on a CPU."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(config.vllm_cfg.cpu_kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The engine core in this process: one process less to start, to stop and to lose.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Otherwise the sampler is compiled with a C++ compiler at the first call (6 to 37 s).
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


class VLLMEngine:
    """vLLM with exact sampling logprobs and weights that a refit replaces."""

    def __init__(
        self, generation: GenerationConfig, policy: PolicyConfig, refit: RefitConfig, model_path: str, seed: int
    ):
        from vllm import LLM

        # Rotary tables have no weights to load; vLLM warns about them at every refit.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._refit = refit
        self._verify = refit.verify != "off"
        settings = generation.vllm_cfg
        self._llm: Any = LLM(
            model_path,
            dtype=policy.precision,
            max_model_len=policy.max_total_sequence_length,
            tensor_parallel_size=settings.tensor_parallel_size,
            enforce_eager=settings.enforce_eager,
            max_num_seqs=settings.max_num_seqs,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            seed=seed,
            logprobs_mode="processed_logprobs",
            worker_extension_cls=EXTENSION,
            skip_tokenizer_init=not generation.stop_strings,
            disable_log_stats=True,
            **generation.vllm_kwargs,
        )

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._llm.collective_rpc("set_sampling_seed", args=(sampling.seed,))
        parameters = SamplingParams(
            n=sampling.samples_per_prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            stop=list(sampling.stop_strings) or None,
            detokenize=bool(sampling.stop_strings),
            ignore_eos=False,
            logprobs=0,
        )
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(requests, parameters, use_tqdm=False)
        return [_completion(sample) for output in outputs for sample in output.outputs]

    def join_refit(self, plan: RefitPlan, host: str, port: int, rank: int, world_size: int) -> None:
        self._llm.collective_rpc("refit_join", args=(plan, host, port, rank, world_size, self._refit.timeout_s))

    def receive_weights(self) -> RefitReport:
        started = time.perf_counter()
        report: RefitReport = self._llm.collective_rpc("refit_receive", args=(self._verify,))[0]
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which belongs to the old weights")
        report.seconds["load"] = time.perf_counter() - started - report.seconds["transfer"]
        return report


def _completion(sample: Any) -> Completion:
    tokens = tuple(sample.token_ids)
    logprobs = tuple(position[token].logprob for position, token in zip(sample.logprobs, tokens, strict=True))
    return Completion(tokens, logprobs, "stop" if sample.finish_reason == "stop" else "length")
